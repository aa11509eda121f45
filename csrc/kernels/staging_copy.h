// Copies whole tensors to a staging buffer and back. The dispatch point for the synchronisation without a backward, as
// slice_copy.h is for gradients.
//
// The staging buffer is flat and contiguous and holds the tensors one after the other, each in the order of its
// elements, whatever its strides. A tensor's dtype may differ from the buffer's: elements are converted.
//
// Thread-safety: the caller alone uses the tensors until the call returns. What ranks must agree on: order, dtypes and
// shapes of the tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ddp_hooks {

// staging = the tensors.
void gather_tensors(const at::Tensor& staging, const std::vector<at::Tensor>& tensors);

// The tensors = staging / divisor, rounded in the dtype of staging; with a divisor of 1, its bits. Autograd sees the
// writes. What staging holds afterwards is undefined.
void scatter_tensors(const at::Tensor& staging, const std::vector<at::Tensor>& tensors, int64_t divisor = 1);

}  // namespace ddp_hooks
