#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cpu/instructions.h"
#include "kernels/devices.h"
#include "kernels/nonzero_scan.h"
#include "kernels/packing.h"
#include "kernels/slice_copy.h"
#include "kernels/tensor_hash.h"
#include "kernels/unit_sample.h"
#include "testing/parts.h"

namespace py = pybind11;

namespace ddp_hooks {

std::vector<PackedSlice> slices_to_pack(const at::Tensor& flat, const WidthOfSlices& slices,
                                        const std::vector<double>& divisors, bool divides) {
  TORCH_CHECK(divisors.empty() || divisors.size() == slices.size(), "expected a divisor for each of ", slices.size(),
              " slices, received ", divisors.size());
  std::vector<PackedSlice> packed;
  for (const auto& [offset, length, width] : slices) {
    packed.push_back({{&flat, offset, length}, width, divisors.empty() ? 1 : divisors[packed.size()], divides});
  }
  return packed;
}

std::vector<SliceSum> borrow(const std::vector<HeldSum>& held) {
  std::vector<SliceSum> sums;
  for (const HeldSum& each : held) {
    sums.push_back(each.sum);
    sums.back().to.flat = &each.flat;
  }
  return sums;
}

void bind_packing(py::module_& m) {
  m.def("narrow_widths", [](const at::Tensor& flat) { return narrow_widths(element_type_of(flat)); });
  m.def("packed_bytes", &packed_bytes, py::arg("numel"), py::arg("width"), py::arg("element_bytes"));

  m.def(
      "pack",
      [](const at::Tensor& to, const at::Tensor& flat, const WidthOfSlices& slices, const std::vector<double>& divisors,
         bool divides) { pack(to, slices_to_pack(flat, slices, divisors, divides)); },
      py::arg("to"), py::arg("flat"), py::arg("slices"), py::arg("divisors") = std::vector<double>(),
      py::arg("divides") = false, py::call_guard<py::gil_scoped_release>());

  py::class_<Contribution>(m, "Contribution")
      .def(py::init([](int64_t offset, Width width, bool own) { return Contribution{offset, width, own}; }),
           py::arg("offset") = 0, py::arg("width") = Width::kFull, py::arg("own") = false);
  py::class_<HeldSum>(m, "SliceSum")
      .def(py::init([](const at::Tensor& flat, int64_t offset, int64_t length,
                       const std::vector<Contribution>& contributions, double divisor, bool divides, bool adds_zero) {
             const Contributions all(contributions.begin(), contributions.end());
             return HeldSum{flat, {{nullptr, offset, length}, all, divisor, divides, adds_zero}};
           }),
           py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("contributions"), py::arg("divisor") = 1,
           py::arg("divides") = false, py::arg("adds_zero") = false);
  m.def(
      "sum_contributions",
      [](const std::optional<at::Tensor>& packed, const std::vector<HeldSum>& sums) {
        sum_contributions(packed.value_or(at::Tensor()), borrow(sums));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("leave_out_avx2", &cpu::leave_out_avx2);
}

void bind_single_kernels(py::module_& m) {
  const auto to_slices = [](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    std::vector<BorrowedSlice> slices;
    for (const auto& [offset, length] : ranges) slices.push_back({&flat, offset, length});
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
  m.def(
      "start_scan",
      [](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
        std::vector<SliceOfTensor> slices;
        for (const auto& [offset, length] : ranges) slices.push_back({flat, offset, length});
        return start_scan(slices);
      },
      py::keep_alive<0, 1>());
  m.def("nonzero_scan", [](const at::Tensor& flat) {
    const ScanResult result = start_scan({{flat, 0, flat.numel()}}).wait().front();
    return std::make_pair(result.any_nonzero, result.any_negative_zero);
  });

  // Of each slice (offset, length, unit length): which part of a sample of its units is zero, and which part of the
  // rest is narrow.
  m.def(
      "sample_units",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices, bool widths) {
        std::vector<UnitsOfSlice> units;
        for (const auto& [offset, length, unit_length] : slices) units.push_back({{flat, offset, length}, unit_length});
        PendingUnitSample sample = start_unit_sample(units, widths);
        std::vector<std::pair<double, double>> fractions;
        for (const SampledUnits& each : sample.wait()) {
          fractions.emplace_back(each.zero_fraction, each.narrow_fraction);
        }
        return fractions;
      },
      py::arg("flat"), py::arg("slices"), py::arg("widths") = false, py::call_guard<py::gil_scoped_release>());

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
