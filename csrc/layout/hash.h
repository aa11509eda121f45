// A 64-bit hash of a sequence of words, the same on every rank and in every build.
//
// For cache keys and for noticing that ranks disagree; not for anything an adversary could profit from. Each word goes
// through the finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#pragma once

#include <cstdint>

namespace ddp_hooks {

class Hash {
 public:
  void add(uint64_t word) {
    uint64_t z = value_ + 0x9E3779B97F4A7C15u + word;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    value_ = z ^ (z >> 31);
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

}  // namespace ddp_hooks
