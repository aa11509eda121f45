#include "engine/backward_prologue.h"

#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <utility>

namespace ddp_hooks {
namespace {

// How often the engine watches each of the Reducer's parameters.
constexpr int64_t kReportsPerParameter = 1;

}  // namespace

bool is_restricted_pass() {
  const auto* restricted = torch::autograd::get_current_graph_task_exec_info();
  return restricted != nullptr && !restricted->empty();
}

BackwardPrologue::BackwardPrologue(const PartsOfPrologue& parts, const std::vector<size_t>& pending,
                                   std::shared_ptr<const ControlGroups> groups, const AgreementSettings& settings,
                                   UsageAgreement::Objections objections)
    : reducer_(parts.reducer),
      views_(parts.views),
      layout_(parts.layout),
      names_(parts.names),
      unused_(reducer_, parts.unmanaged, names_, pending),
      agreement_(reducer_, unused_, names_.size(), std::move(groups), settings, std::move(objections),
                 parts.statistics) {}

void BackwardPrologue::forward_done(const std::vector<at::Tensor>& outputs, bool synchronises,
                                    const std::function<void()>& reached,
                                    const std::function<void(size_t)>& unmanaged_reported) {
  unused_.watch_unmanaged(unmanaged_reported);
  if (!synchronises) return unused_.accumulating_forward_done();
  const int64_t number = reducer_.forward_passes();
  unused_.synchronising_forward_done(number);
  outputs_.watch(outputs, number, reached);
}

bool BackwardPrologue::outputs_reached(bool takes_gradients) {
  if (!reducer_.expects_backward() || reducer_.learns_static_graph()) return false;
  unused_.forget_unless_of(reducer_.forward_passes());
  // Some parameters may have reported before the outputs were reached, if the loss uses them directly.
  const bool begins = !reducer_.in_backward();
  if (is_restricted_pass()) {
    if (begins) views_.restore_all();
    return false;
  }
  unused_.check_declarations(kReportsPerParameter);
  if (!reaches_reducer()) {
    // The Reducer will not begin, and so would never ask for gradients that it does not know.
    for (size_t i = reducer_.parameters().size(); i < names_.size(); ++i) {
      TORCH_CHECK(unused_.has_nothing_to_send(i), "ddp_hooks: parameter '", names_[i],
                  "' was unfrozen after DDP's Reducer had been made without it, and this pass uses no parameter that "
                  "the Reducer knows: call ddp_hooks.rebuild(ddp) after unfreezing");
    }
    return false;
  }
  if (begins) {
    start_exchange();
    takes_gradients ? views_.detach_all() : views_.restore_all();
  }
  return !reducer_.searches_graph() && unused_.prepare_marks();
}

bool BackwardPrologue::reaches_reducer() const {
  return reducer_.searches_graph() ? reducer_.reaches_parameters() : !unused_.is_complete();
}

// Started here and not with the first bucket, so that it is under way before any rank can come to wait for it, whatever
// else the ranks wait for in their backward passes. It must not be started for a pass that never reaches the buckets,
// because the other ranks would not take part.
void BackwardPrologue::start_exchange() {
  if (!agreement_.awaits_start()) return;
  try {
    agreement_.start(layout_.hash());
  } catch (...) {
    agreement_.fail(std::current_exception());
  }
}

std::vector<size_t> BackwardPrologue::take_marks() {
  return unused_.take_marks(reducer_.forward_passes());
}

std::vector<size_t> BackwardPrologue::unready_parameters() const {
  return reducer_.in_backward() ? unused_.unready_parameters(reducer_.forward_passes()) : std::vector<size_t>();
}

AskedUsage BackwardPrologue::first_bucket_ready(bool shadow) {
  unused_.forget_unless_of(reducer_.forward_passes());
  return agreement_.ask(shadow, layout_.hash());
}

bool BackwardPrologue::awaits_backward() const {
  return reducer_.expects_backward() && outputs_.may_come(reducer_.forward_passes());
}

}  // namespace ddp_hooks
