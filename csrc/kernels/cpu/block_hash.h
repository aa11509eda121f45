// The first level of the tensor hash: one block of 4 KiB to four 64-bit words.
//
// With the block as 32-bit words w and the keys k, word p of the result is
//     sum over i of ((w[2i] + k[2i + 8p]) mod 2^32) * ((w[2i+1] + k[2i + 1 + 8p]) mod 2^32)    modulo 2^64.
// That is NH, four times under keys shifted by eight words. One such sum of two different blocks agrees with
// probability at most 2^-32 over the keys, and all four with at most 2^-128: take the last pair of words in which the
// blocks differ; its keys in sum p served the sums before p only for later pairs, which are equal and cancel out
// (Black, Halevi, Krawczyk, Krovetz, Rogaway: "UMAC: fast and secure message authentication", CRYPTO 1999).
//
// 32-bit words, because every x86-64 multiplies several of them at once, and eight for the shift, because keys then
// stay aligned with the widest vectors in use.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp_hooks::cpu {

constexpr size_t kBlockBytes = 4096;
constexpr size_t kBlockWords = kBlockBytes / sizeof(uint32_t);
constexpr size_t kSums = 4;
constexpr size_t kShiftWords = 8;
constexpr size_t kKeyWords = kBlockWords + (kSums - 1) * kShiftWords;

// `block` has kBlockBytes and any alignment; `keys` has kKeyWords and is aligned to 32 bytes.
using CompressBlock = void (*)(const unsigned char* block, const uint32_t* keys, uint64_t* sums);

void compress_block_portable(const unsigned char* block, const uint32_t* keys, uint64_t* sums);

#if defined(__x86_64__)
void compress_block_sse2(const unsigned char* block, const uint32_t* keys, uint64_t* sums);
// Only where the processor has AVX2.
void compress_block_avx2(const unsigned char* block, const uint32_t* keys, uint64_t* sums);
#endif

}  // namespace ddp_hooks::cpu
