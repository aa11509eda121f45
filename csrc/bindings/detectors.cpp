#include <pybind11/stl.h>

#include "bindings/rooms.h"
#include "detectors/units_detector.h"
#include "detectors/values_probe.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_detectors(py::module_& m) {
  py::enum_<ValuesDetector>(m, "ValuesDetector")
      .value("OFF", ValuesDetector::kOff)
      .value("ON", ValuesDetector::kOn)
      .value("ADAPTIVE", ValuesDetector::kAdaptive);

  py::class_<ProbeSettings>(m, "ProbeSettings")
      .def(py::init([](double min_zero_fraction, int64_t hold_steps, int64_t first_pause_steps,
                       int64_t longest_pause_steps) {
             return ProbeSettings{min_zero_fraction, hold_steps, first_pause_steps, longest_pause_steps};
           }),
           py::kw_only(), py::arg("min_zero_fraction"), py::arg("hold_steps"), py::arg("first_pause_steps"),
           py::arg("longest_pause_steps"));
  py::class_<ValuesProbe>(m, "ValuesProbe")
      .def(py::init<const ProbeSettings&>())
      .def("wants_values", &ValuesProbe::wants_values)
      .def("observe", &ValuesProbe::observe);

  py::class_<UnitsDetector>(m, "UnitsDetector")
      .def(py::init([](ValuesDetector detector, const UnitSettings& units, const ProbeSettings& probe) {
             return UnitsDetector({detector, units, probe});
           }),
           py::kw_only(), py::arg("detector"), py::arg("units"), py::arg("probe"))
      .def("use_layout", &UnitsDetector::use_layout)
      .def("least_zero_fraction", &UnitsDetector::least_zero_fraction)
      .def("objections", &UnitsDetector::objections)
      .def("choose", &UnitsDetector::choose)
      .def("is_due", &UnitsDetector::is_due)
      .def("observe", &UnitsDetector::observe);
}

}  // namespace ddp_hooks
