#include "agreement/mask_codec.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "agreement/planes.h"
#include "bindings/rooms.h"
#include "layout/contributors.h"
#include "layout/usage_mask.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_mask_codec(py::module_& m) {
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
