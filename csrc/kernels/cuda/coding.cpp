#include "kernels/cuda/coding.h"

#include "kernels/cuda/launch.h"

namespace ddp_hooks::cuda {

const char* encode(const void* values, int64_t count, ElementType type, char* to, uint32_t* device_bytes,
                   uint32_t* host_bytes, Stream stream) {
  const CodedMessage message{const_cast<char*>(static_cast<const char*>(values)), to, 0, count, type};
  const int64_t warps = section_count(message);
  const char* error = launch_warps(kernels::code_sizes, warps, stream, message);
  if (error == nullptr) error = launch_warps(kernels::code_sections, warps, stream, message, device_bytes);
  return error != nullptr ? error : copy_to_host(host_bytes, device_bytes, kWordsOfSize * sizeof(uint32_t), stream);
}

const char* decode(const char* coded, int64_t bytes, int64_t count, ElementType type, void* to, bool adds,
                   uint32_t* device_wrong, uint32_t* host_wrong, Stream stream) {
  const CodedMessage message{static_cast<char*>(to), const_cast<char*>(coded), bytes, count, type};
  const int64_t warps = section_count(message);
  const char* error = fill_with_zeros(device_wrong, sizeof(uint32_t), stream);
  if (error == nullptr) error = launch_warps(kernels::check_coded, warps, stream, message, device_wrong);
  if (error != nullptr) return error;
  const auto kernel = type == ElementType::kFloat32   ? kernels::decode_float32
                      : type == ElementType::kFloat64 ? kernels::decode_float64
                      : type == ElementType::kFloat16 ? kernels::decode_float16
                                                      : kernels::decode_bfloat16;
  error = launch_warps(kernel, warps, stream, message, adds, device_wrong);
  return error != nullptr ? error : copy_to_host(host_wrong, device_wrong, sizeof(uint32_t), stream);
}

}  // namespace ddp_hooks::cuda
