// All kernels, as they run on a GPU. What each does is decided in the headers, which compile for the host, too.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/cuda/widths.h"

namespace ddp_hooks::cuda {

// Bytes are bytes, whatever they mean.
template <typename Table>
__device__ __forceinline__ void copy(const Table& table, bool to_message) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_chunk(table, warp_of_grid(), [&](int, char* address, int64_t position, int bytes) {
    char* const in_message = table.message + position;
    move_stretch<1>(to_message ? in_message : address, to_message ? address : in_message, bytes, lane, memory, Keep{});
  });
}

template <typename Number, typename Table>
__device__ __forceinline__ void gather_scaled(const Table& table, typename Number::Wide factor) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_chunk(table, warp_of_grid(), [&](int, const char* address, int64_t position, int bytes) {
    move_stretch<sizeof(typename Number::Bits)>(table.message + position, address, bytes, lane, memory,
                                                ScaleBy<Number>{factor});
  });
}

template <typename Number, typename Table>
__device__ __forceinline__ void pack(const Table& table, const Scaling<typename Number::Wide>& scaling) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_stretches(table, warp_of_grid(), [&](int slice, int64_t offset, int64_t position, int bytes) {
    pack_stretch<Number>(table, slice, offset, position, bytes, lane, memory, scaling);
  });
}

template <typename Number, typename Table>
__device__ __forceinline__ void sum(const Table& table, const AdditionOf<Number>& addition) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_stretches(table, warp_of_grid(), [&](int slice, int64_t offset, int64_t, int bytes) {
    sum_stretch<Number>(table, slice, offset, bytes, lane, memory, addition);
  });
}

template <typename Table>
__device__ __forceinline__ void scan_slices(const Table& table, int64_t warps, const ScanMasks& masks,
                                            uint32_t* flags) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  // In the order of memory all warps of a slice would run at once: each would read its chunk before another has found
  // something, and all would write to the same flag. Far apart, most of a slice's warps come when its flag is set.
  visit_chunk(table, chunk_far_apart(warp_of_grid(), warps), [&](int slice, const char* address, int64_t, int bytes) {
    // Volatile, because other warps write it meanwhile. Lanes may read different values; the vote makes them agree.
    volatile uint32_t* flag = flags + slice;
    if (__any_sync(kWholeWarp, (*flag & kFoundNonzero) != 0)) return;
    const uint32_t mine = found_in(bits_of_stretch(address, bytes, lane, memory), masks);
    const uint32_t found = (__any_sync(kWholeWarp, (mine & kFoundNonzero) != 0) ? kFoundNonzero : 0) |
                           (__any_sync(kWholeWarp, (mine & kFoundNegativeZero) != 0) ? kFoundNegativeZero : 0);
    // Looked at again before it is written, or all warps of a large gradient would queue up to write the same.
    if (lane == 0 && found != 0 && (found & ~*flag) != 0) atomicOr(flags + slice, found);
  });
}

__device__ __forceinline__ void scan_units(const Units& units, const ScanMasks& masks, uint32_t* nonzero,
                                           uint32_t* negative_zero) {
  DeviceMemory memory;
  scan_portion(portion_of_warp(units, warp_of_grid()), masks, WarpOfLane{lane_of_thread()}, memory, nonzero,
               negative_zero);
}

template <typename Widths>
__device__ __forceinline__ void scan_widths(const Units& units, uint32_t* bitmaps, int64_t words) {
  DeviceMemory memory;
  scan_widths_of_portion<Widths>(portion_of_warp(units, warp_of_grid()), WarpOfLane{lane_of_thread()}, memory, bitmaps,
                                 words);
}

template <typename Table>
__device__ __forceinline__ void sample_units(const Table& table, const ScanMasks& masks, uint32_t* words) {
  DeviceMemory memory;
  look_at_unit(sampled_unit_of_warp(table, warp_of_grid()), masks, WarpOfLane{lane_of_thread()}, memory, words);
}

template <typename Widths, typename Table>
__device__ __forceinline__ void sample_widths(const Table& table, uint32_t* words) {
  DeviceMemory memory;
  look_at_widths_of_unit<Widths>(sampled_unit_of_warp(table, warp_of_grid()), WarpOfLane{lane_of_thread()}, memory,
                                 words);
}

#define DDP_HOOKS_KERNEL(name, bounds, parameters, ...)                             \
  extern "C" __global__ void __launch_bounds__ bounds ddp_hooks_##name parameters { \
    __VA_ARGS__;                                                                    \
  }
DDP_HOOKS_KERNELS(DDP_HOOKS_KERNEL)

}  // namespace ddp_hooks::cuda
