#include <pybind11/stl.h>

#include <utility>

#include "bindings/rooms.h"
#include "detectors/adaptive_rule.h"
#include "detectors/units_detector.h"

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

  py::class_<UnitsDetector>(m, "UnitsDetector")
      .def(py::init([](When skip_zero_rows, When narrow, const UnitSettings& units, const AdaptiveSettings& adaptive) {
             return UnitsDetector({skip_zero_rows, narrow, units, adaptive});
           }),
           py::kw_only(), py::arg("skip_zero_rows"), py::arg("narrow"), py::arg("units"), py::arg("adaptive"))
      .def("use_layout", &UnitsDetector::use_layout)
      .def("least_zero_fraction", &UnitsDetector::least_zero_fraction)
      .def("least_narrow_fraction", &UnitsDetector::least_narrow_fraction)
      .def("objections", &UnitsDetector::objections)
      // The parameters, and those of them that are asked how wide their units are.
      .def("choose",
           [](UnitsDetector& detector, const UsageMask& used, const UsageMask& objections, int64_t step) {
             ChosenUnits chosen = detector.choose(used, objections, step);
             return std::make_pair(std::move(chosen.parameters), std::move(chosen.widths));
           })
      .def("is_due", &UnitsDetector::is_due)
      .def("observe", [](UnitsDetector& detector, size_t parameter, int64_t step, int64_t elements, double sent,
                         double sent_at_full_width) {
        return detector.observe(parameter, step, elements, {sent, sent_at_full_width});
      });
}

}  // namespace ddp_hooks
