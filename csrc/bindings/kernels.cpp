#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "kernels/cpu/instructions.h"
#include "kernels/devices.h"
#include "kernels/packing.h"
#include "kernels/staging_copy.h"
#include "kernels/tensor_hash.h"
#include "kernels/unit_scan.h"
#include "kernels/width.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

void bind_unit_scan(py::module_& m) {
  // The words of the bitmap of non-zero units, and the units that are zero and hold a -0.0; inexact() returns the words
  // of the bitmaps of what narrow forms do not hold.
  py::class_<PendingUnitScan>(m, "PendingUnitScan")
      .def(
          "wait",
          [](PendingUnitScan& scan) {
            const UnitScanResult& result = scan.wait();
            return std::make_tuple(result.nonzero, result.negative_zeros);
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "inexact", [](PendingUnitScan& scan) { return scan.wait().inexact; },
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "start_unit_scan",
      [](const at::Tensor& flat, int64_t offset, int64_t length, int64_t unit_length,
         const std::optional<std::vector<uint64_t>>& candidates, bool widths) {
        const SliceOfTensor slice{flat, offset, length};
        return candidates ? start_unit_scan(slice, unit_length, *candidates, widths)
                          : start_unit_scan(slice, unit_length, widths);
      },
      py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("unit_length"), py::arg("candidates") = py::none(),
      py::arg("widths") = false, py::keep_alive<0, 1>(), py::call_guard<py::gil_scoped_release>());

  m.def("register_device_kernels", [](const c10::Device& device, const py::capsule& kernels) {
    register_device_kernels(device.type(), *kernels.get_pointer<DeviceKernels>());
  });
  // Why gradients on the device cannot be served, or None.
  m.def("why_unserved", &why_unserved, py::call_guard<py::gil_scoped_release>());
}

// Hashes what a tensor says, not how it lies in memory: its elements in row-major order, so that a channels-last tensor
// and a contiguous one with the same elements have the same digest.
Digest digest_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "hash_tensors: expected strided tensors, received one with layout ",
              tensor.layout());
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
  return hash_bytes(plain.const_data_ptr(), plain.nbytes());
}

void bind_tensor_hash(py::module_& m) {
  // One row of two int64 a tensor: the low and the high half of its digest.
  m.def(
      "hash_tensors",
      [](const std::vector<at::Tensor>& tensors) {
        at::Tensor digests = at::empty({static_cast<int64_t>(tensors.size()), 2}, at::kLong);
        auto* words = digests.mutable_data_ptr<int64_t>();
        for (const at::Tensor& tensor : tensors) {
          const Digest digest = digest_of(tensor);
          *words++ = static_cast<int64_t>(digest.low);
          *words++ = static_cast<int64_t>(digest.high);
        }
        return digests;
      },
      py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

void bind_staging_copy(py::module_& m) {
  m.def("gather_tensors", &gather_tensors, py::arg("staging"), py::arg("tensors"),
        py::call_guard<py::gil_scoped_release>());
  m.def("scatter_tensors", &scatter_tensors, py::arg("staging"), py::arg("tensors"), py::arg("divisor") = 1,
        py::call_guard<py::gil_scoped_release>());
}

// What a rank does with a gradient that travels narrow between two: looks through it, packs it, and adds up what both
// contribute. For measurements.
void narrow_once(const at::Tensor& gradient, const at::Tensor& packed) {
  constexpr int64_t kUnitLength = 4096;
  const SliceOfTensor all{gradient, 0, gradient.numel()};
  start_unit_scan(all, kUnitLength, true).wait();
  pack(packed, {{borrow(all), Width::kBFloat16}});
  SliceSum sum;
  sum.to = borrow(all);
  sum.contributions = {{0, Width::kBFloat16, false}, {0, Width::kBFloat16, true}};
  sum_contributions(packed, {sum});
}

}  // namespace

void bind_kernels(py::module_& m) {
  py::enum_<Width>(m, "Width")
      .value("FULL", Width::kFull)
      .value("BFLOAT16", Width::kBFloat16)
      .value("FLOAT16", Width::kFloat16)
      .value("FLOAT32", Width::kFloat32);
  m.def("leave_out_avx2", &cpu::leave_out_avx2);
  m.def("narrow_once", &narrow_once, py::arg("gradient"), py::arg("packed"), py::call_guard<py::gil_scoped_release>());
  bind_unit_scan(m);
  bind_tensor_hash(m);
  bind_staging_copy(m);
}

}  // namespace ddp_hooks
