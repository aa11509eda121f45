// What tests ask of DDP's Reducer, to see that each member that reducer_view.cpp reads still means what it meant.
//
// Reads by itself, not through ReducerView, and knows torch only: when a new torch changes a member, this says which.
// See docs/supporting-a-new-torch.md. Thread-safety: none; tests ask while nothing else runs.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ddp_hooks {

// `probe_reducer(reducer)`: a dict from the names of members to their values, as plain as they can be had.
void bind_reducer_probes(pybind11::module_& m);

}  // namespace ddp_hooks
