#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "agreement/control_groups.h"
#include "agreement/group_reference.h"
#include "bindings/rooms.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_agreement(py::module_& m) {
  py::class_<ControlGroups, std::shared_ptr<ControlGroups>>(m, "ControlGroups")
      .def(py::init([](const std::vector<std::vector<int>>& hosts, const py::object& all,
                       const std::vector<py::object>& axes, const py::object& sums, const py::object& contributions,
                       const py::object& sizes, const py::object& shares, const py::object& results) {
             const auto to_backend = [](const py::object& group) {
               return group.is_none() ? nullptr : group.cast<c10::intrusive_ptr<c10d::Backend>>();
             };
             std::vector<c10::intrusive_ptr<c10d::Backend>> groups;
             for (const py::object& axis : axes) groups.push_back(to_backend(axis));
             return std::make_shared<ControlGroups>(
                 Topology(hosts), to_backend(all), std::move(groups),
                 DataGroups{to_backend(sums), to_backend(contributions), to_backend(sizes), to_backend(shares),
                            to_backend(results)});
           }),
           py::kw_only(), py::arg("hosts"), py::arg("all"), py::arg("axes"), py::arg("sums") = py::none(),
           py::arg("contributions") = py::none(), py::arg("sizes") = py::none(), py::arg("shares") = py::none(),
           py::arg("results") = py::none())
      .def("have_failed", &ControlGroups::have_failed, py::call_guard<py::gil_scoped_release>());
  m.def(
      "wait_until_groups_are_gone",
      [](double seconds) { return wait_until_gone(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000))); },
      py::call_guard<py::gil_scoped_release>());
  m.def("keep_groups_from_now_on", &keep_groups_from_now_on, py::call_guard<py::gil_scoped_release>());
}

}  // namespace ddp_hooks
