// How many bits, and in which form, hold every number of a stretch exactly.
//
// Under autocast a float32 gradient was computed in 16 bits, and all of its numbers are bfloat16 or float16 numbers. A
// number is held exactly by a form if packing it and unpacking it gives the same bits: infinities, denormals and zeros
// of both signs are, and a NaN if the form has room for its payload. narrow_forms.h has the arithmetic.
//
// Every rank must agree on: the width of what it sends. Thread-safety: pure functions.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/element_type.h"

namespace ddp_hooks {

enum class Width : uint8_t { kFull, kBFloat16, kFloat16, kFloat32 };

// The narrow forms that are tried for a type, in this order; kFull marks an unused place. A complex gradient counts as
// its real view.
constexpr std::array<Width, 2> narrow_widths(ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return {Width::kBFloat16, Width::kFloat16};
    case ElementType::kFloat64:
      return {Width::kFloat32, Width::kFull};
    default:
      return {Width::kFull, Width::kFull};
  }
}

constexpr int64_t bytes_of_number(Width width, int64_t element_bytes) {
  switch (width) {
    case Width::kFull:
      return element_bytes;
    case Width::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// Bytes of `numel` numbers of `element_bytes` each in this form, rounded up to a multiple of `element_bytes`, so that
// what follows is aligned.
constexpr int64_t packed_bytes(int64_t numel, Width width, int64_t element_bytes) {
  const int64_t bytes = numel * bytes_of_number(width, element_bytes);
  return (bytes + element_bytes - 1) / element_bytes * element_bytes;
}

}  // namespace ddp_hooks
