#include "kernels/cpu/narrowing.h"

#include <cstring>

#include "kernels/cpu/elements.h"
#include "kernels/cpu/instructions.h"
#include "kernels/narrow_forms.h"

namespace ddp_hooks::cpu {
namespace {

template <typename Form>
DDP_HOOKS_ALWAYS_INLINE uint64_t lost_in_loop(const char* from, int64_t numel) {
  typename Form::Wide lost = 0;
  for (int64_t i = 0; i < numel; ++i) lost |= Form::lost(load_element<typename Form::Wide>(from, i));
  return lost;
}

template <typename Form>
DDP_HOOKS_ALWAYS_INLINE void narrow_in_loop(char* to, const char* from, int64_t numel) {
  DDP_HOOKS_ELEMENTS_ARE_INDEPENDENT
  for (int64_t i = 0; i < numel; ++i) store_element(to, i, Form::narrow(load_element<typename Form::Wide>(from, i)));
}

template <typename Form>
uint64_t lost_by_baseline(const char* from, int64_t numel) {
  return lost_in_loop<Form>(from, numel);
}

template <typename Form>
void narrow_by_baseline(char* to, const char* from, int64_t numel) {
  narrow_in_loop<Form>(to, from, numel);
}

template <typename Form>
DDP_HOOKS_AVX2 uint64_t lost_by_avx2(const char* from, int64_t numel) {
  return lost_in_loop<Form>(from, numel);
}

template <typename Form>
DDP_HOOKS_AVX2 void narrow_by_avx2(char* to, const char* from, int64_t numel) {
  narrow_in_loop<Form>(to, from, numel);
}

template <typename Form>
void narrow_to(char* to, const char* from, int64_t numel) {
  uses_avx2() ? narrow_by_avx2<Form>(to, from, numel) : narrow_by_baseline<Form>(to, from, numel);
}

}  // namespace

LostBits lost_bits(Width width) {
  const bool avx2 = uses_avx2();
  switch (width) {
    case Width::kBFloat16:
      return avx2 ? lost_by_avx2<BFloat16Form> : lost_by_baseline<BFloat16Form>;
    case Width::kFloat16:
      return avx2 ? lost_by_avx2<Float16Form> : lost_by_baseline<Float16Form>;
    default:
      return avx2 ? lost_by_avx2<Float32Form> : lost_by_baseline<Float32Form>;
  }
}

void narrow(char* to, const char* from, int64_t numel, ElementType type, Width width) {
  switch (width) {
    case Width::kBFloat16:
      return narrow_to<BFloat16Form>(to, from, numel);
    case Width::kFloat16:
      return narrow_to<Float16Form>(to, from, numel);
    case Width::kFloat32:
      return narrow_to<Float32Form>(to, from, numel);
    case Width::kFull:
      // An empty tensor may have no address at all, which memcpy must not be given even for nothing.
      if (numel != 0) std::memcpy(to, from, static_cast<size_t>(numel * element_bytes(type)));
  }
}

}  // namespace ddp_hooks::cpu
