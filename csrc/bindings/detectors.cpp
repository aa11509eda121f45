#include <pybind11/pybind11.h>

#include <cstdint>

#include "bindings/rooms.h"
#include "detectors/adaptive_rule.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_detectors(py::module_& m) {
  py::enum_<When>(m, "When").value("OFF", When::kOff).value("ON", When::kOn).value("ADAPTIVE", When::kAdaptive);

  py::class_<AdaptiveSettings>(m, "AdaptiveSettings")
      .def(py::init([](double min_zero_fraction, int64_t hold_steps, int64_t first_pause_steps,
                       int64_t longest_pause_steps) {
             return AdaptiveSettings{min_zero_fraction, hold_steps, first_pause_steps, longest_pause_steps};
           }),
           py::kw_only(), py::arg("min_zero_fraction"), py::arg("hold_steps") = AdaptiveSettings().hold_steps,
           py::arg("first_pause_steps") = AdaptiveSettings().first_pause_steps,
           py::arg("longest_pause_steps") = AdaptiveSettings().longest_pause_steps)
      .def_readonly("min_zero_fraction", &AdaptiveSettings::min_zero_fraction)
      .def_readonly("hold_steps", &AdaptiveSettings::hold_steps)
      .def_readonly("first_pause_steps", &AdaptiveSettings::first_pause_steps)
      .def_readonly("longest_pause_steps", &AdaptiveSettings::longest_pause_steps);
  py::class_<AdaptiveRule>(m, "AdaptiveRule")
      .def(py::init<const AdaptiveSettings&, int64_t, bool>(), py::arg("settings"), py::kw_only(),
           py::arg("looks_after_pay"), py::arg("starts_paused"))
      .def("is_on", &AdaptiveRule::is_on)
      .def("is_due", &AdaptiveRule::is_due)
      .def("observe", &AdaptiveRule::observe, py::arg("step"), py::arg("saved"), py::arg("total"));
}

}  // namespace ddp_hooks
