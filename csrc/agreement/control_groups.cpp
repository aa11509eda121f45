#include "agreement/control_groups.h"

#include <utility>

namespace ddp_hooks {
namespace {

std::unique_ptr<OrderedGroup> in_turns(c10::intrusive_ptr<c10d::Backend> group) {
  return group ? std::make_unique<OrderedGroup>(std::move(group)) : nullptr;
}

}  // namespace

ControlGroups::ControlGroups(Topology topology, c10::intrusive_ptr<c10d::Backend> all,
                             std::vector<c10::intrusive_ptr<c10d::Backend>> axes, DataGroups data)
    : topology_(std::move(topology)),
      all_(std::move(all)),
      sums_(in_turns(std::move(data.sums))),
      contributions_(in_turns(std::move(data.contributions))),
      sizes_(in_turns(std::move(data.sizes))),
      shares_(std::move(data.shares)),
      results_(in_turns(std::move(data.results))) {
  for (auto& axis : axes) axes_.emplace_back(std::move(axis));
}

std::exception_ptr ControlGroups::fail(std::exception_ptr error) const {
  for (const auto* group : {&contributions_, &sums_, &sizes_, &results_}) {
    if (*group) error = (*group)->fail(error);
  }
  return error;
}

bool ControlGroups::have_failed() const {
  for (const auto* group : {&contributions_, &sums_, &sizes_, &results_}) {
    if (*group && (*group)->has_failed()) return true;
  }
  return false;
}

}  // namespace ddp_hooks
