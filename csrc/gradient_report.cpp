#include "gradient_report.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <memory>
#include <utility>

namespace ddp_hooks {

GradientReport::GradientReport(Accumulator accumulator, std::function<void()> report)
    : accumulator_(std::move(accumulator)) {
  using torch::autograd::variable_list;
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

}  // namespace ddp_hooks
