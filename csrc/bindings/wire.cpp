#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "layout/bucket_layout.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "wire/unit_plan.h"
#include "wire/wire_plan.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_wire(py::module_& m) {
  py::class_<PlanSettings>(m, "PlanSettings")
      .def(py::init([](int64_t in_place_bytes, int64_t pack_bytes, double gap_fraction) {
             return PlanSettings{in_place_bytes, pack_bytes, gap_fraction};
           }),
           py::kw_only(), py::arg("in_place_bytes"), py::arg("pack_bytes"), py::arg("gap_fraction"));

  py::class_<Message>(m, "Message")
      .def_readonly("slices", &Message::slices)
      .def_readonly("numel", &Message::numel)
      .def_readonly("kind", &Message::kind)
      .def_readonly("in_place", &Message::in_place)
      .def_readonly("gaps", &Message::gaps);
  py::enum_<Disposition>(m, "Disposition")
      .value("SKIPPED", Disposition::kSkipped)
      .value("PACKED", Disposition::kPacked)
      .value("WHOLE", Disposition::kWhole);
  py::class_<BucketPlan>(m, "BucketPlan")
      .def_readonly("launches", &BucketPlan::launches)
      .def_readonly("messages_touching", &BucketPlan::messages_touching)
      .def_readonly("disposition", &BucketPlan::disposition);
  const auto or_nothing = [](const LayoutOfBuckets& layout, const std::optional<UsageMask>& divided) {
    return divided.value_or(UsageMask(layout.parameter_count));
  };
  m.def(
      "make_wire_plan",
      [or_nothing](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings,
                   const std::optional<UsageMask>& divided) {
        return make_wire_plan(layout, agreed, or_nothing(layout, divided), settings).buckets;
      },
      py::arg("layout"), py::arg("agreed"), py::arg("settings"), py::arg("divided") = py::none());
  m.def(
      "plan_bucket_by_bucket",
      [or_nothing](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings,
                   const std::optional<UsageMask>& divided) {
        WirePlanner planner(layout, or_nothing(layout, divided), settings);
        std::vector<BucketPlan> plans;
        for (uint32_t b = 0; b < layout.buckets.size(); ++b) plans.push_back(planner.add_bucket(b, agreed));
        return plans;
      },
      py::arg("layout"), py::arg("agreed"), py::arg("settings"), py::arg("divided") = py::none());

  // For each message: whether it travels in place, and its runs (gradient, offset, length), in elements.
  m.def("make_unit_messages", [](const std::vector<Units>& gradients, const UsageMask& used, int64_t element_bytes,
                                 const PlanSettings& settings) {
    std::vector<std::pair<bool, std::vector<std::tuple<size_t, int64_t, int64_t>>>> messages;
    for (const UnitMessage& message : make_unit_messages(gradients, used, element_bytes, settings)) {
      auto& runs = messages.emplace_back(message.in_place, 0).second;
      for (const UnitRun& run : message.runs) runs.emplace_back(run.gradient, run.offset, run.length);
    }
    return messages;
  });
}

}  // namespace ddp_hooks
