// A sample of the units of many slices of memory, as the kernel sees them: which warp looks at which unit.
//
// Each slice has kSampledUnits warps. Each takes a unit, or nothing where the slice has fewer units. A warp
// leaves its unit at the first chunk with a non-zero, so that of a dense gradient a chunk a sampled unit is read. The
// table travels by value, as in slice_table.h, and has an entry a slice, not a unit: what a gradient costs the host is
// little, and a launch has room for those of any bucket.
//
// `Warp` and `Memory` as in units.h. Thread-safety: pure functions but for the bitmaps, to which every warp adds bits
// and from which none takes any.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/lanes.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/cuda/units.h"

namespace ddp_hooks::cuda {

// So many units of a slice are looked at, evenly spread over it.
constexpr int kSampledUnits = 64;
constexpr int kWordsPerSample = kSampledUnits / kUnitsPerWord;

constexpr int kSmallSamples = 160;
constexpr int kLargeSamples = 1300;

template <int kCapacity>
struct SampleTable {
  UnitsOfMemory slices[kCapacity];
  int32_t count;
};

static_assert(sizeof(SampleTable<kSmallSamples>) + 64 <= 4096);
static_assert(sizeof(SampleTable<kLargeSamples>) + 64 <= 32764);

// One sampled unit. Without a byte there is nothing to do.
struct SampledUnit {
  int slice;
  int place;  // in the sample
  const char* address;
  int64_t bytes;
};

// How many of `units` are sampled, and which one is the `place`-th of them.
DDP_HOOKS_HOST_DEVICE int64_t sampled_count(int64_t units) {
  return units < kSampledUnits ? units : kSampledUnits;
}
DDP_HOOKS_HOST_DEVICE int64_t sampled_unit(int64_t units, int64_t place) {
  return place * units / sampled_count(units);
}

DDP_HOOKS_HOST_DEVICE int64_t count_units(const UnitsOfMemory& slice) {
  return (slice.bytes - 1) / slice.unit_bytes + 1;
}

template <int kCapacity>
int64_t warp_count(const SampleTable<kCapacity>& table) {
  return int64_t{table.count} * kSampledUnits;
}

template <int kCapacity>
DDP_HOOKS_HOST_DEVICE SampledUnit sampled_unit_of_warp(const SampleTable<kCapacity>& table, int64_t warp) {
  const auto slice = static_cast<int>(warp / kSampledUnits);
  const auto place = static_cast<int>(warp % kSampledUnits);
  // Blocks are launched whole, so some warps find no slice.
  if (slice >= table.count) return {slice, place, nullptr, 0};
  const UnitsOfMemory& memory = table.slices[slice];
  const int64_t units = count_units(memory);
  if (place >= sampled_count(units)) return {slice, place, nullptr, 0};
  const int64_t begin = sampled_unit(units, place) * memory.unit_bytes;
  const int64_t end = begin + memory.unit_bytes < memory.bytes ? begin + memory.unit_bytes : memory.bytes;
  return {slice, place, memory.address + begin, end - begin};
}

// Sets the unit's bit in its slice's words if it holds a non-zero.
template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void look_at_unit(const SampledUnit& unit, const ScanMasks& masks, const Warp& warp,
                                        Memory& memory, uint32_t* words) {
  for (int64_t position = 0; position < unit.bytes; position += kLargestChunkBytes) {
    const int64_t left = unit.bytes - position;
    const int bytes = static_cast<int>(left < kLargestChunkBytes ? left : kLargestChunkBytes);
    const Votes votes = warp.vote(
        [&](int lane) { return found_in(bits_of_stretch(unit.address + position, bytes, lane, memory), masks); });
    if (votes.nonzero == 0) continue;
    warp.merge(words + unit.slice * kWordsPerSample + unit.place / kUnitsPerWord,
               uint32_t{1} << (unit.place % kUnitsPerWord));
    return;
  }
}

// Calls launch(table, index of its first slice) for one table after another, until one returns an error (not null);
// returns that.
template <typename Launch>
const char* for_each_sample_table(const UnitsOfMemory* slices, size_t count, const Launch& launch) {
  const auto run = [&](auto& table, size_t first, size_t length) -> const char* {
    for (size_t i = 0; i < length; ++i) table.slices[i] = slices[first + i];
    table.count = static_cast<int32_t>(length);
    return launch(table, first);
  };
  for (size_t first = 0; first < count;) {
    const size_t left = count - first;
    const size_t length = left < kLargeSamples ? left : kLargeSamples;
    const char* error = nullptr;
    // Left as they are: only the first `length` entries are read.
    if (length <= kSmallSamples) {
      SampleTable<kSmallSamples> table;
      error = run(table, first, length);
    } else {
      SampleTable<kLargeSamples> table;
      error = run(table, first, length);
    }
    if (error != nullptr) return error;
    first += length;
  }
  return nullptr;
}

// How many of the sampled units are zero, by what was found in their slice.
inline int64_t count_zeros(const uint32_t* words, int64_t units) {
  int64_t zeros = sampled_count(units);
  for (int i = 0; i < kWordsPerSample; ++i) {
    for (uint32_t found = words[i]; found != 0; found &= found - 1) --zeros;
  }
  return zeros;
}

}  // namespace ddp_hooks::cuda
