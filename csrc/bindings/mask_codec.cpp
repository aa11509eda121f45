#include "agreement/mask_codec.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "agreement/bit_sliced_counters.h"
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

  m.def("write_counters", [](const UsageMask& mask, size_t rank, size_t ranks) {
    std::vector<uint64_t> counters(words_of_counters(mask.size(), ranks));
    write_counters(mask, rank, ranks, counters.data());
    return counters;
  });
  m.def("merge_counters",
        [](std::vector<uint64_t> counters, const std::vector<uint64_t>& others, size_t bits, size_t ranks) {
          if (counters.size() != words_of_counters(bits, ranks) || others.size() != counters.size()) {
            throw py::value_error("expected the counters of so many bits and ranks");
          }
          merge_counters(counters.data(), others.data(), bits, ranks);
          return counters;
        });
  // For each bit how many ranks set it, and which, as far as that is known.
  m.def("read_counters", [](const std::vector<uint64_t>& counters, size_t bits, size_t ranks) {
    if (counters.size() != words_of_counters(bits, ranks)) {
      throw py::value_error("expected the counters of so many bits and ranks");
    }
    const Contributors contributors = read_counters(counters.data(), bits, ranks);
    std::vector<std::pair<int64_t, RankSet>> found;
    for (size_t bit = 0; bit < bits; ++bit) found.emplace_back(contributors.count(bit), contributors.ranks(bit));
    return found;
  });
}

}  // namespace ddp_hooks
