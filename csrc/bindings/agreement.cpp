#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "agreement/control_groups.h"
#include "agreement/group_reference.h"
#include "agreement/mask_codec.h"
#include "agreement/planes.h"
#include "bindings/rooms.h"
#include "layout/usage_mask.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_agreement(py::module_& m) {
  py::class_<ControlGroups, std::shared_ptr<ControlGroups>>(m, "ControlGroups")
      .def(py::init([](int world_size, const py::object& all, const std::vector<py::object>& axes) {
             const auto to_backend = [](const py::object& group) {
               return group.is_none() ? nullptr : group.cast<c10::intrusive_ptr<c10d::Backend>>();
             };
             std::vector<c10::intrusive_ptr<c10d::Backend>> groups;
             for (const py::object& axis : axes) groups.push_back(to_backend(axis));
             return std::make_shared<ControlGroups>(world_size, to_backend(all), std::move(groups));
           }),
           py::kw_only(), py::arg("world_size"), py::arg("all"), py::arg("axes"));
  m.def(
      "wait_until_groups_are_gone",
      [](double seconds) { return wait_until_gone(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000))); },
      py::call_guard<py::gil_scoped_release>());
  m.def("keep_groups_from_now_on", &keep_groups_from_now_on, py::call_guard<py::gil_scoped_release>());

  m.def("compress", &compress, py::arg("mask"));
  m.def(
      "merge_compressed", [](const std::vector<uint64_t>& words, UsageMask& into) { merge_compressed(words, into); },
      py::arg("words"), py::arg("into"));

  m.def("write_planes", [](const UsageMask& mask, size_t rank, size_t ranks) {
    std::vector<uint64_t> planes(words_of_planes(mask.size(), ranks));
    write_planes(mask, rank, ranks, planes.data());
    return planes;
  });
  m.def("merge_planes",
        [](std::vector<uint64_t> planes, const std::vector<uint64_t>& others, size_t bits, size_t ranks) {
          if (planes.size() != words_of_planes(bits, ranks) || others.size() != planes.size()) {
            throw py::value_error("expected the planes of so many bits and ranks");
          }
          merge_planes(planes.data(), others.data(), bits, ranks);
          return planes;
        });
  // For each bit how many ranks set it, and which, as far as that is known.
  m.def("read_planes", [](const std::vector<uint64_t>& planes, size_t bits, size_t ranks) {
    if (planes.size() != words_of_planes(bits, ranks)) {
      throw py::value_error("expected the planes of so many bits and ranks");
    }
    const Contributors contributors = read_planes(planes.data(), bits, ranks);
    std::vector<std::pair<int64_t, RankSet>> found;
    for (size_t bit = 0; bit < bits; ++bit) found.emplace_back(contributors.count(bit), contributors.ranks(bit));
    return found;
  });
}

}  // namespace ddp_hooks
