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
#include "kernels/staging_copy.h"
#include "kernels/tensor_digests.h"
#include "kernels/unit_scan.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

void bind_unit_scan(py::module_& m) {
  // The words of the bitmap of non-zero units, and the units that are zero and hold a -0.0.
  py::class_<PendingUnitScan>(m, "PendingUnitScan")
      .def(
          "wait",
          [](PendingUnitScan& scan) {
            const UnitScanResult& result = scan.wait().front();
            return std::make_tuple(result.nonzero, result.negative_zeros);
          },
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "start_unit_scan",
      [](const at::Tensor& flat, int64_t offset, int64_t length, int64_t unit_length,
         const std::optional<std::vector<uint64_t>>& candidates) {
        return start_unit_scan({{{flat, offset, length}, unit_length, candidates}});
      },
      py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("unit_length"), py::arg("candidates") = py::none(),
      py::keep_alive<0, 1>(), py::call_guard<py::gil_scoped_release>());

  m.def("register_device_kernels", [](const c10::Device& device, const py::capsule& kernels) {
    register_device_kernels(device.type(), *kernels.get_pointer<DeviceKernels>());
  });
  // Why gradients on the device cannot be served, or None.
  m.def("why_unserved", &why_unserved, py::call_guard<py::gil_scoped_release>());
}

void bind_tensor_hash(py::module_& m) {
  // One row of two int64 a tensor: the low and the high half of its digest.
  m.def(
      "hash_tensors",
      [](const std::vector<at::Tensor>& tensors) {
        at::Tensor digests = at::empty({static_cast<int64_t>(tensors.size()), 2}, at::kLong);
        auto* words = digests.mutable_data_ptr<int64_t>();
        for (const Digest& digest : digests_of(tensors)) {
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

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("leave_out_avx2", &cpu::leave_out_avx2);
  bind_unit_scan(m);
  bind_tensor_hash(m);
  bind_staging_copy(m);
}

}  // namespace ddp_hooks
