// A float64 as a word of a coded message, which is laid out as a float32 is: which float64s a word holds, how it is
// made, how it is undone.
//
// Always holds: float64_of_word(word_of_float64(bits)) == bits wherever lost_of_float64(bits) is 0, whatever `bits`
// mean: infinities, denormals, zeros of both signs and NaNs, signalling ones too, whose payload ends in enough zeros.
// The answers are the same under every floating-point mode: only normal numbers are added and subtracted, and only sums
// that are exact count.
//
// What is below the smallest normal float32 a word holds as multiples of the smallest float32: to that so much is added
// that the smallest one is the last place of the sum, which then has the multiple in its lowest bits.
//
// Every rank must agree on: all of it. Without branches, so that compilers make vectors of loops over numbers; for host
// and device alike. Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace ddp_hooks::coding {

namespace float64 {

constexpr int kMantissaBits = 52;
constexpr int kDropped = kMantissaBits - 23;
constexpr int kSignShift = 32;
constexpr uint64_t kSign = uint64_t{1} << 63;
// Of magnitudes: what is taken off an exponent; the smallest normal float32; the first power of two beyond the largest;
// infinity.
constexpr uint64_t kRebase = uint64_t{1023 - 127} << kMantissaBits;
constexpr uint64_t kSmallestNormal = uint64_t{1023 - 126} << kMantissaBits;
constexpr uint64_t kTooLarge = uint64_t{1023 + 128} << kMantissaBits;
constexpr uint64_t kInfinity = kSign - (uint64_t{1} << kMantissaBits);
// The same of a word.
constexpr uint32_t kSignOfWord = uint32_t{1} << 31;
constexpr uint32_t kSmallestNormalWord = uint32_t{1} << 23;
constexpr uint32_t kInfiniteWord = uint32_t{255} << 23;
constexpr uint64_t kAddend = uint64_t{1023 - 126 + kDropped} << kMantissaBits;

DDP_HOOKS_HOST_DEVICE double number_of(uint64_t bits) {
  double number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}
DDP_HOOKS_HOST_DEVICE uint64_t bits_of(double number) {
  uint64_t bits;
  memcpy(&bits, &number, sizeof(bits));
  return bits;
}

// All bits where a < b, none otherwise; both without a sign bit. In this way, and not as conditions, because compilers
// make branches of conditions on floating-point operations, and no vectors of loops with branches.
DDP_HOOKS_HOST_DEVICE uint64_t less(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<int64_t>(a - b) >> 63);
}
DDP_HOOKS_HOST_DEVICE uint64_t choose(uint64_t mask, uint64_t a, uint64_t b) {
  return (a & mask) | (b & ~mask);
}

}  // namespace float64

// 0 if a word holds the number.
DDP_HOOKS_HOST_DEVICE uint64_t lost_of_float64(uint64_t bits) {
  using namespace float64;
  const uint64_t magnitude = bits & ~kSign;
  const double addend = number_of(kAddend);
  const uint64_t multiple = bits_of((number_of(magnitude) + addend) - addend) & ~kSign;
  const uint64_t is_out_of_range = ~less(magnitude, kTooLarge) & less(magnitude, kInfinity);
  const uint64_t never_set = (uint64_t{1} << kDropped) - 1;
  return choose(less(magnitude, kSmallestNormal), multiple ^ magnitude, (magnitude & never_set) | is_out_of_range);
}

DDP_HOOKS_HOST_DEVICE uint32_t word_of_float64(uint64_t bits) {
  using namespace float64;
  const uint64_t magnitude = bits & ~kSign;
  const uint64_t multiple = bits_of(number_of(magnitude) + number_of(kAddend)) - kAddend;
  // Of infinity and NaN all bits of the exponent are set, and those that are too many go.
  const uint64_t rebased = (magnitude - (less(magnitude, kInfinity) & kRebase)) >> kDropped;
  const uint64_t held = choose(less(magnitude, kSmallestNormal), multiple, rebased);
  return static_cast<uint32_t>((static_cast<uint32_t>(held) & ~kSignOfWord) | ((bits & kSign) >> kSignShift));
}

DDP_HOOKS_HOST_DEVICE uint64_t float64_of_word(uint32_t word) {
  using namespace float64;
  const uint64_t magnitude = word & ~kSignOfWord;
  const uint64_t number = bits_of(number_of(kAddend + magnitude) - number_of(kAddend)) & ~kSign;
  const uint64_t rebased = (magnitude << kDropped) + kRebase + (~less(magnitude, kInfiniteWord) & kRebase);
  const uint64_t held = choose(less(magnitude, kSmallestNormalWord), number, rebased);
  return held | static_cast<uint64_t>(word & kSignOfWord) << kSignShift;
}

}  // namespace ddp_hooks::coding
