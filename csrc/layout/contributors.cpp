#include "layout/contributors.h"

#include <bit>
#include <stdexcept>
#include <utility>

#include "layout/hash.h"

namespace ddp_hooks {
namespace {

uint64_t number_at(const std::vector<UsageMask>& digits, size_t bit) {
  uint64_t number = 0;
  for (size_t i = 0; i < digits.size(); ++i) number |= uint64_t{digits[i].test(bit)} << i;
  return number;
}

}  // namespace

Contributors::Contributors(std::vector<UsageMask> by_rank) : by_rank_(std::move(by_rank)) {
  for (const UsageMask& mask : by_rank_) {
    if (mask.size() != by_rank_.front().size()) throw std::invalid_argument("expected masks of one size");
  }
}

Contributors::Contributors(std::vector<UsageMask> counts, std::vector<UsageMask> ranks)
    : counts_(std::move(counts)), ranks_(std::move(ranks)) {}

int64_t Contributors::count(size_t bit) const {
  if (by_rank_.empty()) return static_cast<int64_t>(number_at(counts_, bit));
  int64_t count = 0;
  for (const UsageMask& mask : by_rank_) count += mask.test(bit);
  return count;
}

RankSet Contributors::ranks(size_t bit) const {
  if (by_rank_.size() > kMostRanksInSet) return 0;
  RankSet set = 0;
  for (size_t rank = 0; rank < by_rank_.size(); ++rank) set |= RankSet{by_rank_[rank].test(bit)} << rank;
  if (!by_rank_.empty() || number_at(counts_, bit) != 1) return set;
  const uint64_t rank = number_at(ranks_, bit);
  return rank < kMostRanksInSet ? RankSet{1} << rank : 0;
}

uint64_t Contributors::hash() const {
  Hash hash;
  for (const auto* masks : {&by_rank_, &counts_, &ranks_}) {
    hash.add(masks->size());
    for (const UsageMask& mask : *masks) hash.add(mask.hash());
  }
  return hash.value();
}

size_t digits_to_count(size_t most) {
  return static_cast<size_t>(std::bit_width(most));
}

size_t digits_to_name(size_t ranks) {
  return ranks > 1 ? static_cast<size_t>(std::bit_width(ranks - 1)) : 0;
}

}  // namespace ddp_hooks
