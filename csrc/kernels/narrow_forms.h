// The forms in which fewer bits hold a number, on bit patterns: which numbers a form holds, how it is made, how it is
// undone.
//
// Always holds: widen(narrow(bits)) == bits wherever holds(bits) is true, whatever `bits` mean: infinities, denormals,
// zeros of both signs and NaNs, signalling ones too, whose payload ends in enough zeros. The answers are the same under
// every floating-point mode: only normal numbers are added and subtracted, and only sums that are exact count.
//
// Without branches, so that compilers make vectors of loops over numbers; for host and device alike. Thread-safety:
// pure functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/host_device.h"

namespace ddp_hooks {

template <typename To, typename From>
DDP_HOOKS_HOST_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The upper half of a float32.
struct BFloat16Form {
  using Wide = uint32_t;
  using Narrow = uint16_t;
  // Bits that are zero in all numbers that the form holds.
  static constexpr uint32_t kNeverSet = 0xffff;

  static DDP_HOOKS_HOST_DEVICE uint32_t lost(uint32_t bits) { return bits & kNeverSet; }
  static DDP_HOOKS_HOST_DEVICE uint16_t narrow(uint32_t bits) { return static_cast<uint16_t>(bits >> 16); }
  static DDP_HOOKS_HOST_DEVICE uint32_t widen(uint16_t bits) { return uint32_t{bits} << 16; }
};

// A form with a shorter exponent, too. What is below its smallest normal number it holds as multiples of its smallest
// number: to that so much is added that the smallest number is the last place of the sum, which then has the multiple
// in its lowest bits.
template <typename WideBits, typename NarrowBits, typename Float, int kWideMantissaBits, int kMantissaBits,
          int kExponentsBelow, int kExponents>
struct RebasedForm {
  using Wide = WideBits;
  using Narrow = NarrowBits;
  using Signed = std::make_signed_t<Wide>;

  static constexpr int kDropped = kWideMantissaBits - kMantissaBits;
  static constexpr Wide kNeverSet = (Wide{1} << kDropped) - 1;
  static constexpr Wide kSign = Wide{1} << (8 * sizeof(Wide) - 1);
  static constexpr int kSignShift = 8 * (sizeof(Wide) - sizeof(Narrow));
  static constexpr Narrow kNarrowSign = static_cast<Narrow>(kSign >> kSignShift);
  // Of magnitudes: what is taken off an exponent; the smallest normal number of the form; the first power of two beyond
  // its largest; infinity.
  static constexpr Wide kRebase = Wide{kExponentsBelow} << kWideMantissaBits;
  static constexpr Wide kSmallestNormal = Wide{kExponentsBelow + 1} << kWideMantissaBits;
  static constexpr Wide kTooLarge = Wide{kExponentsBelow + kExponents} << kWideMantissaBits;
  static constexpr Wide kInfinity = kSign - (Wide{1} << kWideMantissaBits);
  static constexpr Narrow kNarrowSmallestNormal = Narrow{1} << kMantissaBits;
  static constexpr Narrow kNarrowInfinity = static_cast<Narrow>(Narrow{kExponents} << kMantissaBits);
  static constexpr Wide kAddend = Wide{kExponentsBelow + 1 + kDropped} << kWideMantissaBits;

  // All bits where a < b, none otherwise; both without a sign bit. In this way, and not as conditions, because
  // compilers make branches of conditions on floating-point operations, and no vectors of loops with branches.
  static DDP_HOOKS_HOST_DEVICE Wide less(Wide a, Wide b) {
    return static_cast<Wide>(static_cast<Signed>(a - b) >> (8 * sizeof(Wide) - 1));
  }
  static DDP_HOOKS_HOST_DEVICE Wide choose(Wide mask, Wide a, Wide b) { return (a & mask) | (b & ~mask); }

  static DDP_HOOKS_HOST_DEVICE Wide lost(Wide bits) {
    const Wide magnitude = bits & ~kSign;
    const Float addend = bits_as<Float>(kAddend);
    const Wide multiple = bits_as<Wide>((bits_as<Float>(magnitude) + addend) - addend) & ~kSign;
    const Wide is_out_of_range = ~less(magnitude, kTooLarge) & less(magnitude, kInfinity);
    return choose(less(magnitude, kSmallestNormal), multiple ^ magnitude, (magnitude & kNeverSet) | is_out_of_range);
  }

  static DDP_HOOKS_HOST_DEVICE Narrow narrow(Wide bits) {
    const Wide magnitude = bits & ~kSign;
    const Wide multiple = bits_as<Wide>(bits_as<Float>(magnitude) + bits_as<Float>(kAddend)) - kAddend;
    // Of infinity and NaN all bits of the exponent are set, and those that are too many go.
    const Wide rebased = (magnitude - (less(magnitude, kInfinity) & kRebase)) >> kDropped;
    const Wide held = choose(less(magnitude, kSmallestNormal), multiple, rebased);
    return static_cast<Narrow>((static_cast<Narrow>(held) & ~kNarrowSign) | ((bits & kSign) >> kSignShift));
  }

  static DDP_HOOKS_HOST_DEVICE Wide widen(Narrow bits) {
    const Wide magnitude = static_cast<Wide>(bits & ~kNarrowSign);
    const Float addend = bits_as<Float>(kAddend);
    const Wide number = bits_as<Wide>(bits_as<Float>(kAddend + magnitude) - addend) & ~kSign;
    const Wide rebased = (magnitude << kDropped) + kRebase + (~less(magnitude, kNarrowInfinity) & kRebase);
    const Wide held = choose(less(magnitude, kNarrowSmallestNormal), number, rebased);
    return held | static_cast<Wide>(bits & kNarrowSign) << kSignShift;
  }
};

using Float16Form = RebasedForm<uint32_t, uint16_t, float, 23, 10, 112, 31>;
using Float32Form = RebasedForm<uint64_t, uint32_t, double, 52, 23, 896, 255>;

}  // namespace ddp_hooks
