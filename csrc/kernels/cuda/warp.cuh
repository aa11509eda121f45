// How the lanes of a warp vote, and how what they found gets into a bitmap: `Warp` of units.h, on the device.
#pragma once

#include <cstdint>

#include "kernels/cuda/device_memory.cuh"
#include "kernels/cuda/units.h"

namespace ddp_hooks::cuda {

__device__ __forceinline__ uint32_t or_over_lanes(uint32_t bits) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(kWholeWarp, bits);
#else
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    bits |= __shfl_xor_sync(kWholeWarp, bits, distance);
  }
  return bits;
#endif
}

__device__ __forceinline__ uint32_t largest_over_lanes(uint32_t number) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, number);
#else
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kWholeWarp, number, distance);
    if (other > number) number = other;
  }
  return number;
#endif
}

// A value of each lane, of which a thread has its own.
template <typename T>
struct ValuesOfLanes {
  T own;
  __device__ __forceinline__ const T& at(int) const { return own; }
};

// One lane of a warp, all of whose lanes call these together.
struct WarpOfLane {
  int lane;

  template <typename OfLane>
  __device__ __forceinline__ auto each(const OfLane& of_lane) const {
    return ValuesOfLanes<decltype(of_lane(lane))>{of_lane(lane)};
  }

  // The values of other lanes.
  template <typename T, typename SourceOfLane>
  __device__ __forceinline__ ValuesOfLanes<T> fetch(const ValuesOfLanes<T>& values, const SourceOfLane& source) const {
    return {__shfl_sync(kWholeWarp, values.own, source(lane))};
  }

  template <typename OfLane>
  __device__ __forceinline__ uint32_t vote_on(const OfLane& is_so) const {
    return __ballot_sync(kWholeWarp, is_so(lane));
  }

  template <typename OfLane>
  __device__ __forceinline__ uint32_t any_bits(const OfLane& bits) const {
    return or_over_lanes(bits(lane));
  }

  template <typename OfLane>
  __device__ __forceinline__ uint32_t largest(const OfLane& number) const {
    return largest_over_lanes(number(lane));
  }

  template <typename OfLane>
  __device__ __forceinline__ int64_t sum(const OfLane& number) const {
    int64_t total = number(lane);
    for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(kWholeWarp, total, distance);
    }
    return total;
  }

  // Of the first `count` lanes.
  template <typename ActOfLane>
  __device__ __forceinline__ void for_lanes(int count, const ActOfLane& act) const {
    if (lane < count) act(lane);
  }

  template <typename FoundByLane>
  __device__ __forceinline__ Votes vote(const FoundByLane& found_by_lane) const {
    const uint32_t found = found_by_lane(lane);
    return {__ballot_sync(kWholeWarp, (found & kFoundNonzero) != 0),
            __ballot_sync(kWholeWarp, (found & kFoundNegativeZero) != 0)};
  }

  // Looked at before it is written, or all warps of a long unit would queue up to write the same.
  __device__ __forceinline__ void merge(uint32_t* word, uint32_t bits) const {
    const volatile uint32_t* const seen = word;
    if (lane == 0 && bits != 0 && (bits & ~*seen) != 0) atomicOr(word, bits);
  }
};

}  // namespace ddp_hooks::cuda
