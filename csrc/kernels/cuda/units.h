// The units of many slices of memory, as the unit scan's kernel sees them: which warp takes which, and what it does.
//
// A table of slices travels by value, as in slice_table.h. Each slice has its own warps, one after the other, and its
// own bitmaps. In its slice, a warp takes what follows.
//
// It is one *portion*: several whole units, or a piece of a unit that is longer than a portion. The units of a
// portion have their bits in one word of 32, so that what a warp has found is one atomic OR; pieces of one unit, whose
// warps know nothing of each other, then need nothing besides.
//
// In its portion, each lane first looks at the beginning of one unit: of a dense gradient no more is read, and all of
// that is under way at once. What is left is most likely zero, so the warp reads it as if there were no units, as many
// bytes at once as it can have under way, and looks at one unit after another only where it finds something.
//
// `Warp` says how lanes vote and how bits get into the bitmaps, `Memory` how to load: on the device they are the
// hardware's own, in the tests loops over lanes (emulation.h). Thread-safety: pure functions but for the bitmaps, to
// which every warp adds bits and from which none takes any.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/unit_scan.h"
#include "kernels/cuda/lanes.h"
#include "kernels/cuda/slice_table.h"

namespace ddp_hooks::cuda {

// A portion is at most eight times what a warp reads at once, so that its first look, which waits for memory as long as
// a read does, is little beside it; and smaller where that leaves fewer warps than fill a GPU.
constexpr int64_t kLargestPortionBytes = 8 * kLargestChunkBytes;
constexpr int64_t kSmallestPortionBytes = kLargestChunkBytes;
constexpr int64_t kWarpsThatFill = 2048;

constexpr int kUnitsPerWord = 32;

// A whole unit of this much holds an aligned word. Shorter ones are read by a lane each.
constexpr int kLaneUnitBytes = 2 * kWidestWordBytes;

struct Units {
  const char* address;
  int64_t bytes;
  int64_t unit_bytes;
  int64_t count;
  int64_t units_per_portion;  // a power of two up to kUnitsPerWord; 1 where units have several pieces
  int64_t pieces_per_unit;
  int64_t piece_bytes;  // of a whole piece
};

constexpr int kSmallUnits = 55;
constexpr int kLargeUnits = 450;

template <int kCapacity>
struct UnitsTable {
  Units slices[kCapacity];
  int64_t begin[kCapacity + 1];   // each one's first warp; begin[count] is how many there are
  int64_t first_word[kCapacity];  // of each one's bitmaps
  int32_t count;
};

static_assert(sizeof(UnitsTable<kSmallUnits>) + 64 <= 4096);
static_assert(sizeof(UnitsTable<kLargeUnits>) + 64 <= 32764);

struct Portion {
  int64_t first_unit;
  const char* address;
  int bytes;       // 0: nothing to do
  int unit_bytes;  // of a piece as of a unit
  int units;       // up to kUnitsPerWord, the last one perhaps shorter
  bool is_piece;
};

// `bytes` and `unit_bytes` are more than 0 and multiples of the element's size, as the address is.
inline Units divide_units(const char* address, int64_t bytes, int64_t unit_bytes) {
  int64_t portion_bytes = kSmallestPortionBytes;
  while (portion_bytes < kLargestPortionBytes && portion_bytes * kWarpsThatFill < bytes) portion_bytes *= 2;
  int64_t units_per_portion = 1;
  while (units_per_portion < kUnitsPerWord && 2 * units_per_portion * unit_bytes <= portion_bytes) {
    units_per_portion *= 2;
  }
  const int64_t pieces_per_unit = (unit_bytes - 1) / portion_bytes + 1;
  const int64_t piece_bytes = pieces_per_unit == 1 ? unit_bytes : portion_bytes;
  const int64_t count = (bytes - 1) / unit_bytes + 1;
  return {address, bytes, unit_bytes, count, units_per_portion, pieces_per_unit, piece_bytes};
}

inline int64_t portion_count(const Units& units) {
  return ((units.count - 1) / units.units_per_portion + 1) * units.pieces_per_unit;
}

// Beyond the last portion, and for pieces that the last unit is too short for, one without a byte.
DDP_HOOKS_HOST_DEVICE Portion portion_of_warp(const Units& units, int64_t warp) {
  const int64_t first_unit = warp / units.pieces_per_unit * units.units_per_portion;
  const int64_t piece = warp % units.pieces_per_unit;
  const int64_t begin = first_unit * units.unit_bytes + piece * units.piece_bytes;
  int64_t end = (first_unit + units.units_per_portion) * units.unit_bytes;
  if (end > units.bytes) end = units.bytes;
  const bool is_piece = units.pieces_per_unit > 1;
  if (is_piece && end > begin + units.piece_bytes) end = begin + units.piece_bytes;
  const int bytes = begin < end ? static_cast<int>(end - begin) : 0;
  const int unit_bytes = static_cast<int>(units.piece_bytes);
  return {first_unit, units.address + begin, bytes, unit_bytes, (bytes + unit_bytes - 1) / unit_bytes, is_piece};
}

// The bitmaps of a slice lie one after the other: of units with a non-zero, and of others with a -0.0. Each has an even
// number of words.
constexpr int kBitmaps = 2;

DDP_HOOKS_HOST_DEVICE int64_t words_of_bitmap(int64_t units) {
  return (units + 63) / 64 * 2;
}

template <int kCapacity>
DDP_HOOKS_HOST_DEVICE int64_t warp_count(const UnitsTable<kCapacity>& table) {
  return table.begin[table.count];
}

// Calls visit(units, warp in these, the slice's bitmaps) for the slice whose warp this is. Blocks are launched whole,
// so some warps find no slice.
template <typename Table, typename Visit>
DDP_HOOKS_HOST_DEVICE void visit_units(const Table& table, int64_t warp, uint32_t* bitmaps, const Visit& visit) {
  if (warp >= warp_count(table)) return;
  const int slice = find_slice(table, warp);
  visit(table.slices[slice], warp - table.begin[slice], bitmaps + table.first_word[slice]);
}

// Calls launch(table) for one table after another, until one returns an error (not null); returns that.
template <typename Launch>
const char* for_each_units_table(const UnitsOfMemory* slices, size_t count, const Launch& launch) {
  int64_t word = 0;
  const auto run = [&](auto& table, size_t first, size_t length) -> const char* {
    int64_t warps = 0;
    for (size_t i = 0; i < length; ++i) {
      const UnitsOfMemory& slice = slices[first + i];
      table.slices[i] = divide_units(slice.address, slice.bytes, slice.unit_bytes);
      table.begin[i] = warps;
      table.first_word[i] = word;
      warps += portion_count(table.slices[i]);
      word += kBitmaps * words_of_bitmap(table.slices[i].count);
    }
    table.begin[length] = warps;
    table.count = static_cast<int32_t>(length);
    return launch(table);
  };
  for (size_t first = 0; first < count;) {
    const size_t left = count - first;
    const size_t length = left < kLargeUnits ? left : kLargeUnits;
    const char* error = nullptr;
    // Left as they are: only the first `length` entries are read.
    if (length <= kSmallUnits) {
      UnitsTable<kSmallUnits> table;
      error = run(table, first, length);
    } else {
      UnitsTable<kLargeUnits> table;
      error = run(table, first, length);
    }
    if (error != nullptr) return error;
    first += length;
  }
  return nullptr;
}

// What the lanes of a warp found, a bit each.
struct Votes {
  uint32_t nonzero;
  uint32_t negative_zero;
};

// The OR of a unit of less than kLaneUnitBytes; of a longer one, of its first aligned word, if it holds one.
template <typename Memory>
DDP_HOOKS_HOST_DEVICE uint64_t bits_of_beginning(const char* unit, int bytes, bool is_short, Memory& memory) {
  const auto place = reinterpret_cast<uintptr_t>(unit);
  uint64_t bits = 0;
  if (is_short) {
    // As the narrowest elements, whatever they are, each at its place in an aligned eight bytes.
    DDP_HOOKS_UNROLL
    for (int at = 0; at < kLaneUnitBytes; at += 2) {
      const auto shift = static_cast<unsigned>((place + static_cast<uintptr_t>(at)) % sizeof(uint64_t)) * 8;
      if (at < bytes) bits |= uint64_t{memory.template load<Word<2>>(unit + at).units[0]} << shift;
    }
    return bits;
  }
  const Split split = split_stretch(place, bytes, kWidestWordBytes);
  if (split.words == 0) return 0;
  const auto word = memory.template load<Word<kWidestWordBytes>>(unit + split.head_bytes);
  return word.units[0] | word.units[1];
}

// How many of the lowest bits are zero, of 32.
DDP_HOOKS_HOST_DEVICE int zeros_below(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return bits == 0 ? 32 : __ffs(static_cast<int>(bits)) - 1;
#else
  return bits == 0 ? 32 : __builtin_ctz(bits);
#endif
}

// Adds the bits of a portion's units to the two bitmaps, whose words begin at these addresses.
template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void scan_portion(const Portion& portion, const ScanMasks& masks, const Warp& warp,
                                        Memory& memory, uint32_t* nonzero_units, uint32_t* negative_zero_units) {
  if (portion.bytes == 0) return;
  uint32_t* const nonzero_word = nonzero_units + portion.first_unit / kUnitsPerWord;
  uint32_t* const negative_zero_word = negative_zero_units + portion.first_unit / kUnitsPerWord;
  const auto shift = static_cast<unsigned>(portion.first_unit % kUnitsPerWord);
  if (portion.is_piece) {
    // Volatile, because the warps of other pieces write it meanwhile. Lanes may read different values; the vote makes
    // them agree.
    const volatile uint32_t* const word = nonzero_word;
    if (warp.vote([&](int) { return *word >> shift & 1 ? kFoundNonzero : 0; }).nonzero != 0) return;
  }

  const bool is_short = portion.unit_bytes < kLaneUnitBytes;
  const Votes beginnings = warp.vote([&](int lane) -> uint32_t {
    if (lane >= portion.units) return 0;
    const int begin = lane * portion.unit_bytes;
    const int bytes = portion.bytes - begin < portion.unit_bytes ? portion.bytes - begin : portion.unit_bytes;
    return found_in(bits_of_beginning(portion.address + begin, bytes, is_short, memory), masks);
  });
  uint32_t nonzero = beginnings.nonzero;
  uint32_t negative_zero = is_short ? beginnings.negative_zero : 0;

  const auto look = [&](int begin, int end) {
    return warp.vote(
        [&](int lane) { return found_in(bits_of_stretch(portion.address + begin, end - begin, lane, memory), masks); });
  };
  for (int position = is_short ? portion.bytes : 0; position < portion.bytes;) {
    const int unit = position / portion.unit_bytes;
    const uint32_t known = nonzero >> unit;
    if ((known & 1) != 0) {
      position = (unit + 1) * portion.unit_bytes;
      continue;
    }
    // On to the next unit that is known to hold a non-zero.
    int end = portion.bytes;
    if (known != 0) end = (unit + zeros_below(known)) * portion.unit_bytes;
    if (end > position + kLargestChunkBytes) end = position + static_cast<int>(kLargestChunkBytes);
    Votes votes = look(position, end);
    for (int each = unit; (votes.nonzero | votes.negative_zero) != 0 && position < end; ++each) {
      int end_of_each = (each + 1) * portion.unit_bytes;
      if (end_of_each > end) end_of_each = end;
      // A stretch of one unit has been looked at already.
      const Votes found = each == unit && end_of_each == end ? votes : look(position, end_of_each);
      if (found.nonzero != 0) nonzero |= uint32_t{1} << each;
      if (found.negative_zero != 0) negative_zero |= uint32_t{1} << each;
      position = end_of_each;
    }
    position = end;
  }
  warp.merge(nonzero_word, nonzero << shift);
  warp.merge(negative_zero_word, (negative_zero & ~nonzero) << shift);
}

// What the bitmaps say. A unit in pieces may hold a -0.0 in one and a non-zero in another.
inline cpu::UnitScanResult read_bitmaps(const uint32_t* bitmaps, int64_t units) {
  cpu::UnitScanResult result;
  const int64_t words = words_of_bitmap(units);
  result.nonzero.resize(static_cast<size_t>(words / 2));
  for (int64_t i = 0; i < words; ++i) {
    result.nonzero[static_cast<size_t>(i / 2)] |= uint64_t{bitmaps[i]} << (i % 2 * kUnitsPerWord);
    uint32_t negative_zeros = bitmaps[words + i] & ~bitmaps[i];
    for (; negative_zeros != 0; negative_zeros &= negative_zeros - 1) {
      result.negative_zeros.push_back(static_cast<uint32_t>(i * kUnitsPerWord + zeros_below(negative_zeros)));
    }
  }
  return result;
}

}  // namespace ddp_hooks::cuda
