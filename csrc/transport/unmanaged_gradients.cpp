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

// What this rank contributes of each gradient, flat.
std::vector<at::Tensor> contributions(const std::vector<UnmanagedGradient>& gradients, double factor, bool wait) {
  std::vector<at::Tensor> parts;
  for (const auto& [parameter, used] : gradients) {
    const bool has_gradient = wait && parameter.grad().defined() && !parameter.grad().is_sparse();
    const at::Tensor gradient = has_gradient ? parameter.grad() * factor : at::zeros_like(parameter);
    parts.push_back(as_real(gradient.contiguous()).reshape({-1}));
  }
  return parts;
}

// Whether this rank used each gradient.
at::Tensor flags_of(const std::vector<UnmanagedGradient>& gradients) {
  std::vector<double> flags;
  for (const auto& [parameter, used] : gradients) flags.push_back(used ? 1 : 0);
  return at::tensor(flags, at::kDouble);
}

// `averages`: of all, flat; where some rank used them.
void put_back(const std::vector<UnmanagedGradient>& gradients, const at::Tensor& averages, const at::Tensor& flags) {
  const at::Tensor used_anywhere = flags.ne(0);
  int64_t position = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& parameter = gradients[i].parameter;
    const int64_t numel = as_real(parameter).numel();
    const at::Tensor average = averages.narrow(0, position, numel);
    position += numel;
    if (!used_anywhere[static_cast<int64_t>(i)].item<bool>()) continue;
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    if (gradient.is_sparse()) continue;
    as_real(gradient).copy_(average.view_as(as_real(parameter)));
    // Its memory goes back to its accumulator's stream, for which this one need not have run.
    keep_for_stream(gradient);
  }
}

void average_alike(c10d::Backend& group, c10d::ProcessGroup* on_streams,
                   const std::vector<UnmanagedGradient>& gradients, double factor, bool wait, UnmanagedMessages& sent) {
  std::vector<at::Tensor> parts = contributions(gradients, factor, wait);
  at::Tensor flags = flags_of(gradients);
  c10::intrusive_ptr<c10d::Work> under_way;
  at::Tensor averages;
  if (on_streams != nullptr && !parts.front().is_cpu()) {
    averages = at::cat(parts);
    std::vector<at::Tensor> tensors{averages};
    under_way = on_streams->allreduce(tensors);
    parts.clear();
    sent.messages += 1;
    sent.gradient_bytes += static_cast<int64_t>(averages.nbytes());
  } else {
    // In the message's dtype: a sum of ones may be rounded, but never to 0.
    flags = flags.to(parts.front().options());
  }
  parts.push_back(flags);
  // A control group carries the host's memory, wherever gradients are.
  const at::Tensor message = at::cat(parts).cpu();
  sent.messages += 1;
  sent.flag_bytes += static_cast<int64_t>(flags.nbytes());
  sent.gradient_bytes += static_cast<int64_t>(message.nbytes() - flags.nbytes());
  std::vector<at::Tensor> tensors{message};
  const auto work = group.allreduce(tensors);
  if (!wait) return;
  work->wait();
  if (under_way) under_way->synchronize();
  put_back(gradients, under_way ? averages : message,
           message.narrow(0, message.numel() - flags.numel(), flags.numel()));
}

}  // namespace

UnmanagedMessages average_unmanaged_gradients(c10d::Backend& group, c10d::ProcessGroup* on_streams,
                                              const std::vector<UnmanagedGradient>& gradients, double factor,
                                              bool wait) {
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
    average_alike(group, on_streams, {rest.begin(), others}, factor, wait, sent);
    rest.erase(rest.begin(), others);
  }
  return sent;
}

}  // namespace ddp_hooks
