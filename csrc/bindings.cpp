// The only pybind file: what Python sees of the engine, and of its parts for tests and microbenchmarks.

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <string_view>
#include <utility>
#include <vector>

#include "tensor_hash.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

// Hashes what a tensor says, not how it lies in memory: its elements in row-major order, so that a channels-last tensor
// and a contiguous one with the same elements have the same digest.
Digest hash_tensor(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "hash_tensors: expected strided tensors, received one with layout ",
              tensor.layout());
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
  return hash_bytes(plain.const_data_ptr(), plain.nbytes());
}

void bind_tensor_hash(py::module_& m) {
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
  // One row of two int64 a tensor: the low and the high half of its digest.
  m.def(
      "hash_tensors",
      [](const std::vector<at::Tensor>& tensors) {
        at::Tensor digests = at::empty({static_cast<int64_t>(tensors.size()), 2}, at::kLong);
        auto* words = digests.mutable_data_ptr<int64_t>();
        for (const at::Tensor& tensor : tensors) {
          const Digest digest = hash_tensor(tensor);
          *words++ = static_cast<int64_t>(digest.low);
          *words++ = static_cast<int64_t>(digest.high);
        }
        return digests;
      },
      py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace ddp_hooks

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The compiled part of ddp_hooks.";
  ddp_hooks::bind_tensor_hash(m);
}
