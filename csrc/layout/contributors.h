// Who has something to contribute, for each bit of a mask.
//
// Thread-safety: none; it is a value. Every rank must agree on all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/usage_mask.h"

namespace ddp_hooks {

// A set of ranks, a bit each; the transports that ask for it serve worlds of at most so many.
using RankSet = uint64_t;
constexpr int kMostRanksInSet = 64;

inline bool contains(RankSet set, int rank) {
  return (set >> rank) & 1;
}

class Contributors {
 public:
  // Nobody was asked.
  Contributors() = default;
  // One mask for each rank, in their order; all of one size.
  explicit Contributors(std::vector<UsageMask> by_rank);

  bool are_known() const { return !by_rank_.empty(); }

  // How many contribute.
  int64_t count(size_t bit) const;
  // Which; empty with more ranks than a set has room for.
  RankSet ranks(size_t bit) const;

  // Every rank's mask, where these are known.
  const std::vector<UsageMask>& by_rank() const { return by_rank_; }

  uint64_t hash() const;
  bool operator==(const Contributors& other) const = default;

 private:
  std::vector<UsageMask> by_rank_;
};

}  // namespace ddp_hooks
