#include "plan/plan_cache.h"

#include <utility>

namespace ddp_hooks {

std::shared_ptr<const ReductionPlan> PlanCache::find(const UsageMask& agreed, const UsageMask& divided,
                                                     const Contributors& contributors) {
  auto found = index_.find({agreed, divided, contributors});
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->plan;
}

void PlanCache::insert(const UsageMask& agreed, const UsageMask& divided, const Contributors& contributors,
                       std::shared_ptr<const ReductionPlan> plan) {
  entries_.push_front({{agreed, divided, contributors}, std::move(plan)});
  index_[entries_.front().key] = entries_.begin();
  if (entries_.size() > capacity_) {
    index_.erase(entries_.back().key);
    entries_.pop_back();
  }
}

void PlanCache::clear() {
  index_.clear();
  entries_.clear();
}

}  // namespace ddp_hooks
