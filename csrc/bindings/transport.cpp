#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings/rooms.h"
#include "kernels/packing.h"
#include "layout/transports.h"
#include "plan/direct_plan.h"
#include "plan/reduction_plan.h"
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
                       double all_to_all_seconds_per_byte, double summing_seconds_per_byte, double seconds_per_part) {
             return CollectiveCosts{all_reduce_seconds,          all_reduce_seconds_per_byte, all_to_all_seconds,
                                    all_to_all_seconds_per_byte, summing_seconds_per_byte,    seconds_per_part};
           }),
           py::kw_only(), py::arg("all_reduce_seconds") = CollectiveCosts().all_reduce_seconds,
           py::arg("all_reduce_seconds_per_byte") = CollectiveCosts().all_reduce_seconds_per_byte,
           py::arg("all_to_all_seconds") = CollectiveCosts().all_to_all_seconds,
           py::arg("all_to_all_seconds_per_byte") = CollectiveCosts().all_to_all_seconds_per_byte,
           py::arg("summing_seconds_per_byte") = CollectiveCosts().summing_seconds_per_byte,
           py::arg("seconds_per_part") = CollectiveCosts().seconds_per_part)
      .def_readonly("all_reduce_seconds", &CollectiveCosts::all_reduce_seconds)
      .def_readonly("all_reduce_seconds_per_byte", &CollectiveCosts::all_reduce_seconds_per_byte)
      .def_readonly("all_to_all_seconds", &CollectiveCosts::all_to_all_seconds)
      .def_readonly("all_to_all_seconds_per_byte", &CollectiveCosts::all_to_all_seconds_per_byte)
      .def_readonly("summing_seconds_per_byte", &CollectiveCosts::summing_seconds_per_byte)
      .def_readonly("seconds_per_part", &CollectiveCosts::seconds_per_part);
  py::class_<DirectSettings>(m, "DirectSettings")
      .def(py::init([](bool direct, int world_size, bool owners, int64_t segment_bytes, const CollectiveCosts& costs,
                       int64_t min_direct_bytes, double min_owner_saving) {
             return DirectSettings{
                 {world_size, direct, direct && owners}, segment_bytes, min_direct_bytes, min_owner_saving, costs};
           }),
           py::kw_only(), py::arg("direct"), py::arg("world_size"), py::arg("owners"), py::arg("segment_bytes"),
           py::arg("costs") = CollectiveCosts(), py::arg("min_direct_bytes") = DirectSettings().min_direct_bytes,
           py::arg("min_owner_saving") = DirectSettings().min_owner_saving);
  py::class_<PlanSettings>(m, "PlanSettings")
      .def(py::init([](int64_t in_place_bytes, int64_t pack_bytes, double gap_fraction, const DirectSettings& direct) {
             return PlanSettings{in_place_bytes, pack_bytes, gap_fraction, direct};
           }),
           py::kw_only(), py::arg("in_place_bytes"), py::arg("pack_bytes"),
           py::arg("gap_fraction") = PlanSettings().gap_fraction, py::arg("direct") = DirectSettings());

  m.def("can_send_directly", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device,
                                int count) { return DirectSender::is_possible(*group, device, count); });
  m.def("can_code", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device, int count) {
    return DirectSender::can_code(*group, device, count);
  });
  m.def("sum_parts_once", &sum_parts_once, py::arg("gradient"), py::arg("packed"), py::arg("part_length"),
        py::call_guard<py::gil_scoped_release>());
  m.def("needs_group_for_sums", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device,
                                   int count) { return DirectSender::needs_group_for_sums(*group, device, count); });
}

}  // namespace ddp_hooks
