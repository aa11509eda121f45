#include "kernels/cuda/lanes.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/nonzero_scan.h"

namespace ddp_hooks::cuda {
namespace {

template <int kCapacity>
// Eight blocks a multiprocessor are enough, and let a thread have 64 registers. Not told so, the compiler kept to 32
// and loaded a chunk in three turns instead of one.
__global__ void __launch_bounds__(kBlockThreads, 8)
    nonzero_scan_kernel(const __grid_constant__ SliceTable<kCapacity> table, int64_t warps, ScanMasks masks,
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

}  // namespace

const char* nonzero_scan(const SliceOfMemory* slices, size_t count, ElementType type, uint32_t* device_flags,
                         uint32_t* host_flags, Stream stream) {
  if (count == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const size_t flags_bytes = count * sizeof(uint32_t);
  const char* error = why_failed(cudaMemsetAsync(device_flags, 0, flags_bytes, cuda_stream));
  if (error != nullptr) return error;
  error = for_each_table(slices, count, nullptr,
                         [&]<int kCapacity>(SliceTable<kCapacity>& table, size_t first) -> const char* {
                           int64_t warps = warps_far_apart(chunk_count(table));
                           ScanMasks masks = scan_masks(element_bytes(type));
                           uint32_t* flags = device_flags + first;
                           void* arguments[] = {&table, &warps, &masks, &flags};
                           return launch_warps(&nonzero_scan_kernel<kCapacity>, warps, arguments, cuda_stream);
                         });
  if (error != nullptr) return error;
  return why_failed(cudaMemcpyAsync(host_flags, device_flags, flags_bytes, cudaMemcpyDeviceToHost, cuda_stream));
}

}  // namespace ddp_hooks::cuda
