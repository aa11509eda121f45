#include "engine/output_watch.h"

namespace ddp_hooks {

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
    output.register_hook([reached, graphs](const at::Tensor&) { reached(); });
  }
}

bool OutputWatch::may_come(int64_t number) const {
  return number != number_ || !sees_all_ || !graphs_.expired();
}

}  // namespace ddp_hooks
