// What only tests ask, in an extension of its own, `ddp_hooks_testing._C`, which no wheel holds.
//
// It links the same objects as the package's extension, so none of them is compiled twice, and has what they keep in
// memory once more: what is called here does not meet what the package's extension does. Types that both know are those
// that the package's extension has registered.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "kernels/packing.h"

namespace ddp_hooks {

// As Python holds it, which may let go of the tensor.
struct HeldSum {
  at::Tensor flat;
  SliceSum sum;  // without the tensor
};
std::vector<SliceSum> borrow(const std::vector<HeldSum>& held);

// What a step is planned with: rules and plans.
void bind_planning(pybind11::module_& m);

// Kernels that the package runs within a step only.
void bind_single_kernels(pybind11::module_& m);

// See packing.h.
void bind_packing(pybind11::module_& m);

// Coded messages: see coding.h.
void bind_coding(pybind11::module_& m);

void bind_mask_codec(pybind11::module_& m);

// The CUDA kernels' indexing, played on CPU tensors: see emulation.h.
void bind_emulation(pybind11::module_& m);

// `probe_reducer(reducer)`: a dict from the names of the Reducer's members to their values, as plain as they can be
// had. What tests ask, to see that each member that reducer_view.cpp reads still means what it meant; see
// docs/internals/new-torch.md.
void bind_reducer_probes(pybind11::module_& m);

// What decides a transport; and unmanaged gradients in a group of any size, where the test plays all other ranks.
void bind_transports(pybind11::module_& m);

}  // namespace ddp_hooks
