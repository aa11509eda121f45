#include "kernels/cuda/nonzero_scan.h"

#include "kernels/cuda/launch.h"

namespace ddp_hooks::cuda {

const char* nonzero_scan(const SliceOfMemory* slices, size_t count, ElementType type, uint32_t* device_flags,
                         uint32_t* host_flags, Stream stream) {
  if (count == 0) return nullptr;
  const size_t flags_bytes = count * sizeof(uint32_t);
  const char* error = fill_with_zeros(device_flags, flags_bytes, stream);
  if (error != nullptr) return error;
  const auto launch = [&]<typename Table>(const Table& table, size_t first) -> const char* {
    const int64_t warps = warps_far_apart(chunk_count(table));
    return launch_warps(choose<Table>(kernels::nonzero_scan_small, kernels::nonzero_scan_large), warps, stream, table,
                        warps, scan_masks(element_bytes(type)), device_flags + first);
  };
  error = for_each_table(slices, count, nullptr, launch);
  return error != nullptr ? error : copy_to_host(host_flags, device_flags, flags_bytes, stream);
}

}  // namespace ddp_hooks::cuda
