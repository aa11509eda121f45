// What one rank sends another of a gradient that each of them owns a part of, as in FSDP2's reduce-scatter: the units
// that are not zero; and how the owner adds up what it receives.
//
// The input of a reduce-scatter has a *part* for each rank, all of the same layout: a stretch for each parameter, which
// is divided into units as in layout/units.h. A sender sets a bit for each unit of each part that follows. These masks
// travel first, so a sender decides by itself and unit by unit, and only the masks have to be the same on both ends.
//
// Always holds: what is not sent is +0.0 throughout, to the bit. So an owner's sum is that of the parts themselves, bit
// by bit, but for which NaN a NaN is.
//
// Thread-safety: const functions are; tensors are not locked. Every rank must agree on the stretches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/slice_copy.h"
#include "layout/units.h"

namespace ddp_hooks {

// What a sender reads to choose units. Stretches that nobody reads are sent.
struct ShardQuestion {
  bool zeros = false;
  // Of each stretch: whether it is known to be +0.0 throughout. Empty if nothing is known.
  std::vector<uint8_t> known_zero;

  bool is_known_zero(size_t stretch) const { return !known_zero.empty() && known_zero[stretch] != 0; }
};

class ShardUnits {
 public:
  // The units of each parameter's stretch of a part.
  explicit ShardUnits(std::vector<Units> stretches);

  int64_t numel() const { return numel_; }
  int64_t count() const { return static_cast<int64_t>(ends_.size()); }
  // What the mask of a part takes.
  int64_t mask_bytes() const { return (count() + 7) / 8; }

  struct Part {
    int64_t offset = 0;  // elements into a tensor
    uint8_t* mask = nullptr;
  };
  // Chooses units of some parts of a tensor, and writes mask_bytes() to the mask of each. Returns how many it has
  // chosen. If it reads values on a device, it takes one launch, and the host waits for the answer.
  int64_t choose(const at::Tensor& flat, const std::vector<Part>& parts, const ShardQuestion& question) const;

  // The elements of a part that are sent.
  int64_t sent_elements(const uint8_t* mask) const;

  // Appends to `slices`, which borrow the tensor, what is sent of a part.
  void append_slices(const at::Tensor& flat, int64_t offset, const uint8_t* mask,
                     std::vector<BorrowedSlice>& slices) const;

  struct Received {
    const uint8_t* mask = nullptr;  // null for what lies in the sum's tensor itself, all of it
    int64_t offset = 0;             // elements into what was received
  };
  // to = the parts that were received, added up in this order; +0.0 where there is none. `packed` has the type of `to`.
  void sum(const at::Tensor& to, const at::Tensor& packed, const std::vector<Received>& received) const;

 private:
  std::vector<Units> stretches_;
  std::vector<int64_t> ends_;  // of each unit, in elements from the part's beginning
  int64_t numel_ = 0;
};

}  // namespace ddp_hooks
