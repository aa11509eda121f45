#include "kernels/cuda/slice_copy.h"

#include "kernels/cuda/launch.h"

namespace ddp_hooks::cuda {
namespace {

const char* copy(char* message, const SliceOfMemory* slices, size_t count, bool to_message, Stream stream) {
  return for_each_table(slices, count, message, [&]<typename Table>(const Table& table, size_t) -> const char* {
    return launch_warps(choose<Table>(kernels::copy_small, kernels::copy_large), chunk_count(table), stream, table,
                        to_message);
  });
}

template <typename Wide, typename Small, typename Large>
const char* scale(const Small& small, const Large& large, char* message, const SliceOfMemory* slices, size_t count,
                  double factor, Stream stream) {
  return for_each_table(slices, count, message, [&]<typename Table>(const Table& table, size_t) -> const char* {
    return launch_warps(choose<Table>(small, large), chunk_count(table), stream, table, static_cast<Wide>(factor));
  });
}

}  // namespace

const char* gather_scaled(void* message, const SliceOfMemory* slices, size_t count, ElementType type, double factor,
                          Stream stream) {
  using namespace kernels;
  char* const to = static_cast<char*>(message);
  if (factor == 1) return copy(to, slices, count, true, stream);
  switch (type) {
    case ElementType::kFloat32:
      return scale<float>(gather_scaled_small_float32, gather_scaled_large_float32, to, slices, count, factor, stream);
    case ElementType::kFloat64:
      return scale<double>(gather_scaled_small_float64, gather_scaled_large_float64, to, slices, count, factor, stream);
    case ElementType::kFloat16:
      return scale<float>(gather_scaled_small_float16, gather_scaled_large_float16, to, slices, count, factor, stream);
    case ElementType::kBFloat16:
      return scale<float>(gather_scaled_small_bfloat16, gather_scaled_large_bfloat16, to, slices, count, factor,
                          stream);
  }
  return "unknown element type";
}

const char* scatter(const void* message, const SliceOfMemory* slices, size_t count, Stream stream) {
  // The table has one kind of pointer; with to_message false the message is only read.
  return copy(static_cast<char*>(const_cast<void*>(message)), slices, count, false, stream);
}

}  // namespace ddp_hooks::cuda
