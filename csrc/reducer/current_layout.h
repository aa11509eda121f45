// The layout of the Reducer's buckets, as it stands.
//
// The Reducer rebuilds its buckets once, between two steps. Thread-safety: none; the engine locks, and the Reducer's
// mutex is held. Every rank must agree on the layout.
#pragma once

#include <cstdint>

#include "layout/bucket_layout.h"
#include "reducer/reducer_view.h"

namespace ddp_hooks {

class CurrentLayout {
 public:
  explicit CurrentLayout(const ReducerView& reducer) : reducer_(reducer) {}

  // Reads it if that was never done, or the Reducer has new buckets; returns whether it did.
  bool refresh() {
    if (!layout_.buckets.empty() && is_rebuilt_ == reducer_.has_rebuilt_buckets()) return false;
    is_rebuilt_ = reducer_.has_rebuilt_buckets();
    layout_ = reducer_.layout();
    hash_ = layout_.hash();
    return true;
  }

  const LayoutOfBuckets& operator*() const { return layout_; }
  const LayoutOfBuckets* operator->() const { return &layout_; }
  uint64_t hash() const { return hash_; }

 private:
  const ReducerView& reducer_;
  LayoutOfBuckets layout_;
  uint64_t hash_ = 0;
  bool is_rebuilt_ = false;
};

}  // namespace ddp_hooks
