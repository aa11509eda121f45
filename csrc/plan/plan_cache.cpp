#include "plan/plan_cache.h"

#include <utility>

namespace ddp_hooks {

std::shared_ptr<const ReductionPlan> PlanCache::find(const Key& key) {
  auto found = index_.find(key);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->plan;
}

void PlanCache::insert(const Key& key, std::shared_ptr<const ReductionPlan> plan) {
  entries_.push_front({key, std::move(plan)});
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
