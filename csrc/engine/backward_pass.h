// One backward pass after another, from the forward pass that leads to it to its last bucket: what is sent, and how.
//
// First comes the prologue. The first bucket then begins a step, and it or a later one opens it. From then on each
// bucket sends what is known by now, and the last one closes the step. This class waits only for mask exchanges, and
// for collectives that every rank started before an exchange that has completed, such as the Reducer's all-reduce of
// its used map; gradients travel as futures.
//
// Always holds: what is sent, in what order and in what shape depends on agreed masks, the bucket layout and the
// settings only. Every bucket future handed in is completed or failed, whatever happens.
// Thread-safety: none; the engine locks, and the Reducer's mutex is held where a moment is part of a backward pass.
// Every rank must agree on: EngineSettings, the Reducer's bucket layout, the number of steps.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "agreement/control_groups.h"
#include "detectors/adaptive_rule.h"
#include "detectors/coding_rule.h"
#include "detectors/looked_up_rows.h"
#include "detectors/units_detector.h"
#include "engine/backward_prologue.h"
#include "engine/engine_settings.h"
#include "engine/rebuild_timer.h"
#include "engine/statistics.h"
#include "engine/step.h"
#include "plan/plan_cache.h"
#include "reducer/bucket_views.h"
#include "reducer/current_layout.h"
#include "reducer/reducer_view.h"
#include "transport/message_sender.h"

namespace ddp_hooks {

class BackwardPass {
 public:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;
  // Is called with what a failed exchange of masks said; what it returns is added.
  using Explain = std::function<std::string(const std::string&)>;

  // The references have to outlive every call. The rest is as for `Engine::make`.
  BackwardPass(const ReducerView& reducer, c10d::ProcessGroup& group,
               const std::shared_ptr<const ControlGroups>& control_groups, std::shared_ptr<const HostsOnStreams> hosts,
               const EngineSettings& settings, const std::vector<at::Tensor>& unmanaged,
               const std::vector<std::string>& names, const std::vector<size_t>& pending, Statistics& statistics);

  // What comes before the first bucket; null once this is closed.
  BackwardPrologue* prologue() const { return prologue_.get(); }
  // Null between steps. The step that its last bucket has closed stays until `bucket_taken`.
  const std::shared_ptr<Step>& step() const { return step_; }

  // The moments of a pass, in order; `BackwardPrologue` has the others. What a step left that broke off is returned,
  // for whoever waits for its buckets to be told.
  std::shared_ptr<Step> forward_begins();
  void forward_done(const std::vector<at::Tensor>& outputs, bool synchronises, const std::function<void()>& reached,
                    const std::function<void(size_t)>& unmanaged_reported);
  bool outputs_reached(bool takes_gradients);
  // One of the Reducer's parameters has its gradient. `copies_early`: into the bucket, if it is reduced there.
  void gradient_reported(size_t parameter, bool copies_early);
  // Holds the bucket, of which `future` tells, or sends what leaves with it and with those that were held. `shadow`:
  // this rank has joined.
  void take_bucket(c10d::GradBucket& bucket, bool shadow, const Future& future);
  // In a handler of what `take_bucket` has thrown: fails the buckets that have come.
  void fail(const Future& future, const Explain& explain);
  // To be called after each bucket, however it went.
  void bucket_taken();

  bool has_early_exchange() const {
    return (step_ && step_->asked) || (prologue_ && prologue_->agreement().is_under_way());
  }
  int64_t exchanges_started() const { return prologue_ ? prologue_->agreement().started() : 0; }
  // As for `Engine`. Returns what `forward_begins` does.
  std::shared_ptr<Step> finish_exchanges(int64_t started);
  // Between two steps. `hosts`: as for `Engine::make`.
  void configure(const EngineSettings& settings, std::shared_ptr<const HostsOnStreams> hosts);
  // Lets go of everything but what was counted. What is returned is to be told, or dropped, when no lock is held.
  std::pair<std::unique_ptr<BackwardPrologue>, std::shared_ptr<Step>> close();

  Usage usage() const { return usage_; }
  // May be asked in any thread.
  int64_t agreed_steps() const { return agreed_steps_; }
  MessageSender& sender() { return sender_; }
  const MessageSender& sender() const { return sender_; }

 private:
  const Topology& topology() const { return hosts_ ? hosts_->topology() : control_groups_->topology(); }
  void refresh_layout();
  void begin_step(bool shadow);
  void hold(uint32_t bucket);
  void open_step();
  AgreedUsage agree();
  void keep_untouched();
  void choose_units(const AgreedUsage& usage, int64_t step_number);
  void plan_parameters(const UsageMask& to_send, const Contributors& who);
  void check_bucket(uint32_t bucket);
  void prepare_gradients(uint32_t bucket);
  void wait_for_gradients(uint32_t bucket) const;
  void fill_views(uint32_t bucket);
  void note_unannounced(uint32_t bucket);
  void send_buckets(uint32_t first, uint32_t ready);
  void send_bucket(uint32_t bucket, uint32_t ready);
  void send(uint32_t bucket, const BucketPlan& plan, const Places& divided);
  bool has_yet_to_send(uint32_t bucket) const;
  std::vector<double> send_settled(const SettledUnits& settled);
  void close_step();
  void put_back_dropped();
  void record_usage();
  bool is_time_to_rebuild();

  const ReducerView& reducer_;
  c10d::ProcessGroup& group_;
  const std::shared_ptr<const ControlGroups>& control_groups_;
  std::shared_ptr<const HostsOnStreams> hosts_;  // may be null
  Statistics& statistics_;
  BucketViews views_;
  CurrentLayout layout_;
  const std::vector<c10::Stream> accumulator_streams_;
  EngineSettings settings_;
  std::unique_ptr<BackwardPrologue> prologue_;

  AdaptiveRule skip_zeros_;
  UnitsDetector units_;
  CodingRule coding_;
  std::shared_ptr<const StepInFlight::CodedBytes> last_coded_;  // of the last step; null before
  const std::shared_ptr<LookedUpRows> looked_up_ = std::make_shared<LookedUpRows>();
  PlanCache plans_;
  RebuildTimer rebuild_timer_;
  int64_t step_number_ = 0;
  std::atomic<int64_t> agreed_steps_{0};
  std::shared_ptr<Step> step_;
  std::weak_ptr<Step> last_step_;  // as long as any of its messages is under way
  Usage usage_;
  MessageSender sender_;
};

}  // namespace ddp_hooks
