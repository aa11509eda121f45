#include "bindings/rooms.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of ddp_hooks.";
  py::module_::import("torch.distributed");  // registers the types that appear in the signatures
  ddp_hooks::bind_kernels(m);
  ddp_hooks::bind_layout(m);
  ddp_hooks::bind_reducer(m);
  ddp_hooks::bind_agreement(m);
  ddp_hooks::bind_detectors(m);
  ddp_hooks::bind_transport(m);
  ddp_hooks::bind_shards(m);
  ddp_hooks::bind_engine(m);
  ddp_hooks::bind_threads(m);
}
