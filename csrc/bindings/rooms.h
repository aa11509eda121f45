// What Python sees of each room, for the package itself and for tests and microbenchmarks.
//
// A file a room, because most of the time of compiling one goes into torch's headers, and not every room needs all.
#pragma once

#include <pybind11/pybind11.h>

namespace ddp_hooks {

void bind_kernels(pybind11::module_& m);
void bind_layout(pybind11::module_& m);
void bind_reducer(pybind11::module_& m);
void bind_agreement(pybind11::module_& m);
void bind_mask_codec(pybind11::module_& m);  // and counters: of agreement/ what needs nothing of torch
void bind_detectors(pybind11::module_& m);
void bind_transport(pybind11::module_& m);
void bind_engine(pybind11::module_& m);

// `probe_reducer(reducer)`: a dict from the names of the Reducer's members to their values, as plain as they can be
// had. What tests ask, to see that each member that reducer_view.cpp reads still means what it meant; see
// docs/internals/new-torch.md.
void bind_reducer_probes(pybind11::module_& m);

}  // namespace ddp_hooks
