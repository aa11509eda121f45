// Slices of any number of tensors, packed into a buffer of bytes before they are sent, scaled and added up where they
// arrive. The only place that chooses by device for this.
//
// On the CPU the calls return when all is done. On CUDA they put it on the current stream of the tensors' device and
// return; memory that is freed meanwhile is safe as slice_copy.h says. There, numbers lie at multiples of their size in
// buffers as well.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "kernels/slice_copy.h"
#include "kernels/slices_of_memory.h"

namespace ddp_hooks {

struct PackedSlice {
  BorrowedSlice slice;
  // Divided by this where it `divides`, otherwise multiplied by 1 / divisor, as slice_copy.h does.
  double divisor = 1;
  bool divides = false;
};

// `to` (uint8, flat, with room for all of it) = the slices one after the other, bit by bit unless they are scaled; what
// lies behind is left alone. On CUDA the slices are of one type.
void pack(const at::Tensor& to, const std::vector<PackedSlice>& from);

// Where slices are rows there are many, with one contribution or two.
using Contributions = c10::SmallVector<Contribution, 2>;

// What several ranks contribute to one slice, in the order of ranks.
struct SliceSum {
  BorrowedSlice to;
  Contributions contributions;  // one at least, and at most one is `own`
  double divisor = 1;           // each is multiplied with 1 / divisor
  bool adds_zero = false;       // +0.0 is added at the end, so that -0.0 becomes +0.0
};

// Each slice = its contributions, scaled one by one and added in their order, with each product and each sum rounded to
// the slice's type. A sum of several that is no number is the same NaN wherever it is added up. `packed` (uint8, flat)
// is what was received, and may be undefined if all contributions are `own`. The slices do not overlap.
void sum_contributions(const at::Tensor& packed, const std::vector<SliceSum>& sums);

}  // namespace ddp_hooks
