#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "counts.h"
#include "kernels.h"
#include "memory.h"
#include "process_group.h"
#include "queues.h"

namespace py = pybind11;

PYBIND11_MODULE(_pretend, m) {
  m.doc() = "A device that is pretended: see queues.h.";
  using pretend::Queues;
  m.def(
      "seed", [](uint64_t seed, double lateness) { Queues::get().seed(seed, lateness); }, py::arg("seed"),
      py::arg("lateness") = 0.3);
  m.def("synchronize", [] { Queues::get().synchronize_all(); }, py::call_guard<py::gil_scoped_release>());
  m.def("stop", [] { Queues::get().stop(); }, py::call_guard<py::gil_scoped_release>());
  m.def("counts", [] {
    const pretend::Counts& counts = pretend::Counts::get();
    return std::map<std::string, uint64_t>{{"launches", counts.launches},
                                           {"allocations", counts.allocations},
                                           {"events", counts.events},
                                           {"stream_waits", counts.stream_waits},
                                           {"host_waits", counts.host_waits},
                                           {"collectives", counts.collectives},
                                           {"collective_bytes", counts.collective_bytes}};
  });
  m.def("make_group", &pretend::make_group, py::call_guard<py::gil_scoped_release>());
  m.def("make_host_group", &pretend::make_host_group, py::call_guard<py::gil_scoped_release>());
  // By stream, after how many pieces of work what is put on the current stream runs.
  m.def("passed", [] { return Queues::get().ticket(pretend::current_stream()).passed; });
  m.def("finish_host_collectives_at_once", &pretend::finish_host_collectives_at_once);
  m.def("fail_collective", &pretend::fail_collective);
  m.def("leave_out_copies", &pretend::leave_out_copies);
  m.def("kernels", [] { return py::capsule(&pretend::kernels()); });
  m.def("exchange_stream", &pretend::exchange_stream);
}
