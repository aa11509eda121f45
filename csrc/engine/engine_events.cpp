// What forward passes and autograd tell the engine outside of the hook.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <functional>
#include <utility>

#include "agreement/stopwatch.h"
#include "engine/end_of_backward.h"
#include "engine/engine.h"
#include "engine/step.h"
#include "kernels/devices.h"

namespace ddp_hooks {

void Engine::forward_begins() {
  if (reducer_.is_gone()) return;
  std::shared_ptr<Step> broken;
  {
    auto reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    if (!prologue_ || reducer_.in_backward()) return;
    // What has come back since its last bucket left is done with it; of a pass that then broke off, the rest may come.
    if (const auto last = last_step_.lock()) last->has_failed = true;
    broken.swap(step_);
    if (broken) sender_.drop();
  }
  // Whoever waits for its buckets is told without a lock.
  if (broken) broken->break_off();
}

void Engine::forward_done(const std::vector<at::Tensor>& outputs, bool synchronises) {
  for (const at::Tensor& output : outputs) refuse_capture(output.device());
  std::lock_guard lock(mutex_);
  if (!prologue_) return;
  TORCH_CHECK(
      settings_.rebuild_after == 0 || !reducer_.finalizes_manually(),
      "ddp_hooks: expected rebuild_after or DDP's require_manual_backward_finalization, received both: rebuild_after "
      "rebuilds the Reducer at the end of backward, when gradients that are finalized manually are still in flight; "
      "leave rebuild_after out of the policy, and call ddp_hooks.rebuild(ddp) on every rank after "
      "finalize_backward()");
  const std::weak_ptr<Engine> engine = weak_from_this();
  const auto reached = [engine] {
    if (auto self = engine.lock()) self->outputs_reached();
  };
  const auto unmanaged_reported = [engine](size_t parameter) {
    if (auto self = engine.lock()) self->unmanaged_gradient_reported(parameter);
  };
  prologue_->forward_done(outputs, synchronises, reached, unmanaged_reported);
  // A search of the graph is for those whom it spares something.
  if (!synchronises || data_group_->getSize() == 1 || !reducer_.parameters().front().is_cpu()) return;
  looked_up_->forget();
  if (units_.may_choose()) looked_up_->watch(outputs);
}

void Engine::outputs_reached() {
  {
    auto reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    if (!prologue_) return;
    refresh_layout();
    // With create_graph=True gradients are part of a graph, which the engine would cut; the Reducer refuses that
    // itself.
    if (!prologue_->outputs_reached(takes_gradients_ && !at::GradMode::is_enabled())) return;
    has_marks_ = true;
  }
  // At the latest when all gradients have come; a declared parameter may be in a graph and get none.
  torch::autograd::Engine::get_default_engine().queue_callback([engine = weak_from_this()] {
    if (auto self = engine.lock()) self->gradients_done();
  });
}

void Engine::watch_gradients() {
  for (size_t i = 0; i < reducer_.parameters().size(); ++i) {
    reports_.emplace_back(reducer_.accumulators()[i], [engine = weak_from_this(), i] {
      if (auto self = engine.lock()) self->gradient_reported(i);
    });
  }
}

void Engine::gradient_reported(size_t index) {
  mark_unused_ready();
  // The model may be trained on without its wrapper.
  if (reducer_.is_gone()) return;
  if (lacks_hook_.load(std::memory_order_relaxed)) look_for_hook();
  // On a device a launch for each parameter would cost more than its cache saves.
  const bool copies_early = takes_gradients_ && reducer_.parameters()[index].is_cpu();
  // Where the Reducer searches the graph, it notes itself what was accumulated.
  if (!copies_early && reducer_.searches_graph() && reducer_.has_gradient(index)) return;
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  if (!prologue_) return;
  if (!reducer_.expects_backward()) {
    // It has noted a gradient here, and looked at the placeholder.
    if (views_.is_detached(index)) reducer_.forget_use_without_gradient(index);
    return prologue_->gradient_accumulated(index);
  }
  if (!copies_early) return;
  // Before the step opens, nobody knows how a gradient will travel.
  if (!step_ || step_->error || !reducer_.is_final(index)) return;
  const Stopwatch stopwatch;
  const at::NoGradGuard no_grad;
  sender_.copy_into_bucket_early(*step_, index);
  statistics_.hook_seconds += stopwatch.seconds();
}

// A state that is never registered would leave its module to plain DDP in silence. What counts is that the Reducer has
// no hook, of whatever kind, in a pass that it has finished: a hook of the user's may call this engine when it likes.
void Engine::look_for_hook() {
  {
    auto reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    if (reducer_.has_hook()) lacks_hook_ = false;
    if (!prologue_ || !lacks_hook_ || !reducer_.expects_backward() || is_restricted_pass()) return;
    if (looked_for_hook_in_ == reducer_.forward_passes()) return;
    looked_for_hook_in_ = reducer_.forward_passes();
  }
  queue_last([engine = weak_from_this()] {
    if (auto self = engine.lock()) self->reduced_without_hook();
  });
}

void Engine::reduced_without_hook() {
  std::function<void()> tell;
  if (reducer_.is_gone()) return;
  {
    auto reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    if (!prologue_ || !lacks_hook_) return;
    if (reducer_.expects_backward()) {
      // It was the end of a part of the pass: of one output's, or of a backward pass within it.
      looked_for_hook_in_ = 0;
      return;
    }
    lacks_hook_ = false;
    if (!reducer_.has_hook()) tell.swap(tell_unregistered_);
  }
  if (tell) tell();
}

// Not before the first of the other parameters has reported: from the first mark on DDP requires the pass to be
// finished, so that one that fails before has to leave none. And whatever waits for the agreed mask has gone on by
// then.
void Engine::mark_unused_ready() {
  if (!has_marks_.load(std::memory_order_relaxed)) return;
  std::vector<size_t> unused;
  {
    std::lock_guard lock(mutex_);
    if (!prologue_ || reducer_.is_gone()) return;
    has_marks_ = false;
    unused = prologue_->take_marks();
  }
  // May run the hook, so no lock is held.
  for (size_t index : unused) reducer_.mark_ready(index);
}

void Engine::unmanaged_gradient_reported(size_t index) {
  std::lock_guard lock(mutex_);
  if (prologue_) prologue_->gradient_accumulated(index);
}

std::vector<size_t> Engine::unready_parameters() {
  if (reducer_.is_gone()) return {};
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  return prologue_ ? prologue_->unready_parameters() : std::vector<size_t>();
}

void Engine::gradients_done() {
  mark_unused_ready();
  // May run the hook, so no lock is held.
  for (size_t index : unready_parameters()) reducer_.mark_ready(index);
  std::lock_guard lock(mutex_);
  if (prologue_) prologue_->gradients_done();
}

}  // namespace ddp_hooks
