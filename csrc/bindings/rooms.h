// What Python sees of each room; what only tests and microbenchmarks ask is in testing/.
//
// A file a room, of transport/ two, because most of the time of compiling one goes into torch's headers, and not every
// room needs all.
#pragma once

#include <pybind11/pybind11.h>

namespace ddp_hooks {

void bind_kernels(pybind11::module_& m);
void bind_layout(pybind11::module_& m);
void bind_reducer(pybind11::module_& m);
void bind_agreement(pybind11::module_& m);
void bind_detectors(pybind11::module_& m);
void bind_transport(pybind11::module_& m);
void bind_shards(pybind11::module_& m);  // of transport/, too
void bind_engine(pybind11::module_& m);
// Of no room: what the threads of this process are in.
void bind_threads(pybind11::module_& m);

}  // namespace ddp_hooks
