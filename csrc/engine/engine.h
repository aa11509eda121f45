// Serves one DDP module until that ends: knows who calls when, under which locks, and what is due after backward.
//
// The engine counts a *step* for each synchronised backward pass, in which the Reducer hands over its buckets in order;
// `BackwardPass` decides what is sent. A step, moment by moment, with R for the Reducer's mutex and E for the engine's,
// in the thread of backward() where none is named. What is queued runs at the end of backward: callbacks that are
// queued in a callback, after the Reducer's own.
//
//   entry point              called by                    locks       what happens              queues
//   -----------------------  ---------------------------  ----------  ------------------------  ----------------------
//   forward_begins           Python, before a forward     R, E        forgets a broken pass     -
//   forward_done             Python, after a forward      E           watches the outputs       -
//   outputs_reached          autograd, at an output       R, E        exchange starts, views    gradients_done
//                                                                     are detached
//   gradient_reported        autograd, each accumulator   none: marks what is unused ready      reduced_without_hook,
//                                                         R, E: copies early within a step      until there is a hook
//   run, first bucket        Reducer, which holds R       R, E        takes up the exchange     -
//   run, as the step opens   Reducer, which holds R       R, E        waits for the agreed      -
//                                                                     mask, plans
//   run, from then on        Reducer, which holds R       R, E        messages leave            -
//   run, last bucket         Reducer, which holds R       R, E        closes the step           after_backward; in a
//                                                                                               pass that failed, the
//                                                                                               used map's return
//   a message is back        the process group's thread   none        scatters, completes the   -
//                                                                     bucket's future; or an
//                                                                     owner's sums leave
//   unmanaged_gradient_      autograd, accumulator of     E           notes the gradient        -
//   reported                 what DDP does not know
//   gradients_done           autograd, end of backward    R, E        marks what is unready,    -
//                                                                     for which it holds none
//   after_backward           autograd, after the          E by turns  unmanaged gradients are   errors that concern
//                            Reducer's own callback                   averaged; rebuild         this rank alone
//
// A rank that has joined calls `run` outside of backward, without R, which the engine then takes; it queues nothing.
//
// Always holds: every bucket future handed out is completed or failed, whatever happens.
// Thread-safety: the public functions lock; completions run in the process group's threads and touch only the step
// they belong to. Lock order: the Reducer's mutex, then the engine's.
// Every rank must agree on: EngineSettings, the Reducer's bucket layout, the number of steps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "agreement/control_groups.h"
#include "agreement/group_reference.h"
#include "engine/backward_pass.h"
#include "engine/engine_settings.h"
#include "engine/statistics.h"
#include "reducer/gradient_report.h"
#include "reducer/reducer_view.h"

namespace ddp_hooks {

// What the engine asks of whoever made it; each may be empty.
struct EngineCallbacks {
  // At the end of a backward pass, when EngineSettings::rebuild_after have passed.
  std::function<void()> rebuild;
  // Once, at the end of a backward pass that the Reducer has reduced without any hook.
  std::function<void()> tell_unregistered;
  // With what a failed exchange of masks said, by whoever has waited for it; what it returns is added.
  BackwardPass::Explain explain;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `unmanaged_parameters` are the module's parameters that the Reducer does not know, because they were frozen when it
  // was made. `names` are those of the Reducer's parameters and then of the unmanaged ones, for messages. `pending` (by
  // index) have a gradient that no step has taken up: what the engine of the Reducer before had so. `hosts`: null
  // unless ranks add up in hosts, and the module's group puts collectives on streams.
  static std::shared_ptr<Engine> make(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
                                      std::shared_ptr<const HostsOnStreams> hosts, const EngineSettings& settings,
                                      std::vector<at::Tensor> unmanaged_parameters, std::vector<std::string> names,
                                      const std::vector<size_t>& pending);
  ~Engine();

  // The hook. Never throws: errors arrive through the future, because an exception would leave the Reducer unusable.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);

  // To be called before each forward pass. What comes back from here on for a pass that broke off is not put into the
  // buckets, in which the next one's gradients may lie. An all-reduce in place still writes there, as plain DDP's does.
  void forward_begins();

  // To be called after each forward pass in grad mode, with the tensors among the module's outputs. Notes what is
  // frozen, and arranges for a backward pass that reaches one of the outputs to start the mask exchange and to tell the
  // Reducer about frozen parameters. `synchronises` is false under no_sync().
  void forward_done(const std::vector<at::Tensor>& outputs, bool synchronises);

  // Parameters (by index, the unmanaged ones after the Reducer's) that forward passes from now on do not use.
  void declare_unused(const std::vector<size_t>& parameters);

  // A backward pass that failed before its step opened leaves its exchange under way, on the ranks that have started
  // it. Between two steps all of them finish what any rank has started, before they use the control group for something
  // else, and forget the pass.
  bool has_early_exchange() const { return locked(&BackwardPass::has_early_exchange, pass_); }
  int64_t exchanges_started() const { return locked(&BackwardPass::exchanges_started, pass_); }
  void finish_exchanges(int64_t started);

  // Registers the engine as a hook that the Reducer calls natively. From then on nobody but the engine reads the
  // Reducer's buckets, so gradients need not be in them before the hook is called. Not so where the hook is called
  // through Python, because other hooks may be wrapped around it.
  void register_natively();

  // Takes back everything that was set on the module, the hook included if `remove_hook`, and lets go of the groups.
  // From then on the module trains as plain DDP. Throws during a backward pass, until unmanaged gradients are averaged
  // and a rebuild that is due is done, unless the module is `dying`.
  void close(bool remove_hook, bool dying);

  // Between two passes: parameters (by index) with a gradient that no step has taken up.
  std::vector<size_t> pending() const;

  // Whether a forward pass has been run whose backward pass may still come.
  bool awaits_backward() const;

  void set_callbacks(EngineCallbacks callbacks);

  // For how long the hook has been at one bucket, where it waits for nothing but masks; 0 outside. Takes no lock.
  double seconds_in_hook() const;

  // In how many steps every rank of the group has been heard of. Takes no lock.
  int64_t agreed_steps() const { return pass_.agreed_steps(); }

  // Other settings from the next step on; throws within a step.
  void configure(const EngineSettings& settings, std::shared_ptr<const HostsOnStreams> hosts) {
    locked(&BackwardPass::configure, pass_, settings, std::move(hosts));
  }

  Statistics statistics() const;
  void reset_statistics();
  // Empty masks before the first step.
  Usage usage() const { return locked(&BackwardPass::usage, pass_); }

 private:
  Engine(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
         std::shared_ptr<const HostsOnStreams> hosts, const EngineSettings& settings,
         std::vector<at::Tensor> unmanaged_parameters, std::vector<std::string> names,
         const std::vector<size_t>& pending);
  // Both locks, in their order; throws once the DDP module is gone.
  std::pair<ReducerLock, std::unique_lock<std::recursive_mutex>> lock_both() const {
    return {reducer_.lock(), std::unique_lock(mutex_)};
  }
  // What the pass answers with the engine locked.
  template <typename Function, typename... Arguments>
  std::invoke_result_t<Function, Arguments...> locked(Function function, Arguments&&... arguments) const {
    std::lock_guard lock(mutex_);
    return std::invoke(function, std::forward<Arguments>(arguments)...);
  }
  // Calls a moment below for as long as there is an engine.
  template <typename... Arguments>
  std::function<void(Arguments...)> weakly(void (Engine::*moment)(Arguments...)) {
    return [engine = weak_from_this(), moment](Arguments... arguments) {
      if (const auto self = engine.lock()) (*self.*moment)(arguments...);
    };
  }
  void outputs_reached();
  void gradient_reported(size_t parameter);
  void unmanaged_gradient_reported(size_t parameter);
  void mark_unused_ready();
  void step_closed();
  void gradients_done();
  void after_backward(const std::shared_ptr<Step>& step);
  void average_unmanaged(const Step& step, bool contribute);
  void look_for_hook();
  void reduced_without_hook();

  // Recursive, because buckets may complete while it is held, and what users have chained to their futures runs then
  // and may ask for statistics.
  mutable std::recursive_mutex mutex_;
  const ReducerView reducer_;
  bool takes_gradients_ = false;
  const std::vector<at::Tensor> unmanaged_parameters_;
  const std::vector<std::string> names_;
  GroupReference<c10d::ProcessGroup> data_group_;
  std::shared_ptr<const ControlGroups> control_groups_;
  std::vector<GradientReport> reports_;
  EngineCallbacks callbacks_;
  // Asked with every gradient, so that only a pass with something to mark takes the lock for it.
  std::atomic<bool> has_marks_{false};
  // The same: until the Reducer has a hook, or somebody was told that it has none.
  std::atomic<bool> lacks_hook_{true};
  int64_t looked_for_hook_in_ = 0;  // the forward pass of the backward pass that has been looked at
  // Since when the hook has been at a bucket; the clock's epoch outside.
  std::atomic<std::chrono::steady_clock::time_point> in_hook_since_{};
  // Alive from a step's last bucket until this rank has done what others wait for at the end of its backward pass.
  std::weak_ptr<void> ending_;
  Statistics statistics_;
  BackwardPass pass_;  // its prologue is null once this is closed
};

}  // namespace ddp_hooks
