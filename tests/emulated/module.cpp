#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include "group.h"

namespace py = pybind11;

PYBIND11_MODULE(_emulated, m) {
  m.doc() = "Process groups whose other ranks and links are emulated: see group.h.";
  m.def(
      "set_link",
      [](double latency_seconds, double bytes_per_second, double host_seconds) {
        emulated::link() = {latency_seconds, bytes_per_second, host_seconds};
      },
      py::arg("latency_seconds"), py::arg("bytes_per_second"), py::arg("host_seconds"));
  m.def(
      "make_group",
      [](int rank, int size, const std::string& name, const std::string& device, emulated::HoldUp hold_up) {
        return emulated::make_group(rank, size, name, c10::Device(device).type(), std::move(hold_up));
      },
      py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("device"), py::arg("hold_up"));
}
