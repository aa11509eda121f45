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

// How far a dtype counts without rounding.
int64_t counts_to(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return int64_t{1} << 8;
    case at::kHalf:
      return int64_t{1} << 11;
    case at::kFloat:
      return int64_t{1} << 24;
    case at::kDouble:
      return int64_t{1} << 53;
    default:
      return 1;
  }
}

// What ranks say of each gradient, yes or no, in numbers of the message's dtype that are summed with it. Each number
// counts so many ranks that no sum of theirs is rounded, in whatever order they are added.
class Flags {
 public:
  Flags(const c10d::Backend& group, at::ScalarType dtype)
      : ranks_each_(counts_to(dtype)),
        each_((group.getSize() + ranks_each_ - 1) / ranks_each_),
        own_(group.getRank() / ranks_each_) {}

  // By way of doubles, because not every dtype of a gradient can be filled from numbers.
  at::Tensor write(const std::vector<bool>& answers, const at::TensorOptions& options) const {
    std::vector<double> flags;
    for (const bool yes : answers) {
      for (int64_t i = 0; i < each_; ++i) flags.push_back(yes && i == own_ ? 1.0 : 0.0);
    }
    return at::tensor(flags, at::kDouble).to(options);
  }

  // From the end of a message: how many ranks have said yes, for each of the answers.
  at::Tensor read(const at::Tensor& message, size_t answers) const {
    const int64_t numel = static_cast<int64_t>(answers) * each_;
    return message.narrow(0, message.numel() - numel, numel).to(at::kCPU, at::kDouble).view({-1, each_}).sum(1);
  }

 private:
  const int64_t ranks_each_;
  const int64_t each_;
  const int64_t own_;
};

void average_alike(c10d::Backend& group, const std::vector<UnmanagedGradient>& gradients, double factor, bool wait,
                   UnmanagedMessages& sent) {
  std::vector<at::Tensor> parts;
  // Whether this rank contributes; and then, where that decides what is divided by, whether it adds what an earlier
  // pass has left, as with plain DDP, although this one did not use the parameter.
  std::vector<bool> contributes;
  std::vector<bool> adds_leftover;
  for (const auto& [parameter, used] : gradients) {
    const bool has_gradient = wait && parameter.grad().defined() && !parameter.grad().is_sparse();
    const at::Tensor gradient =
        has_gradient ? parameter.grad() * (factor == 0 ? 1 : factor) : at::zeros_like(parameter);
    parts.push_back(as_real(gradient.contiguous()).reshape({-1}));
    contributes.push_back(used);
    adds_leftover.push_back(has_gradient && !used);
  }
  std::vector<bool> answers = contributes;
  if (factor == 0) answers.insert(answers.end(), adds_leftover.begin(), adds_leftover.end());
  const Flags flags(group, parts.front().scalar_type());
  parts.push_back(flags.write(answers, parts.front().options()));
  // A control group carries the host's memory, wherever gradients are.
  const at::Tensor message = at::cat(parts).cpu();
  sent.messages += 1;
  sent.flag_bytes += static_cast<int64_t>(parts.back().nbytes());
  sent.gradient_bytes += static_cast<int64_t>(message.nbytes() - parts.back().nbytes());
  std::vector<at::Tensor> tensors{message};
  const auto work = group.allreduce(tensors);
  if (!wait) return;
  work->wait();

  int64_t position = 0;
  const at::Tensor given = flags.read(message, answers.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& parameter = gradients[i].parameter;
    const int64_t numel = parts[i].numel();
    const at::Tensor average = message.narrow(0, position, numel);
    position += numel;
    const auto contributors = given[static_cast<int64_t>(i)].item<double>();
    if (contributors == 0) continue;
    if (factor == 0) {
      const bool left_over = given[static_cast<int64_t>(gradients.size() + i)].item<double>() > 0;
      average.div_(left_over ? static_cast<double>(group.getSize()) : contributors);
    }
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
