// The path of a bucket: what `run` does, and what it queues for the end of backward.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "agreement/stopwatch.h"
#include "engine/end_of_backward.h"
#include "engine/engine.h"
#include "engine/step.h"
#include "kernels/devices.h"
#include "transport/unmanaged_gradients.h"

namespace ddp_hooks {
namespace {

bool uses_others_than_reduced(const Step& step, size_t reduced_count) {
  if (!step.unmanaged.empty()) return true;
  for (size_t i = 0; i < reduced_count; ++i) {
    if (!step.used.test(i)) return true;
  }
  return false;
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

}  // namespace

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
                bucket.getIndex(), "; register the hook before backward() begins");
    open_step(shadow);
  }
  if (step_->error) std::rethrow_exception(step_->error);
  check_bucket(index);
  if (!shadow) prepare_gradients(index);
  send_bucket(index);
  if (index + 1 == layout_->buckets.size()) close_step();
}

void Engine::forget_broken_pass() {
  if (!step_) return;
  step_->break_off();
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

// What is known of this bucket, and what is found out meanwhile about this one or earlier ones.
void Engine::send_bucket(uint32_t bucket) {
  Step& step = *step_;
  const BucketPlan& plan = step.plan->buckets[bucket];
  const bool is_sparse = layout_->buckets[bucket].sparse;
  const bool settles_later = step.units && step.units->concerns(bucket);
  settles_later ? step.buckets[bucket].hold() : sender_.count(layout_->buckets[bucket], plan);
  is_sparse ? sender_.send_sparse(step_, bucket) : sender_.send(step_, *layout_, bucket, plan);
  if (!step.units) return;
  const at::Tensor flat = is_sparse ? at::Tensor() : step.buckets[bucket].flat();
  step.units->bucket_ready(bucket, flat, step.local, step.agreed,
                           [&](const SettledUnits& settled) { return send_settled(settled); });
}

std::vector<double> Engine::send_settled(const SettledUnits& settled) {
  Step& step = *step_;
  const size_t bucket_count = layout_->buckets.size();
  std::vector<GradientToSend> gradients;
  Places divided;
  for (const auto& [parameter, offset, gradient, units, is_divided] : settled.gradients) {
    const Stretch in_bucket{settled.bucket, offset, units.slice_length};
    const Stretch by_itself{bucket_count + divided.size(), 0, units.slice_length};
    gradients.push_back({is_divided ? by_itself : in_bucket, units});
    if (is_divided) divided.push_back({gradient.flat, gradient.offset, step.divisor, views_.is_divided(parameter)});
  }
  BucketPlan plan = std::move(step.planner
                                  ->plan(settled.bucket, {std::move(gradients)}, settled.used,
                                         control_groups_->topology().by_host(settled.contributors))
                                  .front());
  BucketInFlight& bucket = step.buckets[settled.bucket];
  sender_.count(layout_->buckets[settled.bucket], plan);
  sender_.send(step_, *layout_, settled.bucket, plan, divided);
  bucket.release();
  return std::move(plan.sent);
}

// What travels from those who contribute, by what was agreed, would leave out a gradient that nobody announced.
void Engine::note_unannounced(uint32_t bucket) {
  Step& step = *step_;
  if (step.plan->direct.count() == 0) return;
  for (const ParameterSlice& slice : layout_->buckets[bucket].slices) {
    if (!step.plan->direct.test(slice.parameter)) continue;
    // Not what this rank uses: it may have taken up masks that an earlier pass, which failed, had sent.
    if (step.contributors.by_rank()[static_cast<size_t>(data_group_->getRank())].test(slice.parameter)) continue;
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

void Engine::open_step(bool shadow) {
  refuse_capture(step_->buckets.front().buffer().device());
  refresh_layout();
  TORCH_CHECK(reducer_.process_group().get() == data_group_.get(),
              "ddp_hooks: the module's process group was replaced; wrap the module and register again on every rank");
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
  choose_units(usage, step_number);
  if (step_->units && step_->units->chosen().whole) {
    return plan_parameters(prologue_->agreement().nothing(), Contributors());
  }
  // A rank that contributes what its mask does not say would not be heard.
  const bool direct = settings_.plan.direct.transports.direct && usage.nothing_left_over && step_->nobody_joined;
  plan_parameters(step_->agreed, direct ? control_groups_->topology().by_host(step_->contributors) : Contributors());
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
  step.expected = coding_.choose(step_number_ - 1, usage.objections);
  step.contributors = usage.contributors;
  step.unannounced = usage.unannounced;
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
  TORCH_CHECK(
      !is_written || !reducer_.finalizes_manually(),
      "ddp_hooks: some parameters are unused on every rank in this step, and finalize_backward() would overwrite "
      "their .grad, which nothing restores afterwards: with require_manual_backward_finalization and "
      "find_unused_parameters=False, expected buckets that the engine fills. Register with "
      "ddp_hooks.register(ddp), do not set lazy_bucket_allocation, call ddp_hooks.rebuild(ddp) after freezing, "
      "or wrap with find_unused_parameters=True");
}

// What is looked into in this step.
void Engine::choose_units(const AgreedUsage& usage, int64_t step_number) {
  Step& step = *step_;
  ChosenUnits chosen{prologue_->agreement().nothing()};
  // A joined rank has nothing to look into, and makes the Reducer write gradients that nobody has.
  if (!step.agreed.test(prologue_->agreement().joined_bit())) {
    chosen = units_.choose(step.agreed, usage.objections, step_number);
  }
  chosen.whole =
      settings_.skip_zeros == When::kOn || (settings_.skip_zeros == When::kAdaptive && skip_zeros_.is_due(step_number));
  if (chosen.is_empty()) return;
  statistics_.skip_zeros_steps += chosen.whole;
  statistics_.skip_zero_rows_steps += chosen.divided.count() > 0;
  step.agreed.subtract(chosen.divided);
  step.planner.emplace(*layout_, chosen.divided, settings_of_plan());
  const DetectedStep detected{
      *layout_,
      layout_.hash(),
      prologue_->agreement(),
      views_,
      {!usage.same_everywhere, !step.buckets.front().buffer().is_cpu(), layout_->buckets_on_idle_link()},
      step.shadow};
  step.units.emplace(detected, *looked_up_, units_, std::move(chosen), step_number);
}

PlanSettings Engine::settings_of_plan() const {
  PlanSettings settings = settings_.plan;
  settings.direct.transports.coded = step_->expected;
  return settings;
}

void Engine::plan_parameters(const UsageMask& to_send, const Contributors& who) {
  const UsageMask held = step_->units ? step_->units->chosen().divided : prologue_->agreement().nothing();
  const PlanCache::Key key{to_send, held, who, step_->expected};
  step_->plan = plans_.find(key);
  (step_->plan ? statistics_.plan_cache_hits : statistics_.plan_cache_misses) += 1;
  if (step_->plan) return;
  RECORD_FUNCTION("ddp_hooks::plan", std::vector<c10::IValue>());
  step_->plan = std::make_shared<ReductionPlan>(make_reduction_plan(*layout_, to_send, held, who, settings_of_plan()));
  plans_.insert(key, step_->plan);
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
  record_usage();
  statistics_.coded_steps += step.coded_messages > 0;
  last_coded_ = step.coded;
  if (step.units && step.units->chosen().whole) {
    skip_zeros_.observe(step_number_ - 1, static_cast<double>(step.units->zero_bytes()),
                        static_cast<double>(step.units->whole_bytes()));
  }
  prologue_->step_closed();
  looked_up_->forget();
  step.rebuild = is_time_to_rebuild();
  if (step.nobody_joined) reducer_.mark_used_map_reduced(step.used);
  if (step.shadow) {
    // No backward pass will end here, so it takes part at once. The control group keeps the order.
    average_unmanaged(step, false);
  } else {
    queue_after_backward();
  }
}

void Engine::record_usage() {
  const Step& step = *step_;
  usage_ = {step.local, step.agreed, {}, step.contributors};
  if (!step.units) return;
  usage_.units = step.units->counts();
  for (const UnitCounts& counts : usage_.units) {
    if (counts.here == 0) usage_.here.clear(counts.parameter);
    if (counts.anywhere > 0) usage_.anywhere.set(counts.parameter);
    statistics_.units_agreed_on += counts.units;
    statistics_.units_sent += counts.anywhere;
  }
}

bool Engine::is_time_to_rebuild() {
  // A new Reducer would learn a static graph anew, in whatever pass comes next; under no_sync() torch cannot.
  if (settings_.rebuild_after == 0 || reducer_.has_static_graph()) return false;
  // A joined rank runs no backward pass, so there is no end at which it could rebuild.
  const bool pays = uses_others_than_reduced(*step_, reducer_.parameters().size()) &&
                    !step_->used.test(prologue_->agreement().joined_bit());
  return rebuild_timer_.step_closed(step_->used.hash(), pays, settings_.rebuild_after);
}

void Engine::queue_after_backward() {
  const Step& step = *step_;
  if (step.untouched.empty() && step.unmanaged.empty() && !step.rebuild && !step.unannounced &&
      !reducer_.searches_graph()) {
    return;
  }
  // Goes with the callbacks if the pass ends without calling them.
  std::shared_ptr<void> ending;
  if (!step.unmanaged.empty() || step.rebuild) ending_ = ending = std::make_shared<char>();
  queue_last([self = shared_from_this(), step = step_, ending = std::move(ending)] { self->after_backward(step); });
}

void Engine::after_backward(const std::shared_ptr<Step>& step) {
  for (const auto& [parameter, gradient] : step->untouched) parameter.mutable_grad() = gradient;
  // Where the used map was marked reduced, the Reducer has not waited for it, but whoever asks for it now expects the
  // reduced one.
  reducer_.wait_for_used_map();
  average_unmanaged(*step, true);
  if (step->unannounced) {
    queue_error(
        "ddp_hooks: parameter '" + names_[*step->unannounced] +
        "' was unused here when the mask exchange began, but has a gradient now, which was not sent: expected the used "
        "parameters to be known when backward reaches the module's outputs. Possible causes are an earlier backward "
        "pass that failed halfway and a gradient set by hand during this one");
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
  const UnmanagedMessages sent = average_unmanaged_gradients(groups->all(), gradients, 1 / step.divisor, contribute);
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

}  // namespace ddp_hooks
