// Which instructions beyond the baseline of x86-64 the kernels may use.
//
// Loops over numbers are compiled twice from one source, for the baseline and for AVX2, where that pays: of sixteen
// bytes at a time, conversions take longer than reading does. Results are the same. Thread-safety: safe from any
// thread.
#pragma once

#if defined(__x86_64__)
#define DDP_HOOKS_HAS_AVX2_KERNELS 1
#define DDP_HOOKS_AVX2 [[gnu::target("avx2")]]
#else
#define DDP_HOOKS_HAS_AVX2_KERNELS 0
#define DDP_HOOKS_AVX2
#endif

// Into functions of either kind.
#define DDP_HOOKS_ALWAYS_INLINE [[gnu::always_inline]] inline
#define DDP_HOOKS_INLINE_LAMBDA __attribute__((always_inline))

// Before a loop that reads an element at or after the place to which it writes it: vectors are safe.
#if defined(__clang__)
#define DDP_HOOKS_ELEMENTS_ARE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DDP_HOOKS_ELEMENTS_ARE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace ddp_hooks::cpu {

// And BMI2 and F16C, which all processors with AVX2 have.
bool uses_avx2();

// For tests: what processors without AVX2 run is run here, too. Holds for the whole process.
void leave_out_avx2(bool leave_out);

}  // namespace ddp_hooks::cpu
