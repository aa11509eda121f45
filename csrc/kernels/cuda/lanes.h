// What one lane of a warp does with a stretch of memory that the whole warp works on.
//
// A stretch has an unaligned head, a body of aligned words, and a tail. Words are as wide as the alignment allows: up
// to 16 bytes, for a move as wide as the two addresses are aligned to each other. Loads stay within the stretch.
//
// `Memory` says how to load and store, so that the tests can watch each access; on the device it is DeviceMemory.
// Lanes do not communicate here. A stretch has at most kLargestChunkBytes. Addresses are multiples of the element's
// size.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/slice_table.h"

namespace ddp_hooks::cuda {

constexpr int kWidestWordBytes = 16;
// Loads that a lane has under way at once.
constexpr int kLoadsInFlight = 8;

// What one access moves, in units that registers hold.
template <int kBytes>
struct alignas(kBytes) Word {
  using Unit = std::conditional_t<
      kBytes >= 8, uint64_t,
      std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, unsigned char>>>;
  Unit units[kBytes / sizeof(Unit)];
};

// A word as numbers.
template <typename Bits, int kBytes>
DDP_HOOKS_HOST_DEVICE Bits get_number(const Word<kBytes>& word, int index) {
  using Unit = typename Word<kBytes>::Unit;
  constexpr int kPerUnit = sizeof(Unit) / sizeof(Bits);
  return static_cast<Bits>(word.units[index / kPerUnit] >> (index % kPerUnit * 8 * static_cast<int>(sizeof(Bits))));
}
template <typename Bits, int kBytes>
DDP_HOOKS_HOST_DEVICE void put_number(Word<kBytes>& word, int index, Bits bits) {  // where there is none yet
  using Unit = typename Word<kBytes>::Unit;
  constexpr int kPerUnit = sizeof(Unit) / sizeof(Bits);
  word.units[index / kPerUnit] |= Unit{bits} << (index % kPerUnit * 8 * static_cast<int>(sizeof(Bits)));
}

// How a stretch falls apart into words of some width.
struct Split {
  int head_bytes;
  int words;
  int tail_begin;  // bytes into the stretch
  int tail_bytes;
};

DDP_HOOKS_HOST_DEVICE Split split_stretch(uintptr_t address, int bytes, int word_bytes) {
  Split split;
  split.head_bytes = static_cast<int>((0 - address) & static_cast<uintptr_t>(word_bytes - 1));
  if (split.head_bytes > bytes) split.head_bytes = bytes;
  split.words = (bytes - split.head_bytes) / word_bytes;
  split.tail_begin = split.head_bytes + split.words * word_bytes;
  split.tail_bytes = bytes - split.tail_begin;
  return split;
}

// The byte at which this lane finds its element of head or tail, or -1 if it has none. The first half of the warp takes
// the head, the second the tail: each has fewer elements than half a warp has lanes, so one access does for both.
DDP_HOOKS_HOST_DEVICE int edge_of_lane(const Split& split, int lane, int element_bytes) {
  constexpr int kHalf = kWarpLanes / 2;
  static_assert(kWidestWordBytes <= kHalf);
  const int offset = lane % kHalf * element_bytes;
  if (lane < kHalf) return offset < split.head_bytes ? offset : -1;
  return offset < split.tail_bytes ? split.tail_begin + offset : -1;
}

template <int kElementBytes, int kWordBytes, typename Memory, typename Transform>
DDP_HOOKS_HOST_DEVICE void move_words(char* to, const char* from, int bytes, int lane, Memory& memory,
                                      const Transform& transform) {
  const Split split = split_stretch(reinterpret_cast<uintptr_t>(to), bytes, kWordBytes);
  const int edge_at = edge_of_lane(split, lane, kElementBytes);
  // Loaded before the words and stored after them, so that nothing waits for it alone.
  Word<kElementBytes> edge = {};
  if (edge_at >= 0) edge = memory.template load<Word<kElementBytes>>(from + edge_at);
  const char* const from_words = from + split.head_bytes;
  char* const to_words = to + split.head_bytes;
  for (int base = lane; base < split.words; base += kLoadsInFlight * kWarpLanes) {
    Word<kWordBytes> words[kLoadsInFlight] = {};
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int index = base + i * kWarpLanes;
      if (index < split.words) words[i] = memory.template load<Word<kWordBytes>>(from_words + index * kWordBytes);
    }
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int index = base + i * kWarpLanes;
      if (index < split.words) memory.store(to_words + index * kWordBytes, transform(words[i]));
    }
  }
  if (edge_at >= 0) memory.store(to + edge_at, transform(edge));
}

// to[...] = transform(from[...]); the stretches are the same or do not overlap.
template <int kElementBytes, typename Memory, typename Transform>
DDP_HOOKS_HOST_DEVICE void move_stretch(char* to, const char* from, int bytes, int lane, Memory& memory,
                                        const Transform& transform) {
  // Multiples of the element's size, so the narrowest words that can be needed are elements.
  const uintptr_t apart = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if (apart % 16 == 0) return move_words<kElementBytes, 16>(to, from, bytes, lane, memory, transform);
  if constexpr (kElementBytes < 8) {
    if (apart % 8 == 0) return move_words<kElementBytes, 8>(to, from, bytes, lane, memory, transform);
  }
  if constexpr (kElementBytes < 4) {
    if (apart % 4 == 0) return move_words<kElementBytes, 4>(to, from, bytes, lane, memory, transform);
  }
  if constexpr (kElementBytes < 2) {
    if (apart % 2 == 0) return move_words<kElementBytes, 2>(to, from, bytes, lane, memory, transform);
  }
  move_words<kElementBytes, kElementBytes>(to, from, bytes, lane, memory, transform);
}

// A transform of move_stretch that changes nothing.
struct Keep {
  template <typename T>
  DDP_HOOKS_HOST_DEVICE T operator()(const T& word) const {
    return word;
  }
};

// A transform of move_stretch that multiplies each number. `Number` has the unsigned integer that holds one (Bits), the
// type of the factor (Wide) and scale(bits, factor).
template <typename Number>
struct ScaleBy {
  typename Number::Wide factor;

  template <int kBytes>
  DDP_HOOKS_HOST_DEVICE Word<kBytes> operator()(Word<kBytes> word) const {
    using Unit = typename Word<kBytes>::Unit;
    using Bits = typename Number::Bits;
    constexpr int kUnits = kBytes / sizeof(Unit);
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kUnits; ++i) {
      Unit scaled = 0;
      DDP_HOOKS_UNROLL
      for (unsigned shift = 0; shift < 8 * sizeof(Unit); shift += 8 * sizeof(Bits)) {
        scaled |= static_cast<Unit>(Unit{Number::scale(static_cast<Bits>(word.units[i] >> shift), factor)} << shift);
      }
      word.units[i] = scaled;
    }
    return word;
  }
};

// Which bits of eight bytes, taken as elements of some size, are signs and which are not.
struct ScanMasks {
  uint64_t sign;
  uint64_t magnitude;
};

inline ScanMasks scan_masks(int64_t element_bytes) {
  const uint64_t sign = element_bytes == 8   ? 0x8000000000000000u
                        : element_bytes == 4 ? 0x8000000080000000u
                                             : 0x8000800080008000u;
  return {sign, ~sign};
}

constexpr uint32_t kFoundNonzero = 1;
constexpr uint32_t kFoundNegativeZero = 2;  // means something only when no non-zero was found

// The OR of what this lane reads of a stretch, every byte at its place in an aligned eight bytes.
template <typename Memory>
DDP_HOOKS_HOST_DEVICE uint64_t bits_of_stretch(const char* from, int bytes, int lane, Memory& memory) {
  using Wide = Word<kWidestWordBytes>;
  const Split split = split_stretch(reinterpret_cast<uintptr_t>(from), bytes, kWidestWordBytes);
  const int edge_at = edge_of_lane(split, lane, 1);
  uint64_t bits = 0;
  if (edge_at >= 0) {
    const auto place = static_cast<unsigned>(reinterpret_cast<uintptr_t>(from + edge_at) % sizeof(uint64_t));
    bits = uint64_t{memory.template load<Word<1>>(from + edge_at).units[0]} << (8 * place);
  }
  const char* const from_words = from + split.head_bytes;
  static_assert(kLargestChunkBytes <= kLoadsInFlight * kWarpLanes * kWidestWordBytes);
  if (lane < split.words) {
    // What lies past the end is replaced by the last word: looking at it again changes nothing, and loads without a
    // condition are all under way at once (with one, the compiler saw fit to wait for each before the next).
    Wide words[kLoadsInFlight];
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int index = lane + i * kWarpLanes;
      const int within = index < split.words ? index : split.words - 1;
      words[i] = memory.template load<Wide>(from_words + within * kWidestWordBytes);
    }
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) bits |= words[i].units[0] | words[i].units[1];
  }
  return bits;
}

DDP_HOOKS_HOST_DEVICE uint32_t found_in(uint64_t bits, const ScanMasks& masks) {
  return ((bits & masks.magnitude) != 0 ? kFoundNonzero : 0) | ((bits & masks.sign) != 0 ? kFoundNegativeZero : 0);
}

}  // namespace ddp_hooks::cuda
