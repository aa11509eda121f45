#include "kernels/cuda/contribution_sum.h"

#include "kernels/cuda/launch.h"

namespace ddp_hooks::cuda {
namespace {

template <typename Bits, typename Wide, typename Small, typename Large>
const char* sum_numbers(const Small& small, const Large& large, const char* packed, const SliceToSum* slices,
                        size_t count, double factor, bool adds_zero, Stream stream) {
  const auto negative_zero = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const Addition<Bits, Wide> addition{static_cast<Wide>(factor), adds_zero ? Bits{0} : negative_zero};
  return for_each_sum_table(slices, count, packed, [&]<typename Table>(const Table& table) -> const char* {
    return launch_warps(choose<Table>(small, large), chunk_count(table), stream, table, addition);
  });
}

}  // namespace

const char* sum_terms(const char* packed, const SliceToSum* slices, size_t count, ElementType type, double factor,
                      bool adds_zero, Stream stream) {
  using namespace kernels;
  const auto sum = [&]<typename Bits, typename Wide>(Bits, Wide, const auto& small, const auto& large) {
    return sum_numbers<Bits, Wide>(small, large, packed, slices, count, factor, adds_zero, stream);
  };
  switch (type) {
    case ElementType::kFloat32:
      return sum(uint32_t{}, float{}, sum_small_float32, sum_large_float32);
    case ElementType::kFloat64:
      return sum(uint64_t{}, double{}, sum_small_float64, sum_large_float64);
    case ElementType::kFloat16:
      return sum(uint16_t{}, float{}, sum_small_float16, sum_large_float16);
    case ElementType::kBFloat16:
      return sum(uint16_t{}, float{}, sum_small_bfloat16, sum_large_bfloat16);
  }
  return "unknown element type";
}

}  // namespace ddp_hooks::cuda
