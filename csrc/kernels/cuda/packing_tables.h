// What is packed, and what is added up, as the kernels see it: many slices of a launch, and of each what a lane needs.
//
// As in slice_table.h the slices of a launch lie one after the other, what they fill is cut into chunks of equal size
// and each warp takes one, and tables travel by value. Packed slices fill the buffer; sums fill as many bytes as their
// slices have. How many contributions a slice has may differ, so they stand in a list of their own.
//
// Always holds: what is packed lies at multiples of its element's size, terms at multiples of their numbers' sizes;
// `begin` and `first_term` do not decrease.
// Thread-safety: pure functions of a table that nobody writes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/slice_table.h"
#include "kernels/width.h"

namespace ddp_hooks::cuda {

constexpr int kSmallPackTable = 156;
constexpr int kLargePackTable = 1300;

template <int kCapacity>
struct PackTable {
  int64_t begin[kCapacity + 1];  // bytes into the part of the buffer that belongs to this launch
  const char* address[kCapacity];
  int64_t filled_bytes[kCapacity];  // what is left of a slice's bytes in the buffer is padding
  Width width[kCapacity];
  double factor;  // of slices at full width
  char* to;
  int64_t chunk_bytes;
  int32_t count;
};

static_assert(sizeof(PackTable<kSmallPackTable>) + 64 <= 4096);
static_assert(sizeof(PackTable<kLargePackTable>) + 64 <= 32764);

// How many of the first slices one table can hold: those at full width are scaled alike.
inline size_t count_alike(const SliceToPack* slices, size_t count) {
  if (count > kLargePackTable) count = kLargePackTable;
  const SliceToPack* full = nullptr;
  for (size_t i = 0; i < count; ++i) {
    if (slices[i].width != Width::kFull) continue;
    if (full != nullptr && full->factor != slices[i].factor) return i;
    full = &slices[i];
  }
  return count;
}

template <int kCapacity>
void fill_table(PackTable<kCapacity>& table, const SliceToPack* slices, size_t count, int64_t element_bytes, char* to) {
  int64_t position = 0;
  table.factor = 1;
  for (size_t i = 0; i < count; ++i) {
    const auto& [address, numel, width, factor] = slices[i];
    if (width == Width::kFull) table.factor = factor;
    table.begin[i] = position;
    table.address[i] = address;
    table.filled_bytes[i] = numel * bytes_of_number(width, element_bytes);
    table.width[i] = width;
    position += packed_bytes(numel, width, element_bytes);
  }
  table.begin[count] = position;
  table.to = to;
  table.chunk_bytes = choose_chunk_bytes(position, static_cast<int64_t>(count));
  table.count = static_cast<int32_t>(count);
}

template <int kMostSlices, int kMostTerms>
struct SumTable {
  static constexpr int kSlices = kMostSlices;
  static constexpr int kTerms = kMostTerms;
  int64_t begin[kSlices + 1];  // bytes of this launch's slices, one after the other
  char* address[kSlices];
  uint64_t terms[kTerms];  // offsets, with the width in the highest bits, or kOwnTerm
  int32_t first_term[kSlices + 1];
  const char* packed;
  int64_t chunk_bytes;
  int32_t count;
};

// No slice has more contributions than the large table has room for.
using SmallSumTable = SumTable<100, 220>;
using LargeSumTable = SumTable<880, 1840>;
static_assert(sizeof(SmallSumTable) + 64 <= 4096);
static_assert(sizeof(LargeSumTable) + 64 <= 32764);

constexpr uint64_t kOwnTerm = ~uint64_t{0};
constexpr int kOffsetBits = 62;

DDP_HOOKS_HOST_DEVICE int64_t offset_of_term(uint64_t term) {
  return static_cast<int64_t>(term & ((uint64_t{1} << kOffsetBits) - 1));
}
DDP_HOOKS_HOST_DEVICE Width width_of_term(uint64_t term) {
  return static_cast<Width>(term >> kOffsetBits);
}

// How many of the first slices a table has room for.
template <typename Table>
size_t count_fitting(const SliceToSum* slices, size_t count) {
  size_t terms = 0;
  for (size_t i = 0; i < count; ++i) {
    terms += slices[i].count;
    if (i == Table::kSlices || terms > Table::kTerms) return i;
  }
  return count;
}

template <int kSlices, int kTerms>
void fill_table(SumTable<kSlices, kTerms>& table, const SliceToSum* slices, size_t count, const char* packed) {
  int64_t position = 0;
  int32_t terms = 0;
  for (size_t i = 0; i < count; ++i) {
    table.begin[i] = position;
    table.address[i] = slices[i].address;
    table.first_term[i] = terms;
    for (size_t j = 0; j < slices[i].count; ++j) {
      const Contribution& term = slices[i].terms[j];
      table.terms[terms++] =
          term.own ? kOwnTerm : static_cast<uint64_t>(term.offset) | static_cast<uint64_t>(term.width) << kOffsetBits;
    }
    position += slices[i].bytes;
  }
  table.begin[count] = position;
  table.first_term[count] = terms;
  table.packed = packed;
  table.chunk_bytes = choose_chunk_bytes(position, static_cast<int64_t>(count));
  table.count = static_cast<int32_t>(count);
}

// Calls launch(table) for one table after another, until one returns an error (not null); returns that. Tables without
// a byte are left out.
template <typename Launch>
const char* for_each_pack_table(const SliceToPack* slices, size_t count, int64_t element_bytes, char* to,
                                const Launch& launch) {
  const auto run = [&](auto& table, size_t taken) -> const char* {
    fill_table(table, slices, taken, element_bytes, to);
    const int64_t bytes = table.begin[taken];
    slices += taken;
    count -= taken;
    to += bytes;
    return bytes == 0 ? nullptr : launch(table);
  };
  while (count != 0) {
    const char* error = nullptr;
    const size_t taken = count_alike(slices, count);
    // Left as they are: only the first entries are read.
    if (taken <= kSmallPackTable) {
      PackTable<kSmallPackTable> table;
      error = run(table, taken);
    } else {
      PackTable<kLargePackTable> table;
      error = run(table, taken);
    }
    if (error != nullptr) return error;
  }
  return nullptr;
}

template <typename Launch>
const char* for_each_sum_table(const SliceToSum* slices, size_t count, const char* packed, const Launch& launch) {
  const auto run = [&](auto& table, size_t taken) -> const char* {
    fill_table(table, slices, taken, packed);
    slices += taken;
    count -= taken;
    return table.begin[taken] == 0 ? nullptr : launch(table);
  };
  while (count != 0) {
    const char* error = nullptr;
    if (count_fitting<SmallSumTable>(slices, count) == count) {
      SmallSumTable table;
      error = run(table, count);
    } else {
      const size_t taken = count_fitting<LargeSumTable>(slices, count);
      if (taken == 0) return "a slice has more contributions than a launch holds";
      LargeSumTable table;
      error = run(table, taken);
    }
    if (error != nullptr) return error;
  }
  return nullptr;
}

}  // namespace ddp_hooks::cuda
