// Every kernel, in one list: its name, launch bounds, parameters and body. Whoever defines, launches or plays kernels
// takes them from here, so none can disagree about a parameter.
//
// nvcc compiles them once (kernels.cu), as functions without mangled names, for every GPU and every CUDA. The host
// finds them by name (driver.h), and the tests' stand-in for a driver plays the bodies on the CPU.
//
// No CUDA header is needed to include this. Thread-safety: constants.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/coding_lanes.h"
#include "kernels/cuda/lanes.h"
#include "kernels/cuda/samples.h"
#include "kernels/cuda/slice_table.h"
#include "kernels/cuda/sum_lanes.h"
#include "kernels/cuda/sum_tables.h"
#include "kernels/cuda/units.h"

// A parameter that is read where it lies, in the constant bank; the word keeps it from being copied to each thread.
#if defined(__CUDACC__)
#define DDP_HOOKS_IN_PLACE const __grid_constant__
#else
#define DDP_HOOKS_IN_PLACE const
#endif

namespace ddp_hooks::cuda {

constexpr int kBlockThreads = kWarpsPerBlock * kWarpLanes;

// Scans and samples: eight blocks a multiprocessor are enough, and let a thread have 64 registers. Not told so, the
// compiler kept to 32 and loaded a chunk in three turns instead of one.
// clang-format off
#define DDP_HOOKS_KERNELS(KERNEL) \
  KERNEL(copy_small, (kBlockThreads), (DDP_HOOKS_IN_PLACE SliceTable<kSmallTable> table, bool to_message), copy(table, to_message)) \
  KERNEL(copy_large, (kBlockThreads), (DDP_HOOKS_IN_PLACE SliceTable<kLargeTable> table, bool to_message), copy(table, to_message)) \
  DDP_HOOKS_KERNELS_OF_TYPE(KERNEL, float32, Float32, uint32_t, float) \
  DDP_HOOKS_KERNELS_OF_TYPE(KERNEL, float64, Float64, uint64_t, double) \
  DDP_HOOKS_KERNELS_OF_TYPE(KERNEL, float16, Float16, uint16_t, float) \
  DDP_HOOKS_KERNELS_OF_TYPE(KERNEL, bfloat16, BFloat16, uint16_t, float) \
  KERNEL(unit_scan_small, (kBlockThreads, 8), (DDP_HOOKS_IN_PLACE UnitsTable<kSmallUnits> table, ScanMasks masks, uint32_t* bitmaps), scan_units(table, masks, bitmaps)) \
  KERNEL(unit_scan_large, (kBlockThreads, 8), (DDP_HOOKS_IN_PLACE UnitsTable<kLargeUnits> table, ScanMasks masks, uint32_t* bitmaps), scan_units(table, masks, bitmaps)) \
  KERNEL(unit_sample_small, (kBlockThreads, 8), (DDP_HOOKS_IN_PLACE SampleTable<kSmallSamples> table, ScanMasks masks, uint32_t* words), sample_units(table, masks, words)) \
  KERNEL(unit_sample_large, (kBlockThreads, 8), (DDP_HOOKS_IN_PLACE SampleTable<kLargeSamples> table, ScanMasks masks, uint32_t* words), sample_units(table, masks, words)) \
  KERNEL(code_sizes, (kBlockThreads), (DDP_HOOKS_IN_PLACE CodedMessage message), code_sizes(message)) \
  KERNEL(code_sections, (kBlockThreads), (DDP_HOOKS_IN_PLACE CodedMessage message, uint32_t* message_bytes), code_sections(message, message_bytes)) \
  KERNEL(check_coded, (kBlockThreads), (DDP_HOOKS_IN_PLACE CodedMessage message, uint32_t* wrong), check_coded(message, wrong))

#define DDP_HOOKS_KERNELS_OF_TYPE(KERNEL, type, Number, Bits, Wide) \
  KERNEL(gather_scaled_small_##type, (kBlockThreads), (DDP_HOOKS_IN_PLACE SliceTable<kSmallTable> table, Wide factor), gather_scaled<Number>(table, factor)) \
  KERNEL(gather_scaled_large_##type, (kBlockThreads), (DDP_HOOKS_IN_PLACE SliceTable<kLargeTable> table, Wide factor), gather_scaled<Number>(table, factor)) \
  KERNEL(sum_small_##type, (kBlockThreads), (DDP_HOOKS_IN_PLACE SmallSumTable table, Addition<Bits, Wide> addition), sum<Number>(table, addition)) \
  KERNEL(sum_large_##type, (kBlockThreads), (DDP_HOOKS_IN_PLACE LargeSumTable table, Addition<Bits, Wide> addition), sum<Number>(table, addition)) \
  KERNEL(decode_##type, (kBlockThreads), (DDP_HOOKS_IN_PLACE CodedMessage message, bool adds, const uint32_t* wrong), decode<Number>(message, adds, wrong))
// clang-format on

#define DDP_HOOKS_KERNEL(name, ...) name,
enum class KernelId { DDP_HOOKS_KERNELS(DDP_HOOKS_KERNEL) count };
#undef DDP_HOOKS_KERNEL

// A kernel as the host sees it, with what it has to be given.
template <typename Signature>
struct Kernel;
template <typename FirstParameter, typename... Parameters>
struct Kernel<void(FirstParameter, Parameters...)> {
  using Table = FirstParameter;
  KernelId id;
};

namespace kernels {
#define DDP_HOOKS_KERNEL(name, bounds, parameters, ...) inline constexpr Kernel<void parameters> name{KernelId::name};
DDP_HOOKS_KERNELS(DDP_HOOKS_KERNEL)
#undef DDP_HOOKS_KERNEL
}  // namespace kernels

// The one of two kernels that takes this table.
template <typename Table, typename Small, typename Large>
constexpr auto choose(const Small& small, const Large& large) {
  if constexpr (std::is_same_v<Table, typename Small::Table>) {
    return small;
  } else {
    return large;
  }
}

}  // namespace ddp_hooks::cuda
