// Gathers slices of buckets into a message, scaled, and scatters a message back. The only place that chooses by device
// for this.
//
// A copy is one contiguous stretch on either side; several make up a message. On the CPU the call returns when all is
// copied. On CUDA it puts the copies on the current stream of the tensors' device and returns; memory that is freed
// meanwhile is safe if it belongs to that stream (torch's allocator keeps the order), and must be recorded on it if
// not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/element_type.h"

namespace ddp_hooks {

struct SliceOfTensor {
  at::Tensor flat;  // one-dimensional, contiguous
  int64_t offset = 0;
  int64_t length = 0;

  // Whether `next` begins where this ends.
  bool continues_in(const SliceOfTensor& next) const {
    return flat.is_same(next.flat) && offset + length == next.offset;
  }
};

// The same of a tensor that somebody else holds meanwhile: of many rows each would count a reference.
struct BorrowedSlice {
  const at::Tensor* flat = nullptr;
  int64_t offset = 0;
  int64_t length = 0;

  bool continues_in(const BorrowedSlice& next) const { return flat == next.flat && offset + length == next.offset; }
};

inline BorrowedSlice borrow(const SliceOfTensor& slice) {
  return {&slice.flat, slice.offset, slice.length};
}
std::vector<BorrowedSlice> borrow(const std::vector<SliceOfTensor>& slices);

// Where the slice begins.
char* address_of(const SliceOfTensor& slice);

// Refuses a tensor that is not one-dimensional and contiguous, and a range outside it.
void check_range(const at::Tensor& flat, int64_t offset, int64_t length);

// Refuses elements that do not lie at multiples of their size, as a device demands and the CPU does not.
void check_aligned(const at::Tensor& flat);

// The element type of a flat gradient; refuses what a gradient cannot be.
ElementType element_type_of(const at::Tensor& flat);

// message = the slices, one after the other, times `factor`.
void gather_scaled(const at::Tensor& message, const std::vector<BorrowedSlice>& slices, double factor);

// message = the slices divided by `divisor`. On CUDA multiplied with 1/divisor, as ATen divides by a number there.
void gather_divided(const at::Tensor& message, const std::vector<BorrowedSlice>& slices, double divisor);

// The slices = their stretches of the message.
void scatter(const at::Tensor& message, const std::vector<BorrowedSlice>& slices);

// A stretch of one tensor.
struct Range {
  int64_t offset = 0;
  int64_t length = 0;
};

// The ranges of `to`, which do not overlap, += their stretches of the message, each sum rounded once.
void scatter_add(const at::Tensor& message, const at::Tensor& to, const std::vector<Range>& ranges);

}  // namespace ddp_hooks
