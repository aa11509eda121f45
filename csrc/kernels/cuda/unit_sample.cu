#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/unit_sample.h"
#include "kernels/cuda/warp.cuh"
#include "kernels/cuda/widths.h"

namespace ddp_hooks::cuda {
namespace {

// As many registers as nonzero_scan_kernel may have, and for the same reason.
template <int kCapacity>
__global__ void __launch_bounds__(kBlockThreads, 8)
    unit_sample_kernel(const __grid_constant__ SampleTable<kCapacity> table, ScanMasks masks, uint32_t* words) {
  DeviceMemory memory;
  const WarpOfLane warp{lane_of_thread()};
  look_at_unit(sampled_unit_of_warp(table, warp_of_grid()), masks, warp, memory, words);
}

// What lanes note for themselves takes more registers than votes do.
template <int kCapacity, typename Widths>
__global__ void __launch_bounds__(kBlockThreads, 5)
    widths_sample_kernel(const __grid_constant__ SampleTable<kCapacity> table, uint32_t* words) {
  DeviceMemory memory;
  const WarpOfLane warp{lane_of_thread()};
  const SampledUnit unit = sampled_unit_of_warp(table, warp_of_grid());
  if (unit.bytes != 0) look_at_widths_of_unit<Widths>(unit, warp, memory, words);
}

template <int kCapacity>
const char* sample_widths(SampleTable<kCapacity>& table, ElementType type, uint32_t* words, cudaStream_t stream) {
  void* arguments[] = {&table, &words};
  const auto kernel = type == ElementType::kFloat32 ? &widths_sample_kernel<kCapacity, WidthsOfFloat32>
                                                    : &widths_sample_kernel<kCapacity, WidthsOfFloat64>;
  return launch_warps(kernel, warp_count(table), arguments, stream);
}

template <int kCapacity>
const char* sample_nonzeros(SampleTable<kCapacity>& table, ElementType type, uint32_t* words, cudaStream_t stream) {
  ScanMasks masks = scan_masks(element_bytes(type));
  void* arguments[] = {&table, &masks, &words};
  return launch_warps(&unit_sample_kernel<kCapacity>, warp_count(table), arguments, stream);
}

}  // namespace

const char* unit_sample(const UnitsOfMemory* slices, size_t count, ElementType type, bool widths,
                        uint32_t* device_words, uint32_t* host_words, Stream stream) {
  if (count == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const auto words_per_slice = static_cast<size_t>(words_of_sample(type, widths));
  const size_t words_bytes = count * words_per_slice * sizeof(uint32_t);
  const char* error = why_failed(cudaMemsetAsync(device_words, 0, words_bytes, cuda_stream));
  if (error != nullptr) return error;
  error = for_each_sample_table(
      slices, count, [&]<int kCapacity>(SampleTable<kCapacity>& table, size_t first) -> const char* {
        uint32_t* const words = device_words + first * words_per_slice;
        return words_per_slice == kWordsPerSample ? sample_nonzeros(table, type, words, cuda_stream)
                                                  : sample_widths(table, type, words, cuda_stream);
      });
  if (error != nullptr) return error;
  return why_failed(cudaMemcpyAsync(host_words, device_words, words_bytes, cudaMemcpyDeviceToHost, cuda_stream));
}

}  // namespace ddp_hooks::cuda
