#include "kernels/cuda/unit_scan.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/widths.h"

namespace ddp_hooks::cuda {
namespace {

const char* scan_widths(const Units& units, ElementType type, uint32_t* bitmaps, Stream stream) {
  const auto kernel = type == ElementType::kFloat32 ? kernels::widths_scan_float32 : kernels::widths_scan_float64;
  return launch_warps(kernel, portion_count(units), stream, units, bitmaps, words_of_bitmap(units.count));
}

const char* scan_nonzeros(const Units& units, ElementType type, uint32_t* bitmaps, Stream stream) {
  return launch_warps(kernels::unit_scan, portion_count(units), stream, units, scan_masks(element_bytes(type)), bitmaps,
                      bitmaps + words_of_bitmap(units.count));
}

}  // namespace

const char* unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type, bool widths,
                      uint32_t* device_bitmaps, uint32_t* host_bitmaps, Stream stream) {
  const Units units = divide_units(slice.address, slice.bytes, unit_bytes);
  const int bitmaps = bitmap_count(type, widths);
  const size_t bitmaps_bytes = static_cast<size_t>(bitmaps * words_of_bitmap(units.count)) * sizeof(uint32_t);
  const char* error = fill_with_zeros(device_bitmaps, bitmaps_bytes, stream);
  if (error != nullptr) return error;
  error = bitmaps == kBitmapsOfWidths ? scan_widths(units, type, device_bitmaps, stream)
                                      : scan_nonzeros(units, type, device_bitmaps, stream);
  return error != nullptr ? error : copy_to_host(host_bitmaps, device_bitmaps, bitmaps_bytes, stream);
}

}  // namespace ddp_hooks::cuda
