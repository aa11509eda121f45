#include "detectors/looked_up_rows.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "reducer/bucket_views.h"

namespace ddp_hooks {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr int64_t kUnitsPerWord = 64;

// What an embedding's node has saved of its forward pass; null of another node, and of one whose gradient is sparse.
const torch::autograd::SavedVariable* indices_of(const Node& node) {
  if (const auto* embedding = dynamic_cast<const torch::autograd::generated::EmbeddingBackward0*>(&node)) {
    return embedding->sparse ? nullptr : &embedding->indices_;
  }
  if (const auto* bag = dynamic_cast<const torch::autograd::generated::EmbeddingBagBackward0*>(&node)) {
    return bag->sparse ? nullptr : &bag->indices_;
  }
  return nullptr;
}

// What the gradient of an embedding's table is handed to; null where that is no parameter's accumulator.
const AccumulateGrad* accumulator_of(const Node& node) {
  return node.num_outputs() == 0 ? nullptr : dynamic_cast<const AccumulateGrad*>(node.next_edge(0).function.get());
}

bool answers_in_python(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
}

class Watch : public torch::autograd::FunctionPostHook {
 public:
  Watch(Node& node, std::shared_ptr<LookedUpRows> told) : node_(node), told_(std::move(told)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    // Another hook may have changed what the node has made, or be about to.
    if (node_.post_hooks().size() != 1 || outputs.empty() || !outputs.front().defined()) return outputs;
    // A mode sees every operation, and may have answered in torch's stead, and so may a class of tensors.
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return outputs;
    if (std::any_of(inputs.begin(), inputs.end(), answers_in_python)) return outputs;
    const AccumulateGrad* accumulator = accumulator_of(node_);
    if (accumulator == nullptr || !hands_on_unchanged(*accumulator, accumulator->variable)) return outputs;
    // Hooks on what is saved compute it anew, move it or count how often they are asked.
    const torch::autograd::SavedVariable* indices = indices_of(node_);
    if (indices != nullptr && !indices->has_hooks()) {
      told_->note(accumulator->variable, outputs.front(), indices->unpack());
    }
    return outputs;
  }

  // Compiled autograd would trace it: there is nothing in it to trace.
  void compiled_args(torch::autograd::CompiledNodeArgs& /*args*/) const override {}

 private:
  Node& node_;  // which this belongs to
  const std::shared_ptr<LookedUpRows> told_;
};

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() && tensor.is_contiguous() &&
         !tensor.is_inference() && !tensor.key_set().has(c10::DispatchKey::Python);
}

}  // namespace

void LookedUpRows::watch(const std::vector<at::Tensor>& outputs) {
  std::vector<Node*> waiting;
  std::unordered_set<const Node*> seen;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) waiting.push_back(node);
  };
  for (const at::Tensor& output : outputs) visit(output.grad_fn().get());
  while (!waiting.empty()) {
    Node& node = *waiting.back();
    waiting.pop_back();
    for (const torch::autograd::Edge& edge : node.next_edges()) visit(edge.function.get());
    if (!node.post_hooks().empty() || indices_of(node) == nullptr || accumulator_of(node) == nullptr) continue;
    node.add_post_hook(std::make_unique<Watch>(node, shared_from_this()));
  }
}

void LookedUpRows::forget() {
  std::lock_guard lock(mutex_);
  gradients_.clear();
}

void LookedUpRows::note(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& indices) {
  if (!is_plain(gradient) || gradient.dim() != 2 || gradient.storage_offset() != 0 || !gradient.is_floating_point()) {
    return;
  }
  if (!indices.defined() || !indices.is_cpu() || indices.layout() != at::kStrided ||
      indices.key_set().has(c10::DispatchKey::Python)) {
    return;
  }
  // With as many there is nothing to save.
  const int64_t rows = gradient.size(0);
  if (gradient.numel() == 0 || indices.numel() >= rows) return;
  const at::NoGradGuard no_grad;
  const at::Tensor positions = indices.to(at::kLong).contiguous();
  const auto* first = positions.const_data_ptr<int64_t>();
  std::vector<int64_t> looked_up(first, first + positions.numel());
  if (std::any_of(looked_up.begin(), looked_up.end(), [&](int64_t row) { return row < 0 || row >= rows; })) return;
  std::lock_guard lock(mutex_);
  // Of what is gone nobody will ask.
  std::erase_if(gradients_, [](const Gradient& made) { return made.memory.use_count() == 0; });
  gradients_.push_back({parameter.unsafeGetTensorImpl(), gradient.storage().getWeakStorageImpl(),
                        static_cast<uint32_t>(gradient._version()), gradient.scalar_type(), gradient.size(1),
                        gradient.numel(), std::move(looked_up)});
}

std::vector<uint64_t> LookedUpRows::units_of(const at::Tensor& parameter, const at::Tensor& flat,
                                             int64_t unit_length) const {
  if (!is_plain(flat) || flat.storage_offset() != 0) return {};
  std::lock_guard lock(mutex_);
  const auto made = [&](const Gradient& gradient) {
    // An address may be given out anew, but not while there is a reference to what it was, weak as it may be.
    return gradient.parameter == parameter.unsafeGetTensorImpl() &&
           gradient.memory._unsafe_get_target() == flat.storage().unsafeGetStorageImpl() &&
           gradient.version == static_cast<uint32_t>(flat._version()) && gradient.type == flat.scalar_type() &&
           gradient.length == flat.numel();
  };
  const auto found = std::find_if(gradients_.begin(), gradients_.end(), made);
  if (found == gradients_.end()) return {};
  const int64_t units = (flat.numel() - 1) / unit_length + 1;
  std::vector<uint64_t> words(static_cast<size_t>((units - 1) / kUnitsPerWord + 1));
  for (const int64_t row : found->rows) {
    const int64_t last = ((row + 1) * found->row_length - 1) / unit_length;
    for (int64_t unit = row * found->row_length / unit_length; unit <= last; ++unit) {
      words[static_cast<size_t>(unit / kUnitsPerWord)] |= uint64_t{1} << (unit % kUnitsPerWord);
    }
  }
  return words;
}

}  // namespace ddp_hooks
