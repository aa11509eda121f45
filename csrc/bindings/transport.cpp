#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "kernels/packing.h"
#include "layout/bucket_layout.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "plan/direct_plan.h"
#include "plan/reduction_plan.h"
#include "plan/unit_plan.h"
#include "transport/direct_sender.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

// What ranks do with parts of a gradient that owners sum: they are dealt out, packed, added up and put back. For
// measurements. `packed` is as large as the gradient, whose length is a multiple of `part_length`.
void sum_parts_once(const at::Tensor& gradient, const at::Tensor& packed, int64_t part_length) {
  const int64_t element_bytes = gradient.element_size();
  std::vector<DirectPart> parts;
  std::vector<PackedSlice> slices;
  std::vector<BorrowedSlice> places;
  std::vector<SliceSum> sums;
  const auto count = static_cast<size_t>(gradient.numel() / part_length);
  places.reserve(count);
  slices.reserve(count);
  sums.reserve(count);
  for (int64_t begin = 0; begin < gradient.numel(); begin += part_length) {
    const bool is_even = parts.size() % 2 == 0;
    parts.push_back({{0, begin, part_length}, is_even ? RankSet{0b011} : RankSet{0b110}});
    const BorrowedSlice place{&gradient, begin, part_length};
    places.push_back(place);
    slices.push_back({place});
    sums.push_back({place, {{begin * element_bytes}, {begin * element_bytes}}});
  }
  constexpr int64_t kSegmentBytes = 256 << 10;
  const Transports transports{3, true, true};
  make_direct_messages(parts, element_bytes, transports, {transports, kSegmentBytes});
  pack(packed, slices);
  sum_contributions(packed, sums);
  scatter(packed.view(gradient.scalar_type()), places);
}

}  // namespace

void bind_transport(py::module_& m) {
  py::class_<CollectiveCosts>(m, "CollectiveCosts")
      .def(py::init([](double all_reduce_seconds, double all_reduce_seconds_per_byte, double all_to_all_seconds,
                       double all_to_all_seconds_per_byte, double narrowing_seconds_per_byte,
                       double summing_seconds_per_byte, double seconds_per_part) {
             return CollectiveCosts{all_reduce_seconds,
                                    all_reduce_seconds_per_byte,
                                    all_to_all_seconds,
                                    all_to_all_seconds_per_byte,
                                    narrowing_seconds_per_byte,
                                    summing_seconds_per_byte,
                                    seconds_per_part};
           }),
           py::kw_only(), py::arg("all_reduce_seconds") = CollectiveCosts().all_reduce_seconds,
           py::arg("all_reduce_seconds_per_byte") = CollectiveCosts().all_reduce_seconds_per_byte,
           py::arg("all_to_all_seconds") = CollectiveCosts().all_to_all_seconds,
           py::arg("all_to_all_seconds_per_byte") = CollectiveCosts().all_to_all_seconds_per_byte,
           py::arg("narrowing_seconds_per_byte") = CollectiveCosts().narrowing_seconds_per_byte,
           py::arg("summing_seconds_per_byte") = CollectiveCosts().summing_seconds_per_byte,
           py::arg("seconds_per_part") = CollectiveCosts().seconds_per_part)
      .def_readonly("all_reduce_seconds", &CollectiveCosts::all_reduce_seconds)
      .def_readonly("all_reduce_seconds_per_byte", &CollectiveCosts::all_reduce_seconds_per_byte)
      .def_readonly("all_to_all_seconds", &CollectiveCosts::all_to_all_seconds)
      .def_readonly("all_to_all_seconds_per_byte", &CollectiveCosts::all_to_all_seconds_per_byte)
      .def_readonly("narrowing_seconds_per_byte", &CollectiveCosts::narrowing_seconds_per_byte)
      .def_readonly("summing_seconds_per_byte", &CollectiveCosts::summing_seconds_per_byte)
      .def_readonly("seconds_per_part", &CollectiveCosts::seconds_per_part)
      .def("narrow_pays", &narrow_pays, py::arg("world_size"));
  py::class_<DirectSettings>(m, "DirectSettings")
      .def(py::init([](bool direct, int world_size, bool owners, int64_t segment_bytes, const CollectiveCosts& costs,
                       int64_t min_direct_bytes, double min_owner_saving) {
             return DirectSettings{
                 {world_size, direct, direct && owners}, segment_bytes, min_direct_bytes, min_owner_saving, costs};
           }),
           py::kw_only(), py::arg("direct"), py::arg("world_size"), py::arg("owners"), py::arg("segment_bytes"),
           py::arg("costs") = CollectiveCosts(), py::arg("min_direct_bytes") = DirectSettings().min_direct_bytes,
           py::arg("min_owner_saving") = DirectSettings().min_owner_saving);
  py::class_<DirectPart, Stretch>(m, "DirectPart")
      .def_readonly("contributors", &DirectPart::contributors)
      .def_readonly("width", &DirectPart::width);
  py::class_<DirectGroup>(m, "DirectGroup")
      .def_readonly("owner", &DirectGroup::owner)
      .def_readonly("numel", &DirectGroup::numel)
      .def_readonly("parts", &DirectGroup::parts);
  py::class_<DirectMessage>(m, "DirectMessage")
      .def_readonly("is_summed", &DirectMessage::is_summed)
      .def_readonly("for_all_bytes", &DirectMessage::for_all_bytes)
      .def_readonly("is_gathered", &DirectMessage::is_gathered)
      .def_readonly("numel", &DirectMessage::numel)
      .def_readonly("groups", &DirectMessage::groups)
      .def("bytes",
           [](const DirectMessage& message, int64_t element_bytes) {
             const MessageBytes bytes = bytes_of(message, element_bytes);
             return std::make_pair(bytes.payload, bytes.narrow);
           })
      .def("contribution_bytes", [](const DirectMessage& message, int rank, int64_t element_bytes) {
        std::vector<int64_t> bytes;
        for (const DirectGroup& group : message.groups) bytes.push_back(contribution_bytes(group, rank, element_bytes));
        return bytes;
      });

  py::class_<PlanSettings>(m, "PlanSettings")
      .def(py::init([](int64_t in_place_bytes, int64_t pack_bytes, double gap_fraction, const DirectSettings& direct) {
             return PlanSettings{in_place_bytes, pack_bytes, gap_fraction, direct};
           }),
           py::kw_only(), py::arg("in_place_bytes"), py::arg("pack_bytes"),
           py::arg("gap_fraction") = PlanSettings().gap_fraction, py::arg("direct") = DirectSettings());

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
                   const std::optional<UsageMask>& divided) {
        ReductionPlanner planner(layout, or_nothing(layout, divided), settings);
        std::vector<BucketPlan> plans;
        for (uint32_t b = 0; b < layout.buckets.size(); ++b) plans.push_back(planner.add_bucket(b, agreed));
        return plans;
      },
      py::arg("layout"), py::arg("agreed"), py::arg("settings"), py::arg("divided") = py::none());

  // The all-reduced messages and the others; and by gradient how many elements are sent, counted at their transports'
  // costs, and how many these would be if none could travel narrow.
  m.def(
      "make_unit_plan",
      [](const std::vector<Units>& gradients, const UsageMask& used, int64_t element_bytes,
         const PlanSettings& settings, const std::vector<UsageMask>& by_rank) {
        const UnitPlan plan = make_unit_plan(gradients, used, Contributors(by_rank), element_bytes, settings);
        std::vector<std::pair<double, double>> sent;
        for (const SentElements& one : plan.sent) sent.emplace_back(one.elements, one.at_full_width);
        return std::make_tuple(plan.reduced, plan.direct, std::move(sent));
      },
      py::arg("gradients"), py::arg("used"), py::arg("element_bytes"), py::arg("settings"),
      py::arg("by_rank") = std::vector<UsageMask>());

  m.def("can_send_directly", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device) {
    return DirectSender::is_possible(*group, device);
  });
  m.def("sum_parts_once", &sum_parts_once, py::arg("gradient"), py::arg("packed"), py::arg("part_length"),
        py::call_guard<py::gil_scoped_release>());
  m.def("needs_group_for_sums", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device) {
    return DirectSender::needs_group_for_sums(*group, device);
  });
}

}  // namespace ddp_hooks
