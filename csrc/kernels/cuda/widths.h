// Which narrow forms hold the units of a stretch of memory, as the kernels see it: what the unit scan and the sample do
// when they are asked for widths, too.
//
// As in units.h each lane first looks at the beginning of one unit of its warp's portion; a unit that no form holds by
// then is settled, and no more of it is read. What is left the warp reads as if there were no units. Each lane notes
// for itself, a bit for each of up to 32 units, what it found where, and one OR over the lanes brings that together: in
// gradients that are narrow each unit holds something, so a vote on each would take longer than reading does.
//
// `Warp` and `Memory` as in units.h. Thread-safety: pure functions but for the bitmaps, to which every warp adds bits
// and from which none takes any.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cuda/lanes.h"
#include "kernels/cuda/samples.h"
#include "kernels/cuda/units.h"
#include "kernels/narrow_forms.h"

namespace ddp_hooks::cuda {

// What a number may show besides kFoundNonzero and kFoundNegativeZero: the first form does not hold it, or the second.
constexpr uint32_t kFoundInexact = 4;
constexpr uint32_t kFoundInexactToo = 8;

// What a number of each type that has narrow forms shows.
struct WidthsOfFloat32 {
  using Bits = uint32_t;
  static DDP_HOOKS_HOST_DEVICE uint32_t found_in(uint32_t bits) {
    if (bits << 1 == 0) return bits == 0 ? 0 : kFoundNegativeZero;
    return kFoundNonzero | (BFloat16Form::lost(bits) != 0 ? kFoundInexact : 0) |
           (Float16Form::lost(bits) != 0 ? kFoundInexactToo : 0);
  }
};

// The second form is not in use, and holds nothing but zeros.
struct WidthsOfFloat64 {
  using Bits = uint64_t;
  static DDP_HOOKS_HOST_DEVICE uint32_t found_in(uint64_t bits) {
    if (bits << 1 == 0) return bits == 0 ? 0 : kFoundNegativeZero;
    return kFoundNonzero | (Float32Form::lost(bits) != 0 ? kFoundInexact : 0) | kFoundInexactToo;
  }
};

// What was found in up to kUnitsPerWord units, a bit each.
struct FoundInUnits {
  uint32_t nonzero = 0;
  uint32_t negative_zero = 0;
  uint32_t inexact = 0;
  uint32_t inexact_too = 0;

  DDP_HOOKS_HOST_DEVICE void add(uint32_t found, int unit) {
    nonzero |= (found & kFoundNonzero) / kFoundNonzero << unit;
    negative_zero |= (found & kFoundNegativeZero) / kFoundNegativeZero << unit;
    inexact |= (found & kFoundInexact) / kFoundInexact << unit;
    inexact_too |= (found & kFoundInexactToo) / kFoundInexactToo << unit;
  }
  DDP_HOOKS_HOST_DEVICE void merge(const FoundInUnits& other) {
    nonzero |= other.nonzero;
    negative_zero |= other.negative_zero;
    inexact |= other.inexact;
    inexact_too |= other.inexact_too;
  }
  // Units in which nothing else can be found.
  DDP_HOOKS_HOST_DEVICE uint32_t settled() const { return inexact & inexact_too; }
};

// What this lane finds in a stretch that begins `position` bytes into its portion. Settled units are not read.
template <typename Widths, typename Memory>
DDP_HOOKS_HOST_DEVICE FoundInUnits widths_of_stretch(const char* from, int bytes, int position, int unit_bytes,
                                                     uint32_t settled, int lane, Memory& memory) {
  using Bits = typename Widths::Bits;
  using Wide = Word<kWidestWordBytes>;
  constexpr int kBits = sizeof(Bits);
  constexpr int kNumbers = kWidestWordBytes / kBits;
  FoundInUnits found;
  const Split split = split_stretch(reinterpret_cast<uintptr_t>(from), bytes, kWidestWordBytes);
  const int edge_at = edge_of_lane(split, lane, kBits);
  if (edge_at >= 0) {
    const Bits bits = memory.template load<Word<kBits>>(from + edge_at).units[0];
    found.add(Widths::found_in(bits), (position + edge_at) / unit_bytes);
  }
  if (lane >= split.words) return found;
  const char* const from_words = from + split.head_bytes;
  const int position_of_words = position + split.head_bytes;
  static_assert(kLargestChunkBytes <= kLoadsInFlight * kWarpLanes * kWidestWordBytes);
  // As in bits_of_stretch, what is not wanted is replaced by a word that is, or by the last one.
  Wide words[kLoadsInFlight];
  int first_unit[kLoadsInFlight];
  DDP_HOOKS_UNROLL
  for (int i = 0; i < kLoadsInFlight; ++i) {
    const int index = lane + i * kWarpLanes;
    const int at = position_of_words + index * kWidestWordBytes;
    first_unit[i] = at / unit_bytes;
    const int last_unit = (at + kWidestWordBytes - 1) / unit_bytes;
    // Beyond the stretch units have no bit in `settled`.
    const bool is_left_out = index >= split.words || (last_unit - first_unit[i] <= 1 &&
                                                      (settled >> first_unit[i] & settled >> last_unit & 1) != 0);
    if (is_left_out) first_unit[i] = -1;
    const int within = first_unit[i] >= 0 ? index : split.words - 1;
    words[i] = memory.template load<Wide>(from_words + within * kWidestWordBytes);
  }
  DDP_HOOKS_UNROLL
  for (int i = 0; i < kLoadsInFlight; ++i) {
    if (first_unit[i] < 0) continue;
    const int at = position_of_words + (lane + i * kWarpLanes) * kWidestWordBytes;
    const int left_in_unit = (first_unit[i] + 1) * unit_bytes - at;
    uint32_t in_unit = 0;
    DDP_HOOKS_UNROLL
    for (int j = 0; j < kNumbers; ++j) {
      const uint32_t in_number = Widths::found_in(get_number<Bits>(words[i], j));
      if (j * kBits < left_in_unit) {
        in_unit |= in_number;
      } else {
        found.add(in_number, (at + j * kBits) / unit_bytes);
      }
    }
    found.add(in_unit, first_unit[i]);
  }
  return found;
}

// Four bitmaps, of `words` each: as in units.h, and then of what the first form does not hold, and the second.
constexpr int kBitmapsOfWidths = 4;

// Adds the bits of a portion's units.
template <typename Widths, typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void scan_widths_of_portion(const Portion& portion, const Warp& warp, Memory& memory,
                                                  uint32_t* bitmaps, int64_t words) {
  if (portion.bytes == 0) return;
  uint32_t* const word = bitmaps + portion.first_unit / kUnitsPerWord;
  const auto shift = static_cast<unsigned>(portion.first_unit % kUnitsPerWord);
  FoundInUnits found;
  if (portion.is_piece) {
    // Volatile, because the warps of other pieces write it meanwhile.
    const volatile uint32_t* const known = word;
    found = warp.combine([&](int) {
      FoundInUnits mine;
      mine.inexact = known[2 * words] >> shift & 1;
      mine.inexact_too = known[3 * words] >> shift & 1;
      return mine;
    });
    if (found.settled() != 0) return;
  }
  found.merge(warp.combine([&](int lane) {
    FoundInUnits mine;
    if (lane >= portion.units || portion.unit_bytes < kLaneUnitBytes) return mine;
    const int begin = lane * portion.unit_bytes;
    const int bytes = portion.bytes - begin < portion.unit_bytes ? portion.bytes - begin : portion.unit_bytes;
    const char* const unit = portion.address + begin;
    const Split split = split_stretch(reinterpret_cast<uintptr_t>(unit), bytes, kWidestWordBytes);
    if (split.words == 0) return mine;
    const auto beginning = memory.template load<Word<kWidestWordBytes>>(unit + split.head_bytes);
    uint32_t in_unit = 0;
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kWidestWordBytes / static_cast<int>(sizeof(typename Widths::Bits)); ++i) {
      in_unit |= Widths::found_in(get_number<typename Widths::Bits>(beginning, i));
    }
    mine.add(in_unit, lane);
    return mine;
  }));
  const uint32_t all = portion.units == kUnitsPerWord ? ~uint32_t{0} : (uint32_t{1} << portion.units) - 1;
  for (int position = 0; position < portion.bytes; position += static_cast<int>(kLargestChunkBytes)) {
    const int left = portion.bytes - position;
    const int bytes = left < kLargestChunkBytes ? left : static_cast<int>(kLargestChunkBytes);
    const uint32_t settled = found.settled();
    const int first_unit = position / portion.unit_bytes;
    const int behind_last = (position + bytes - 1) / portion.unit_bytes + 1;
    const uint32_t up_to_last = behind_last == kUnitsPerWord ? all : (uint32_t{1} << behind_last) - 1;
    if ((~settled & up_to_last) >> first_unit == 0) continue;
    found.merge(warp.combine([&](int lane) {
      return widths_of_stretch<Widths>(portion.address + position, bytes, position, portion.unit_bytes, settled, lane,
                                       memory);
    }));
  }
  warp.merge(word, found.nonzero << shift);
  warp.merge(word + words, (found.negative_zero & ~found.nonzero) << shift);
  warp.merge(word + 2 * words, found.inexact << shift);
  warp.merge(word + 3 * words, found.inexact_too << shift);
}

// What the bitmaps say of units of some type. Where no form was looked for, none holds what is not zero.
inline cpu::UnitScanResult read_bitmaps_of_widths(const uint32_t* bitmaps, int64_t units, ElementType type) {
  cpu::UnitScanResult result = read_bitmaps(bitmaps, units);
  const int64_t words = words_of_bitmap(units);
  result.inexact.fill(result.nonzero);
  for (size_t k = 0; k < result.inexact.size(); ++k) {
    if (narrow_widths(type)[k] == Width::kFull) continue;
    const uint32_t* const bitmap = bitmaps + static_cast<int64_t>(2 + k) * words;
    for (int64_t i = 0; i < words; i += 2) {
      result.inexact[k][static_cast<size_t>(i / 2)] = bitmap[i] | uint64_t{bitmap[i + 1]} << kUnitsPerWord;
    }
  }
  return result;
}

// How many bitmaps a scan fills.
inline int bitmap_count(ElementType type, bool widths) {
  return widths && narrow_widths(type)[0] != Width::kFull ? kBitmapsOfWidths : 2;
}

// The words of a sample of widths: of the units with a non-zero, of what the first form does not hold, and the second.
constexpr int kBitmapsOfSample = 3;

// How many words a sample fills for each slice.
inline int words_of_sample(ElementType type, bool widths) {
  return bitmap_count(type, widths) == kBitmapsOfWidths ? kBitmapsOfSample * kWordsPerSample : kWordsPerSample;
}

// Sets the unit's bits in its slice's words.
template <typename Widths, typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void look_at_widths_of_unit(const SampledUnit& unit, const Warp& warp, Memory& memory,
                                                  uint32_t* words) {
  constexpr int64_t kWidthBytes = kWidthElements * static_cast<int64_t>(sizeof(typename Widths::Bits));
  static_assert(kWidthBytes % kLargestChunkBytes == 0);
  // A warp without a slice has no words to set, not even to what they are.
  if (unit.bytes == 0) return;
  FoundInUnits found;
  for (int64_t position = 0; position < unit.bytes; position += kLargestChunkBytes) {
    const bool is_for_widths = position < kWidthBytes;
    if (found.settled() != 0 || (!is_for_widths && found.nonzero != 0)) break;
    const int64_t left = unit.bytes - position;
    const int bytes = static_cast<int>(left < kLargestChunkBytes ? left : kLargestChunkBytes);
    const FoundInUnits here = warp.combine(
        [&](int lane) { return widths_of_stretch<Widths>(unit.address + position, bytes, 0, bytes, 0, lane, memory); });
    found.nonzero |= here.nonzero;
    if (is_for_widths) found.merge(here);
  }
  uint32_t* const word = words + unit.slice * kBitmapsOfSample * kWordsPerSample + unit.place / kUnitsPerWord;
  const int shift = unit.place % kUnitsPerWord;
  warp.merge(word, found.nonzero << shift);
  warp.merge(word + kWordsPerSample, found.inexact << shift);
  warp.merge(word + 2 * kWordsPerSample, found.inexact_too << shift);
}

// What was found in the sampled units of a slice.
struct SampleCounts {
  int64_t taken = 0;
  int64_t zeros = 0;
  std::array<int64_t, 2> narrow{};  // not zero, and held by each form
};

inline SampleCounts count_sample(const uint32_t* words, int64_t units, ElementType type, bool widths) {
  SampleCounts counts{sampled_count(units), count_zeros(words, units), {}};
  for (size_t k = 0; widths && k < counts.narrow.size(); ++k) {
    if (narrow_widths(type)[k] == Width::kFull) continue;
    const uint32_t* const inexact = words + static_cast<int64_t>(1 + k) * kWordsPerSample;
    for (int i = 0; i < kWordsPerSample; ++i) {
      for (uint32_t held = words[i] & ~inexact[i]; held != 0; held &= held - 1) ++counts.narrow[k];
    }
  }
  return counts;
}

}  // namespace ddp_hooks::cuda
