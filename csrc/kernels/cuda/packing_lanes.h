// What one lane of a warp does to pack a stretch, and to add up a stretch of contributions.
//
// A lane stores words: kPackedAlignment bytes of the buffer, where every slice begins at a multiple of that, and 16
// bytes of a sum, whose head and tail are elements. What it loads for a word is aligned to its elements only, and is
// loaded in as wide pieces as its address allows, which is the same for all words of a stretch.
//
// `Memory` as in lanes.h. Lanes do not communicate.
#pragma once

#include <cstdint>

#include "kernels/cuda/lanes.h"
#include "kernels/cuda/packing_tables.h"
#include "kernels/narrow_forms.h"

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

// Numbers that are left as they are.
template <typename BitsOfNumber>
struct FullForm {
  using Wide = BitsOfNumber;
  using Narrow = BitsOfNumber;
  static DDP_HOOKS_HOST_DEVICE Narrow narrow(Wide bits) { return bits; }
  static DDP_HOOKS_HOST_DEVICE Wide widen(Narrow bits) { return bits; }
};

template <typename Form>
constexpr int kTimesAsWide = sizeof(typename Form::Wide) / sizeof(typename Form::Narrow);

template <typename Form>
DDP_HOOKS_HOST_DEVICE Word<kPackedAlignment> narrow_word(const Word<kPackedAlignment * kTimesAsWide<Form>>& word) {
  Word<kPackedAlignment> packed = {};
  DDP_HOOKS_UNROLL
  for (int i = 0; i < kPackedAlignment / static_cast<int>(sizeof(typename Form::Narrow)); ++i) {
    put_number<typename Form::Narrow>(packed, i, Form::narrow(get_number<typename Form::Wide>(word, i)));
  }
  return packed;
}

template <typename Form, int kPieceBytes, typename Memory>
DDP_HOOKS_HOST_DEVICE void pack_words(char* to, const char* from, int words, int lane, Memory& memory) {
  constexpr int kFromBytes = kPackedAlignment * kTimesAsWide<Form>;
  for (int base = lane; base < words; base += kLoadsInFlight * kWarpLanes) {
    Word<kFromBytes> loaded[kLoadsInFlight] = {};
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int index = base + i * kWarpLanes;
      if (index < words) loaded[i] = load_in_pieces<kFromBytes, kPieceBytes>(from + index * kFromBytes, memory);
    }
    DDP_HOOKS_UNROLL
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int index = base + i * kWarpLanes;
      if (index < words) memory.store(to + index * kPackedAlignment, narrow_word<Form>(loaded[i]));
    }
  }
}

// to = the numbers that begin at `offset` bytes of a packed slice. `to`, `offset` and `bytes` are multiples of
// kPackedAlignment.
template <typename Form, typename Memory>
DDP_HOOKS_HOST_DEVICE void pack_stretch_as(char* to, const char* slice, int64_t filled_bytes, int64_t offset, int bytes,
                                           int lane, Memory& memory) {
  using Wide = typename Form::Wide;
  constexpr int kFromBytes = kPackedAlignment * kTimesAsWide<Form>;
  const char* const from = slice + offset * kTimesAsWide<Form>;
  const int filled = filled_bytes - offset < bytes ? static_cast<int>(filled_bytes - offset) : bytes;
  const int words = filled / kPackedAlignment;
  const auto place = reinterpret_cast<uintptr_t>(from);
  if (place % kFromBytes == 0) {
    pack_words<Form, kFromBytes>(to, from, words, lane, memory);
  } else if (sizeof(Wide) < 8 && place % 8 == 0) {
    pack_words<Form, 8>(to, from, words, lane, memory);
  } else if (sizeof(Wide) < 4 && place % 4 == 0) {
    pack_words<Form, 4>(to, from, words, lane, memory);
  } else {
    pack_words<Form, sizeof(Wide)>(to, from, words, lane, memory);
  }
  if (lane != 0 || words * kPackedAlignment == bytes) return;
  // The last word of a slice, of which what is not a number is zero in every form.
  Word<kFromBytes> last = {};
  const int numbers = (filled - words * kPackedAlignment) / static_cast<int>(sizeof(typename Form::Narrow));
  DDP_HOOKS_UNROLL
  for (int i = 0; i < kFromBytes / static_cast<int>(sizeof(Wide)); ++i) {
    const char* const number = from + words * kFromBytes + i * static_cast<int>(sizeof(Wide));
    if (i < numbers) put_number<Wide>(last, i, memory.template load<Word<sizeof(Wide)>>(number).units[0]);
  }
  memory.store(to + words * kPackedAlignment, narrow_word<Form>(last));
}

template <typename Memory>
DDP_HOOKS_HOST_DEVICE void pack_stretch(char* to, const char* slice, Width width, int64_t filled_bytes, int64_t offset,
                                        int bytes, int lane, Memory& memory) {
  switch (width) {
    case Width::kBFloat16:
      return pack_stretch_as<BFloat16Form>(to, slice, filled_bytes, offset, bytes, lane, memory);
    case Width::kFloat16:
      return pack_stretch_as<Float16Form>(to, slice, filled_bytes, offset, bytes, lane, memory);
    case Width::kFloat32:
      return pack_stretch_as<Float32Form>(to, slice, filled_bytes, offset, bytes, lane, memory);
    case Width::kFull:
      // As the narrowest numbers, whatever they are.
      return pack_stretch_as<FullForm<uint16_t>>(to, slice, filled_bytes, offset, bytes, lane, memory);
  }
}

// What is done with each contribution. `Number` has the unsigned integer that holds one (Bits), the type of the factor
// (Wide), scale(bits, factor) and add(bits, bits).
template <typename Number>
struct Addition {
  typename Number::Wide factor;
  typename Number::Bits last;  // added at the end: +0.0, or -0.0, which changes nothing
};

// So many numbers of a term, from the `index`-th of the slice on, at their places in a word of the slice's numbers.
template <typename Form, int kNumbers, typename Memory>
DDP_HOOKS_HOST_DEVICE Word<kNumbers * sizeof(typename Form::Wide)> load_numbers(const char* numbers, int64_t index,
                                                                                Memory& memory) {
  using Wide = typename Form::Wide;
  using Narrow = typename Form::Narrow;
  constexpr int kNarrowBytes = kNumbers * sizeof(Narrow);
  const auto loaded = load_word<kNarrowBytes>(numbers + index * static_cast<int64_t>(sizeof(Narrow)), memory);
  Word<kNumbers * sizeof(Wide)> word = {};
  DDP_HOOKS_UNROLL
  for (int i = 0; i < kNumbers; ++i) put_number<Wide>(word, i, Form::widen(get_number<Narrow>(loaded, i)));
  return word;
}

// The sum of all terms of so many numbers, from the `index`-th of the slice on.
template <typename Number, int kNumbers, typename Table, typename Memory>
DDP_HOOKS_HOST_DEVICE Word<kNumbers * sizeof(typename Number::Bits)> sum_of_terms(const Table& table, int slice,
                                                                                  int64_t index, Memory& memory,
                                                                                  const Addition<Number>& addition) {
  using Bits = typename Number::Bits;
  using Sum = Word<kNumbers * sizeof(Bits)>;
  const auto load = [&](uint64_t term) {
    if (term == kOwnTerm) return load_numbers<FullForm<Bits>, kNumbers>(table.address[slice], index, memory);
    const char* const numbers = table.packed + offset_of_term(term);
    if constexpr (sizeof(Bits) == 4) {
      if (width_of_term(term) == Width::kBFloat16) return load_numbers<BFloat16Form, kNumbers>(numbers, index, memory);
      if (width_of_term(term) == Width::kFloat16) return load_numbers<Float16Form, kNumbers>(numbers, index, memory);
    } else if constexpr (sizeof(Bits) == 8) {
      if (width_of_term(term) == Width::kFloat32) return load_numbers<Float32Form, kNumbers>(numbers, index, memory);
    }
    return load_numbers<FullForm<Bits>, kNumbers>(numbers, index, memory);
  };
  const int first = table.first_term[slice];
  const int end = table.first_term[slice + 1];
  Sum sum = {};
  for (int term = first; term < end; ++term) {
    const Sum loaded = load(table.terms[term]);
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
  for (int i = 0; i < kNumbers; ++i) put_number<Bits>(result, i, Number::add(get_number<Bits>(sum, i), addition.last));
  return result;
}

// The stretch that begins `offset` bytes into a slice = its part of the sum of the slice's terms.
template <typename Number, typename Table, typename Memory>
DDP_HOOKS_HOST_DEVICE void sum_stretch(const Table& table, int slice, int64_t offset, int bytes, int lane,
                                       Memory& memory, const Addition<Number>& addition) {
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
