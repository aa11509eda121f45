// Plans that were made before, because masks repeat.
//
// Always holds: what is in it was made for one layout and one settings; whoever changes either clears it.
// Thread-safety: none; the engine locks. Ranks may differ.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <optional>
#include <unordered_map>

#include "layout/contributors.h"
#include "layout/usage_mask.h"
#include "plan/reduction_plan.h"

namespace ddp_hooks {

// By what a plan was made of; the least recently used one is forgotten first.
class PlanCache {
 public:
  explicit PlanCache(size_t capacity) : capacity_(capacity) {}

  // Apart from the settings: `coded` is what messages are expected to take.
  struct Key {
    UsageMask agreed;
    UsageMask divided;
    Contributors contributors;
    std::optional<CodedParts> coded;
    bool operator==(const Key& other) const = default;
  };

  std::shared_ptr<const ReductionPlan> find(const Key& key);
  void insert(const Key& key, std::shared_ptr<const ReductionPlan> plan);
  void clear();

 private:
  struct Entry {
    Key key;
    std::shared_ptr<const ReductionPlan> plan;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return key.agreed.hash() ^ (key.divided.hash() << 1) ^ (key.contributors.hash() << 2);
    }
  };

  size_t capacity_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> index_;
};

}  // namespace ddp_hooks
