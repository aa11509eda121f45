// Who has something to contribute, for each bit of a mask.
//
// Known either from every rank's own mask, or from counters that are merged without keeping the masks apart: how many
// ranks set the bit, and the numbers of those ranks ORed together, which is *the* rank where there is one only.
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
  // `counts`: the binary digits of how many, the lowest first. `ranks`: those of the ranks' numbers, likewise.
  Contributors(std::vector<UsageMask> counts, std::vector<UsageMask> ranks);

  bool are_known() const { return !by_rank_.empty() || !counts_.empty(); }

  // How many contribute.
  int64_t count(size_t bit) const;
  // Which; empty where that is not known: with counters where more than one does, and beyond kMostRanksInSet.
  RankSet ranks(size_t bit) const;

  // Every rank's mask, where these are known.
  const std::vector<UsageMask>& by_rank() const { return by_rank_; }

  uint64_t hash() const;
  bool operator==(const Contributors& other) const = default;

 private:
  std::vector<UsageMask> by_rank_;
  std::vector<UsageMask> counts_;
  std::vector<UsageMask> ranks_;
};

// How many binary digits count up to `most`, or name what is below a number of ranks.
size_t digits_to_count(size_t most);
size_t digits_to_name(size_t ranks);

}  // namespace ddp_hooks
