// From a bucket that is ready to a future of its averaged gradients, sending only what some rank needs.
//
// One engine serves one DDP module. A *step* is one synchronised backward pass: the Reducer hands over its buckets in
// order, the first one opens the step and the last one closes it. Nothing waits in here except for mask exchanges, and
// for what every rank has begun before one that is over; gradients travel as futures.
//
// A step, moment by moment. R is the Reducer's mutex, E the engine's; the thread is that of backward() where none is
// named. What is queued runs at the end of backward: callbacks that are queued in a callback, after the Reducer's own.
//
//   entry point              called by                    locks       what happens              queues
//   -----------------------  ---------------------------  ----------  ------------------------  ----------------------
//   forward_begins           Python, before a forward     R, E        forgets a broken pass     -
//   forward_done             Python, after a forward      E           watches the outputs       -
//   outputs_reached          autograd, at an output       R, E        exchange starts, views    gradients_done
//                                                                     are detached
//   gradient_reported        autograd, each accumulator   none: marks what is unused ready      reduced_without_hook,
//                                                         R, E: copies early within a step      until there is a hook
//   run, first bucket        Reducer, which holds R       R, E        open_step: waits for the  -
//                                                                     agreed mask, plans
//   run, every bucket        Reducer, which holds R       R, E        take_bucket: detectors    -
//                                                                     exchange masks, messages
//                                                                     leave
//   run, last bucket         Reducer, which holds R       R, E        close_step; step_ is      after_backward; in a
//                                                                     null again                pass that failed, the
//                                                                                               used map's return
//   contributions are back   the process group's thread   none        an owner sums, and sends  -
//                                                                     the sums to all
//   a message is back        the process group's thread   none        scatters; completes the   -
//                                                                     bucket's future
//   unmanaged_gradient_      autograd, accumulator of     E           notes the gradient        -
//   reported                 what DDP does not know
//   gradients_done           autograd, end of backward    R, E        marks what is unready,    -
//                                                                     for which it holds none
//   after_backward           autograd, after the          E by turns  unmanaged gradients are   errors that concern
//                            Reducer's own callback                   averaged; rebuild         this rank alone
//
// A rank that has joined calls `run` outside of backward, without R, which the engine then takes; it queues nothing.
// `run` and what it queues are in engine_buckets.cpp, the other entry points in engine_events.cpp, settings and life in
// engine.cpp.
//
// Always holds: what is sent, in what order and in what shape depends on agreed masks, the bucket layout and the
// settings only. Every bucket future handed out is completed or failed, whatever happens.
// Thread-safety: the public functions lock; completions run in the process group's threads and touch only the step
// they belong to. Lock order: the Reducer's mutex, then the engine's.
// Every rank must agree on: EngineSettings, the Reducer's bucket layout, the number of steps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "agreement/control_groups.h"
#include "agreement/group_reference.h"
#include "detectors/adaptive_rule.h"
#include "detectors/coding_rule.h"
#include "detectors/looked_up_rows.h"
#include "detectors/units_detector.h"
#include "detectors/units_of_step.h"
#include "engine/backward_prologue.h"
#include "engine/engine_settings.h"
#include "engine/rebuild_timer.h"
#include "engine/statistics.h"
#include "plan/plan_cache.h"
#include "reducer/bucket_views.h"
#include "reducer/current_layout.h"
#include "reducer/gradient_report.h"
#include "reducer/reducer_view.h"
#include "transport/message_sender.h"

namespace ddp_hooks {

struct Usage {
  UsageMask here;                 // this rank contributed a gradient in the last step
  UsageMask anywhere;             // some rank did
  std::vector<UnitCounts> units;  // of the parameters that were agreed on by units
  Contributors contributors;      // of each parameter, as far as that was asked for
};

struct Step;

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `unmanaged_parameters` are the module's parameters that the Reducer does not know, because they were frozen when it
  // was made. `names` are those of the Reducer's parameters and then of the unmanaged ones, for messages. `pending` (by
  // index) have a gradient that no step has taken up: what the engine of the Reducer before had so.
  static std::shared_ptr<Engine> make(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
                                      const EngineSettings& settings, std::vector<at::Tensor> unmanaged_parameters,
                                      std::vector<std::string> names, const std::vector<size_t>& pending);
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

  // A backward pass that failed before its first bucket leaves its exchange under way on this rank alone. When any rank
  // has one, all of them finish it before they use the control group for something else.
  bool has_early_exchange() const;
  void finish_early_exchange();

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

  // Called at the end of a backward pass when EngineSettings::rebuild_after have passed.
  void set_rebuild(std::function<void()> rebuild);

  // Called once, at the end of a backward pass that the Reducer has reduced without any hook.
  void set_tell_unregistered(std::function<void()> tell);

  // Called with what a failed exchange of masks said, by whoever has waited for it; what it returns is added.
  void set_explain(std::function<std::string(const std::string&)> explain);

  // For how long the hook has been at one bucket, where it waits for nothing but masks; 0 outside. Takes no lock.
  double seconds_in_hook() const;

  // In how many steps every rank of the group has been heard of. Takes no lock.
  int64_t agreed_steps() const { return agreed_steps_; }

  // Other settings from the next step on; throws within a step.
  void configure(const EngineSettings& settings);

  Statistics statistics() const;
  void reset_statistics();
  // Empty masks before the first step.
  Usage usage() const;

 private:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  Engine(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
         const EngineSettings& settings, std::vector<at::Tensor> unmanaged_parameters, std::vector<std::string> names,
         const std::vector<size_t>& pending);
  // The moments of a pass.
  void outputs_reached();
  void gradient_reported(size_t parameter);
  void unmanaged_gradient_reported(size_t parameter);
  void take_bucket(c10d::GradBucket& bucket, bool shadow, const Future& future);
  std::exception_ptr explained(const std::exception_ptr& error) const;
  void forget_broken_pass();
  void check_bucket(uint32_t bucket);
  void wait_for_gradients(uint32_t bucket) const;
  void prepare_gradients(uint32_t bucket);
  void open_step(bool shadow);
  AgreedUsage agree(bool shadow);
  void keep_untouched();
  UsageMask tell(bool nothing);
  PlanSettings settings_of_plan() const;
  void choose_units(const AgreedUsage& usage, int64_t step_number);
  void plan_parameters(const UsageMask& to_send, const Contributors& who);
  void send_bucket(uint32_t bucket);
  std::vector<double> send_settled(const SettledUnits& settled);
  EngineSettings fitted(EngineSettings settings) const;
  void close_step();
  void record_usage();
  bool is_time_to_rebuild();
  void queue_after_backward();
  void leave_out_used_map();
  void gradients_done();
  void after_backward(const std::shared_ptr<Step>& step);
  void rebuild();

  void look_for_hook();
  void reduced_without_hook();
  void watch_gradients();
  void mark_unused_ready();
  std::vector<size_t> unready_parameters();
  void refresh_layout();
  void fill_views(uint32_t bucket);
  void note_unannounced(uint32_t bucket);
  void average_unmanaged(const Step& step, bool contribute);

  // Recursive, because buckets may complete while it is held, and what users have chained to their futures runs then
  // and may ask for statistics.
  mutable std::recursive_mutex mutex_;
  const ReducerView reducer_;
  BucketViews views_;
  CurrentLayout layout_;
  bool takes_gradients_ = false;
  const std::vector<at::Tensor> unmanaged_parameters_;
  const std::vector<std::string> names_;
  GroupReference<c10d::ProcessGroup> data_group_;
  const std::vector<c10::Stream> accumulator_streams_;
  std::shared_ptr<const ControlGroups> control_groups_;
  EngineSettings settings_;
  std::vector<GradientReport> reports_;
  std::unique_ptr<BackwardPrologue> prologue_;  // null once this is closed
  // Asked with every gradient, so that only a pass with something to mark takes the lock for it.
  std::atomic<bool> has_marks_{false};
  // The same: until the Reducer has a hook, or somebody was told that it has none.
  std::atomic<bool> lacks_hook_{true};
  std::function<void()> tell_unregistered_;
  int64_t looked_for_hook_in_ = 0;  // the forward pass of the backward pass that has been looked at

  AdaptiveRule skip_zeros_;
  UnitsDetector units_;
  CodingRule coding_;
  std::shared_ptr<const StepInFlight::CodedBytes> last_coded_;  // of the last step; null before
  const std::shared_ptr<LookedUpRows> looked_up_ = std::make_shared<LookedUpRows>();
  PlanCache plans_;
  RebuildTimer rebuild_timer_;
  std::function<void()> rebuild_;
  std::function<std::string(const std::string&)> explain_;
  // Since when the hook has been at a bucket, on the steady clock, and 0 outside.
  std::atomic<std::chrono::steady_clock::rep> in_hook_since_{0};
  int64_t step_number_ = 0;
  std::atomic<int64_t> agreed_steps_{0};
  std::shared_ptr<Step> step_;     // null between steps
  std::weak_ptr<Step> last_step_;  // as long as any of its messages is under way
  // Alive from a step's last bucket until this rank has done what others wait for at the end of its backward pass.
  std::weak_ptr<void> ending_;

  Usage usage_;
  Statistics statistics_;
  MessageSender sender_;
};

}  // namespace ddp_hooks
