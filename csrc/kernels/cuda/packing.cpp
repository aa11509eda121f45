#include "kernels/cuda/packing.h"

#include "kernels/cuda/launch.h"

namespace ddp_hooks::cuda {
namespace {

template <typename Bits, typename Wide, typename Small, typename Large>
const char* pack_numbers(const Small& small, const Large& large, char* to, const SliceToPack* slices, size_t count,
                         Stream stream) {
  return for_each_pack_table(slices, count, sizeof(Bits), to, [&]<typename Table>(const Table& table) -> const char* {
    return launch_warps(choose<Table>(small, large), chunk_count(table), stream, table, scaling_of<Wide>(table));
  });
}

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

const char* pack(char* to, const SliceToPack* slices, size_t count, ElementType type, Stream stream) {
  using namespace kernels;
  switch (type) {
    case ElementType::kFloat32:
      return pack_numbers<uint32_t, float>(pack_small_float32, pack_large_float32, to, slices, count, stream);
    case ElementType::kFloat64:
      return pack_numbers<uint64_t, double>(pack_small_float64, pack_large_float64, to, slices, count, stream);
    case ElementType::kFloat16:
      return pack_numbers<uint16_t, float>(pack_small_float16, pack_large_float16, to, slices, count, stream);
    case ElementType::kBFloat16:
      return pack_numbers<uint16_t, float>(pack_small_bfloat16, pack_large_bfloat16, to, slices, count, stream);
  }
  return "unknown element type";
}

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
