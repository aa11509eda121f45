// What one rank sends another of a gradient that each of them owns a part of, as in FSDP2's reduce-scatter: unit by
// unit not at all, narrow, or in full; and how the owner adds up what it receives.
//
// The input of a reduce-scatter has a *part* for each rank, all of the same layout: a stretch for each parameter, which
// falls apart into units as in layout/units.h. A sender gives each unit of each part a *code*: two bits that say in
// which form it travels. Codes travel first; they say how many bytes follow and where everything lies. So a sender
// decides by itself and unit by unit, and only the codes have to be the same on both ends.
//
// Always holds: what is not sent is +0.0 throughout, to the bit, and what is sent narrow is exact. So an owner's sum is
// that of the parts themselves, bit by bit, but for which NaN a NaN is.
//
// Thread-safety: const functions are; tensors are not locked. Every rank must agree on the stretches.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/packing.h"
#include "kernels/slice_copy.h"
#include "kernels/width.h"
#include "layout/units.h"

namespace ddp_hooks {

enum class UnitCode : uint8_t { kNothing = 0, kFirstNarrow = 1, kSecondNarrow = 2, kFull = 3 };

// What a sender reads to choose codes. Stretches that nobody reads are sent in full.
struct ShardQuestion {
  bool zeros = false;
  bool widths = false;
  // Of each stretch: whether it is known to be +0.0 throughout. Empty if nothing is known.
  std::vector<uint8_t> known_zero;
};

// What came of it, summed over units.
struct ShardFindings {
  int64_t bytes = 0;         // that are sent
  int64_t narrow_bytes = 0;  // so many of them narrow
  int64_t units_sent = 0;
  int64_t units_narrow = 0;
};

class ShardUnits {
 public:
  // The units of each parameter's stretch of a part.
  explicit ShardUnits(std::vector<Units> stretches);

  int64_t numel() const { return numel_; }
  int64_t count() const { return static_cast<int64_t>(ends_.size()); }
  // What the codes of a part take.
  int64_t code_bytes() const { return (count() + 3) / 4; }

  // Chooses codes for a part, which begins at `offset` of a CPU tensor, and writes code_bytes() to `codes`.
  ShardFindings choose(const at::Tensor& flat, int64_t offset, const ShardQuestion& question, uint8_t* codes) const;

  // Bytes of a part with these codes.
  int64_t packed_bytes(const uint8_t* codes, ElementType type) const;

  // Appends to `slices`, which borrow the tensor, what `pack` has to write for a part with these codes.
  void append_slices(const at::Tensor& flat, int64_t offset, const uint8_t* codes,
                     std::vector<PackedSlice>& slices) const;

  struct Received {
    const uint8_t* codes = nullptr;  // null for what lies in the sum's tensor itself, in full
    int64_t offset = 0;              // bytes into what was received
  };
  // to = the parts that were received, added up in this order; +0.0 where there is none. `packed` is uint8.
  void sum(const at::Tensor& to, const at::Tensor& packed, const std::vector<Received>& received) const;

 private:
  std::vector<Units> stretches_;
  std::vector<int64_t> ends_;  // of each unit, in elements from the part's beginning
  int64_t numel_ = 0;
};

}  // namespace ddp_hooks
