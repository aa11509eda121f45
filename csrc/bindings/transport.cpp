#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "plan/direct_plan.h"
#include "plan/reduction_plan.h"
#include "transport/direct_sender.h"
#include "transport/hosts_on_streams.h"
#include "transport/launch.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_transport(py::module_& m) {
  py::class_<DirectSettings>(m, "DirectSettings")
      .def(py::init([](bool direct, int world_size, bool owners, int64_t segment_bytes, int64_t min_direct_bytes,
                       double min_owner_saving) {
             return DirectSettings{
                 {world_size, direct, direct && owners}, segment_bytes, min_direct_bytes, min_owner_saving};
           }),
           py::kw_only(), py::arg("direct"), py::arg("world_size"), py::arg("owners"), py::arg("segment_bytes"),
           py::arg("min_direct_bytes") = DirectSettings().min_direct_bytes,
           py::arg("min_owner_saving") = DirectSettings().min_owner_saving);
  py::class_<PlanSettings>(m, "PlanSettings")
      .def(py::init([](int64_t in_place_bytes, int64_t pack_bytes, bool one_message_per_bucket, double gap_fraction,
                       const DirectSettings& direct) {
             return PlanSettings{in_place_bytes, pack_bytes, one_message_per_bucket, gap_fraction, direct};
           }),
           py::kw_only(), py::arg("in_place_bytes"), py::arg("pack_bytes"), py::arg("one_message_per_bucket") = false,
           py::arg("gap_fraction") = PlanSettings().gap_fraction, py::arg("direct") = DirectSettings());

  py::class_<HostsOnStreams, std::shared_ptr<HostsOnStreams>>(m, "HostsOnStreams")
      .def(py::init([](const std::vector<std::vector<int>>& hosts, HostsOnStreams::Group within,
                       HostsOnStreams::Group between) {
             return std::make_shared<HostsOnStreams>(Topology(hosts), std::move(within), std::move(between));
           }),
           py::kw_only(), py::arg("hosts"), py::arg("within"), py::arg("between"));
  m.def("puts_on_streams", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device) {
    return is_on_streams(backend_name(*group, device.type()), device.type());
  });
  m.def("can_code", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device, int count) {
    return DirectSender::can_code(*group, device, count);
  });
  m.def("needs_group_for_sums", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device,
                                   int count) { return DirectSender::needs_group_for_sums(*group, device, count); });
}

}  // namespace ddp_hooks
