#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/unit_sample.h"
#include "kernels/cuda/warp.cuh"

namespace ddp_hooks::cuda {
namespace {

// As many registers as nonzero_scan_kernel may have, and for the same reason.
template <int kCapacity>
__global__ void __launch_bounds__(kBlockThreads, 8)
    unit_sample_kernel(const __grid_constant__ SampleTable<kCapacity> table, ScanMasks masks, uint32_t* words) {
  DeviceMemory memory;
  const WarpOfLane warp{lane_of_thread()};
  look_at_unit(sampled_unit_of_warp(table, chunk_of_warp()), masks, warp, memory, words);
}

}  // namespace

const char* unit_sample(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_words,
                        uint32_t* host_words, Stream stream) {
  if (count == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const size_t words_bytes = count * kWordsPerSample * sizeof(uint32_t);
  const char* error = why_failed(cudaMemsetAsync(device_words, 0, words_bytes, cuda_stream));
  if (error != nullptr) return error;
  ScanMasks masks = scan_masks(element_bytes(type));
  error = for_each_sample_table(
      slices, count, [&]<int kCapacity>(SampleTable<kCapacity>& table, size_t first) -> const char* {
        uint32_t* words = device_words + first * kWordsPerSample;
        void* arguments[] = {&table, &masks, &words};
        return launch_warps(&unit_sample_kernel<kCapacity>, warp_count(table), arguments, cuda_stream);
      });
  if (error != nullptr) return error;
  return why_failed(cudaMemcpyAsync(host_words, device_words, words_bytes, cudaMemcpyDeviceToHost, cuda_stream));
}

}  // namespace ddp_hooks::cuda
