#include "kernels/cuda/unit_scan.h"

#include "kernels/cuda/launch.h"

namespace ddp_hooks::cuda {

const char* unit_scan(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_bitmaps,
                      uint32_t* host_bitmaps, Stream stream) {
  if (count == 0) return nullptr;
  int64_t words = 0;
  for (size_t i = 0; i < count; ++i) words += kBitmaps * words_of_bitmap(slices[i].count());
  const size_t bitmaps_bytes = static_cast<size_t>(words) * sizeof(uint32_t);
  const char* error = fill_with_zeros(device_bitmaps, bitmaps_bytes, stream);
  if (error != nullptr) return error;
  error = for_each_units_table(slices, count, [&]<typename Table>(const Table& table) {
    return launch_warps(choose<Table>(kernels::unit_scan_small, kernels::unit_scan_large), warp_count(table), stream,
                        table, scan_masks(element_bytes(type)), device_bitmaps);
  });
  return error != nullptr ? error : copy_to_host(host_bitmaps, device_bitmaps, bitmaps_bytes, stream);
}

}  // namespace ddp_hooks::cuda
