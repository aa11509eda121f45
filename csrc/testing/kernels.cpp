#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/devices.h"
#include "kernels/nonzero_scan.h"
#include "kernels/slice_copy.h"
#include "kernels/tensor_hash.h"
#include "kernels/unit_sample.h"
#include "testing/parts.h"

namespace py = pybind11;

namespace ddp_hooks {

void bind_single_kernels(py::module_& m) {
  const auto to_slices = [](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    std::vector<SliceOfTensor> slices;
    for (const auto& [offset, length] : ranges) slices.push_back({flat, offset, length});
    return slices;
  };
  m.def("gather_scaled", [to_slices](const at::Tensor& message, const at::Tensor& flat,
                                     const std::vector<std::pair<int64_t, int64_t>>& ranges,
                                     double factor) { gather_scaled(message, to_slices(flat, ranges), factor); });
  m.def("scatter", [to_slices](const at::Tensor& message, const at::Tensor& flat,
                               const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    scatter(message, to_slices(flat, ranges));
  });

  m.def("scatter_add",
        [](const at::Tensor& message, const at::Tensor& to, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
          std::vector<Range> stretches;
          for (const auto& [offset, length] : ranges) stretches.push_back({offset, length});
          scatter_add(message, to, stretches);
        });

  // For each slice: (any non-zero, any -0.0 if all are zero).
  py::class_<PendingScan>(m, "PendingScan")
      .def(
          "wait",
          [](PendingScan& scan) {
            std::vector<std::pair<bool, bool>> results;
            for (const ScanResult& result : scan.wait()) {
              results.emplace_back(result.any_nonzero, result.any_negative_zero);
            }
            return results;
          },
          py::call_guard<py::gil_scoped_release>());
  m.def("start_scan", [to_slices](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    return start_scan(to_slices(flat, ranges));
  });
  m.def("nonzero_scan", [](const at::Tensor& flat) {
    const ScanResult result = start_scan({{flat, 0, flat.numel()}}).wait().front();
    return std::make_pair(result.any_nonzero, result.any_negative_zero);
  });

  // Which part of a sample of its units is zero, of each slice: (offset, length, unit length).
  m.def(
      "sample_units",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices) {
        std::vector<UnitsOfSlice> units;
        for (const auto& [offset, length, unit_length] : slices) units.push_back({{flat, offset, length}, unit_length});
        return start_unit_sample(units).wait();
      },
      py::call_guard<py::gil_scoped_release>());

  m.def("is_capturing", [](const at::Tensor& tensor) { return is_capturing(tensor.device()); });

  py::enum_<HashKernel>(m, "HashKernel")
      .value("FASTEST", HashKernel::kFastest)
      .value("PORTABLE", HashKernel::kPortable)
      .value("SSE2", HashKernel::kSse2)
      .value("AVX2", HashKernel::kAvx2);

  m.def("hash_kernel_is_supported", &is_supported);
  m.def(
      "hash_bytes",
      [](const py::bytes& data, HashKernel kernel) {
        TORCH_CHECK(is_supported(kernel), "hash_bytes: expected a kernel that this processor can run, received ",
                    static_cast<int>(kernel));
        const std::string_view view = data;
        const Digest digest = hash_bytes(view.data(), view.size(), kernel);
        return std::make_pair(digest.low, digest.high);
      },
      py::arg("data"), py::arg("kernel") = HashKernel::kFastest);
}

}  // namespace ddp_hooks
