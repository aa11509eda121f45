#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "costs.h"
#include "counts.h"
#include "kernels.h"
#include "memory.h"
#include "process_group.h"
#include "queues.h"
#include "trace.h"

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
  m.def("bytes_by_group", [] { return pretend::Counts::get().bytes_by_group(); });
  m.def("make_group", &pretend::make_group, py::call_guard<py::gil_scoped_release>());
  m.def("make_host_group", &pretend::make_host_group, py::call_guard<py::gil_scoped_release>());
  // By stream, after how many pieces of work what is put on the current stream runs.
  m.def("passed", [] { return Queues::get().ticket(pretend::current_stream()).passed; });
  m.def("finish_host_collectives_at_once", &pretend::finish_host_collectives_at_once);
  m.def("fail_collective", &pretend::fail_collective);
  m.def("end_memory_late", &pretend::end_memory_late);
  m.def("leave_out_copies", &pretend::leave_out_copies);
  // A kernel that takes so many seconds and touches nothing.
  m.def("work", [](double seconds) {
    ++pretend::Counts::get().launches;
    const auto run = [] { return true; };
    Queues::get().put(pretend::current_stream(), run, {seconds, pretend::Costs::get().launch});
  });
  m.def("costs", [] {
    const pretend::Costs& costs = pretend::Costs::get();
    return std::map<std::string, double>{{"launch", costs.launch},   {"collective_launch", costs.collective_launch},
                                         {"kernel", costs.kernel},   {"memory", costs.memory},
                                         {"latency", costs.latency}, {"link", costs.link},
                                         {"hosts", costs.hosts}};
  });
  py::class_<pretend::Moment>(m, "Moment")
      .def_readonly("what", &pretend::Moment::what)
      .def_readonly("stream", &pretend::Moment::stream)
      .def_property_readonly("seconds", [](const pretend::Moment& m) { return m.cost.seconds; })
      .def_property_readonly("host_seconds", [](const pretend::Moment& m) { return m.cost.host_seconds; })
      .def_property_readonly("bytes", [](const pretend::Moment& m) { return m.cost.bytes; })
      .def_property_readonly("collective", [](const pretend::Moment& m) { return m.cost.collective; })
      .def_property_readonly("ranks", [](const pretend::Moment& m) { return m.cost.ranks; })
      .def_readonly("number", &pretend::Moment::number)
      .def_readonly("after", &pretend::Moment::after);
  m.def("begin_trace", [] { pretend::Trace::get().begin(); });
  m.def("end_trace", [] { return pretend::Trace::get().end(); });
  m.def("kernels", [] { return py::capsule(&pretend::kernels()); });
  m.def("exchange_stream", &pretend::exchange_stream);
}
