#include "layout/usage_mask.h"

#include <bit>
#include <stdexcept>
#include <string>
#include <utility>

#include "layout/hash.h"

namespace ddp_hooks {
namespace {

void clear_tail(std::vector<uint64_t>& words, size_t size) {
  if (size % 64 != 0) words.back() &= (uint64_t{1} << (size % 64)) - 1;
}

void check_same_size(const UsageMask& a, const UsageMask& b) {
  if (a.size() != b.size()) {
    throw std::invalid_argument("usage masks: expected " + std::to_string(a.size()) + " parameters, received " +
                                std::to_string(b.size()));
  }
}

}  // namespace

UsageMask::UsageMask(size_t size, bool used) : size_(size), words_(word_count(size), used ? ~uint64_t{0} : 0) {
  clear_tail(words_, size_);
}

UsageMask::UsageMask(size_t size, std::vector<uint64_t> words) : size_(size), words_(std::move(words)) {
  if (words_.size() != word_count(size_)) {
    throw std::invalid_argument("usage mask of " + std::to_string(size_) + " parameters: expected " +
                                std::to_string(word_count(size_)) + " words, received " +
                                std::to_string(words_.size()));
  }
  clear_tail(words_, size_);
}

void UsageMask::merge(const UsageMask& other) {
  check_same_size(*this, other);
  for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
}

void UsageMask::subtract(const UsageMask& other) {
  check_same_size(*this, other);
  for (size_t i = 0; i < words_.size(); ++i) words_[i] &= ~other.words_[i];
}

size_t UsageMask::count() const {
  size_t total = 0;
  for (uint64_t word : words_) total += static_cast<size_t>(std::popcount(word));
  return total;
}

uint64_t UsageMask::hash() const {
  Hash hash;
  hash.add(size_);
  for (uint64_t word : words_) hash.add(word);
  return hash.value();
}

}  // namespace ddp_hooks
