#include "agreement/mask_codec.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "layout/usage_mask.h"
#include "testing/parts.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_mask_codec(py::module_& m) {
  m.def("compress", &compress, py::arg("mask"));
  m.def(
      "merge_compressed", [](const std::vector<uint64_t>& words, UsageMask& into) { merge_compressed(words, into); },
      py::arg("words"), py::arg("into"));
}

}  // namespace ddp_hooks
