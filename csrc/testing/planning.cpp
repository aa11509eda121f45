#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "detectors/coding_rule.h"
#include "detectors/units_detector.h"
#include "layout/bucket_layout.h"
#include "layout/contributors.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "plan/direct_plan.h"
#include "plan/reduction_plan.h"
#include "testing/parts.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

void bind_rules(py::module_& m) {
  py::class_<UnitsDetector>(m, "UnitsDetector")
      .def(py::init([](When skip_zero_rows, const UnitSettings& units, const AdaptiveSettings& adaptive) {
             return UnitsDetector({skip_zero_rows, units, adaptive});
           }),
           py::kw_only(), py::arg("skip_zero_rows"), py::arg("units"), py::arg("adaptive"))
      .def("use_layout", &UnitsDetector::use_layout)
      .def("least_zero_fraction", &UnitsDetector::least_zero_fraction)
      .def("objections", &UnitsDetector::objections)
      .def("choose", [](UnitsDetector& detector, const UsageMask& used, const UsageMask& objections,
                        int64_t step) { return detector.choose(used, objections, step).divided; })
      .def("is_due", &UnitsDetector::is_due)
      .def("observe", &UnitsDetector::observe);

  py::class_<CodedParts>(m, "CodedParts")
      .def(py::init([](double contribution, double sum) { return CodedParts{contribution, sum}; }), py::kw_only(),
           py::arg("contribution"), py::arg("sum"))
      .def_readonly("contribution", &CodedParts::contribution)
      .def_readonly("sum", &CodedParts::sum);
  py::class_<CodingRule>(m, "CodingRule")
      .def(py::init([](When coded, double least_saving, const AdaptiveSettings& adaptive, int world_size) {
             return CodingRule({coded, least_saving}, adaptive, world_size);
           }),
           py::kw_only(), py::arg("coded"), py::arg("least_saving"), py::arg("adaptive"), py::arg("world_size"))
      // Of contributions and of sums: bytes before, and bytes after.
      .def("tell",
           [](const CodingRule& rule, const UsageMask& mask, int64_t contributions, int64_t coded_contributions,
              int64_t sums, int64_t coded_sums) {
             const StepInFlight::CodedBytes last{contributions, coded_contributions, sums, coded_sums};
             return rule.tell(mask, &last);
           })
      .def("choose", &CodingRule::choose);
}

void bind_plans(py::module_& m) {
  py::class_<Stretch>(m, "Stretch")
      .def_readonly("place", &Stretch::place)
      .def_readonly("offset", &Stretch::offset)
      .def_readonly("length", &Stretch::length);
  // What leaves the all-reduces takes these parts of its bytes.
  m.def("coded", [](DirectSettings settings, const CodedParts& parts) {
    settings.transports.coded = parts;
    return settings;
  });
  py::class_<DirectPart, Stretch>(m, "DirectPart").def_readonly("contributors", &DirectPart::contributors);
  py::class_<DirectGroup>(m, "DirectGroup")
      .def_readonly("owner", &DirectGroup::owner)
      .def_readonly("numel", &DirectGroup::numel)
      .def_readonly("parts", &DirectGroup::parts);
  py::class_<DirectMessage>(m, "DirectMessage")
      .def_property_readonly("is_summed", &DirectMessage::is_summed)
      .def_readonly("for_all_bytes", &DirectMessage::for_all_bytes)
      .def_readonly("is_gathered", &DirectMessage::is_gathered)
      .def_readonly("is_coded", &DirectMessage::is_coded)
      .def_readonly("numel", &DirectMessage::numel)
      .def_readonly("groups", &DirectMessage::groups)
      .def("bytes",
           [](const DirectMessage& message, int64_t element_bytes) {
             const MessageBytes bytes = bytes_of(message, element_bytes);
             return std::make_pair(bytes.contributions, bytes.sums);
           })
      .def("contribution_bytes", [](const DirectMessage& message, int rank, int64_t element_bytes) {
        std::vector<int64_t> bytes;
        for (const DirectGroup& group : message.groups) bytes.push_back(contribution_bytes(group, rank, element_bytes));
        return bytes;
      });

  py::class_<Message>(m, "Message")
      .def_readonly("stretches", &Message::stretches)
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
      .def_readonly("direct", &BucketPlan::direct)
      .def_readonly("messages_touching", &BucketPlan::messages_touching)
      .def_readonly("disposition", &BucketPlan::disposition);
  const auto or_nothing = [](const LayoutOfBuckets& layout, const std::optional<UsageMask>& divided) {
    return divided.value_or(UsageMask(layout.parameter_count));
  };
  m.def(
      "make_reduction_plan",
      [or_nothing](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings,
                   const std::optional<UsageMask>& divided, const std::vector<UsageMask>& by_rank) {
        return make_reduction_plan(layout, agreed, or_nothing(layout, divided), Contributors(by_rank), settings)
            .buckets;
      },
      py::arg("layout"), py::arg("agreed"), py::arg("settings"), py::arg("divided") = py::none(),
      py::arg("by_rank") = std::vector<UsageMask>());
  m.def(
      "plan_bucket_by_bucket",
      [or_nothing](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings,
                   const std::optional<UsageMask>& divided, const std::vector<UsageMask>& by_rank) {
        Planner planner(layout, or_nothing(layout, divided), settings);
        std::vector<BucketPlan> plans;
        for (uint32_t b = 0; b < layout.buckets.size(); ++b) {
          plans.push_back(planner.plan(b, {whole_gradients(b, layout, agreed)}, agreed, Contributors(by_rank)).front());
        }
        return plans;
      },
      py::arg("layout"), py::arg("agreed"), py::arg("settings"), py::arg("divided") = py::none(),
      py::arg("by_rank") = std::vector<UsageMask>());

  // Of the divided gradients of a bucket: the all-reduced messages and the others; and by gradient how many elements
  // are sent, each counted at its relative cost before it is coded.
  m.def(
      "make_unit_plan",
      [](const std::vector<Units>& units, const UsageMask& used, int64_t element_bytes, const PlanSettings& settings,
         const std::vector<UsageMask>& by_rank) {
        const LayoutOfBuckets layout{{{{}, 0, element_bytes}}, 0};
        std::vector<GradientToSend> gradients;
        for (const Units& each : units) gradients.push_back({{gradients.size() + 1, 0, each.slice_length}, each});
        BucketPlan plan = std::move(Planner(layout, UsageMask(0), settings)
                                        .plan(0, {std::move(gradients)}, used, Contributors(by_rank))
                                        .front());
        // Counted without the bucket.
        for (Message& message : plan.launches) {
          for (Stretch& stretch : message.stretches) stretch.place -= 1;
        }
        for (DirectMessage& message : plan.direct) {
          for (DirectGroup& group : message.groups) {
            for (DirectPart& part : group.parts) part.place -= 1;
          }
        }
        return std::make_tuple(std::move(plan.launches), std::move(plan.direct), std::move(plan.sent));
      },
      py::arg("gradients"), py::arg("used"), py::arg("element_bytes"), py::arg("settings"),
      py::arg("by_rank") = std::vector<UsageMask>());
}

}  // namespace

void bind_planning(py::module_& m) {
  bind_rules(m);
  bind_plans(m);
}

}  // namespace ddp_hooks
