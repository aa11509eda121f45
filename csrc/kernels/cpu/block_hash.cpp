#include "kernels/cpu/block_hash.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ddp_hooks::cpu {

void compress_block_portable(const unsigned char* block, const uint32_t* keys, uint64_t* sums) {
  for (size_t p = 0; p < kSums; ++p) sums[p] = 0;
  for (size_t i = 0; i < kBlockWords; i += 2) {
    uint32_t words[2];
    std::memcpy(words, block + i * sizeof(uint32_t), sizeof(words));
    for (size_t p = 0; p < kSums; ++p) {
      const uint32_t* key = keys + i + p * kShiftWords;
      sums[p] += uint64_t{words[0] + key[0]} * uint64_t{words[1] + key[1]};
    }
  }
}

#if defined(__x86_64__)

// A pair of words is one 64-bit lane: its low half times its high half is one multiplication instruction.

void compress_block_sse2(const unsigned char* block, const uint32_t* keys, uint64_t* sums) {
  constexpr size_t kLanes = sizeof(__m128i) / sizeof(uint32_t);
  __m128i totals[kSums] = {};
  for (size_t i = 0; i < kBlockWords; i += kLanes) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + i * sizeof(uint32_t)));
    for (size_t p = 0; p < kSums; ++p) {
      const __m128i key = _mm_load_si128(reinterpret_cast<const __m128i*>(keys + i + p * kShiftWords));
      const __m128i keyed = _mm_add_epi32(words, key);
      totals[p] = _mm_add_epi64(totals[p], _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32)));
    }
  }
  for (size_t p = 0; p < kSums; ++p) {
    uint64_t lanes[2];
    std::memcpy(lanes, &totals[p], sizeof(lanes));
    sums[p] = lanes[0] + lanes[1];
  }
}

__attribute__((target("avx2"))) void compress_block_avx2(const unsigned char* block, const uint32_t* keys,
                                                         uint64_t* sums) {
  constexpr size_t kLanes = sizeof(__m256i) / sizeof(uint32_t);
  __m256i totals[kSums] = {};
  for (size_t i = 0; i < kBlockWords; i += kLanes) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + i * sizeof(uint32_t)));
    for (size_t p = 0; p < kSums; ++p) {
      const __m256i key = _mm256_load_si256(reinterpret_cast<const __m256i*>(keys + i + p * kShiftWords));
      const __m256i keyed = _mm256_add_epi32(words, key);
      totals[p] = _mm256_add_epi64(totals[p], _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)));
    }
  }
  for (size_t p = 0; p < kSums; ++p) {
    uint64_t lanes[4];
    std::memcpy(lanes, &totals[p], sizeof(lanes));
    sums[p] = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
}

#endif

}  // namespace ddp_hooks::cpu
