#include "testing/parts.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "What only tests ask of the compiled part of ddp_hooks.";
  py::module_::import("ddp_hooks");  // which checks torch, and registers the types that both know
  ddp_hooks::bind_planning(m);
  ddp_hooks::bind_single_kernels(m);
  ddp_hooks::bind_packing(m);
  ddp_hooks::bind_coding(m);
  ddp_hooks::bind_mask_codec(m);
  ddp_hooks::bind_emulation(m);
  ddp_hooks::bind_reducer_probes(m);
  ddp_hooks::bind_transports(m);
}
