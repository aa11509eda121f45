#include "kernels/cuda/unit_sample.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/widths.h"

namespace ddp_hooks::cuda {
namespace {

template <typename Table>
const char* sample_widths(const Table& table, ElementType type, uint32_t* words, Stream stream) {
  using namespace kernels;
  const auto kernel = type == ElementType::kFloat32
                          ? choose<Table>(widths_sample_small_float32, widths_sample_large_float32)
                          : choose<Table>(widths_sample_small_float64, widths_sample_large_float64);
  return launch_warps(kernel, warp_count(table), stream, table, words);
}

template <typename Table>
const char* sample_nonzeros(const Table& table, ElementType type, uint32_t* words, Stream stream) {
  return launch_warps(choose<Table>(kernels::unit_sample_small, kernels::unit_sample_large), warp_count(table), stream,
                      table, scan_masks(element_bytes(type)), words);
}

}  // namespace

const char* unit_sample(const UnitsOfMemory* slices, size_t count, ElementType type, bool widths,
                        uint32_t* device_words, uint32_t* host_words, Stream stream) {
  if (count == 0) return nullptr;
  const auto words_per_slice = static_cast<size_t>(words_of_sample(type, widths));
  const size_t words_bytes = count * words_per_slice * sizeof(uint32_t);
  const char* error = fill_with_zeros(device_words, words_bytes, stream);
  if (error != nullptr) return error;
  error = for_each_sample_table(slices, count, [&](const auto& table, size_t first) -> const char* {
    uint32_t* const words = device_words + first * words_per_slice;
    return words_per_slice == kWordsPerSample ? sample_nonzeros(table, type, words, stream)
                                              : sample_widths(table, type, words, stream);
  });
  return error != nullptr ? error : copy_to_host(host_words, device_words, words_bytes, stream);
}

}  // namespace ddp_hooks::cuda
