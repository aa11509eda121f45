#include "transport/unmanaged_gradients.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "transport/launch.h"

namespace ddp_hooks {
namespace {

bool may_share_message(const UnmanagedGradient& a, const UnmanagedGradient& b) {
  return a.parameter.scalar_type() == b.parameter.scalar_type() && a.parameter.device() == b.parameter.device();
}

// gloo sums no complex numbers; a complex gradient travels as its real view.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void average_alike(c10d::Backend& group, const std::vector<UnmanagedGradient>& gradients, double factor, bool wait,
                   UnmanagedMessages& sent) {
  std::vector<at::Tensor> parts;
  // Whether this rank used the gradient, in the message's dtype: a sum of ones may be rounded, but never to 0. By way
  // of doubles, because not every dtype of a gradient can be filled from numbers.
  std::vector<double> flags;
  for (const auto& [parameter, used] : gradients) {
    const bool has_gradient = wait && parameter.grad().defined() && !parameter.grad().is_sparse();
    const at::Tensor gradient = has_gradient ? parameter.grad() * factor : at::zeros_like(parameter);
    parts.push_back(as_real(gradient.contiguous()).reshape({-1}));
    flags.push_back(used ? 1 : 0);
  }
  parts.push_back(at::tensor(flags, at::kDouble).to(parts.front().options()));
  // A control group carries the host's memory, wherever gradients are.
  const at::Tensor message = at::cat(parts).cpu();
  sent.messages += 1;
  sent.flag_bytes += static_cast<int64_t>(parts.back().nbytes());
  sent.gradient_bytes += static_cast<int64_t>(message.nbytes() - parts.back().nbytes());
  std::vector<at::Tensor> tensors{message};
  const auto work = group.allreduce(tensors);
  if (!wait) return;
  work->wait();

  const auto count = static_cast<int64_t>(gradients.size());
  const at::Tensor used_anywhere = message.narrow(0, message.numel() - count, count).ne(0);
  int64_t position = 0;
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& parameter = gradients[i].parameter;
    const int64_t numel = parts[i].numel();
    const at::Tensor average = message.narrow(0, position, numel);
    position += numel;
    if (!used_anywhere[i].item<bool>()) continue;
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    if (gradient.is_sparse()) continue;
    as_real(gradient).copy_(average.view_as(as_real(parameter)));
    // Its memory goes back to its accumulator's stream, for which this one need not have run.
    keep_for_stream(gradient);
  }
}

}  // namespace

UnmanagedMessages average_unmanaged_gradients(c10d::Backend& group, const std::vector<UnmanagedGradient>& gradients,
                                              double factor, bool wait) {
  RECORD_FUNCTION("ddp_hooks::unmanaged_gradients", std::vector<c10::IValue>());
  const at::NoGradGuard no_grad;
  UnmanagedMessages sent;
  std::vector<UnmanagedGradient> rest = gradients;
  for (size_t i = 0; wait && i < rest.size(); ++i) {
    const at::Tensor& gradient = rest[i].parameter.grad();
    if (!rest[i].used || !gradient.defined() || !gradient.is_sparse()) continue;
    sent.sparse = i;
    rest[i].used = false;
  }
  while (!rest.empty()) {
    const UnmanagedGradient first = rest.front();
    const auto others = std::stable_partition(
        rest.begin(), rest.end(), [&](const UnmanagedGradient& one) { return may_share_message(one, first); });
    average_alike(group, {rest.begin(), others}, factor, wait, sent);
    rest.erase(rest.begin(), others);
  }
  return sent;
}

}  // namespace ddp_hooks
