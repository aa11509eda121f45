#include "agreement/planes.h"

#include <algorithm>
#include <vector>

namespace ddp_hooks {
namespace {

std::vector<UsageMask> read(const uint64_t*& planes, size_t count, size_t bits) {
  std::vector<UsageMask> masks;
  const size_t words = UsageMask::word_count(bits);
  for (size_t i = 0; i < count; ++i, planes += words) {
    masks.emplace_back(bits, std::vector<uint64_t>(planes, planes + words));
  }
  return masks;
}

}  // namespace

size_t words_of_planes(size_t bits, size_t ranks) {
  return (digits_to_count(ranks) + digits_to_name(ranks)) * UsageMask::word_count(bits);
}

void write_planes(const UsageMask& mask, size_t rank, size_t ranks, uint64_t* planes) {
  const std::vector<uint64_t>& words = mask.words();
  std::fill_n(planes, words_of_planes(mask.size(), ranks), 0);
  std::copy(words.begin(), words.end(), planes);
  planes += digits_to_count(ranks) * words.size();
  for (size_t digit = 0; digit < digits_to_name(ranks); ++digit, planes += words.size()) {
    if ((rank >> digit) & 1) std::copy(words.begin(), words.end(), planes);
  }
}

void merge_planes(uint64_t* planes, const uint64_t* others, size_t bits, size_t ranks) {
  const size_t words = UsageMask::word_count(bits);
  const size_t digits = digits_to_count(ranks);
  for (size_t word = 0; word < words; ++word) {
    // 64 additions at once, digit by digit.
    uint64_t carry = 0;
    for (size_t digit = 0; digit < digits; ++digit) {
      uint64_t& a = planes[digit * words + word];
      const uint64_t b = others[digit * words + word];
      const uint64_t sum = a ^ b ^ carry;
      carry = (a & b) | (carry & (a ^ b));
      a = sum;
    }
  }
  for (size_t i = digits * words; i < words_of_planes(bits, ranks); ++i) planes[i] |= others[i];
}

Contributors read_planes(const uint64_t* planes, size_t bits, size_t ranks) {
  std::vector<UsageMask> counts = read(planes, digits_to_count(ranks), bits);
  return {std::move(counts), read(planes, digits_to_name(ranks), bits)};
}

}  // namespace ddp_hooks
