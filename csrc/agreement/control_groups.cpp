#include "agreement/control_groups.h"

#include <utility>

namespace ddp_hooks {

ControlGroups::ControlGroups(int world_size, c10::intrusive_ptr<c10d::Backend> all,
                             std::vector<c10::intrusive_ptr<c10d::Backend>> axes,
                             c10::intrusive_ptr<c10d::Backend> sums)
    : world_size_(world_size),
      all_(std::move(all)),
      sums_(sums ? std::make_unique<OrderedGroup>(std::move(sums)) : nullptr) {
  for (auto& axis : axes) axes_.emplace_back(std::move(axis));
}

}  // namespace ddp_hooks
