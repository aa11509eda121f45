#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/coding.h"
#include "kernels/cpu/instructions.h"
#include "kernels/devices.h"
#include "kernels/packing.h"
#include "kernels/slice_copy.h"
#include "kernels/tensor_hash.h"
#include "kernels/unit_sample.h"
#include "kernels/unit_scan.h"
#include "testing/parts.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

// As a class of its own, because the extension has one of the same scan that answers by units.
struct ScanOfSlices {
  PendingUnitScan pending;
};

}  // namespace

std::vector<SliceSum> borrow(const std::vector<HeldSum>& held) {
  std::vector<SliceSum> sums;
  for (const HeldSum& each : held) {
    sums.push_back(each.sum);
    sums.back().to.flat = &each.flat;
  }
  return sums;
}

void bind_packing(py::module_& m) {
  // Slices of one tensor: (offset, length), and what each is divided by, if anything is.
  m.def(
      "pack",
      [](const at::Tensor& to, const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& slices,
         const std::vector<double>& divisors, bool divides) {
        TORCH_CHECK(divisors.empty() || divisors.size() == slices.size(), "expected a divisor for each of ",
                    slices.size(), " slices, received ", divisors.size());
        std::vector<PackedSlice> packed;
        for (const auto& [offset, length] : slices) {
          packed.push_back({{&flat, offset, length}, divisors.empty() ? 1 : divisors[packed.size()], divides});
        }
        pack(to, packed);
      },
      py::arg("to"), py::arg("flat"), py::arg("slices"), py::arg("divisors") = std::vector<double>(),
      py::arg("divides") = false, py::call_guard<py::gil_scoped_release>());

  py::class_<Contribution>(m, "Contribution")
      .def(py::init([](int64_t offset, bool own) { return Contribution{offset, own}; }), py::arg("offset") = 0,
           py::arg("own") = false);
  py::class_<HeldSum>(m, "SliceSum")
      .def(py::init([](const at::Tensor& flat, int64_t offset, int64_t length,
                       const std::vector<Contribution>& contributions, double divisor, bool adds_zero) {
             const Contributions all(contributions.begin(), contributions.end());
             return HeldSum{flat, {{nullptr, offset, length}, all, divisor, adds_zero}};
           }),
           py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("contributions"), py::arg("divisor") = 1,
           py::arg("adds_zero") = false);
  m.def(
      "sum_contributions",
      [](const std::optional<at::Tensor>& packed, const std::vector<HeldSum>& sums) {
        sum_contributions(packed.value_or(at::Tensor()), borrow(sums));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("leave_out_avx2", &cpu::leave_out_avx2);
}

// Fills words of a device and of the host, with fill(words of the device, words of the host, the stream), and waits.
template <size_t kWords, typename Fill>
std::array<uint32_t, kWords> answer_of_device(c10::Device device, const Fill& fill) {
  const c10::DeviceGuard guard(device);
  const auto words = at::TensorOptions(at::kInt);
  const at::Tensor on_device = at::zeros({kWords}, words.device(device));
  const at::Tensor on_host = at::zeros({kWords}, words.pinned_memory(true));
  const auto address = [](const at::Tensor& tensor) { return static_cast<uint32_t*>(tensor.data_ptr()); };
  check_launch(fill(address(on_device), address(on_host), current_stream_handle(device)), device, "code gradients");
  current_stream(device).synchronize();
  std::array<uint32_t, kWords> answer;
  std::memcpy(answer.data(), on_host.data_ptr(), sizeof(answer));
  return answer;
}

int64_t encode_tensor(const at::Tensor& flat, const at::Tensor& to) {
  const ElementType type = element_type_of(flat);
  const int64_t most = most_coded_bytes(flat.numel(), type);
  TORCH_CHECK(to.numel() >= most, "encode: expected a buffer of at least ", most, " bytes, received ", to.numel());
  char* const coded = static_cast<char*>(to.data_ptr());
  if (flat.is_cpu()) return encode(flat.data_ptr(), flat.numel(), type, coded);
  const auto bytes = answer_of_device<2>(flat.device(), [&](uint32_t* words, uint32_t* host, StreamHandle stream) {
    return kernels_of(flat.device()).encode(flat.data_ptr(), flat.numel(), type, coded, words, host, stream);
  });
  return static_cast<int64_t>(bytes[0] | uint64_t{bytes[1]} << 32);
}

void decode_to_tensor(const at::Tensor& coded, const at::Tensor& to, bool adds) {
  const ElementType type = element_type_of(to);
  const char* const message = static_cast<const char*>(coded.data_ptr());
  if (to.is_cpu()) return decode(message, coded.numel(), to.numel(), type, to.data_ptr(), adds);
  const auto wrong = answer_of_device<1>(to.device(), [&](uint32_t* words, uint32_t* host, StreamHandle stream) {
    return kernels_of(to.device())
        .decode(message, coded.numel(), to.numel(), type, to.data_ptr(), adds, words, host, stream);
  });
  TORCH_CHECK(wrong[0] == 0, "expected a coded message that accounts for each of its bytes, received one with flaws ",
              wrong[0]);
}

// `to` has room for the most.
void bind_coding(py::module_& m) {
  m.def("encode", &encode_tensor, py::arg("flat"), py::arg("to"), py::call_guard<py::gil_scoped_release>());
  m.def("decode", &decode_to_tensor, py::arg("coded"), py::arg("to"), py::arg("adds") = false,
        py::call_guard<py::gil_scoped_release>());
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

  // For each slice, which is one unit: (any non-zero, any -0.0 if all are zero).
  py::class_<ScanOfSlices>(m, "ScanOfSlices")
      .def(
          "wait",
          [](ScanOfSlices& scan) {
            std::vector<std::pair<bool, bool>> results;
            for (const UnitScanResult& result : scan.pending.wait()) {
              results.emplace_back(!result.nonzero.empty() && result.nonzero.front() != 0,
                                   !result.negative_zeros.empty());
            }
            return results;
          },
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "start_scan",
      [](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
        std::vector<UnitsToScan> scans;
        for (const auto& [offset, length] : ranges) {
          scans.push_back({{flat, offset, length}, std::max<int64_t>(1, length), std::nullopt});
        }
        return ScanOfSlices{start_unit_scan(scans)};
      },
      py::keep_alive<0, 1>());

  // Of each slice (offset, length, unit length): which part of a sample of its units is zero.
  m.def(
      "sample_units",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices) {
        std::vector<UnitsOfSlice> units;
        for (const auto& [offset, length, unit_length] : slices) units.push_back({{flat, offset, length}, unit_length});
        return std::vector<double>(start_unit_sample(units).wait());
      },
      py::arg("flat"), py::arg("slices"), py::call_guard<py::gil_scoped_release>());

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
