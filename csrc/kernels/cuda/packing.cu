#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/packing.h"
#include "kernels/cuda/packing_lanes.h"

namespace ddp_hooks::cuda {
namespace {

template <int kCapacity, typename Number>
__global__ void __launch_bounds__(kBlockThreads)
    pack_kernel(const __grid_constant__ PackTable<kCapacity> table, Scaling<Number> scaling) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_stretches(table, warp_of_grid(), [&](int slice, int64_t offset, int64_t position, int bytes) {
    pack_stretch(table, slice, offset, position, bytes, lane, memory, scaling);
  });
}

template <typename Number>
const char* pack_numbers(char* to, const SliceToPack* slices, size_t count, cudaStream_t stream) {
  return for_each_pack_table(
      slices, count, sizeof(typename Number::Bits), to, [&]<int kCapacity>(PackTable<kCapacity>& table) -> const char* {
        Scaling<Number> scaling = scaling_of<Number>(table);
        void* arguments[] = {&table, &scaling};
        return launch_warps(&pack_kernel<kCapacity, Number>, chunk_count(table), arguments, stream);
      });
}

template <typename Table, typename Number>
__global__ void __launch_bounds__(kBlockThreads)
    sum_kernel(const __grid_constant__ Table table, Addition<Number> addition) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_stretches(table, warp_of_grid(), [&](int slice, int64_t offset, int64_t, int bytes) {
    sum_stretch<Number>(table, slice, offset, bytes, lane, memory, addition);
  });
}

template <typename Number>
const char* sum(const char* packed, const SliceToSum* slices, size_t count, double factor, bool adds_zero,
                cudaStream_t stream) {
  using Bits = typename Number::Bits;
  const auto negative_zero = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  Addition<Number> addition{static_cast<typename Number::Wide>(factor), adds_zero ? Bits{0} : negative_zero};
  return for_each_sum_table(slices, count, packed, [&]<typename Table>(Table& table) -> const char* {
    void* arguments[] = {&table, &addition};
    return launch_warps(&sum_kernel<Table, Number>, chunk_count(table), arguments, stream);
  });
}

}  // namespace

const char* pack(char* to, const SliceToPack* slices, size_t count, ElementType type, Stream stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (type) {
    case ElementType::kFloat32:
      return pack_numbers<Float32>(to, slices, count, cuda_stream);
    case ElementType::kFloat64:
      return pack_numbers<Float64>(to, slices, count, cuda_stream);
    case ElementType::kFloat16:
      return pack_numbers<Float16>(to, slices, count, cuda_stream);
    case ElementType::kBFloat16:
      return pack_numbers<BFloat16>(to, slices, count, cuda_stream);
  }
  return "unknown element type";
}

const char* sum_terms(const char* packed, const SliceToSum* slices, size_t count, ElementType type, double factor,
                      bool adds_zero, Stream stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (type) {
    case ElementType::kFloat32:
      return sum<Float32>(packed, slices, count, factor, adds_zero, cuda_stream);
    case ElementType::kFloat64:
      return sum<Float64>(packed, slices, count, factor, adds_zero, cuda_stream);
    case ElementType::kFloat16:
      return sum<Float16>(packed, slices, count, factor, adds_zero, cuda_stream);
    case ElementType::kBFloat16:
      return sum<BFloat16>(packed, slices, count, factor, adds_zero, cuda_stream);
  }
  return "unknown element type";
}

}  // namespace ddp_hooks::cuda
