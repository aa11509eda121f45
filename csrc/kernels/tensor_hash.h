// A 128-bit hash of a run of bytes, fast enough to ask of a whole model whether it changed.
//
// What it represents: equal bytes give equal digests, on every rank, in every build (golden values stand in the tests).
// Different bytes give different digests but for a chance far below that of a memory error. Order, position and length
// all count. It is not cryptographic: the keys are fixed, and who knows them can construct collisions.
//
// Construction: two levels, each a universal hash with a proof.
//
//   1. Blocks of 4 KiB, the last one padded with zeros, are compressed to four 64-bit words by NH with a
//      Toeplitz shift (cpu/block_hash.h). Two different blocks agree in all four with probability at most 2^-128 over
//      the choice of the keys.
//   2. These words are the coefficients of a polynomial over the integers modulo p = 2^127 - 1, evaluated at a fixed
//      point (Carter and Wegman); the length in bytes is its last coefficient. Two different sequences of n blocks
//      agree with probability at most (4n + 1) / p: about 2^-106 for a tensor of 2 GiB.
//
// The probabilities are over the keys, so for fixed keys they hold for data that was not made with them in hand. Any 64
// bits of the digest can be compared alone, and collide with probability about (4n + 1) / 2^64.
//
// Thread-safety: pure functions over immutable keys. What ranks must agree on: nothing; bytes are read as little-endian
// words.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp_hooks {

struct Digest {
  uint64_t low;
  uint64_t high;
};

// Which code computes the first level; all give the same digests. kFastest is what this machine runs best; the others
// are for the tests that compare them.
enum class HashKernel { kFastest, kPortable, kSse2, kAvx2 };

bool is_supported(HashKernel kernel);

// The bytes that every piece but the last one has to hold a multiple of.
constexpr size_t kHashBlockBytes = 4096;

// The digest of bytes that come in pieces, as they do from a device. Thread-safety: none.
class HashInPieces {
 public:
  explicit HashInPieces(HashKernel kernel = HashKernel::kFastest) : kernel_(kernel) {}

  // `data` needs no alignment, and may be null when `bytes` is 0.
  void add(const void* data, size_t bytes);
  Digest finish() const;

 private:
  HashKernel kernel_;
  size_t bytes_ = 0;
  Digest value_{0, 0};
};

inline Digest hash_bytes(const void* data, size_t bytes, HashKernel kernel = HashKernel::kFastest) {
  HashInPieces hash(kernel);
  hash.add(data, bytes);
  return hash.finish();
}

}  // namespace ddp_hooks
