#include "engine/engine.h"

#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>

#include <tuple>
#include <utility>

#include "agreement/stopwatch.h"
#include "engine/end_of_backward.h"
#include "kernels/devices.h"
#include "transport/unmanaged_gradients.h"

namespace ddp_hooks {
namespace {

using std::chrono::steady_clock;

constexpr steady_clock::time_point kOutside{};  // of the hook

// The engine as a hook that the Reducer calls natively, without Python and its GIL.
class SkipUnusedHook : public c10d::CppCommHookInterface<std::shared_ptr<Engine>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override { return state_->run(bucket); }
};

// What a rank has not sent the others wait for, and they would take the next that comes from it for that: its
// all-reduce of the used map, which is of another size and another type.
void leave_out_used_map(const ReducerView& reducer) {
  if (!reducer.searches_graph()) return;
  // Goes with the callback if the pass ends without calling it.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [left_out = reducer.leave_out_used_map()]() mutable { left_out.reset(); });
}

}  // namespace

std::shared_ptr<Engine> Engine::make(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
                                     std::shared_ptr<const HostsOnStreams> hosts, const EngineSettings& settings,
                                     std::vector<at::Tensor> unmanaged_parameters, std::vector<std::string> names,
                                     const std::vector<size_t>& pending) {
  std::shared_ptr<Engine> engine(new Engine(std::move(reducer), std::move(groups), std::move(hosts), settings,
                                            std::move(unmanaged_parameters), std::move(names), pending));
  for (size_t i = 0; i < engine->reducer_.parameters().size(); ++i) {
    engine->reports_.emplace_back(engine->reducer_.accumulators()[i], [weak = std::weak_ptr<Engine>(engine), i] {
      if (auto self = weak.lock()) self->gradient_reported(i);
    });
  }
  return engine;
}

Engine::Engine(std::weak_ptr<c10d::Reducer> reducer, std::shared_ptr<const ControlGroups> groups,
               std::shared_ptr<const HostsOnStreams> hosts, const EngineSettings& settings,
               std::vector<at::Tensor> unmanaged_parameters, std::vector<std::string> names,
               const std::vector<size_t>& pending)
    : reducer_(std::move(reducer)),
      unmanaged_parameters_(std::move(unmanaged_parameters)),
      names_(std::move(names)),
      data_group_(reducer_.process_group()),
      control_groups_(std::move(groups)),
      pass_(reducer_, *data_group_, control_groups_, std::move(hosts), settings, unmanaged_parameters_, names_, pending,
            statistics_) {}

Engine::~Engine() {
  // Perhaps within the Reducer's own destructor, which drops the group after this; and perhaps with the GIL held.
  data_group_.let_go_after(reducer_.lifetime());
}

void Engine::close(bool remove_hook, bool dying) {
  // Declared before the locks: what this drops, other groups and hooks among it, goes when they are free again.
  std::vector<GradientReport> reports;
  std::unique_ptr<BackwardPrologue> prologue;
  std::shared_ptr<const ControlGroups> control_groups;
  EngineCallbacks callbacks;
  std::unique_ptr<c10d::CommHookInterface> hook;
  std::shared_ptr<Step> broken;
  {
    const bool reducer_is_gone = reducer_.is_gone();
    ReducerLock reducer_lock;
    if (!reducer_is_gone) reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    if (!pass_.prologue()) return;
    TORCH_CHECK(dying || reducer_is_gone || (!reducer_.in_backward() && ending_.expired()),
                "ddp_hooks: expected the state to be closed between two steps, received a call during a backward pass");
    std::tie(prologue, broken) = pass_.close();
    if (!reducer_is_gone) {
      if (!reducer_.in_backward()) reducer_.unmark_used_map_reduced();
      reducer_.forget_parameters_of_buckets();
      if (remove_hook && !dying) hook = reducer_.take_hook();
    }
    reports.swap(reports_);
    control_groups.swap(control_groups_);
    std::swap(callbacks, callbacks_);
    if (dying || reducer_is_gone) {
      data_group_.let_go_after(reducer_.lifetime());
    } else {
      data_group_.let_go();
    }
  }
  // Whoever waits for its buckets is told without a lock.
  if (broken) broken->break_off();
}

double Engine::seconds_in_hook() const {
  const steady_clock::time_point since = in_hook_since_;
  if (since == kOutside) return 0;
  return std::chrono::duration<double>(steady_clock::now() - since).count();
}

void Engine::declare_unused(const std::vector<size_t>& parameters) {
  std::lock_guard lock(mutex_);
  if (pass_.prologue()) pass_.prologue()->unused().declare(parameters);
}

void Engine::register_natively() {
  reducer_.register_hook(std::make_unique<SkipUnusedHook>(shared_from_this()));
  // Where buckets get their memory as gradients come, there is no slice to put a gradient into before.
  takes_gradients_ = !reducer_.allocates_lazily();
  lacks_hook_ = false;
}

void Engine::set_callbacks(EngineCallbacks callbacks) {
  // What was set before goes when the lock is free again.
  std::lock_guard lock(mutex_);
  std::swap(callbacks, callbacks_);
}

std::vector<size_t> Engine::pending() const {
  if (reducer_.is_gone()) return {};
  const auto locks = lock_both();
  return pass_.prologue() ? pass_.prologue()->unused().pending() : std::vector<size_t>();
}

bool Engine::awaits_backward() const {
  const auto locks = lock_both();
  return pass_.prologue() && pass_.prologue()->awaits_backward();
}

Statistics Engine::statistics() const {
  std::lock_guard lock(mutex_);
  Statistics statistics = statistics_;
  statistics.messages += pass_.sender().late_statistics();
  return statistics;
}

void Engine::reset_statistics() {
  std::lock_guard lock(mutex_);
  statistics_ = {};
  pass_.sender().reset_late_statistics();
}

// The moments of a pass.

void Engine::forward_begins() {
  if (reducer_.is_gone()) return;
  std::shared_ptr<Step> broken;
  {
    const auto locks = lock_both();
    if (!pass_.prologue() || reducer_.in_backward()) return;
    broken = pass_.forward_begins();
  }
  // Whoever waits for its buckets is told without a lock.
  if (broken) broken->break_off();
}

void Engine::finish_exchanges(int64_t started) {
  std::shared_ptr<Step> broken;
  {
    const auto locks = lock_both();
    broken = pass_.finish_exchanges(started);
  }
  if (broken) broken->break_off();
}

void Engine::forward_done(const std::vector<at::Tensor>& outputs, bool synchronises) {
  for (const at::Tensor& output : outputs) refuse_capture(output.device());
  std::lock_guard lock(mutex_);
  if (!pass_.prologue()) return;
  pass_.forward_done(outputs, synchronises, weakly(&Engine::outputs_reached),
                     weakly(&Engine::unmanaged_gradient_reported));
}

void Engine::outputs_reached() {
  {
    const auto locks = lock_both();
    if (!pass_.prologue()) return;
    // With create_graph=True gradients are part of a graph, which the engine would cut; the Reducer refuses that
    // itself.
    if (!pass_.outputs_reached(takes_gradients_ && !at::GradMode::is_enabled())) return;
    has_marks_ = true;
  }
  // At the latest when all gradients have come; a declared parameter may be in a graph and get none.
  torch::autograd::Engine::get_default_engine().queue_callback(weakly(&Engine::gradients_done));
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
  const auto locks = lock_both();
  if (pass_.prologue()) pass_.gradient_reported(index, copies_early);
}

// A state that is never registered would leave its module to plain DDP in silence. What counts is that the Reducer has
// no hook, of whatever kind, in a pass that it has finished: a hook of the user's may call this engine when it likes.
void Engine::look_for_hook() {
  {
    const auto locks = lock_both();
    if (reducer_.has_hook()) lacks_hook_ = false;
    if (!pass_.prologue() || !lacks_hook_ || !reducer_.expects_backward() || is_restricted_pass()) return;
    if (looked_for_hook_in_ == reducer_.forward_passes()) return;
    looked_for_hook_in_ = reducer_.forward_passes();
  }
  queue_last(weakly(&Engine::reduced_without_hook));
}

void Engine::reduced_without_hook() {
  std::function<void()> tell;
  if (reducer_.is_gone()) return;
  {
    const auto locks = lock_both();
    if (!pass_.prologue() || !lacks_hook_) return;
    if (reducer_.expects_backward()) {
      // It was the end of a part of the pass: of one output's, or of a backward pass within it.
      looked_for_hook_in_ = 0;
      return;
    }
    lacks_hook_ = false;
    if (!reducer_.has_hook()) tell.swap(callbacks_.tell_unregistered);
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
    if (!pass_.prologue() || reducer_.is_gone()) return;
    has_marks_ = false;
    unused = pass_.prologue()->take_marks();
  }
  // May run the hook, so no lock is held.
  for (size_t index : unused) reducer_.mark_ready(index);
}

void Engine::unmanaged_gradient_reported(size_t index) {
  std::lock_guard lock(mutex_);
  if (pass_.prologue()) pass_.prologue()->unused().accumulated(index);
}

void Engine::gradients_done() {
  mark_unused_ready();
  std::vector<size_t> unready;
  if (!reducer_.is_gone()) {
    const auto locks = lock_both();
    if (pass_.prologue()) unready = pass_.prologue()->unready_parameters();
  }
  // May run the hook, so no lock is held.
  for (size_t index : unready) reducer_.mark_ready(index);
  std::lock_guard lock(mutex_);
  if (pass_.prologue()) pass_.prologue()->unused().pass_ended();
}

c10::intrusive_ptr<c10::ivalue::Future> Engine::run(c10d::GradBucket& bucket) {
  RECORD_FUNCTION("ddp_hooks::bucket", std::vector<c10::IValue>());
  const Stopwatch stopwatch;
  in_hook_since_ = steady_clock::now();
  const auto out_of_hook = c10::make_scope_exit([this] { in_hook_since_ = kOutside; });
  // A joined rank runs the hook outside of any backward pass and does not hold the Reducer's mutex.
  ReducerLock reducer_lock;
  // With its device, a future carries the point on the stream at which its value is there.
  std::vector<c10::Device> devices;
  if (!bucket.getBuffer().is_cpu()) devices.push_back(bucket.getBuffer().device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
  try {
    const bool shadow = !reducer_.in_backward();
    if (shadow) reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    const double waited_before = statistics_.exchanges.wait_seconds;
    const at::NoGradGuard no_grad;
    try {
      TORCH_CHECK(pass_.prologue(),
                  "ddp_hooks: expected a state that serves this module, received one that was closed; call ",
                  "ddp_hooks.register(ddp) on every rank");
      pass_.take_bucket(bucket, shadow, future);
      if (pass_.step()->closed) step_closed();
    } catch (...) {
      pass_.fail(future, callbacks_.explain);
    }
    if (bucket.isLast() && !shadow && !(pass_.step() && pass_.step()->closed)) leave_out_used_map(reducer_);
    pass_.bucket_taken();
    statistics_.hook_seconds += stopwatch.seconds() - (statistics_.exchanges.wait_seconds - waited_before);
  } catch (...) {
    if (!future->completed()) future->setError(std::current_exception());
  }
  return future;
}

void Engine::step_closed() {
  const Step& step = *pass_.step();
  // A joined rank has no backward pass that would end here, so it takes part at once. The control group keeps the
  // order.
  if (step.shadow) return average_unmanaged(step, false);
  if (step.untouched.empty() && step.unmanaged.empty() && !step.rebuild && !step.unannounced &&
      !reducer_.searches_graph()) {
    return;
  }
  // Goes with the callbacks if the pass ends without calling them.
  std::shared_ptr<void> ending;
  if (!step.unmanaged.empty() || step.rebuild) ending_ = ending = std::make_shared<char>();
  queue_last(
      [self = shared_from_this(), step = pass_.step(), ending = std::move(ending)] { self->after_backward(step); });
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
  if (step->rebuild) {
    // A rebuild closes this engine, which lets go of what it is doing right now.
    std::unique_lock lock(mutex_);
    const std::function<void()> rebuild = callbacks_.rebuild;
    lock.unlock();
    if (rebuild) rebuild();
  }
  std::lock_guard lock(mutex_);
  ending_.reset();
}

void Engine::average_unmanaged(const Step& step, bool contribute) {
  if (step.unmanaged.empty()) return;
  const size_t reduced_count = reducer_.parameters().size();
  // Held, because the module may go, and close this, while the group is waited for.
  std::shared_ptr<const ControlGroups> groups;
  c10::intrusive_ptr<c10d::ProcessGroup> on_streams;
  std::vector<UnmanagedGradient> gradients;
  {
    std::lock_guard lock(mutex_);
    if (!pass_.prologue() || control_groups_->world_size() == 1) return;
    groups = control_groups_;
    if (step.nobody_joined && pass_.sender().is_on_streams()) on_streams = reducer_.process_group();
    for (size_t i : step.unmanaged) {
      gradients.push_back(
          {unmanaged_parameters_[i], contribute && pass_.prologue()->unused().has_accumulated(reduced_count + i)});
    }
    if (contribute) pass_.prologue()->unused().unmanaged_taken_up();
  }
  // A rank that has joined does not need the result, and must go on: the others wait for it elsewhere first.
  const UnmanagedMessages sent =
      average_unmanaged_gradients(groups->all(), on_streams.get(), gradients, 1 / step.divisor, contribute);
  if (sent.sparse) {
    queue_error(
        "ddp_hooks: parameter '" + names_[reduced_count + step.unmanaged[*sent.sparse]] +
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
