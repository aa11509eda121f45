#include "kernels/cuda/lanes.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/slice_copy.h"

namespace ddp_hooks::cuda {
namespace {

// The table is read where it lies, in the constant bank; __grid_constant__ keeps it from being copied to each thread.
template <int kCapacity, typename Number>
__global__ void __launch_bounds__(kBlockThreads)
    gather_scaled_kernel(const __grid_constant__ SliceTable<kCapacity> table, typename Number::Wide factor) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_chunk(table, warp_of_grid(), [&](int, const char* address, int64_t position, int bytes) {
    move_stretch<sizeof(typename Number::Bits)>(table.message + position, address, bytes, lane, memory,
                                                ScaleBy<Number>{factor});
  });
}

// Bytes are bytes, whatever they mean.
template <int kCapacity>
__global__ void __launch_bounds__(kBlockThreads)
    copy_kernel(const __grid_constant__ SliceTable<kCapacity> table, bool to_message) {
  const int lane = lane_of_thread();
  DeviceMemory memory;
  visit_chunk(table, warp_of_grid(), [&](int, char* address, int64_t position, int bytes) {
    char* const in_message = table.message + position;
    move_stretch<1>(to_message ? in_message : address, to_message ? address : in_message, bytes, lane, memory, Keep{});
  });
}

const char* copy(char* message, const SliceOfMemory* slices, size_t count, bool to_message, Stream stream) {
  return for_each_table(
      slices, count, message, [&]<int kCapacity>(SliceTable<kCapacity>& table, size_t) -> const char* {
        return launch_over_chunks(&copy_kernel<kCapacity>, table, static_cast<cudaStream_t>(stream), to_message);
      });
}

template <typename Number>
const char* scale(char* message, const SliceOfMemory* slices, size_t count, double factor, Stream stream) {
  return for_each_table(
      slices, count, message, [&]<int kCapacity>(SliceTable<kCapacity>& table, size_t) -> const char* {
        return launch_over_chunks(&gather_scaled_kernel<kCapacity, Number>, table, static_cast<cudaStream_t>(stream),
                                  static_cast<typename Number::Wide>(factor));
      });
}

}  // namespace

const char* gather_scaled(void* message, const SliceOfMemory* slices, size_t count, ElementType type, double factor,
                          Stream stream) {
  char* const to = static_cast<char*>(message);
  if (factor == 1) return copy(to, slices, count, true, stream);
  switch (type) {
    case ElementType::kFloat32:
      return scale<Float32>(to, slices, count, factor, stream);
    case ElementType::kFloat64:
      return scale<Float64>(to, slices, count, factor, stream);
    case ElementType::kFloat16:
      return scale<Float16>(to, slices, count, factor, stream);
    case ElementType::kBFloat16:
      return scale<BFloat16>(to, slices, count, factor, stream);
  }
  return "unknown element type";
}

const char* scatter(const void* message, const SliceOfMemory* slices, size_t count, Stream stream) {
  // The table has one kind of pointer; with to_message false the message is only read.
  return copy(static_cast<char*>(const_cast<void*>(message)), slices, count, false, stream);
}

}  // namespace ddp_hooks::cuda
