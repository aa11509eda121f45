#include "kernels/cuda/unit_sample.h"

#include "kernels/cuda/launch.h"

namespace ddp_hooks::cuda {

const char* unit_sample(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_words,
                        uint32_t* host_words, Stream stream) {
  if (count == 0) return nullptr;
  const size_t words_bytes = count * kWordsPerSample * sizeof(uint32_t);
  const char* error = fill_with_zeros(device_words, words_bytes, stream);
  if (error != nullptr) return error;
  error = for_each_sample_table(slices, count, [&]<typename Table>(const Table& table, size_t first) {
    return launch_warps(choose<Table>(kernels::unit_sample_small, kernels::unit_sample_large), warp_count(table),
                        stream, table, scan_masks(element_bytes(type)), device_words + first * kWordsPerSample);
  });
  return error != nullptr ? error : copy_to_host(host_words, device_words, words_bytes, stream);
}

}  // namespace ddp_hooks::cuda
