// What one lane of a warp does to pack a stretch, and to add up a stretch of contributions.
//
// A lane stores words: 8 bytes of the buffer, 16 bytes of a sum; head and tail of a stretch are numbers. What it loads
// for a word is aligned to its numbers only, and is loaded in as wide pieces as its address allows, which is the same
// for all words of a stretch.
//
// `Memory` as in lanes.h. Lanes do not communicate.
#pragma once

#include <cstdint>
#include <type_traits>

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

constexpr int kPackedWordBytes = 8;

// Numbers that are left as they are.
template <typename BitsOfNumber>
struct FullForm {
  using Wide = BitsOfNumber;
  using Narrow = BitsOfNumber;
  static DDP_HOOKS_HOST_DEVICE Narrow narrow(Wide bits) { return bits; }
  static DDP_HOOKS_HOST_DEVICE Wide widen(Narrow bits) { return bits; }
};

// Numbers that are scaled. `Number` has the unsigned integer that holds one (Bits), the type of the factor (Wide),
// widen(bits), scale(bits, factor), add(bits, bits) and the NaN of sums (kNan).
template <typename Number>
struct ScaledForm {
  using Wide = typename Number::Bits;
  using Narrow = typename Number::Bits;
  typename Number::Wide factor;
  DDP_HOOKS_HOST_DEVICE Narrow narrow(Wide bits) const { return Number::scale(bits, factor); }
};

template <typename Form>
constexpr int kTimesAsWide = sizeof(typename Form::Wide) / sizeof(typename Form::Narrow);

template <typename Form>
DDP_HOOKS_HOST_DEVICE Word<kPackedWordBytes> narrow_word(const Form& form,
                                                         const Word<kPackedWordBytes * kTimesAsWide<Form>>& word) {
  Word<kPackedWordBytes> packed = {};
  DDP_HOOKS_UNROLL
  for (int i = 0; i < kPackedWordBytes / static_cast<int>(sizeof(typename Form::Narrow)); ++i) {
    put_number<typename Form::Narrow>(packed, i, form.narrow(get_number<typename Form::Wide>(word, i)));
  }
  return packed;
}

template <int kPieceBytes, typename Form, typename Memory>
DDP_HOOKS_HOST_DEVICE void pack_words(const Form& form, char* to, const char* from, int words, int lane,
                                      Memory& memory) {
  constexpr int kFromBytes = kPackedWordBytes * kTimesAsWide<Form>;
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
      if (index < words) memory.store(to + index * kPackedWordBytes, narrow_word(form, loaded[i]));
    }
  }
}

// to = the numbers that begin at `from`: `filled` bytes of them, and zeros up to `bytes`, which are a number at most.
template <typename Form, typename Memory>
DDP_HOOKS_HOST_DEVICE void pack_numbers_as(const Form& form, char* to, const char* from, int filled, int bytes,
                                           int lane, Memory& memory) {
  using Wide = typename Form::Wide;
  using Narrow = typename Form::Narrow;
  constexpr int kTimes = kTimesAsWide<Form>;
  constexpr int kFromBytes = kPackedWordBytes * kTimes;
  const Split split = split_stretch(reinterpret_cast<uintptr_t>(to), filled, kPackedWordBytes);
  const int edge_at = edge_of_lane(split, lane, sizeof(Narrow));
  if (edge_at >= 0) {
    const Wide number = memory.template load<Word<sizeof(Wide)>>(from + edge_at * kTimes).units[0];
    memory.store(to + edge_at, Word<sizeof(Narrow)>{{form.narrow(number)}});
  }
  if (lane == 0 && filled != bytes) memory.store(to + filled, Word<sizeof(Narrow)>{});
  char* const to_words = to + split.head_bytes;
  const char* const from_words = from + split.head_bytes * kTimes;
  const auto place = reinterpret_cast<uintptr_t>(from_words);
  if (place % kFromBytes == 0) return pack_words<kFromBytes>(form, to_words, from_words, split.words, lane, memory);
  if constexpr (sizeof(Wide) < 8 && kFromBytes > 8) {
    if (place % 8 == 0) return pack_words<8>(form, to_words, from_words, split.words, lane, memory);
  }
  if constexpr (sizeof(Wide) < 4) {
    if (place % 4 == 0) return pack_words<4>(form, to_words, from_words, split.words, lane, memory);
  }
  pack_words<sizeof(Wide)>(form, to_words, from_words, split.words, lane, memory);
}

// How slices at full width are scaled.
template <typename Wide>
struct Scaling {
  Wide factor;
  bool is_one;  // then they are copied, whatever they are
};

template <typename Wide, int kCapacity>
Scaling<Wide> scaling_of(const PackTable<kCapacity>& table) {
  return {static_cast<Wide>(table.factor), table.factor == 1};
}

// The stretch of the buffer that begins at `position`, `offset` bytes into a packed slice.
template <typename Number, int kCapacity, typename Memory>
DDP_HOOKS_HOST_DEVICE void pack_stretch(const PackTable<kCapacity>& table, int slice, int64_t offset, int64_t position,
                                        int bytes, int lane, Memory& memory,
                                        const Scaling<typename Number::Wide>& scaling) {
  using Bits = typename Number::Bits;
  const int64_t left = table.filled_bytes[slice] - offset;
  const int filled = left < bytes ? static_cast<int>(left) : bytes;
  const auto pack_as = [&](const auto& form) {
    using Form = std::decay_t<decltype(form)>;
    const char* const from = table.address[slice] + offset * kTimesAsWide<Form>;
    pack_numbers_as(form, table.to + position, from, filled, bytes, lane, memory);
  };
  const Width width = table.width[slice];
  if constexpr (sizeof(Bits) == 4) {
    if (width == Width::kBFloat16) return pack_as(BFloat16Form{});
    if (width == Width::kFloat16) return pack_as(Float16Form{});
  } else if constexpr (sizeof(Bits) == 8) {
    if (width == Width::kFloat32) return pack_as(Float32Form{});
  }
  scaling.is_one ? pack_as(FullForm<Bits>{}) : pack_as(ScaledForm<Number>{scaling.factor});
}

// What is done with each contribution.
template <typename Bits, typename Wide>
struct Addition {
  Wide factor;
  Bits last;  // added at the end: +0.0, or -0.0, which changes nothing
};
template <typename Number>
using AdditionOf = Addition<typename Number::Bits, typename Number::Wide>;

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
                                                                                  const AdditionOf<Number>& addition) {
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
