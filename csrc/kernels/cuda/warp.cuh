// How the lanes of a warp vote, and how what they found gets into a bitmap: `Warp` of units.h, on the device.
#pragma once

#include <cstdint>

#include "kernels/cuda/device_memory.cuh"
#include "kernels/cuda/units.h"
#include "kernels/cuda/widths.h"

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

// One lane of a warp, all of whose lanes call these together.
struct WarpOfLane {
  int lane;

  template <typename FoundByLane>
  __device__ __forceinline__ Votes vote(const FoundByLane& found_by_lane) const {
    const uint32_t found = found_by_lane(lane);
    return {__ballot_sync(kWholeWarp, (found & kFoundNonzero) != 0),
            __ballot_sync(kWholeWarp, (found & kFoundNegativeZero) != 0)};
  }

  template <typename FoundByLane>
  __device__ __forceinline__ FoundInUnits combine(const FoundByLane& found_by_lane) const {
    const FoundInUnits found = found_by_lane(lane);
    return {or_over_lanes(found.nonzero), or_over_lanes(found.negative_zero), or_over_lanes(found.inexact),
            or_over_lanes(found.inexact_too)};
  }

  // Looked at before it is written, or all warps of a long unit would queue up to write the same.
  __device__ __forceinline__ void merge(uint32_t* word, uint32_t bits) const {
    const volatile uint32_t* const seen = word;
    if (lane == 0 && bits != 0 && (bits & ~*seen) != 0) atomicOr(word, bits);
  }
};

}  // namespace ddp_hooks::cuda
