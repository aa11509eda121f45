// How two numbers are added on the CPU: in the type that ATen computes in, rounded once.
#pragma once

#include <limits>

#include "kernels/cpu/instructions.h"

namespace ddp_hooks::cpu {

// `Wide` is the type that ATen computes in.
template <typename T>
struct Arithmetic {
  using Wide = float;
};
template <>
struct Arithmetic<double> {
  using Wide = double;
};

template <typename T>
DDP_HOOKS_ALWAYS_INLINE T add(T a, T b) {
  using Wide = typename Arithmetic<T>::Wide;
  return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
}

// Of two NaN a processor keeps the first, and which that is compilers choose; every rank has to get the same bits.
template <typename T>
DDP_HOOKS_ALWAYS_INLINE T add_terms(T a, T b) {
  using Wide = typename Arithmetic<T>::Wide;
  const Wide sum = static_cast<Wide>(a) + static_cast<Wide>(b);
  return static_cast<T>(sum == sum ? sum : std::numeric_limits<Wide>::quiet_NaN());
}

}  // namespace ddp_hooks::cpu
