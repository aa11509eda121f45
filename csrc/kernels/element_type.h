// The element types that gradients come in. A complex gradient travels as its real view, so none is listed.
#pragma once

#include <cstdint>

namespace ddp_hooks {

enum class ElementType : uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

inline int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat32:
      return 4;
    case ElementType::kFloat16:
    case ElementType::kBFloat16:
      break;
  }
  return 2;
}

}  // namespace ddp_hooks
