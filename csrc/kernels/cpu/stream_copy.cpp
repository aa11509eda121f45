#include "kernels/cpu/stream_copy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ddp_hooks::cpu {
namespace {

// Less than this is likely to be read again while it is in a cache.
constexpr size_t kStreamedBytes = 128 * 1024;

#ifdef __SSE2__

// `to` is aligned to 16 bytes and `bytes` a multiple of 64.
void stream_lines(unsigned char* to, const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) {
    const auto* in = reinterpret_cast<const __m128i*>(from + i);
    auto* out = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
}

void copy_streamed(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  // To the next cache line; from there the stores fill every line whole.
  const size_t head = std::min(bytes, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
  const size_t lines = (bytes - head) / 64 * 64;
  std::memcpy(out, in, head);
  stream_lines(out + head, in + head, lines);
  std::memcpy(out + head + lines, in + head + lines, bytes - head - lines);
}

// Streamed stores are ordered with nothing, not even with the release of a lock.
void finish_stream() {
  _mm_sfence();
}

#else

void copy_streamed(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

void finish_stream() {}

#endif

template <typename T>
void quotients(T* to, const T* from, int64_t numel, T divisor) {
  int exponent = 0;
  if (std::frexp(divisor, &exponent) == T(0.5)) {
    // The reciprocal of a power of two is exact, so the product is the quotient, several times as fast.
    const T factor = 1 / divisor;
    for (int64_t i = 0; i < numel; ++i) to[i] = from[i] * factor;
  } else {
    for (int64_t i = 0; i < numel; ++i) to[i] = from[i] / divisor;
  }
}

template <typename T>
void stream_quotients_of(T* to, const T* from, int64_t numel, T divisor) {
  if (numel * sizeof(T) < kStreamedBytes) return quotients(to, from, numel, divisor);
  // Blocks that stay in the first-level cache on their way.
  std::array<T, 4096 / sizeof(T)> block;
  for (int64_t start = 0; start < numel; start += block.size()) {
    const int64_t length = std::min<int64_t>(block.size(), numel - start);
    quotients(block.data(), from + start, length, divisor);
    copy_streamed(to + start, block.data(), length * sizeof(T));
  }
  finish_stream();
}

}  // namespace

void stream_copy(void* to, const void* from, size_t bytes) {
  if (bytes < kStreamedBytes) {
    // An empty tensor may have no address at all, which memcpy must not be given even for nothing.
    if (bytes != 0) std::memcpy(to, from, bytes);
    return;
  }
  copy_streamed(to, from, bytes);
  finish_stream();
}

void stream_quotients(float* to, const float* from, int64_t numel, float divisor) {
  stream_quotients_of(to, from, numel, divisor);
}

void stream_quotients(double* to, const double* from, int64_t numel, double divisor) {
  stream_quotients_of(to, from, numel, divisor);
}

}  // namespace ddp_hooks::cpu
