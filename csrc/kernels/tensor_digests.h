// The digests of tensors, wherever they are.
//
// What it represents: a digest (tensor_hash.h) says what a tensor holds, not how it lies in memory. Its elements are
// hashed in row-major order, so a channels-last tensor and a contiguous one with the same elements have the same
// digest.
//
// The elements of an accelerator's tensors come to the host together, in copies of up to 16 MiB into two page-locked
// buffers. While one copy travels, the host hashes the one before, and it waits once for each.
//
// Thread-safety: pure functions. What ranks must agree on: nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/tensor_hash.h"

namespace ddp_hooks {

std::vector<Digest> digests_of(const std::vector<at::Tensor>& tensors);

}  // namespace ddp_hooks
