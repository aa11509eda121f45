#include "wire/late_gradients.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>

namespace ddp_hooks {
namespace {

bool may_share_message(const LateGradient& a, const LateGradient& b) {
  return a.parameter.scalar_type() == b.parameter.scalar_type() && a.parameter.device() == b.parameter.device();
}

// gloo sums no complex numbers; a complex gradient travels as its real view.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void average_alike(c10d::Backend& group, const std::vector<LateGradient>& gradients, double factor, bool wait,
                   LateMessages& sent) {
  std::vector<at::Tensor> parts;
  std::vector<double> flags;
  for (const auto& [parameter, used] : gradients) {
    const bool has_gradient = wait && parameter.grad().defined() && !parameter.grad().is_sparse();
    const at::Tensor gradient =
        has_gradient ? parameter.grad() * (factor == 0 ? 1 : factor) : at::zeros_like(parameter);
    parts.push_back(as_real(gradient.contiguous()).reshape({-1}));
    flags.push_back(used ? 1.0 : 0.0);
  }
  // By way of doubles, because not every dtype of a gradient can be filled from numbers.
  parts.push_back(at::tensor(flags, at::kDouble).to(parts.front().options()));
  at::Tensor message = at::cat(parts);
  sent.messages += 1;
  sent.flag_bytes += static_cast<int64_t>(parts.back().nbytes());
  sent.gradient_bytes += static_cast<int64_t>(message.nbytes() - parts.back().nbytes());
  std::vector<at::Tensor> tensors{message};
  const auto work = group.allreduce(tensors);
  if (!wait) return;
  work->wait();

  int64_t position = 0;
  const at::Tensor given =
      message.narrow(0, message.numel() - static_cast<int64_t>(flags.size()), static_cast<int64_t>(flags.size()))
          .to(at::kCPU, at::kDouble);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& parameter = gradients[i].parameter;
    const int64_t numel = parts[i].numel();
    const at::Tensor average = message.narrow(0, position, numel);
    position += numel;
    const auto contributors = given[static_cast<int64_t>(i)].item<double>();
    if (contributors == 0) continue;
    if (factor == 0) average.div_(contributors);
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    if (gradient.is_sparse()) continue;
    as_real(gradient).copy_(average.view_as(as_real(parameter)));
  }
}

}  // namespace

LateMessages average_late_gradients(c10d::Backend& group, const std::vector<LateGradient>& gradients, double factor,
                                    bool wait) {
  RECORD_FUNCTION("ddp_hooks::late_gradients", std::vector<c10::IValue>());
  const at::NoGradGuard no_grad;
  LateMessages sent;
  std::vector<LateGradient> rest = gradients;
  for (size_t i = 0; wait && i < rest.size(); ++i) {
    const at::Tensor& gradient = rest[i].parameter.grad();
    if (!rest[i].used || !gradient.defined() || !gradient.is_sparse()) continue;
    sent.sparse = i;
    rest[i].used = false;
  }
  while (!rest.empty()) {
    const LateGradient first = rest.front();
    const auto others = std::stable_partition(rest.begin(), rest.end(),
                                              [&](const LateGradient& one) { return may_share_message(one, first); });
    average_alike(group, {rest.begin(), others}, factor, wait, sent);
    rest.erase(rest.begin(), others);
  }
  return sent;
}

}  // namespace ddp_hooks
