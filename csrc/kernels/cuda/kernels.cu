// All kernels, as they run on a GPU. What each does is decided in the headers, which compile for the host, too.
#include "kernels/cuda/coding_lanes.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/warp.cuh"

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
__device__ __forceinline__ void sum(const Table& table, const AdditionOf<Number>& addition) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_stretches(table, warp_of_grid(), [&](int slice, int64_t offset, int64_t, int bytes) {
    sum_stretch<Number>(table, slice, offset, bytes, lane, memory, addition);
  });
}

template <typename Table>
__device__ __forceinline__ void scan_units(const Table& table, const ScanMasks& masks, uint32_t* bitmaps) {
  DeviceMemory memory;
  visit_units(table, warp_of_grid(), bitmaps, [&](const Units& units, int64_t warp, uint32_t* of_slice) {
    scan_portion(portion_of_warp(units, warp), masks, WarpOfLane{lane_of_thread()}, memory, of_slice,
                 of_slice + words_of_bitmap(units.count));
  });
}

template <typename Table>
__device__ __forceinline__ void sample_units(const Table& table, const ScanMasks& masks, uint32_t* words) {
  DeviceMemory memory;
  look_at_unit(sampled_unit_of_warp(table, warp_of_grid()), masks, WarpOfLane{lane_of_thread()}, memory, words);
}

__device__ __forceinline__ void code_sizes(const CodedMessage& message) {
  DeviceMemory memory;
  size_section(message, warp_of_grid(), WarpOfLane{lane_of_thread()}, memory);
}

__device__ __forceinline__ void code_sections(const CodedMessage& message, uint32_t* message_bytes) {
  DeviceMemory memory;
  write_section(message, warp_of_grid(), message_bytes, WarpOfLane{lane_of_thread()}, memory);
}

__device__ __forceinline__ void check_coded(const CodedMessage& message, uint32_t* wrong) {
  DeviceMemory memory;
  check_section(message, warp_of_grid(), wrong, WarpOfLane{lane_of_thread()}, memory);
}

template <typename Number>
__device__ __forceinline__ void decode(const CodedMessage& message, bool adds, const uint32_t* wrong) {
  DeviceMemory memory;
  decode_section<Number>(message, warp_of_grid(), adds, wrong, WarpOfLane{lane_of_thread()}, memory);
}

#define DDP_HOOKS_KERNEL(name, bounds, parameters, ...)                             \
  extern "C" __global__ void __launch_bounds__ bounds ddp_hooks_##name parameters { \
    __VA_ARGS__;                                                                    \
  }
DDP_HOOKS_KERNELS(DDP_HOOKS_KERNEL)

}  // namespace ddp_hooks::cuda
