#include "engine/output_watch.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <utility>

namespace ddp_hooks {

namespace {

using torch::autograd::variable_list;

// What at::Tensor::register_hook() sets cannot be there when compiled autograd collects a graph.
class ReachedHook : public torch::autograd::FunctionPreHook {
 public:
  ReachedHook(std::function<void()> reached, std::shared_ptr<void> graphs)
      : reached_(std::move(reached)), graphs_(std::move(graphs)) {}

  variable_list operator()(const variable_list& gradients) override {
    reached_();
    return gradients;
  }

  // There is nothing in it to trace: DDP's Reducer does not run under compiled autograd, and says so.
  void compiled_args(torch::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  const std::function<void()> reached_;
  const std::shared_ptr<void> graphs_;
};

}  // namespace

void OutputWatch::watch(const std::vector<at::Tensor>& outputs, int64_t number, const std::function<void()>& reached) {
  number_ = number;
  sees_all_ = !outputs.empty();
  // Hooks live as long as the graph that they are in.
  const auto graphs = std::make_shared<char>();
  graphs_ = graphs;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    if (output.is_leaf()) {
      // A hook on a leaf would stay for good.
      sees_all_ = false;
      continue;
    }
    output.grad_fn()->add_tensor_pre_hook(std::make_unique<ReachedHook>(reached, graphs));
  }
}

bool OutputWatch::may_come(int64_t number) const {
  return number != number_ || !sees_all_ || !graphs_.expired();
}

}  // namespace ddp_hooks
