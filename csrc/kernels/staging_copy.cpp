#include "kernels/staging_copy.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "kernels/cpu/stream_copy.h"

namespace ddp_hooks {
namespace {

// Whether the tensor's memory holds its elements as the staging buffer does.
bool is_plain(const at::Tensor& tensor, const at::Tensor& staging) {
  return tensor.is_cpu() && staging.is_cpu() && tensor.scalar_type() == staging.scalar_type() &&
         tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// The stretches of the staging buffer, in the shapes of the tensors, for those tensors that ATen has to copy.
struct Strided {
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> pieces;
};

// Calls `on_plain(tensor, address of its stretch)` for the plain tensors, and returns the others.
template <typename OnPlain>
Strided for_each_tensor(const at::Tensor& staging, const std::vector<at::Tensor>& tensors, const OnPlain& on_plain) {
  TORCH_CHECK(staging.dim() == 1 && staging.is_contiguous(),
              "ddp_hooks: expected a flat, contiguous staging buffer, received sizes ", staging.sizes());
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  TORCH_CHECK(numel == staging.numel(), "ddp_hooks: expected a staging buffer of ", numel, " elements, received ",
              staging.numel());
  Strided others;
  auto* const base = static_cast<char*>(staging.data_ptr());
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    if (is_plain(tensor, staging)) {
      on_plain(tensor, base + offset * staging.element_size());
    } else {
      others.tensors.push_back(tensor);
      others.pieces.push_back(staging.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    }
    offset += tensor.numel();
  }
  return others;
}

void write_plain(const at::Tensor& tensor, const void* from, int64_t divisor) {
  tensor.unsafeGetTensorImpl()->bump_version();
  void* const to = tensor.mutable_data_ptr();
  if (divisor == 1) return cpu::stream_copy(to, from, tensor.nbytes());
  if (tensor.scalar_type() == at::kFloat) {
    return cpu::stream_quotients(static_cast<float*>(to), static_cast<const float*>(from), tensor.numel(),
                                 static_cast<float>(divisor));
  }
  cpu::stream_quotients(static_cast<double*>(to), static_cast<const double*>(from), tensor.numel(),
                        static_cast<double>(divisor));
}

}  // namespace

void gather_tensors(const at::Tensor& staging, const std::vector<at::Tensor>& tensors) {
  const Strided others = for_each_tensor(staging, tensors, [](const at::Tensor& tensor, void* to) {
    // An empty tensor may have no address at all, which memcpy must not be given even for nothing.
    if (tensor.numel() != 0) std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
  });
  if (!others.tensors.empty()) at::_foreach_copy_(others.pieces, others.tensors);
}

void scatter_tensors(const at::Tensor& staging, const std::vector<at::Tensor>& tensors, int64_t divisor) {
  TORCH_CHECK(
      divisor >= 1 && (divisor == 1 || staging.scalar_type() == at::kFloat || staging.scalar_type() == at::kDouble),
      "ddp_hooks: expected to divide float32 or float64 by 1 or more, received ", staging.scalar_type(), " and ",
      divisor);
  const Strided others = for_each_tensor(
      staging, tensors, [divisor](const at::Tensor& tensor, const void* from) { write_plain(tensor, from, divisor); });
  if (others.tensors.empty()) return;
  if (divisor != 1) at::_foreach_div_(others.pieces, static_cast<double>(divisor));
  at::_foreach_copy_(others.tensors, others.pieces);
}

}  // namespace ddp_hooks
