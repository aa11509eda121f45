#include "kernels/cpu/instructions.h"

#include <atomic>

namespace ddp_hooks::cpu {
namespace {

bool has_avx2() {
#if DDP_HOOKS_HAS_AVX2_KERNELS
  // F16C is older, and not every compiler can ask for it.
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("bmi2") != 0;
#else
  return false;
#endif
}

std::atomic<bool>& wanted() {
  static std::atomic<bool> value = has_avx2();
  return value;
}

}  // namespace

bool uses_avx2() {
  return wanted().load(std::memory_order_relaxed);
}

void leave_out_avx2(bool leave_out) {
  wanted().store(!leave_out && has_avx2(), std::memory_order_relaxed);
}

}  // namespace ddp_hooks::cpu
