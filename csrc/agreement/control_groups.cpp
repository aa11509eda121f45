#include "agreement/control_groups.h"

#include <utility>

namespace ddp_hooks {

ControlGroups::ControlGroups(int world_size, c10::intrusive_ptr<c10d::Backend> all,
                             std::vector<c10::intrusive_ptr<c10d::Backend>> axes)
    : world_size_(world_size), all_(std::move(all)) {
  for (auto& axis : axes) axes_.emplace_back(std::move(axis));
}

}  // namespace ddp_hooks
