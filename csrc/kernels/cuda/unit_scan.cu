#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/unit_scan.h"
#include "kernels/cuda/units.h"
#include "kernels/cuda/warp.cuh"

namespace ddp_hooks::cuda {
namespace {

// As many registers as nonzero_scan_kernel may have, and for the same reason.
__global__ void __launch_bounds__(kBlockThreads, 8)
    unit_scan_kernel(const __grid_constant__ Units units, ScanMasks masks, uint32_t* nonzero_units,
                     uint32_t* negative_zero_units) {
  DeviceMemory memory;
  const WarpOfLane warp{lane_of_thread()};
  scan_portion(portion_of_warp(units, chunk_of_warp()), masks, warp, memory, nonzero_units, negative_zero_units);
}

}  // namespace

const char* unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type, uint32_t* device_bitmaps,
                      uint32_t* host_bitmaps, Stream stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Units units = divide_units(slice.address, slice.bytes, unit_bytes);
  const int64_t words = words_of_bitmap(units.count);
  const size_t bitmaps_bytes = 2 * static_cast<size_t>(words) * sizeof(uint32_t);
  const char* error = why_failed(cudaMemsetAsync(device_bitmaps, 0, bitmaps_bytes, cuda_stream));
  if (error != nullptr) return error;
  ScanMasks masks = scan_masks(element_bytes(type));
  uint32_t* negative_zero_units = device_bitmaps + words;
  void* arguments[] = {&units, &masks, &device_bitmaps, &negative_zero_units};
  error = launch_warps(&unit_scan_kernel, portion_count(units), arguments, cuda_stream);
  if (error != nullptr) return error;
  return why_failed(cudaMemcpyAsync(host_bitmaps, device_bitmaps, bitmaps_bytes, cudaMemcpyDeviceToHost, cuda_stream));
}

}  // namespace ddp_hooks::cuda
