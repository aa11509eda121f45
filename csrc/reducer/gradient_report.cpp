#include "reducer/gradient_report.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace ddp_hooks {
namespace {

using torch::autograd::variable_list;

class LambdaPreHook : public torch::autograd::FunctionPreHook {
 public:
  explicit LambdaPreHook(std::function<void()> guard) : guard_(std::move(guard)) {}

  variable_list operator()(const variable_list& gradients) override {
    const bool any = std::any_of(gradients.begin(), gradients.end(), [](const auto& one) { return one.defined(); });
    if (any) guard_();
    return gradients;
  }

  // Compiled autograd, which DDP's own Reducer does not run under, would trace it: there is nothing in it to trace.
  void compiled_args(torch::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  const std::function<void()> guard_;
};

}  // namespace

GradientReport::GradientReport(Accumulator accumulator, std::function<void()> report)
    : accumulator_(std::move(accumulator)) {
  key_ = accumulator_->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [report = std::move(report)](const variable_list& outputs, const variable_list&) {
        report();
        return outputs;
      },
      [](torch::autograd::CompiledNodeArgs&) {}));
}

GradientReport::~GradientReport() {
  if (accumulator_) accumulator_->del_post_hook(key_);
}

bool GradientGuard::is_one(const torch::autograd::FunctionPreHook& hook) {
  return dynamic_cast<const LambdaPreHook*>(&hook) != nullptr;
}

GradientGuard::GradientGuard(Accumulator accumulator, std::function<void()> guard)
    : accumulator_(std::move(accumulator)) {
  auto hook = std::make_unique<LambdaPreHook>(std::move(guard));
  hook_ = hook.get();
  accumulator_->add_pre_hook(std::move(hook));
}

GradientGuard::~GradientGuard() {
  if (!accumulator_) return;
  auto& hooks = accumulator_->pre_hooks();
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), [&](const auto& hook) { return hook.get() == hook_; }),
              hooks.end());
}

}  // namespace ddp_hooks
