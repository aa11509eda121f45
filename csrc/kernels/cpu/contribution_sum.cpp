#include "kernels/cpu/contribution_sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "kernels/cpu/addition.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/instructions.h"

namespace ddp_hooks::cpu {
namespace {

// What sums of more than two terms are kept in meanwhile; stays in the first-level cache.
constexpr int64_t kBlockBytes = 4096;

template <typename T>
struct Product {
  typename Arithmetic<T>::Wide factor;
  DDP_HOOKS_ALWAYS_INLINE T operator()(T number) const {
    return static_cast<T>(static_cast<typename Arithmetic<T>::Wide>(number) * factor);
  }
};

template <typename T, typename ElementAt>
DDP_HOOKS_ALWAYS_INLINE void fill_in_loop(char* to, int64_t numel, const ElementAt& element_at) {
  DDP_HOOKS_ELEMENTS_ARE_INDEPENDENT
  for (int64_t i = 0; i < numel; ++i) store_element<T>(to, i, element_at(i));
}

template <typename T, typename ElementAt>
void fill_by_baseline(char* to, int64_t numel, ElementAt element_at) {
  fill_in_loop<T>(to, numel, element_at);
}

template <typename T, typename ElementAt>
DDP_HOOKS_AVX2 void fill_by_avx2(char* to, int64_t numel, ElementAt element_at) {
  fill_in_loop<T>(to, numel, element_at);
}

template <typename T, typename ElementAt>
void fill(char* to, int64_t numel, const ElementAt& element_at) {
  uses_avx2() ? fill_by_avx2<T>(to, numel, element_at) : fill_by_baseline<T>(to, numel, element_at);
}

// These three add `last` at the end: +0.0, or -0.0, which changes nothing.

template <typename T>
void scale_one(char* to, const char* term, int64_t numel, Product<T> scale, T last) {
  fill<T>(to, numel, [=](int64_t i) DDP_HOOKS_INLINE_LAMBDA { return add(scale(load_element<T>(term, i)), last); });
}

template <typename T>
void add_two(char* to, const char* a, const char* b, int64_t numel, Product<T> scale, T last) {
  fill<T>(to, numel, [=](int64_t i) DDP_HOOKS_INLINE_LAMBDA {
    return add(add_terms(scale(load_element<T>(a, i)), scale(load_element<T>(b, i))), last);
  });
}

template <typename T>
void add_one_more(char* to, const char* sums, const char* term, int64_t numel, Product<T> scale, T last) {
  fill<T>(to, numel, [=](int64_t i) DDP_HOOKS_INLINE_LAMBDA {
    return add(add_terms(load_element<T>(sums, i), scale(load_element<T>(term, i))), last);
  });
}

template <typename T>
void sum(char* to, const char* const* terms, size_t count, int64_t numel, double factor, bool adds_zero) {
  constexpr auto kElementBytes = static_cast<int64_t>(sizeof(T));
  const Product<T> scale{static_cast<typename Arithmetic<T>::Wide>(factor)};
  const T nothing = static_cast<T>(-0.0f);
  const T last = adds_zero ? static_cast<T>(0.0f) : nothing;
  if (count == 1) return scale_one<T>(to, terms[0], numel, scale, last);
  if (count == 2) return add_two<T>(to, terms[0], terms[1], numel, scale, last);
  alignas(64) char sums[kBlockBytes];
  for (int64_t begin = 0; begin < numel; begin += kBlockBytes / kElementBytes) {
    const int64_t length = std::min(numel - begin, kBlockBytes / kElementBytes);
    const auto from_here = [&](size_t i) { return terms[i] + begin * kElementBytes; };
    add_two<T>(sums, from_here(0), from_here(1), length, scale, nothing);
    for (size_t i = 2; i + 1 < count; ++i) add_one_more<T>(sums, sums, from_here(i), length, scale, nothing);
    add_one_more<T>(to + begin * kElementBytes, sums, from_here(count - 1), length, scale, last);
  }
}

}  // namespace

void sum_terms(char* to, const char* const* terms, size_t count, int64_t numel, ElementType type, double factor,
               bool adds_zero) {
  switch (type) {
    case ElementType::kFloat32:
      return sum<float>(to, terms, count, numel, factor, adds_zero);
    case ElementType::kFloat64:
      return sum<double>(to, terms, count, numel, factor, adds_zero);
    case ElementType::kFloat16:
      return sum<c10::Half>(to, terms, count, numel, factor, adds_zero);
    case ElementType::kBFloat16:
      return sum<c10::BFloat16>(to, terms, count, numel, factor, adds_zero);
  }
}

}  // namespace ddp_hooks::cpu
