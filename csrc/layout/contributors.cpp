#include "layout/contributors.h"

#include <stdexcept>
#include <utility>

#include "layout/hash.h"

namespace ddp_hooks {

Contributors::Contributors(std::vector<UsageMask> by_rank) : by_rank_(std::move(by_rank)) {
  for (const UsageMask& mask : by_rank_) {
    if (mask.size() != by_rank_.front().size()) throw std::invalid_argument("expected masks of one size");
  }
}

int64_t Contributors::count(size_t bit) const {
  int64_t count = 0;
  for (const UsageMask& mask : by_rank_) count += mask.test(bit);
  return count;
}

RankSet Contributors::ranks(size_t bit) const {
  if (by_rank_.size() > kMostRanksInSet) return 0;
  RankSet set = 0;
  for (size_t rank = 0; rank < by_rank_.size(); ++rank) set |= RankSet{by_rank_[rank].test(bit)} << rank;
  return set;
}

uint64_t Contributors::hash() const {
  Hash hash;
  hash.add(by_rank_.size());
  for (const UsageMask& mask : by_rank_) hash.add(mask.hash());
  return hash.value();
}

}  // namespace ddp_hooks
