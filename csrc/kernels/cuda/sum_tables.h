// What is added up, as the kernels see it: many slices of a launch, and of each what a lane needs.
//
// As in slice_table.h the slices of a launch lie one after the other, their bytes are cut into chunks of equal size and
// each warp takes one, and tables travel by value. How many contributions a slice has may differ, so they stand in a
// list of their own.
//
// Always holds: terms lie at multiples of their numbers' size; `begin` and `first_term` do not decrease.
// Thread-safety: pure functions of a table that nobody writes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/slice_table.h"

namespace ddp_hooks::cuda {

template <int kMostSlices, int kMostTerms>
struct SumTable {
  static constexpr int kSlices = kMostSlices;
  static constexpr int kTerms = kMostTerms;
  int64_t begin[kSlices + 1];  // bytes of this launch's slices, one after the other
  char* address[kSlices];
  int64_t terms[kTerms];  // offsets, or kOwnTerm
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

constexpr int64_t kOwnTerm = -1;

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
      table.terms[terms++] = term.own ? kOwnTerm : term.offset;
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
