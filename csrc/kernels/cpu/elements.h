// Elements of memory that need not be aligned.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/instructions.h"

namespace ddp_hooks::cpu {

template <typename T>
DDP_HOOKS_ALWAYS_INLINE T load_element(const char* from, int64_t index) {
  T element;
  std::memcpy(&element, from + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return element;
}

template <typename T>
DDP_HOOKS_ALWAYS_INLINE void store_element(char* to, int64_t index, const T& element) {
  std::memcpy(to + index * static_cast<int64_t>(sizeof(T)), &element, sizeof(T));
}

}  // namespace ddp_hooks::cpu
