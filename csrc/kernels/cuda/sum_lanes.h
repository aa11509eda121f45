// What one lane of a warp does to add up a stretch of contributions.
//
// A lane stores words of 16 bytes; head and tail of a stretch are numbers. What it loads for a word is aligned to its
// numbers only, and is loaded in as wide pieces as its address allows, which is the same for all words of a stretch.
//
// `Memory` as in lanes.h. Lanes do not communicate.
#pragma once

#include <cstdint>

#include "kernels/cuda/lanes.h"
#include "kernels/cuda/sum_tables.h"

namespace ddp_hooks::cuda {

// So many bytes of less than that many at a time.
template <int kBytes, int kPieceBytes, typename Memory>
DDP_HOOKS_HOST_DEVICE Word<kBytes> load_in_pieces(const char* from, Memory& memory) {
  if constexpr (kPieceBytes == kBytes) {
    return memory.template load<Word<kBytes>>(from);
  } else {
    using Unit = typename Word<kBytes>::Unit;
    constexpr int kUnitBytes = sizeof(Unit);
    Word<kBytes> word = {};
    DDP_HOOKS_UNROLL
    for (int at = 0; at < kBytes; at += kPieceBytes) {
      const Unit piece = memory.template load<Word<kPieceBytes>>(from + at).units[0];
      word.units[at / kUnitBytes] |= piece << (at % kUnitBytes * 8);
    }
    return word;
  }
}

template <int kBytes, typename Memory>
DDP_HOOKS_HOST_DEVICE Word<kBytes> load_word(const char* from, Memory& memory) {
  const auto place = reinterpret_cast<uintptr_t>(from);
  if (place % kBytes == 0) return load_in_pieces<kBytes, kBytes>(from, memory);
  if constexpr (kBytes > 8) {
    if (place % 8 == 0) return load_in_pieces<kBytes, 8>(from, memory);
  }
  if constexpr (kBytes > 4) {
    if (place % 4 == 0) return load_in_pieces<kBytes, 4>(from, memory);
  }
  return load_in_pieces<kBytes, 2>(from, memory);
}

// What is done with each contribution. `Number` has the unsigned integer that holds one (Bits), the type of the factor
// (Wide), widen(bits), scale(bits, factor), add(bits, bits) and the NaN of sums (kNan).
template <typename Bits, typename Wide>
struct Addition {
  Wide factor;
  Bits last;  // added at the end: +0.0, or -0.0, which changes nothing
};
template <typename Number>
using AdditionOf = Addition<typename Number::Bits, typename Number::Wide>;

// The sum of all terms of so many numbers, from the `index`-th of the slice on.
template <typename Number, int kNumbers, typename Table, typename Memory>
DDP_HOOKS_HOST_DEVICE Word<kNumbers * sizeof(typename Number::Bits)> sum_of_terms(const Table& table, int slice,
                                                                                  int64_t index, Memory& memory,
                                                                                  const AdditionOf<Number>& addition) {
  using Bits = typename Number::Bits;
  constexpr int kBytes = kNumbers * sizeof(Bits);
  using Sum = Word<kBytes>;
  const int64_t begin = index * static_cast<int64_t>(sizeof(Bits));
  const int first = table.first_term[slice];
  const int end = table.first_term[slice + 1];
  Sum sum = {};
  for (int term = first; term < end; ++term) {
    const int64_t offset = table.terms[term];
    const char* const numbers = offset == kOwnTerm ? table.address[slice] : table.packed + offset;
    const Sum loaded = load_word<kBytes>(numbers + begin, memory);
    Sum next = {};
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      const Bits scaled = Number::scale(get_number<Bits>(loaded, i), addition.factor);
      put_number<Bits>(next, i, term == first ? scaled : Number::add(get_number<Bits>(sum, i), scaled));
    }
    sum = next;
  }
  Sum result = {};
  DDP_HOOKS_UNROLL
  for (int i = 0; i < kNumbers; ++i) {
    const Bits total = Number::add(get_number<Bits>(sum, i), addition.last);
    // Of several terms the NaN is always the same, wherever they are added up.
    const bool is_nan = Number::widen(total) != Number::widen(total);
    put_number<Bits>(result, i, is_nan && end - first > 1 ? Number::kNan : total);
  }
  return result;
}

// The stretch that begins `offset` bytes into a slice = its part of the sum of the slice's terms.
template <typename Number, typename Table, typename Memory>
DDP_HOOKS_HOST_DEVICE void sum_stretch(const Table& table, int slice, int64_t offset, int bytes, int lane,
                                       Memory& memory, const AdditionOf<Number>& addition) {
  constexpr int kElementBytes = sizeof(typename Number::Bits);
  constexpr int kNumbers = kWidestWordBytes / kElementBytes;
  char* const to = table.address[slice] + offset;
  const Split split = split_stretch(reinterpret_cast<uintptr_t>(to), bytes, kWidestWordBytes);
  const int edge_at = edge_of_lane(split, lane, kElementBytes);
  if (edge_at >= 0) {
    const int64_t index = (offset + edge_at) / kElementBytes;
    memory.store(to + edge_at, sum_of_terms<Number, 1>(table, slice, index, memory, addition));
  }
  const int64_t first = (offset + split.head_bytes) / kElementBytes;
  for (int word = lane; word < split.words; word += kWarpLanes) {
    const auto sum = sum_of_terms<Number, kNumbers>(table, slice, first + int64_t{word} * kNumbers, memory, addition);
    memory.store(to + split.head_bytes + word * kWidestWordBytes, sum);
  }
}

}  // namespace ddp_hooks::cuda
