#include "wire/plan_cache.h"

#include <utility>

namespace ddp_hooks {

std::shared_ptr<const WirePlan> PlanCache::find(const UsageMask& agreed) {
  auto found = index_.find(agreed);
  if (found == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->plan;
}

void PlanCache::insert(const UsageMask& agreed, std::shared_ptr<const WirePlan> plan) {
  entries_.push_front({agreed, std::move(plan)});
  index_[agreed] = entries_.begin();
  if (entries_.size() > capacity_) {
    index_.erase(entries_.back().mask);
    entries_.pop_back();
  }
}

void PlanCache::clear() {
  index_.clear();
  entries_.clear();
}

}  // namespace ddp_hooks
