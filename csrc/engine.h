// From a bucket that is ready to a future of its averaged gradients, sending only what some rank needs.
//
// One engine serves one DDP module. A *step* is one synchronised backward pass: the Reducer hands over its buckets in
// order, the first one opens the step and the last one closes it. Nothing waits in here except for mask exchanges;
// gradients travel as futures.
//
// Always holds: what is sent, in what order and in what shape depends on agreed masks, the bucket layout and the
// settings only. Every bucket future handed out is completed or failed, whatever happens.
// Thread-safety: the public functions lock; completions run in the process group's threads and touch only the step
// they belong to. Lock order: the Reducer's mutex, then the engine's.
// Every rank must agree on: EngineSettings, the Reducer's bucket layout, the number of steps.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "mask_exchange.h"
#include "reducer_view.h"
#include "usage_mask.h"
#include "values_probe.h"
#include "wire_plan.h"

namespace ddp_hooks {

enum class ValuesDetector : uint8_t { kOff, kOn, kAdaptive };

struct EngineSettings {
  bool graph_detector = true;
  ValuesDetector values_detector = ValuesDetector::kOff;
  PlanSettings plan;
  ProbeSettings probe;
  // Identifies policy, world and model; ranks with different ones must not exchange masks.
  uint64_t configuration = 0;
};

// Counters since the last reset. All but the seconds are the same on every rank.
struct Statistics {
  int64_t steps = 0;
  int64_t values_steps = 0;
  int64_t buckets_whole = 0;
  int64_t buckets_packed = 0;
  int64_t buckets_skipped = 0;
  int64_t messages = 0;
  int64_t dense_bytes = 0;    // what plain DDP would have handed to its all-reduce
  int64_t payload_bytes = 0;  // what was handed to it
  int64_t mask_bytes = 0;
  int64_t exchanges = 0;
  int64_t plan_cache_hits = 0;
  int64_t plan_cache_misses = 0;
  double exchange_wait_seconds = 0;  // the backward pass stood still for the agreed mask
  double hook_seconds = 0;           // spent in the hook besides
};

struct Usage {
  UsageMask here;      // this rank contributed a gradient in the last step
  UsageMask anywhere;  // some rank did
};

class Step;

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // `names[i]` is the name of the Reducer's parameter i, for messages.
  Engine(std::weak_ptr<c10d::Reducer> reducer, c10::intrusive_ptr<c10d::ProcessGroup> control_group,
         const EngineSettings& settings, std::vector<std::string> names);
  ~Engine();

  // The hook. Never throws: errors arrive through the future, because an exception would leave the Reducer unusable.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);

  // Arranges for the mask exchange to start when a backward pass reaches one of these outputs of the module.
  void watch_outputs(const std::vector<at::Tensor>& outputs);

  // Other settings from the next step on; throws within a step.
  void configure(const EngineSettings& settings);

  Statistics statistics() const;
  void reset_statistics();
  // Empty masks before the first step.
  Usage usage() const;

 private:
  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  void outputs_reached() noexcept;
  void take_bucket(c10d::GradBucket& bucket, bool shadow, const Future& future);
  void open_step(bool shadow);
  void refresh_layout();
  UsageMask agree_on_usage();
  std::unique_ptr<PendingExchange> start_exchange(UsageMask local, uint64_t phase);
  UsageMask timed_wait(PendingExchange& exchange);
  void start_values_exchange(uint32_t bucket);
  void settle_values(uint32_t bucket);
  void send(uint32_t bucket, const BucketPlan& plan);
  bool graph_detector_applies() const;

  mutable std::mutex mutex_;
  const ReducerView reducer_;
  EngineSettings settings_;
  const std::vector<std::string> names_;
  const c10::intrusive_ptr<c10d::ProcessGroup> data_group_;
  MaskExchange exchange_;
  ValuesProbe probe_;

  LayoutOfBuckets layout_;
  uint64_t layout_hash_ = 0;
  bool layout_is_rebuilt_ = false;
  PlanCache plans_;
  std::vector<at::Tensor> staging_;  // one for each packed message of a step, kept from step to step

  bool attached_ = false;  // the Reducer has called at least once
  int64_t step_number_ = 0;
  std::shared_ptr<Step> step_;  // null between steps

  // The exchange that outputs_reached() started for the backward pass under way, and that pass's graph task.
  std::unique_ptr<PendingExchange> early_exchange_;
  int early_graph_task_ = -1;
  std::exception_ptr early_error_;

  Usage usage_;
  Statistics statistics_;
};

}  // namespace ddp_hooks
