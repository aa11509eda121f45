#include "agreement/bit_sliced_counters.h"

#include <algorithm>
#include <vector>

namespace ddp_hooks {
namespace {

std::vector<UsageMask> read(const uint64_t*& counters, size_t count, size_t bits) {
  std::vector<UsageMask> masks;
  const size_t words = UsageMask::word_count(bits);
  for (size_t i = 0; i < count; ++i, counters += words) {
    masks.emplace_back(bits, std::vector<uint64_t>(counters, counters + words));
  }
  return masks;
}

}  // namespace

size_t words_of_counters(size_t bits, size_t ranks) {
  return (digits_to_count(ranks) + digits_to_name(ranks)) * UsageMask::word_count(bits);
}

void write_counters(const UsageMask& mask, size_t rank, size_t ranks, uint64_t* counters) {
  const std::vector<uint64_t>& words = mask.words();
  std::fill_n(counters, words_of_counters(mask.size(), ranks), 0);
  std::copy(words.begin(), words.end(), counters);
  counters += digits_to_count(ranks) * words.size();
  for (size_t digit = 0; digit < digits_to_name(ranks); ++digit, counters += words.size()) {
    if ((rank >> digit) & 1) std::copy(words.begin(), words.end(), counters);
  }
}

void merge_counters(uint64_t* counters, const uint64_t* others, size_t bits, size_t ranks) {
  const size_t words = UsageMask::word_count(bits);
  const size_t digits = digits_to_count(ranks);
  for (size_t word = 0; word < words; ++word) {
    // 64 additions at once, digit by digit.
    uint64_t carry = 0;
    for (size_t digit = 0; digit < digits; ++digit) {
      uint64_t& a = counters[digit * words + word];
      const uint64_t b = others[digit * words + word];
      const uint64_t sum = a ^ b ^ carry;
      carry = (a & b) | (carry & (a ^ b));
      a = sum;
    }
  }
  for (size_t i = digits * words; i < words_of_counters(bits, ranks); ++i) counters[i] |= others[i];
}

Contributors read_counters(const uint64_t* counters, size_t bits, size_t ranks) {
  std::vector<UsageMask> counts = read(counters, digits_to_count(ranks), bits);
  return {std::move(counts), read(counters, digits_to_name(ranks), bits)};
}

}  // namespace ddp_hooks
