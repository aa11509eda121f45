#include "engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "agreement/stopwatch.h"
#include "engine/skip_unused_hook.h"
#include "engine/step.h"
#include "kernels/devices.h"
#include "transport/unmanaged_gradients.h"

namespace ddp_hooks {
namespace {

// Models that switch between a handful of branches on each of a few ranks need some dozens.
constexpr size_t kCachedPlans = 64;

bool uses_others_than_reduced(const Step& step, size_t reduced_count) {
  if (!step.unmanaged.empty()) return true;
  for (size_t i = 0; i < reduced_count; ++i) {
    if (!step.used.test(i)) return true;
  }
  return false;
}

// Where DDP was told to go on (`_update_process_group`).
std::exception_ptr broken_off() {
  return std::make_exception_ptr(std::runtime_error("ddp_hooks: this backward pass was broken off"));
}

// To be raised at the end of this backward pass by a rank that is wrong alone. What is queued behind an error is never
// called, and other ranks may wait for it: an expectation's verdict, another module's unmanaged gradients. So it comes
// after whatever is queued now, and after what that queues.
void queue_error(std::string message) {
  auto& autograd = torch::autograd::Engine::get_default_engine();
  autograd.queue_callback([&autograd, message = std::move(message)] {
    autograd.queue_callback([message] { TORCH_CHECK(false, message); });
  });
}

// Says since when the hook has been at a bucket, however it leaves.
class InHook {
 public:
  explicit InHook(std::atomic<std::chrono::steady_clock::rep>& since) : since_(since) {
    since_ = std::chrono::steady_clock::now().time_since_epoch().count();
  }
  ~InHook() { since_ = 0; }
  InHook(const InHook&) = delete;
  InHook& operator=(const InHook&) = delete;

 private:
  std::atomic<std::chrono::steady_clock::rep>& since_;
};

void refuse_capture(c10::Device device) {
  TORCH_CHECK(
      !is_capturing(device),
      "ddp_hooks: expected a step that is run, received one that is captured into a CUDA graph: what is sent is "
      "agreed on the host in each step, and a graph would replay one step's answer. Capture without this hook");
}

}  // namespace

std::shared_ptr<Engine> Engine::make(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
                                     const EngineSettings& settings, std::vector<at::Tensor> unmanaged_parameters,
                                     std::vector<std::string> names, const std::vector<size_t>& pending) {
  std::shared_ptr<Engine> engine(new Engine(std::move(reducer), std::move(groups), settings,
                                            std::move(unmanaged_parameters), std::move(names), pending));
  engine->watch_gradients();
  return engine;
}

Engine::Engine(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
               const EngineSettings& settings, std::vector<at::Tensor> unmanaged_parameters,
               std::vector<std::string> names, const std::vector<size_t>& pending)
    : reducer_(std::move(reducer)),
      views_(reducer_),
      layout_(reducer_),
      unmanaged_parameters_(std::move(unmanaged_parameters)),
      names_(std::move(names)),
      data_group_(reducer_.process_group()),
      accumulator_streams_(reducer_.accumulator_streams()),
      settings_(fitted(settings)),
      control_groups_(std::move(groups)),
      probe_(settings.values.probe),
      units_(settings_.units),
      plans_(kCachedPlans),
      sender_(*data_group_, reducer_.parameters().front().device().type(), control_groups_, views_,
              statistics_.messages) {
  const size_t parameters = reducer_.parameters().size() + unmanaged_parameters_.size();
  TORCH_CHECK(names_.size() == parameters, "ddp_hooks: expected a name for each of the module's ", parameters,
              " parameters, received ", names_.size());
  const PartsOfPrologue parts{reducer_, views_, layout_, unmanaged_parameters_, names_, statistics_.exchanges};
  prologue_ = std::make_unique<BackwardPrologue>(parts, pending, control_groups_, settings_.agreement,
                                                 [this](bool none) { return units_.objections(none); });
  for (size_t i : pending) {
    if (i < reducer_.parameters().size()) reducer_.note_used(i);
  }
}

Engine::~Engine() {
  // Perhaps within the Reducer's own destructor, which drops the group after this; and perhaps with the GIL held.
  data_group_.let_go_after(reducer_.lifetime());
}

void Engine::close(bool remove_hook, bool dying) {
  // Declared before the locks: what this drops, other groups and hooks among it, goes when they are free again.
  std::vector<GradientReport> reports;
  std::unique_ptr<BackwardPrologue> prologue;
  std::shared_ptr<const ControlGroups> control_groups;
  std::function<void()> rebuild;
  std::function<void()> tell_unregistered;
  std::function<std::string(const std::string&)> explain;
  std::unique_ptr<c10d::CommHookInterface> hook;
  const bool reducer_is_gone = reducer_.is_gone();
  ReducerLock reducer_lock;
  if (!reducer_is_gone) reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  if (!prologue_) return;
  if (!reducer_is_gone) {
    TORCH_CHECK(dying || (!step_ && !reducer_.in_backward() && ending_.expired()),
                "ddp_hooks: expected the state to be closed between two steps, received a call during a backward pass");
    // Not into buckets that a forward pass has had made anew since the last step.
    views_.forget();
    if (!reducer_.in_backward()) reducer_.unmark_used_map_reduced();
    if (remove_hook && !dying) hook = reducer_.take_hook();
  }
  step_.reset();
  sender_.drop();
  reports.swap(reports_);
  prologue.swap(prologue_);
  control_groups.swap(control_groups_);
  rebuild.swap(rebuild_);
  tell_unregistered.swap(tell_unregistered_);
  explain.swap(explain_);
  if (dying || reducer_is_gone) {
    data_group_.let_go_after(reducer_.lifetime());
  } else {
    data_group_.let_go();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> Engine::run(c10d::GradBucket& bucket) {
  RECORD_FUNCTION("ddp_hooks::bucket", std::vector<c10::IValue>());
  const Stopwatch stopwatch;
  const InHook in_hook(in_hook_since_);
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
    const double waited_before = statistics_.exchanges.wait_seconds;
    const at::NoGradGuard no_grad;
    try {
      TORCH_CHECK(prologue_, "ddp_hooks: expected a state that serves this module, received one that was closed; call ",
                  "ddp_hooks.register(ddp) on every rank");
      take_bucket(bucket, shadow, future);
    } catch (...) {
      const bool is_known = step_ && step_->error;
      const std::exception_ptr error = is_known ? step_->error : explained(std::current_exception());
      step_ ? step_->fail(error) : future->setError(error);
      // Collectives that are still under way keep their own references.
      sender_.drop();
    }
    if (bucket.isLast() && !shadow && !(step_ && step_->closed)) leave_out_used_map();
    if (step_ && step_->buckets.size() >= layout_->buckets.size()) {
      last_step_ = step_;
      step_.reset();
    }
    statistics_.hook_seconds += stopwatch.seconds() - (statistics_.exchanges.wait_seconds - waited_before);
  } catch (...) {
    if (!future->completed()) future->setError(std::current_exception());
  }
  return future;
}

double Engine::seconds_in_hook() const {
  using std::chrono::steady_clock;
  const steady_clock::rep since = in_hook_since_;
  if (since == 0) return 0;
  const auto taken = steady_clock::now() - steady_clock::time_point(steady_clock::duration(since));
  return std::chrono::duration<double>(taken).count();
}

// Asks who was missing, for seconds, while the others fail for the same reason.
std::exception_ptr Engine::explained(const std::exception_ptr& error) const {
  if (!explain_) return error;
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& failed) {
    // Of a type that users may catch, so it stays the same error.
    const std::string more = explain_(failed.what());
    if (!more.empty()) failed.add_context(more);
    return std::current_exception();
  } catch (const std::exception& failed) {
    const std::string said = failed.what();
    const std::string more = explain_(said);
    return more.empty() ? error : std::make_exception_ptr(std::runtime_error(said + "\n" + more));
  } catch (...) {
    return error;
  }
}

void Engine::take_bucket(c10d::GradBucket& bucket, bool shadow, const Future& future) {
  if (bucket.getIndex() == 0 && !reducer_.learns_static_graph()) forget_broken_pass();
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
  check_bucket(index);
  if (!shadow) prepare_gradients(index);
  send_parameters(index);
  if (step_->units) {
    step_->units->bucket_ready(index, layout_->buckets[index].sparse ? at::Tensor() : step_->buckets[index].flat(),
                               step_->local, [&](const SettledUnits& settled) { return send_units(settled); });
  }
  if (index + 1 == layout_->buckets.size()) close_step();
}

void Engine::forget_broken_pass() {
  if (!step_) return;
  step_->fail(broken_off());
  step_.reset();
  sender_.drop();
}

void Engine::check_bucket(uint32_t bucket) {
  const BucketLayout& layout = layout_->buckets[bucket];
  if (layout.sparse) {
    statistics_.dense_bytes += payload_bytes(step_->buckets[bucket].buffer());
    return;
  }
  const int64_t received = step_->buckets[bucket].flat().numel();
  TORCH_CHECK(received == layout.numel, "ddp_hooks: bucket ", bucket, ": expected ", layout.numel,
              " elements of the module that the state was made for, received ", received,
              ". A SkipUnusedState serves one DistributedDataParallel module; make one for each");
}

// Accumulators that are made on different streams accumulate on those, such as old ones and new ones of a Reducer that
// was made anew. What is sent now is of this bucket and of those before; the Reducer goes by the last gradient's
// stream, and autograd records a gradient on its accumulator's alone.
void Engine::wait_for_gradients(uint32_t bucket) const {
  const c10::Device device = step_->buckets[bucket].buffer().device();
  for (const c10::Stream& stream : accumulator_streams_) {
    if (stream.device() != device || stream == current_stream(device)) continue;
    c10::Event accumulated(device.type());
    accumulated.record(stream);
    accumulated.block(current_stream(device));
  }
  if (accumulator_streams_.size() <= 1) return;
  for (const ParameterSlice& slice : layout_->buckets[bucket].slices) {
    const at::Tensor& gradient = reducer_.parameters()[slice.parameter].grad();
    if (!gradient.defined() || gradient.is_sparse()) continue;
    for (const c10::Stream& stream : accumulator_streams_) {
      if (stream.device() == device) gradient.record_stream(stream);
    }
  }
}

void Engine::prepare_gradients(uint32_t bucket) {
  wait_for_gradients(bucket);
  fill_views(bucket);
  note_unannounced(bucket);
  // Before the bucket is sent, because then gradients are where autograd has left them. Alone nobody asks.
  const BucketLayout& layout = layout_->buckets[bucket];
  if (layout.sparse || data_group_->getSize() == 1) return;
  units_.look(layout, step_->buckets[bucket].flat(), views_, step_->agreed, step_number_);
}

// Whole ones: of this bucket, or of those whose values are known now.
void Engine::send_parameters(uint32_t bucket) {
  if (step_->units && step_->units->concerns(bucket)) step_->buckets[bucket].hold();
  if (!step_->values) return send_bucket(bucket, step_->plan->buckets[bucket]);
  const bool scans = !layout_->buckets[bucket].sparse && !step_->shadow;  // a joined rank's buckets are all zeros
  step_->values->bucket_ready(
      bucket, scans ? std::make_optional(step_->buckets[bucket].flat()) : std::nullopt, step_->local, step_->agreed,
      [&](uint32_t settled) { send_bucket(settled, step_->planner->add_bucket(settled, step_->agreed)); });
}

// What travels from those who contribute, by what was agreed, would leave out a gradient that nobody announced.
void Engine::note_unannounced(uint32_t bucket) {
  Step& step = *step_;
  if (!step.plan || step.plan->direct.count() == 0) return;
  for (const ParameterSlice& slice : layout_->buckets[bucket].slices) {
    if (!step.plan->direct.test(slice.parameter)) continue;
    // Not what this rank uses: it may have taken up masks that an earlier pass, which failed, had sent.
    if (contains(step.contributors.ranks(slice.parameter), data_group_->getRank())) continue;
    if (!views_.has_gradient(slice.parameter)) continue;
    step.unannounced = slice.parameter;
    // What comes from the others is written here, and the Reducer wants to find it in .grad.
    if (reducer_.gradients_are_views()) views_.fill(slice.parameter);
  }
}

void Engine::fill_views(uint32_t bucket) {
  const Step& step = *step_;
  // Alone nothing is sent, and the Reducer copies what it finds in the bucket.
  const bool all_used = data_group_->getSize() == 1;
  // A rank that has joined tells the Reducer about old uses, and the Reducer makes gradients of them; without a search
  // it asks nobody, and would make gradients of everything.
  const bool unused_too = step.agreed.test(prologue_->agreement().joined_bit()) && reducer_.searches_graph();
  for (const ParameterSlice& slice : layout_->buckets[bucket].slices) {
    if (!views_.is_detached(slice.parameter)) continue;
    reducer_.forget_use_without_gradient(slice.parameter);
    // Empty parameters never travel, but where another rank used one, the Reducer has to make a .grad for it here.
    const bool used = step.agreed.test(slice.parameter);
    if (used ? all_used || slice.length == 0 : unused_too) views_.fill(slice.parameter);
  }
}

void Engine::send_bucket(uint32_t bucket, const BucketPlan& plan) {
  sender_.send(step_, *layout_, bucket, plan, step_->units && step_->units->concerns(bucket));
}

// What a group and a policy allow.
EngineSettings Engine::fitted(EngineSettings settings) const {
  Transports& transports = settings.plan.direct.transports;
  transports.world_size = data_group_->getSize();
  transports.broadcasts = transports.broadcasts && settings.agreement.graph_detector &&
                          DirectSender::is_possible(*data_group_, reducer_.parameters().front().device());
  transports.sums = transports.sums && transports.broadcasts &&
                    DirectSender::can_sum(*data_group_, reducer_.parameters().front().device());
  const bool pays =
      settings.units.widths == ValuesDetector::kOn || narrow_pays(settings.plan.direct.costs, transports.world_size);
  if (!transports.broadcasts || !pays) settings.units.widths = ValuesDetector::kOff;
  settings.agreement.asks_who = transports.broadcasts || settings.averages_contributors;
  return settings;
}

std::vector<SentElements> Engine::send_units(const SettledUnits& settled) {
  std::vector<Units> units;
  for (const DividedGradient& gradient : settled.gradients) units.push_back(gradient.units);
  const int64_t element_bytes = layout_->buckets[settled.bucket].element_bytes;
  const UnitPlan plan = make_unit_plan(units, settled.used, settled.contributors, element_bytes, settings_.plan);
  sender_.send_units(step_, settled.bucket, settled.gradients, plan);
  return plan.sent;
}

void Engine::open_step(bool shadow) {
  refuse_capture(step_->buckets.front().buffer().device());
  refresh_layout();
  TORCH_CHECK(
      reducer_.process_group().get() == data_group_.get(),
      "ddp_hooks: the module's process group was replaced; wrap the module anew on every rank, and register again");
  reducer_.wait_for_used_map();
  reducer_.unmark_used_map_reduced();
  const int64_t step_number = step_number_++;
  statistics_.steps += 1;
  for (const BucketLayout& bucket : layout_->buckets) statistics_.dense_bytes += bucket.bytes();

  const AgreedUsage usage = agree(shadow);
  ++agreed_steps_;
  keep_untouched();
  // Alone there is nobody to send to, whatever is used.
  if (data_group_->getSize() == 1) return plan_parameters(prologue_->agreement().nothing(), Contributors());
  choose_detectors(usage, step_number);
  if (step_->values) return;
  // A rank that contributes what its mask does not say would not be heard.
  const bool direct = settings_.plan.direct.transports.broadcasts && usage.nothing_left_over && step_->nobody_joined;
  plan_parameters(step_->agreed, direct ? step_->contributors : Contributors());
}

// Waits for the other ranks.
AgreedUsage Engine::agree(bool shadow) {
  Step& step = *step_;
  const size_t reduced_count = reducer_.parameters().size();
  step.shadow = shadow;
  step.divisor = reducer_.divisor();
  step.copied_early = UsageMask(reduced_count);
  AgreedUsage usage = prologue_->first_bucket_ready(shadow);
  step.local = usage.here;
  step.agreed = step.used = usage.anywhere;
  step.nobody_joined = usage.nobody_joined;
  step.contributors = usage.contributors;
  step.unannounced = usage.unannounced;
  // What is left of earlier passes is sent again by ranks that do not count as contributors, and was divided already.
  step.divides_by_contributors =
      settings_.averages_contributors && step.contributors.are_known() && usage.nothing_left_over;
  for (size_t i = 0; i < unmanaged_parameters_.size(); ++i) {
    if (step.agreed.test(reduced_count + i)) step.unmanaged.push_back(i);
  }
  return usage;
}

// The gradients that no rank has used, which the Reducer is about to overwrite.
void Engine::keep_untouched() {
  Step& step = *step_;
  if (step.shadow || reducer_.searches_graph()) return;
  bool is_written = false;
  for (size_t i = 0; i < reducer_.parameters().size(); ++i) {
    if (step.agreed.test(i) || views_.is_detached(i)) continue;
    const at::Tensor& parameter = reducer_.parameters()[i];
    step.untouched.emplace_back(parameter, parameter.grad());
    // With a static graph the Reducer itself leaves alone what was unused in the first pass.
    is_written = is_written || !reducer_.has_static_graph() || !parameter.requires_grad();
  }
  TORCH_CHECK(!is_written || !reducer_.finalizes_manually(),
              "ddp_hooks: some parameters are unused on every rank in this step, and DDP would write their .grad in "
              "finalize_backward(), after which nothing puts it "
              "back: with require_manual_backward_finalization and without a search of the graph expected buckets "
              "that the engine fills; register with ddp_hooks.register(ddp), leave lazy_bucket_allocation out, call "
              "ddp_hooks.rebuild(ddp) after freezing, or wrap with find_unused_parameters=True");
}

// What is looked into in this step: units of some parameters, and the values of the others.
void Engine::choose_detectors(const AgreedUsage& usage, int64_t step_number) {
  Step& step = *step_;
  const DetectedStep detected{
      *layout_,
      layout_.hash(),
      prologue_->agreement(),
      views_,
      {!usage.same_everywhere, !step.buckets.front().buffer().is_cpu(), layout_->buckets_on_idle_link()}};
  // A joined rank has nothing to look into, and makes the Reducer write gradients that nobody has.
  if (!step.agreed.test(prologue_->agreement().joined_bit())) {
    ChosenUnits chosen = units_.choose(step.agreed, usage.objections, step_number);
    if (chosen.parameters.count() > 0) {
      statistics_.rows_steps += chosen.asks_rows;
      statistics_.narrow_steps += chosen.widths.count() > 0;
      step.agreed.subtract(chosen.parameters);
      step.units.emplace(detected, *looked_up_, units_, std::move(chosen), step_number);
    }
  }
  const ValuesDetector detector = settings_.values.detector;
  if (detector == ValuesDetector::kOff) return;
  if (detector == ValuesDetector::kAdaptive && !probe_.wants_values(step_number)) return;
  statistics_.values_steps += 1;
  step.planner.emplace(*layout_, divided(), settings_.plan);
  step.values.emplace(detected);
}

// The parameters that travel by units in this step.
UsageMask Engine::divided() const {
  return step_->units ? step_->units->chosen() : prologue_->agreement().nothing();
}

void Engine::plan_parameters(const UsageMask& to_send, const Contributors& who) {
  step_->plan = plans_.find(to_send, divided(), who);
  (step_->plan ? statistics_.plan_cache_hits : statistics_.plan_cache_misses) += 1;
  if (step_->plan) return;
  RECORD_FUNCTION("ddp_hooks::plan", std::vector<c10::IValue>());
  step_->plan = std::make_shared<ReductionPlan>(make_reduction_plan(*layout_, to_send, divided(), who, settings_.plan));
  plans_.insert(to_send, divided(), who, step_->plan);
}

// What a rank has not sent the others wait for, and they would take the next that comes from it for that: its
// all-reduce of the used map, which is of another size and another type.
void Engine::leave_out_used_map() {
  if (!reducer_.searches_graph()) return;
  // Goes with the callback if the pass ends without calling it.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [left_out = reducer_.leave_out_used_map()]() mutable { left_out.reset(); });
}

void Engine::refresh_layout() {
  if (!layout_.refresh()) return;
  units_.use_layout(*layout_);
  views_.forget();
  plans_.clear();
  sender_.drop();
}

void Engine::close_step() {
  Step& step = *step_;
  step.closed = true;
  usage_ = {step.local, step.agreed, {}, step.contributors};
  if (step.units) {
    usage_.units = step.units->counts();
    for (const UnitCounts& counts : usage_.units) {
      if (counts.here == 0) usage_.here.clear(counts.parameter);
      if (counts.anywhere > 0) usage_.anywhere.set(counts.parameter);
      statistics_.units_agreed_on += counts.units;
      statistics_.units_sent += counts.anywhere;
      statistics_.units_narrow += counts.narrow;
    }
  }
  if (step.values) probe_.observe(step_number_ - 1, step.values->used_bytes(), step.values->zero_bytes());
  prologue_->step_closed();
  looked_up_->forget();
  // A new Reducer would learn a static graph anew, in whatever pass comes next; under no_sync() torch cannot.
  if (settings_.rebuild_after_steps > 0 && !reducer_.has_static_graph()) {
    // A joined rank runs no backward pass, so there is no end at which it could rebuild.
    const bool pays = uses_others_than_reduced(step, reducer_.parameters().size()) &&
                      !step.used.test(prologue_->agreement().joined_bit());
    step.rebuild = rebuild_timer_.step_closed(step.used.hash(), pays, settings_.rebuild_after_steps);
  }
  if (step.nobody_joined) reducer_.mark_used_map_reduced(step.used);
  if (step.shadow) {
    // No backward pass will end here, so it takes part at once. The control group keeps the order.
    average_unmanaged(step, false);
    return;
  }
  if (step.untouched.empty() && step.unmanaged.empty() && !step.rebuild && !step.unannounced &&
      !reducer_.searches_graph()) {
    return;
  }
  // Goes with the callbacks if the pass ends without calling them.
  std::shared_ptr<void> ending;
  if (!step.unmanaged.empty() || step.rebuild) ending_ = ending = std::make_shared<char>();
  // The Reducer queues its own last act when this call returns; what is queued from within a callback comes after it.
  auto& autograd = torch::autograd::Engine::get_default_engine();
  autograd.queue_callback([&autograd, self = shared_from_this(), step = step_, ending = std::move(ending)] {
    autograd.queue_callback([self, step, ending] { self->after_backward(step); });
  });
}

void Engine::after_backward(const std::shared_ptr<Step>& step) {
  for (const auto& [parameter, gradient] : step->untouched) parameter.mutable_grad() = gradient;
  // Where the map of used parameters was settled, the Reducer has not waited for it, but whoever asks for it now
  // expects the reduced one.
  reducer_.wait_for_used_map();
  average_unmanaged(*step, true);
  if (step->unannounced) {
    queue_error(
        "ddp_hooks: parameter '" + names_[*step->unannounced] +
        "' was unused here when the mask exchange began and has a gradient now, which was not sent: expected what is "
        "used to stand when backward reaches the module's outputs. An earlier backward pass that failed half-way, or a "
        "gradient made by hand during this one, can be the cause");
  }
  // Drops buckets that .grad has yet to be read from on this stream. The wait for their futures recorded them on it.
  if (step->rebuild) rebuild();
  std::lock_guard lock(mutex_);
  ending_.reset();
}

// A rebuild closes this engine, which lets go of what it is doing right now.
void Engine::rebuild() {
  std::function<void()> rebuild;
  {
    std::lock_guard lock(mutex_);
    rebuild = rebuild_;
  }
  if (rebuild) rebuild();
}

void Engine::average_unmanaged(const Step& step, bool contribute) {
  if (step.unmanaged.empty()) return;
  // Held, because the module may go, and close this, while the group is waited for.
  std::shared_ptr<const ControlGroups> groups;
  std::vector<UnmanagedGradient> gradients;
  {
    std::lock_guard lock(mutex_);
    if (!prologue_ || control_groups_->world_size() == 1) return;
    groups = control_groups_;
    for (size_t i : step.unmanaged) {
      gradients.push_back({unmanaged_parameters_[i], contribute && prologue_->unmanaged_has_gradient(i)});
    }
    if (contribute) prologue_->unmanaged_averaged();
  }
  // A rank that has joined does not need the result, and must go on: the others wait for it elsewhere first.
  const UnmanagedMessages sent = average_unmanaged_gradients(
      groups->all(), gradients, step.divides_by_contributors ? 0 : 1 / step.divisor, contribute);
  if (sent.sparse) {
    queue_error(
        "ddp_hooks: parameter '" + names_[reducer_.parameters().size() + step.unmanaged[*sent.sparse]] +
        "' was unfrozen after DDP's Reducer had been made without it: expected a dense gradient, received a sparse "
        "one, which was not sent; call ddp_hooks.rebuild(ddp) after unfreezing");
  }
  std::lock_guard lock(mutex_);
  statistics_.messages.messages += sent.messages;
  statistics_.messages.payload_bytes += sent.gradient_bytes;
  statistics_.exchanges.mask_bytes += sent.flag_bytes;
  // Plain DDP, which does not know these, would have to send them, too.
  statistics_.dense_bytes += sent.gradient_bytes;
}

void Engine::declare_unused(const std::vector<size_t>& parameters) {
  std::lock_guard lock(mutex_);
  if (prologue_) prologue_->declare_unused(parameters);
}

void Engine::register_natively() {
  reducer_.register_hook(std::make_unique<SkipUnusedHook>(shared_from_this()));
  // Where buckets get their memory as gradients come, there is no slice to put a gradient into before.
  takes_gradients_ = !reducer_.allocates_lazily();
  lacks_hook_ = false;
}

void Engine::watch_gradients() {
  for (size_t i = 0; i < reducer_.parameters().size(); ++i) {
    reports_.emplace_back(reducer_.accumulators()[i], [engine = weak_from_this(), i] {
      if (auto self = engine.lock()) self->gradient_reported(i);
    });
  }
}

void Engine::gradient_reported(size_t index) {
  mark_absent();
  // The model may be trained on without its wrapper.
  if (reducer_.is_gone()) return;
  if (lacks_hook_.load(std::memory_order_relaxed)) look_for_hook();
  // On a device a launch for each parameter would cost more than its cache saves.
  const bool copies_early = takes_gradients_ && reducer_.parameters()[index].is_cpu();
  // Where the Reducer searches the graph, it notes itself what was accumulated.
  if (!copies_early && reducer_.searches_graph()) return;
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  if (!prologue_) return;
  if (!reducer_.expects_backward()) return prologue_->gradient_accumulated(index);
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
  // Behind the Reducer's own last act. In a pass that fails nothing of this is called.
  auto& autograd = torch::autograd::Engine::get_default_engine();
  autograd.queue_callback([&autograd, engine = weak_from_this()] {
    autograd.queue_callback([engine] {
      if (auto self = engine.lock()) self->reduced_without_hook();
    });
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
void Engine::mark_absent() {
  if (!has_marks_.load(std::memory_order_relaxed)) return;
  std::vector<size_t> absent;
  {
    std::lock_guard lock(mutex_);
    if (!prologue_ || reducer_.is_gone()) return;
    has_marks_ = false;
    absent = prologue_->take_marks();
  }
  // May run the hook, so no lock is held.
  for (size_t index : absent) reducer_.mark_ready(index);
}

void Engine::unmanaged_gradient_reported(size_t index) {
  std::lock_guard lock(mutex_);
  if (prologue_) prologue_->gradient_accumulated(index);
}

void Engine::set_rebuild(std::function<void()> rebuild) {
  // What was set before goes when the lock is free again.
  std::lock_guard lock(mutex_);
  rebuild_.swap(rebuild);
}

void Engine::set_explain(std::function<std::string(const std::string&)> explain) {
  std::lock_guard lock(mutex_);
  explain_.swap(explain);
}

void Engine::set_tell_unregistered(std::function<void()> tell) {
  std::lock_guard lock(mutex_);
  tell_unregistered_.swap(tell);
}

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
  if (broken) broken->fail(broken_off());
}

void Engine::forward_done(const std::vector<at::Tensor>& outputs, bool synchronises) {
  for (const at::Tensor& output : outputs) refuse_capture(output.device());
  std::lock_guard lock(mutex_);
  if (!prologue_) return;
  TORCH_CHECK(
      settings_.rebuild_after_steps == 0 || !reducer_.finalizes_manually(),
      "ddp_hooks: rebuild_after makes the Reducer anew at the end of backward, when with DDP's "
      "require_manual_backward_finalization its gradients are still under way: expected one of the two, received "
      "both; leave rebuild_after out of the policy, and call ddp_hooks.rebuild(ddp) on every rank after "
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

std::vector<size_t> Engine::unready_parameters() {
  if (reducer_.is_gone()) return {};
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  return prologue_ ? prologue_->unready_parameters() : std::vector<size_t>();
}

void Engine::gradients_done() {
  mark_absent();
  // May run the hook, so no lock is held.
  for (size_t index : unready_parameters()) reducer_.mark_ready(index);
  std::lock_guard lock(mutex_);
  if (prologue_) prologue_->gradients_done();
}

std::vector<size_t> Engine::pending() const {
  if (reducer_.is_gone()) return {};
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  return prologue_ ? prologue_->pending() : std::vector<size_t>();
}

bool Engine::awaits_backward() const {
  auto reducer_lock = reducer_.lock();
  std::lock_guard lock(mutex_);
  return prologue_ && prologue_->awaits_backward();
}

bool Engine::has_early_exchange() const {
  std::lock_guard lock(mutex_);
  return prologue_ && prologue_->agreement().is_under_way();
}

void Engine::finish_early_exchange() {
  std::lock_guard lock(mutex_);
  if (!prologue_->agreement().is_under_way()) refresh_layout();
  prologue_->agreement().finish(layout_.hash());
}

void Engine::configure(const EngineSettings& settings) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!step_ && !(prologue_ && prologue_->agreement().is_under_way()),
              "ddp_hooks: expected a change of policy between two steps, received one during a backward pass");
  settings_ = fitted(settings);
  probe_ = ValuesProbe(settings.values.probe);
  units_ = UnitsDetector(settings_.units);
  // With the layout that stands; before the first step there is none yet.
  units_.use_layout(*layout_);
  plans_.clear();
  sender_.drop();
  step_number_ = 0;
  rebuild_timer_.restart();
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
