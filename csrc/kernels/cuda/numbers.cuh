// How numbers of each type are scaled and added on the device: in the type that ATen computes in, and rounded once;
// and the NaN that sums are, as on the CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ddp_hooks::cuda {

struct Float32 {
  using Bits = uint32_t;
  using Wide = float;
  static constexpr Bits kNan = 0x7fc00000;
  static __device__ __forceinline__ Wide widen(Bits bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ Bits round(Wide number) { return __float_as_uint(number); }
  static __device__ __forceinline__ Bits scale(Bits bits, Wide factor) { return round(__fmul_rn(widen(bits), factor)); }
  static __device__ __forceinline__ Bits add(Bits a, Bits b) { return round(__fadd_rn(widen(a), widen(b))); }
};

struct Float64 {
  using Bits = uint64_t;
  using Wide = double;
  static constexpr Bits kNan = 0x7ff8000000000000;
  static __device__ __forceinline__ Wide widen(Bits bits) { return __longlong_as_double(static_cast<long long>(bits)); }
  static __device__ __forceinline__ Bits round(Wide number) { return static_cast<Bits>(__double_as_longlong(number)); }
  static __device__ __forceinline__ Bits scale(Bits bits, Wide factor) { return round(__dmul_rn(widen(bits), factor)); }
  static __device__ __forceinline__ Bits add(Bits a, Bits b) { return round(__dadd_rn(widen(a), widen(b))); }
};

struct Float16 {
  using Bits = uint16_t;
  using Wide = float;
  static constexpr Bits kNan = 0x7e00;
  static __device__ __forceinline__ Wide widen(Bits bits) { return __half2float(__ushort_as_half(bits)); }
  static __device__ __forceinline__ Bits round(Wide number) { return __half_as_ushort(__float2half_rn(number)); }
  static __device__ __forceinline__ Bits scale(Bits bits, Wide factor) { return round(__fmul_rn(widen(bits), factor)); }
  static __device__ __forceinline__ Bits add(Bits a, Bits b) { return round(__fadd_rn(widen(a), widen(b))); }
};

struct BFloat16 {
  using Bits = uint16_t;
  using Wide = float;
  static constexpr Bits kNan = 0x7fc0;
  static __device__ __forceinline__ Wide widen(Bits bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); }
  static __device__ __forceinline__ Bits round(Wide number) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(number));
  }
  static __device__ __forceinline__ Bits scale(Bits bits, Wide factor) { return round(__fmul_rn(widen(bits), factor)); }
  static __device__ __forceinline__ Bits add(Bits a, Bits b) { return round(__fadd_rn(widen(a), widen(b))); }
};

}  // namespace ddp_hooks::cuda
