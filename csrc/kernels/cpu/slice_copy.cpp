#include "kernels/cpu/slice_copy.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>

namespace ddp_hooks::cpu {
namespace {

// `Wide` is the type that ATen computes in for `T`: the product is taken there and rounded once.
template <typename T, typename Wide>
void scale(void* to, const void* from, int64_t numel, double factor) {
  T* out = static_cast<T*>(to);
  const T* in = static_cast<const T*>(from);
  const Wide wide_factor = static_cast<Wide>(factor);
  for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<T>(static_cast<Wide>(in[i]) * wide_factor);
}

template <typename T, typename Wide>
void divide(void* to, const void* from, int64_t numel, double divisor) {
  T* out = static_cast<T*>(to);
  const T* in = static_cast<const T*>(from);
  const Wide wide_divisor = static_cast<Wide>(divisor);
  for (int64_t i = 0; i < numel; ++i) out[i] = static_cast<T>(static_cast<Wide>(in[i]) / wide_divisor);
}

}  // namespace

void copy_scaled(void* to, const void* from, int64_t numel, ElementType type, double factor) {
  switch (type) {
    case ElementType::kFloat32:
      return scale<float, float>(to, from, numel, factor);
    case ElementType::kFloat64:
      return scale<double, double>(to, from, numel, factor);
    case ElementType::kFloat16:
      return scale<c10::Half, float>(to, from, numel, factor);
    case ElementType::kBFloat16:
      return scale<c10::BFloat16, float>(to, from, numel, factor);
  }
}

void copy_divided(void* to, const void* from, int64_t numel, ElementType type, double divisor) {
  switch (type) {
    case ElementType::kFloat32:
      return divide<float, float>(to, from, numel, divisor);
    case ElementType::kFloat64:
      return divide<double, double>(to, from, numel, divisor);
    case ElementType::kFloat16:
      return divide<c10::Half, float>(to, from, numel, divisor);
    case ElementType::kBFloat16:
      return divide<c10::BFloat16, float>(to, from, numel, divisor);
  }
}

void copy(void* to, const void* from, int64_t numel, ElementType type) {
  // An empty tensor may have no address at all, which memcpy must not be given even for nothing.
  if (numel != 0) std::memcpy(to, from, static_cast<size_t>(numel * element_bytes(type)));
}

}  // namespace ddp_hooks::cpu
