#include "engine/engine.h"

#include <stdexcept>
#include <utility>

#include "engine/skip_unused_hook.h"
#include "engine/step.h"

namespace ddp_hooks {
namespace {

// Models that switch between a handful of branches on each of a few ranks need some dozens.
constexpr size_t kCachedPlans = 64;

AdaptiveRule rule_of_skip_zeros(const EngineSettings& settings) {
  return {settings.units.adaptive, settings.units.adaptive.hold_steps, true};
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
      control_groups_(std::move(groups)),
      settings_(fitted(settings)),
      skip_zeros_(rule_of_skip_zeros(settings)),
      units_(settings_.units),
      coding_(settings_.coding, settings_.units.adaptive, control_groups_->topology().host_count()),
      plans_(kCachedPlans),
      sender_(*data_group_, reducer_.parameters().front().device().type(), control_groups_, views_,
              statistics_.messages) {
  const size_t parameters = reducer_.parameters().size() + unmanaged_parameters_.size();
  TORCH_CHECK(names_.size() == parameters, "ddp_hooks: expected a name for each of the module's ", parameters,
              " parameters, received ", names_.size());
  sender_.set_adds_up_in_hosts(settings_.plan.adds_up_in_hosts);
  const PartsOfPrologue parts{reducer_, views_, layout_, unmanaged_parameters_, names_, statistics_.exchanges};
  prologue_ = std::make_unique<BackwardPrologue>(parts, pending, control_groups_, settings_.agreement,
                                                 [this](bool none) { return tell(none); });
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
    reducer_.forget_parameters_of_buckets();
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

double Engine::seconds_in_hook() const {
  using std::chrono::steady_clock;
  const steady_clock::rep since = in_hook_since_;
  if (since == 0) return 0;
  const auto taken = steady_clock::now() - steady_clock::time_point(steady_clock::duration(since));
  return std::chrono::duration<double>(taken).count();
}

// What a group and a policy allow.
EngineSettings Engine::fitted(EngineSettings settings) const {
  const Topology& topology = control_groups_->topology();
  const c10::Device device = reducer_.parameters().front().device();
  const int hosts = topology.host_count();
  Transports& transports = settings.plan.direct.transports;
  settings.plan.adds_up_in_hosts = transports.direct && topology.shares_hosts();
  // A host's ranks have as much room in a message as a rank would that has a host of its own.
  settings.plan.direct.segment_bytes *= topology.ranks_per_host();
  transports.world_size = hosts;
  transports.direct =
      transports.direct && settings.agreement.skip_unused && DirectSender::is_possible(*data_group_, device, hosts);
  transports.owners = transports.owners && transports.direct && DirectSender::can_sum(*data_group_, device, hosts);
  const bool may_code =
      transports.direct && control_groups_->has_contributions() && DirectSender::can_code(*data_group_, device, hosts);
  if (!may_code) settings.coding.coded = When::kOff;
  settings.agreement.asks_who = transports.direct;
  return settings;
}

// What travels beside the usage mask.
UsageMask Engine::tell(bool nothing) {
  CodedAmounts amounts;
  if (last_coded_ && !nothing) {
    amounts = {last_coded_->contribution_bytes, last_coded_->coded_contribution_bytes, last_coded_->sum_bytes,
               last_coded_->coded_sum_bytes};
  }
  return coding_.tell(units_.objections(nothing), amounts);
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
  skip_zeros_ = rule_of_skip_zeros(settings);
  units_ = UnitsDetector(settings_.units);
  coding_ = CodingRule(settings_.coding, settings_.units.adaptive, control_groups_->topology().host_count());
  sender_.set_adds_up_in_hosts(settings_.plan.adds_up_in_hosts);
  // With the layout that stands; before the first step there is none yet.
  units_.use_layout(*layout_);
  plans_.clear();
  sender_.drop();
  step_number_ = 0;
  rebuild_timer_.restart();
}

Statistics Engine::statistics() const {
  std::lock_guard lock(mutex_);
  Statistics statistics = statistics_;
  statistics.messages += sender_.late_statistics();
  return statistics;
}

void Engine::reset_statistics() {
  std::lock_guard lock(mutex_);
  statistics_ = {};
  sender_.reset_late_statistics();
}

Usage Engine::usage() const {
  std::lock_guard lock(mutex_);
  return usage_;
}

}  // namespace ddp_hooks
