// A set of indices, one bit each. Whoever makes a mask defines what an index means: a parameter, a unit, or a flag.
//
// Represents indices 0 .. size()-1 in 64-bit words; this is also the form in which masks travel.
// Always holds: bits at and above size() in the last word are zero, so that words compare, count and hash as the set.
// Thread-safety: none; a mask is a value.
// Every rank must agree on: size(), and what each index means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddp_hooks {

class UsageMask {
 public:
  UsageMask() = default;
  explicit UsageMask(size_t size, bool used = false);
  // Takes over words that came from another rank; throws std::invalid_argument when their number does not fit.
  UsageMask(size_t size, std::vector<uint64_t> words);

  size_t size() const { return size_; }
  const std::vector<uint64_t>& words() const { return words_; }

  bool test(size_t index) const { return (words_[index / 64] >> (index % 64)) & 1; }
  void set(size_t index) { words_[index / 64] |= uint64_t{1} << (index % 64); }
  void clear(size_t index) { words_[index / 64] &= ~(uint64_t{1} << (index % 64)); }

  // Sets begin .. end - 1, a word at a time; begin < end <= size().
  void set_range(size_t begin, size_t end) {
    const size_t first = begin / 64, last = (end - 1) / 64;
    const uint64_t from_begin = ~uint64_t{0} << (begin % 64), to_end = ~uint64_t{0} >> (63 - (end - 1) % 64);
    if (first == last) {
      words_[first] |= from_begin & to_end;
      return;
    }
    words_[first] |= from_begin;
    for (size_t i = first + 1; i < last; ++i) words_[i] = ~uint64_t{0};
    words_[last] |= to_end;
  }

  // Set union; throws std::invalid_argument when the sizes differ.
  void merge(const UsageMask& other);

  // Set difference; throws in the same case.
  void subtract(const UsageMask& other);

  size_t count() const;
  uint64_t hash() const;
  bool operator==(const UsageMask& other) const = default;

  static size_t word_count(size_t size) { return (size + 63) / 64; }

 private:
  size_t size_ = 0;
  std::vector<uint64_t> words_;
};

}  // namespace ddp_hooks
