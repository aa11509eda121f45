#include "engine.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "devices.h"
#include "late_gradients.h"
#include "skip_unused_hook.h"
#include "step.h"
#include "stopwatch.h"

namespace ddp_hooks {
namespace {

// Models that switch between a handful of branches on each of a few ranks need some dozens.
constexpr size_t kCachedPlans = 64;
// How often each of the Reducer's parameters is watched; see Engine::watch_gradients.
constexpr int64_t kReportsPerParameter = 1;

int64_t used_bytes(const BucketLayout& bucket, const UsageMask& mask) {
  int64_t elements = 0;
  for (const ParameterSlice& slice : bucket.slices) {
    if (mask.test(slice.parameter)) elements += slice.length;
  }
  return elements * bucket.element_bytes;
}

bool any_used(const BucketLayout& bucket, const UsageMask& mask) {
  return std::any_of(bucket.slices.begin(), bucket.slices.end(),
                     [&](const ParameterSlice& slice) { return slice.length > 0 && mask.test(slice.parameter); });
}

void refuse_capture(c10::Device device) {
  TORCH_CHECK(
      !is_capturing(device),
      "ddp_hooks: expected a step that is run, received one that is captured into a CUDA graph: what is sent is "
      "agreed on the host in each step, and a graph would replay one step's answer. Capture without this hook");
}

}  // namespace

std::shared_ptr<Engine> Engine::make(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
                                     const EngineSettings& settings, std::vector<at::Tensor> late_parameters,
                                     std::vector<std::string> names) {
  std::shared_ptr<Engine> engine(
      new Engine(std::move(reducer), std::move(groups), settings, std::move(late_parameters), std::move(names)));
  engine->watch_gradients();
  return engine;
}

Engine::Engine(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
               const EngineSettings& settings, std::vector<at::Tensor> late_parameters, std::vector<std::string> names)
    : reducer_(std::move(reducer)),
      slots_(reducer_),
      settings_(settings),
      late_parameters_(std::move(late_parameters)),
      names_(std::move(names)),
      data_group_(reducer_.process_group()),
      control_groups_(std::move(groups)),
      reduced_count_(reducer_.parameters().size()),
      probe_(settings.probe),
      plans_(kCachedPlans),
      sender_(*data_group_, slots_, statistics_) {
  TORCH_CHECK(names_.size() == reduced_count_ + late_parameters_.size(),
              "ddp_hooks: expected a name for each of the module's ", reduced_count_ + late_parameters_.size(),
              " parameters, received ", names_.size());
  absence_ = std::make_unique<Absence>(reducer_, late_parameters_, names_);
  agreement_ = std::make_unique<UsageAgreement>(reducer_, *absence_, names_, control_groups_, settings_, statistics_);
}

Engine::~Engine() {
  // Perhaps within the Reducer's own destructor, which drops the group after this; and perhaps with the GIL held.
  data_group_.let_go_after(reducer_.lifetime());
}

void Engine::close(bool remove_hook, bool dying) {
  // Declared before the locks: what this drops, other groups and hooks among it, goes when they are free again.
  std::vector<GradientReport> reports;
  std::unique_ptr<Absence> absence;
  std::unique_ptr<UsageAgreement> agreement;
  std::shared_ptr<const ControlGroups> control_groups;
  std::function<void()> rebuild;
  std::unique_ptr<c10d::CommHookInterface> hook;
  const bool reducer_is_gone = reducer_.is_gone();
  ReducerLock reducer_lock;
  if (!reducer_is_gone) reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  if (closed_) return;
  if (!reducer_is_gone) {
    TORCH_CHECK(dying || (!step_ && !reducer_.in_backward()),
                "ddp_hooks: expected the state to be closed between two steps, received a call during a backward pass");
    for (size_t i = 0; i < reduced_count_; ++i) slots_.give_back(i);
    if (remove_hook && !dying) hook = reducer_.take_hook();
  }
  closed_ = true;
  step_.reset();
  sender_.drop_staging();
  reports.swap(reports_);
  absence.swap(absence_);
  agreement.swap(agreement_);
  control_groups.swap(control_groups_);
  rebuild.swap(rebuild_);
  if (dying || reducer_is_gone) {
    data_group_.let_go_after(reducer_.lifetime());
  } else {
    data_group_.let_go();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Engine::run(c10d::GradBucket& bucket) {
  const Stopwatch stopwatch;
  // A joined rank runs the hook outside of any backward pass and does not hold the Reducer's mutex.
  ReducerLock reducer_lock;
  // With its device, a future carries the point on the stream at which its value is there.
  std::vector<c10::Device> devices;
  if (!bucket.getBuffer().is_cpu()) devices.push_back(bucket.getBuffer().device());
  Future future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
  try {
    const bool shadow = !reducer_.in_backward();
    if (shadow) reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    TORCH_CHECK(!closed_, "ddp_hooks: expected a state that serves this module, received one that was closed; call ",
                "ddp_hooks.register(ddp) on every rank");
    const double waited_before = statistics_.exchange_wait_seconds;
    const at::NoGradGuard no_grad;
    try {
      take_bucket(bucket, shadow, future);
    } catch (...) {
      if (!step_) throw;
      step_->fail(std::current_exception());
      // Collectives that are still under way keep their own references.
      sender_.drop_staging();
    }
    if (step_ && step_->buckets.size() >= layout_.buckets.size()) step_.reset();
    statistics_.hook_seconds += stopwatch.seconds() - (statistics_.exchange_wait_seconds - waited_before);
  } catch (...) {
    if (!future->completed()) future->setError(std::current_exception());
  }
  return future;
}

void Engine::take_bucket(c10d::GradBucket& bucket, bool shadow, const Future& future) {
  if (step_ && bucket.getIndex() == 0 && !reducer_.learns_static_graph()) {
    // The pass before broke off between two buckets, and DDP was told to go on (`_update_process_group`).
    step_->fail(std::make_exception_ptr(std::runtime_error("ddp_hooks: this backward pass was broken off")));
    step_.reset();
    sender_.drop_staging();
  }
  const bool first = !step_;
  if (first) step_ = std::make_shared<Step>();
  // Buckets are counted here, because in the first pass of a static graph the Reducer numbers every bucket 0.
  const auto index = static_cast<uint32_t>(step_->buckets.size());
  step_->buckets.emplace_back(bucket.getBuffer(), future);
  if (first) {
    TORCH_CHECK(bucket.getIndex() == 0, "ddp_hooks: expected the first bucket of a backward pass, received bucket ",
                bucket.getIndex(), ": register the hook before backward() begins");
    open_step(shadow);
  }
  if (step_->error) std::rethrow_exception(step_->error);

  const BucketLayout& layout = layout_.buckets[index];
  if (!layout.sparse) {
    const int64_t received = step_->buckets[index].flat().numel();
    TORCH_CHECK(received == layout.numel, "ddp_hooks: bucket ", index, ": expected ", layout.numel,
                " elements of the module that the state was made for, received ", received,
                ". A SkipUnusedState serves one DistributedDataParallel module; make one for each");
  }
  const bool last = index + 1 == layout_.buckets.size();
  if (!shadow) fill_slots(index);
  if (step_->planner) {
    advance_values(index);
  } else {
    sender_.send(step_, layout_, index, step_->plan->buckets[index]);
  }
  if (last) close_step();
}

void Engine::fill_slots(uint32_t bucket) {
  const Step& step = *step_;
  // Alone nothing is sent, and the Reducer copies what it finds in the bucket.
  const bool all_used = data_group_->getSize() == 1;
  // A rank that has joined tells the Reducer about old uses, and the Reducer makes gradients of them; without a search
  // it asks nobody, and would make gradients of everything.
  const bool unused_too = step.agreed.test(agreement_->joined_bit()) && reducer_.searches_graph();
  for (const ParameterSlice& slice : layout_.buckets[bucket].slices) {
    if (!slots_.is_vacant(slice.parameter)) continue;
    reducer_.forget_use_without_gradient(slice.parameter);
    // Empty parameters never travel, but where another rank used one, the Reducer has to make a .grad for it here.
    const bool used = step.agreed.test(slice.parameter);
    if (used ? all_used || slice.length == 0 : unused_too) slots_.fill(slice.parameter);
  }
}

void Engine::open_step(bool shadow) {
  refuse_capture(step_->buckets.front().buffer().device());
  refresh_layout();
  TORCH_CHECK(
      reducer_.process_group().get() == data_group_.get(),
      "ddp_hooks: the module's process group was replaced; wrap the module anew on every rank, and register again");
  reducer_.unsettle_used_map();
  const int64_t step_number = step_number_++;
  statistics_.steps += 1;
  for (const BucketLayout& bucket : layout_.buckets) statistics_.dense_bytes += bucket.bytes();

  Step& step = *step_;
  step.shadow = shadow;
  step.divisor = reducer_.divisor();
  step.factor = 1.0 / step.divisor;
  step.brought = UsageMask(reduced_count_);
  absence_->forget_unless_of(reducer_.forward_passes());
  AgreedUsage usage = agreement_->agree(shadow, layout_hash_);
  step.local = std::move(usage.here);
  step.agreed = std::move(usage.anywhere);
  step.used = step.agreed;
  step.same_usage = usage.same_everywhere;
  step.nobody_joined = usage.nobody_joined;
  for (size_t i = 0; i < late_parameters_.size(); ++i) {
    if (step.agreed.test(reduced_count_ + i)) step.late.push_back(late_parameters_[i]);
  }
  if (!shadow && !reducer_.searches_graph()) {
    for (size_t i = 0; i < reduced_count_; ++i) {
      if (!step.agreed.test(i) && !slots_.is_vacant(i)) {
        step.untouched.emplace_back(parameter(i), parameter(i).grad());
      }
    }
  }

  const bool alone = data_group_->getSize() == 1;
  const bool values = settings_.values_detector == ValuesDetector::kOn ||
                      (settings_.values_detector == ValuesDetector::kAdaptive && probe_.wants_values(step_number));
  if (values && !alone) {
    statistics_.values_steps += 1;
    step.planner.emplace(layout_, settings_.plan);
    step.settles_last = !step.same_usage;
    return;
  }
  // Alone there is nobody to send to, whatever is used.
  const UsageMask to_send = alone ? agreement_->nothing() : step.agreed;
  step.plan = plans_.find(to_send);
  (step.plan ? statistics_.plan_cache_hits : statistics_.plan_cache_misses) += 1;
  if (!step.plan) {
    RECORD_FUNCTION("ddp_hooks::plan", std::vector<c10::IValue>());
    step.plan = std::make_shared<WirePlan>(make_wire_plan(layout_, to_send, settings_.plan));
    plans_.insert(to_send, step.plan);
  }
}

void Engine::refresh_layout() {
  // The Reducer rebuilds its buckets once, between two steps.
  if (!layout_.buckets.empty() && layout_is_rebuilt_ == reducer_.has_rebuilt_buckets()) return;
  layout_is_rebuilt_ = reducer_.has_rebuilt_buckets();
  slots_.forget();
  layout_ = reducer_.layout();
  layout_hash_ = layout_.hash();
  plans_.clear();
  sender_.drop_staging();
}

void Engine::advance_values(uint32_t bucket) {
  Step& step = *step_;
  scan_values(bucket);
  const bool last = bucket + 1 == layout_.buckets.size();
  // A device scans while the host goes on, so there the answer is asked for one bucket later.
  const uint32_t scanned = last || step.buckets[bucket].buffer().is_cpu() ? bucket + 1 : bucket;
  while (step.exchanged < scanned) start_values_exchange(step.exchanged++);
  const uint32_t ready = last ? bucket + 1 : step.settles_last || scanned == 0 ? 0 : scanned - 1;
  while (step.settled < ready) settle_values(step.settled++);
}

void Engine::scan_values(uint32_t bucket) {
  RECORD_FUNCTION("ddp_hooks::scan", std::vector<c10::IValue>());
  Step& step = *step_;
  const BucketLayout& layout = layout_.buckets[bucket];
  ValuesOfBucket& values = step.values.emplace_back(Step::Values{ValuesOfBucket(layout), nullptr}).here;
  // A joined rank's buckets are all zeros; so are undefined gradients, which the Reducer fills in.
  if (layout.sparse || step.shadow) return;
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    const size_t parameter = layout.slices[i].parameter;
    if (!step.agreed.test(parameter)) continue;
    if (!step.local.test(parameter) && !reducer_.has_gradient(parameter)) continue;
    values.add(i, step.buckets[bucket].flat(), slots_);
  }
  values.start();
}

void Engine::start_values_exchange(uint32_t bucket) {
  Step& step = *step_;
  const BucketLayout& layout = layout_.buckets[bucket];
  if (layout.sparse || !any_used(layout, step.agreed)) return;
  const UsageMask nonzero = step.values[bucket].here.nonzero();
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    if (!nonzero.test(i)) step.local.clear(layout.slices[i].parameter);
  }
  step.values[bucket].exchange = agreement_->start_exchange(nonzero, layout_hash_, bucket + 1);
}

void Engine::settle_values(uint32_t bucket) {
  Step& step = *step_;
  const BucketLayout& layout = layout_.buckets[bucket];
  if (PendingExchange* exchange = step.values[bucket].exchange.get()) {
    const int64_t before = used_bytes(layout, step.agreed);
    step.values[bucket].here.settle(agreement_->wait(*exchange), step.agreed, slots_);
    step.used_bytes += before;
    step.zero_bytes += before - used_bytes(layout, step.agreed);
  }
  sender_.send(step_, layout_, bucket, step.planner->add_bucket(bucket, step.agreed));
}

void Engine::close_step() {
  Step& step = *step_;
  usage_ = {step.local, step.agreed};
  if (step.planner) probe_.observe(step_number_ - 1, step.used_bytes, step.zero_bytes);
  absence_->step_closed();
  step.rebuild = is_time_to_rebuild(step);
  if (step.nobody_joined) reducer_.settle_used_map(step.used);
  if (step.shadow) {
    // No backward pass will end here, so it takes part at once. The control group keeps the order.
    average_late(step, false);
    return;
  }
  if (step.untouched.empty() && step.late.empty() && !step.rebuild && !reducer_.searches_graph()) return;
  // The Reducer queues its own last act when this call returns; what is queued from within a callback comes after it.
  auto& autograd = torch::autograd::Engine::get_default_engine();
  autograd.queue_callback([&autograd, self = shared_from_this(), step = step_] {
    autograd.queue_callback([self, step] { self->after_backward(step); });
  });
}

bool Engine::is_time_to_rebuild(const Step& step) {
  // A new Reducer would learn a static graph anew, in whatever pass comes next; under no_sync() torch cannot.
  if (settings_.rebuild_after_steps == 0 || reducer_.has_static_graph()) return false;
  bool differs = !step.late.empty();
  for (size_t i = 0; i < reduced_count_ && !differs; ++i) differs = !step.used.test(i);
  // A joined rank runs no backward pass at the end of which it could rebuild.
  const uint64_t hash = step.used.hash();
  const bool same = hash == stable_mask_hash_ && differs && !step.used.test(agreement_->joined_bit());
  stable_steps_ = same ? stable_steps_ + 1 : 1;
  stable_mask_hash_ = hash;
  return same && stable_steps_ == settings_.rebuild_after_steps;
}

void Engine::after_backward(const std::shared_ptr<Step>& step) {
  for (const auto& [parameter, gradient] : step->untouched) parameter.mutable_grad() = gradient;
  // Where the map of used parameters was settled, the Reducer has not waited for it, but whoever asks for it now
  // expects the reduced one.
  reducer_.wait_for_used_map();
  average_late(*step, true);
  if (step->rebuild && rebuild_) rebuild_();
}

void Engine::average_late(const Step& step, bool contribute) {
  if (step.late.empty() || control_groups_->world_size() == 1) return;
  const LateMessages sent = average_late_gradients(control_groups_->all(), step.late, step.factor, contribute);
  std::lock_guard lock(mutex_);
  statistics_.messages += sent.messages;
  statistics_.payload_bytes += sent.gradient_bytes;
  statistics_.mask_bytes += sent.flag_bytes;
  // Plain DDP, which does not know these, would have to send them, too.
  statistics_.dense_bytes += sent.gradient_bytes;
}

const at::Tensor& Engine::parameter(size_t index) const {
  return index < reduced_count_ ? reducer_.parameters()[index] : late_parameters_[index - reduced_count_];
}

void Engine::declare_unused(const std::vector<size_t>& parameters) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  absence_->declare(parameters);
}

void Engine::register_natively() {
  reducer_.register_hook(std::make_unique<SkipUnusedHook>(shared_from_this()));
  takes_gradients_ = true;
}

void Engine::watch_gradients() {
  for (size_t i = 0; i < reduced_count_; ++i) {
    reports_.emplace_back(reducer_.accumulators()[i], [engine = weak_from_this(), i] {
      if (auto self = engine.lock()) self->gradient_reported(i);
    });
  }
}

void Engine::gradient_reported(size_t index) {
  if (has_to_mark_.load(std::memory_order_relaxed)) mark_absent();
  // The model may be trained on without its wrapper.
  if (reducer_.is_gone()) return;
  // On a device a launch for each parameter would cost more than its cache saves.
  const bool brings = takes_gradients_ && parameter(index).is_cpu();
  // Where the Reducer searches the graph, it notes itself what was accumulated.
  if (!brings && reducer_.searches_graph()) return;
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  if (closed_) return;
  if (!reducer_.expects_backward()) return absence_->accumulated(index);
  if (!brings) return;
  // Before the step opens, nobody knows how a gradient will travel.
  if (!step_ || step_->error || !reducer_.is_final(index)) return;
  const Stopwatch stopwatch;
  const at::NoGradGuard no_grad;
  sender_.bring_early(*step_, index);
  statistics_.hook_seconds += stopwatch.seconds();
}

// Without a graph search the Reducer waits for every parameter, and one that is absent will not report by itself. It is
// told when the first of the others has reported: from then on DDP requires the pass to be finished, so that one that
// fails before has to leave no mark. And whatever waits for the agreed mask has gone on until then.
void Engine::mark_absent() {
  std::vector<size_t> absent;
  {
    std::lock_guard lock(mutex_);
    has_to_mark_ = false;
    absent.swap(to_mark_);
    if (reducer_.is_gone() || to_mark_forward_ != reducer_.forward_passes()) return;
  }
  // May run the hook, so no lock is held.
  for (size_t index : absent) reducer_.mark_ready(index);
}

void Engine::set_rebuild(std::function<void()> rebuild) {
  rebuild_ = std::move(rebuild);
}

void Engine::forward_done(const std::vector<at::Tensor>& outputs, bool synchronises) {
  for (const at::Tensor& output : outputs) refuse_capture(output.device());
  std::lock_guard lock(mutex_);
  if (closed_) return;
  has_to_mark_ = false;
  to_mark_.clear();
  if (!synchronises) {
    absence_->accumulating_forward_done();
    return;
  }
  watched_forward_ = reducer_.forward_passes();
  absence_->synchronising_forward_done(watched_forward_);
  // Hooks live as long as the graph that they are in.
  const auto graphs = std::make_shared<char>();
  graphs_of_outputs_ = graphs;
  outputs_are_watched_ = !outputs.empty();
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    if (output.is_leaf()) {
      // A hook on a leaf would stay for good.
      outputs_are_watched_ = false;
      continue;
    }
    output.register_hook([engine = weak_from_this(), graphs](const at::Tensor&) {
      if (auto self = engine.lock()) self->outputs_reached();
    });
  }
}

bool Engine::awaits_backward() const {
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  if (!reducer_.expects_backward()) return false;
  // What was not watched may still come.
  const bool watched = watched_forward_ == reducer_.forward_passes() && outputs_are_watched_;
  return !watched || !graphs_of_outputs_.expired();
}

void Engine::outputs_reached() {
  {
    auto reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    if (closed_) return;
    if (!reducer_.expects_backward() || reducer_.learns_static_graph()) return;
    absence_->forget_unless_of(reducer_.forward_passes());
    const auto* restricted = torch::autograd::get_current_graph_task_exec_info();
    if (restricted != nullptr && !restricted->empty()) {
      // torch.autograd.grad() and backward(inputs=...) may stop short of the parameters. Distributed autograd does not,
      // but keeps gradients elsewhere than in .grad, where the Reducer alone finds them.
      if (!reducer_.in_backward()) give_slots_back();
      return;
    }
    absence_->check_declarations(kReportsPerParameter);
    if (!reaches_reducer()) {
      // The Reducer will not begin, and so would never ask for gradients that it does not know.
      for (size_t i = reduced_count_; i < agreement_->joined_bit(); ++i) {
        TORCH_CHECK(absence_->has_nothing_to_send(i), "ddp_hooks: parameter '", names_[i],
                    "' was thawed after DDP's Reducer had been made without it, and nothing that the Reducer knows is "
                    "used beside it: call ddp_hooks.rebuild(ddp) after thawing");
      }
      return;
    }
    // With create_graph=True gradients are part of a graph, which the engine would cut; the Reducer refuses that
    // itself.
    const bool takes_gradients = takes_gradients_ && !at::GradMode::is_enabled();
    // Some parameters may have reported before the outputs were reached, if the loss uses them directly.
    if (!reducer_.in_backward()) {
      start_early_exchange();
      takes_gradients ? vacate_slots() : give_slots_back();
    }
    if (reducer_.searches_graph()) return;
    std::vector<size_t> absent = absence_->take_to_mark();
    if (absent.empty()) return;
    to_mark_ = std::move(absent);
    to_mark_forward_ = reducer_.forward_passes();
    has_to_mark_ = true;
  }
  // At the latest when all gradients have come; a declared parameter may be in a graph and get none.
  torch::autograd::Engine::get_default_engine().queue_callback([engine = weak_from_this()] {
    if (auto self = engine.lock()) self->gradients_done();
  });
}

void Engine::gradients_done() {
  if (has_to_mark_) mark_absent();
  std::lock_guard lock(mutex_);
  if (!closed_) absence_->pass_ended();
}

bool Engine::reaches_reducer() const {
  if (reducer_.searches_graph()) return reducer_.reaches_parameters();
  for (size_t i = 0; i < reduced_count_; ++i) {
    if (!absence_->is_absent(i)) return true;
  }
  return false;
}

// Started here and not with the first bucket, so that it is under way before any rank can come to wait for it, whatever
// else the ranks wait for in their backward passes. It must not be started for a pass that never reaches the buckets,
// because the other ranks would not take part.
void Engine::start_early_exchange() {
  if (!agreement_->awaits_start()) return;
  try {
    refresh_layout();
    agreement_->start(layout_hash_);
  } catch (...) {
    agreement_->fail(std::current_exception());
  }
}

void Engine::vacate_slots() {
  refresh_layout();
  slots_.note_gradients();
  for (size_t i = 0; i < reduced_count_; ++i) slots_.vacate(i);
}

void Engine::give_slots_back() {
  refresh_layout();
  slots_.note_gradients();
  for (size_t i = 0; i < reduced_count_; ++i) slots_.give_back(i);
}

bool Engine::has_early_exchange() const {
  std::lock_guard lock(mutex_);
  return !closed_ && agreement_->is_under_way();
}

void Engine::finish_early_exchange() {
  std::lock_guard lock(mutex_);
  if (!agreement_->is_under_way()) refresh_layout();
  agreement_->finish(layout_hash_);
}

void Engine::configure(const EngineSettings& settings) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!step_ && !agreement_->is_under_way(),
              "ddp_hooks: expected a change of policy between two steps, received one during a backward pass");
  settings_ = settings;
  probe_ = ValuesProbe(settings.probe);
  plans_.clear();
  sender_.drop_staging();
  step_number_ = 0;
  stable_steps_ = 0;
}

Statistics Engine::statistics() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void Engine::reset_statistics() {
  std::lock_guard lock(mutex_);
  statistics_ = {};
}

Usage Engine::usage() const {
  std::lock_guard lock(mutex_);
  return usage_;
}

}  // namespace ddp_hooks
