// Plans that were made before, because masks repeat.
//
// Always holds: what is in it was made for one layout and one settings; whoever changes either clears it.
// Thread-safety: none; the engine locks. Ranks may differ.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <unordered_map>

#include "layout/usage_mask.h"
#include "wire/wire_plan.h"

namespace ddp_hooks {

// By agreed mask; the least recently used plan is forgotten first.
class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  std::shared_ptr<const WirePlan> find(const UsageMask& agreed);
  void insert(const UsageMask& agreed, std::shared_ptr<const WirePlan> plan);
  void clear();

 private:
  struct Entry {
    UsageMask mask;
    std::shared_ptr<const WirePlan> plan;
  };
  struct MaskHash {
    size_t operator()(const UsageMask& mask) const { return mask.hash(); }
  };

  size_t capacity_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<UsageMask, std::list<Entry>::iterator, MaskHash> index_;
};

}  // namespace ddp_hooks
