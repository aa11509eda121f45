#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/unit_scan.h"
#include "kernels/cuda/units.h"
#include "kernels/cuda/warp.cuh"
#include "kernels/cuda/widths.h"

namespace ddp_hooks::cuda {
namespace {

// As many registers as nonzero_scan_kernel may have, and for the same reason.
__global__ void __launch_bounds__(kBlockThreads, 8)
    unit_scan_kernel(const __grid_constant__ Units units, ScanMasks masks, uint32_t* nonzero_units,
                     uint32_t* negative_zero_units) {
  DeviceMemory memory;
  const WarpOfLane warp{lane_of_thread()};
  scan_portion(portion_of_warp(units, warp_of_grid()), masks, warp, memory, nonzero_units, negative_zero_units);
}

// What lanes note for themselves takes more registers than votes do.
template <typename Widths>
__global__ void __launch_bounds__(kBlockThreads, 5)
    widths_scan_kernel(const __grid_constant__ Units units, uint32_t* bitmaps, int64_t words) {
  DeviceMemory memory;
  const WarpOfLane warp{lane_of_thread()};
  scan_widths_of_portion<Widths>(portion_of_warp(units, warp_of_grid()), warp, memory, bitmaps, words);
}

const char* scan_widths(Units& units, ElementType type, uint32_t* bitmaps, cudaStream_t stream) {
  int64_t words = words_of_bitmap(units.count);
  void* arguments[] = {&units, &bitmaps, &words};
  const auto kernel =
      type == ElementType::kFloat32 ? &widths_scan_kernel<WidthsOfFloat32> : &widths_scan_kernel<WidthsOfFloat64>;
  return launch_warps(kernel, portion_count(units), arguments, stream);
}

const char* scan_nonzeros(Units& units, ElementType type, uint32_t* bitmaps, cudaStream_t stream) {
  ScanMasks masks = scan_masks(element_bytes(type));
  uint32_t* negative_zero_units = bitmaps + words_of_bitmap(units.count);
  void* arguments[] = {&units, &masks, &bitmaps, &negative_zero_units};
  return launch_warps(&unit_scan_kernel, portion_count(units), arguments, stream);
}

}  // namespace

const char* unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type, bool widths,
                      uint32_t* device_bitmaps, uint32_t* host_bitmaps, Stream stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  Units units = divide_units(slice.address, slice.bytes, unit_bytes);
  const int bitmaps = bitmap_count(type, widths);
  const size_t bitmaps_bytes = static_cast<size_t>(bitmaps * words_of_bitmap(units.count)) * sizeof(uint32_t);
  const char* error = why_failed(cudaMemsetAsync(device_bitmaps, 0, bitmaps_bytes, cuda_stream));
  if (error != nullptr) return error;
  error = bitmaps == kBitmapsOfWidths ? scan_widths(units, type, device_bitmaps, cuda_stream)
                                      : scan_nonzeros(units, type, device_bitmaps, cuda_stream);
  if (error != nullptr) return error;
  return why_failed(cudaMemcpyAsync(host_bitmaps, device_bitmaps, bitmaps_bytes, cudaMemcpyDeviceToHost, cuda_stream));
}

}  // namespace ddp_hooks::cuda
