#include "kernels/cuda/lanes.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/nonzero_scan.h"

namespace ddp_hooks::cuda {
namespace {

template <int kCapacity>
// Eight blocks a multiprocessor are enough, and let a thread have 64 registers. Not told so, the compiler kept to 32
// and loaded a chunk in three turns instead of one.
__global__ void __launch_bounds__(kBlockThreads, 8)
    nonzero_scan_kernel(const __grid_constant__ SliceTable<kCapacity> table, ScanMasks masks, uint32_t* flags) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_chunk(table, chunk_of_warp(), [&](int slice, const char* address, int64_t, int bytes) {
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

}  // namespace

const char* nonzero_scan(const SliceOfMemory* slices, size_t count, ElementType type, uint32_t* device_flags,
                         uint32_t* host_flags, Stream stream) {
  if (count == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const size_t flags_bytes = count * sizeof(uint32_t);
  const char* error = why_failed(cudaMemsetAsync(device_flags, 0, flags_bytes, cuda_stream));
  if (error != nullptr) return error;
  const ScanMasks masks = scan_masks(element_bytes(type));
  error = for_each_table(
      slices, count, nullptr, [&]<int kCapacity>(SliceTable<kCapacity>& table, size_t first) -> const char* {
        return launch_over_chunks(&nonzero_scan_kernel<kCapacity>, table, cuda_stream, masks, device_flags + first);
      });
  if (error != nullptr) return error;
  return why_failed(cudaMemcpyAsync(host_flags, device_flags, flags_bytes, cudaMemcpyDeviceToHost, cuda_stream));
}

}  // namespace ddp_hooks::cuda
