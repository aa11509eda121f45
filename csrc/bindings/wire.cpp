#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/rooms.h"
#include "layout/bucket_layout.h"
#include "layout/usage_mask.h"
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
  m.def("make_wire_plan", [](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings) {
    return make_wire_plan(layout, agreed, settings).buckets;
  });
  m.def("plan_bucket_by_bucket",
        [](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings) {
          WirePlanner planner(layout, settings);
          std::vector<BucketPlan> plans;
          for (uint32_t b = 0; b < layout.buckets.size(); ++b) plans.push_back(planner.add_bucket(b, agreed));
          return plans;
        });
}

}  // namespace ddp_hooks
