#include "kernels/tensor_hash.h"

#include <array>
#include <bit>
#include <cstring>

#include "kernels/cpu/block_hash.h"

namespace ddp_hooks {
namespace {

static_assert(std::endian::native == std::endian::little, "digests are defined over little-endian words");

__extension__ using uint128 = unsigned __int128;

constexpr uint128 kPrime = (uint128{1} << 127) - 1;

// splitmix64 (Steele, Lea, Flood, 2014): the keys only have to look random, and to be the same in every build.
constexpr uint64_t next_key(uint64_t& state) {
  state += 0x9E3779B97F4A7C15u;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

struct Keys {
  alignas(32) std::array<uint32_t, cpu::kKeyWords> block{};
  uint128 point = 0;
};

constexpr Keys make_keys() {
  Keys keys;
  uint64_t state = 0;
  for (uint32_t& key : keys.block) key = static_cast<uint32_t>(next_key(state) >> 32);
  const uint64_t high = next_key(state);
  keys.point = ((uint128{high} << 64) | next_key(state)) >> 1;
  return keys;
}

constexpr Keys kKeys = make_keys();

// x + y modulo p for x, y <= p. The result is <= p as well; p itself stands for 0.
uint128 add_modulo(uint128 x, uint128 y) {
  const uint128 sum = x + y;
  return (sum & kPrime) + (sum >> 127);
}

// x * y modulo p for x, y <= p.
uint128 multiply_modulo(uint128 x, uint128 y) {
  const uint64_t x0 = static_cast<uint64_t>(x), x1 = static_cast<uint64_t>(x >> 64);
  const uint64_t y0 = static_cast<uint64_t>(y), y1 = static_cast<uint64_t>(y >> 64);
  const uint128 low = uint128{x0} * y0;
  // x1 and y1 are below 2^63: neither the cross products nor the carry can overflow their sum.
  const uint128 middle = uint128{x0} * y1 + uint128{x1} * y0 + (low >> 64);
  const uint128 high = uint128{x1} * y1 + (middle >> 64);
  const uint128 low_words = (middle << 64) | static_cast<uint64_t>(low);
  // The product is high * 2^128 + low_words, and 2^127 is 1 modulo p.
  return add_modulo((high << 1) | (low_words >> 127), low_words & kPrime);
}

uint128 add_coefficient(uint128 value, uint64_t word) {
  return add_modulo(multiply_modulo(value, kKeys.point), word);
}

uint128 join(const Digest& words) {
  return (uint128{words.high} << 64) | words.low;
}

Digest divide(uint128 value) {
  return {static_cast<uint64_t>(value), static_cast<uint64_t>(value >> 64)};
}

cpu::CompressBlock compressor(HashKernel kernel) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (kernel == HashKernel::kAvx2 || (kernel == HashKernel::kFastest && has_avx2)) return cpu::compress_block_avx2;
  if (kernel == HashKernel::kSse2 || kernel == HashKernel::kFastest) return cpu::compress_block_sse2;
#endif
  (void)kernel;
  return cpu::compress_block_portable;
}

}  // namespace

bool is_supported(HashKernel kernel) {
#if defined(__x86_64__)
  return kernel != HashKernel::kAvx2 || __builtin_cpu_supports("avx2");
#else
  return kernel == HashKernel::kFastest || kernel == HashKernel::kPortable;
#endif
}

static_assert(kHashBlockBytes == cpu::kBlockBytes, "pieces end where blocks do");

void HashInPieces::add(const void* data, size_t bytes) {
  const cpu::CompressBlock compress_block = compressor(kernel_);
  uint128 value = join(value_);
  const auto add_block = [&](const unsigned char* block) {
    uint64_t sums[cpu::kSums];
    compress_block(block, kKeys.block.data(), sums);
    for (const uint64_t sum : sums) value = add_coefficient(value, sum);
  };

  const auto* position = static_cast<const unsigned char*>(data);
  size_t left = bytes;
  for (; left >= cpu::kBlockBytes; left -= cpu::kBlockBytes, position += cpu::kBlockBytes) add_block(position);
  if (left > 0) {
    std::array<unsigned char, cpu::kBlockBytes> padded{};
    std::memcpy(padded.data(), position, left);
    add_block(padded.data());
  }
  bytes_ += bytes;
  value_ = divide(value);
}

Digest HashInPieces::finish() const {
  const uint128 value = add_coefficient(join(value_), bytes_);
  return divide(value == kPrime ? 0 : value);
}

}  // namespace ddp_hooks
