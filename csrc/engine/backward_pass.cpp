#include "engine/backward_pass.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <list>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "agreement/stopwatch.h"
#include "kernels/devices.h"

namespace ddp_hooks {
namespace {

// Models that switch between a handful of branches on each of a few ranks need some dozens.
constexpr size_t kCachedPlans = 64;

// What a group and a policy allow.
EngineSettings fitted(EngineSettings settings, const Topology& topology, const ControlGroups& control_groups,
                      c10d::ProcessGroup& group, c10::Device device) {
  const int hosts = topology.host_count();
  Transports& transports = settings.plan.direct.transports;
  settings.plan.adds_up_in_hosts = transports.direct && control_groups.topology().shares_hosts();
  // A host's ranks have as much room in a message as a rank would that has a host of its own.
  settings.plan.direct.segment_bytes *= topology.ranks_per_host();
  transports.world_size = hosts;
  transports.direct =
      transports.direct && settings.agreement.skip_unused && DirectSender::is_possible(group, device, hosts);
  transports.owners = transports.owners && transports.direct && DirectSender::can_sum(group, device, hosts);
  const bool may_code =
      transports.direct && control_groups.has_contributions() && DirectSender::can_code(group, device, hosts);
  if (!may_code) settings.coding.coded = When::kOff;
  settings.agreement.asks_who = transports.direct;
  if (!settings.opening_bytes) settings.opening_bytes = device.is_cpu() ? 0 : kFirstBytes;
  return settings;
}

// Asks who was missing, for seconds, while the others fail for the same reason.
std::exception_ptr explained(const std::exception_ptr& error, const BackwardPass::Explain& explain) {
  if (!explain) return error;
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& failed) {
    // Of a type that users may catch, so it stays the same error.
    const std::string more = explain(failed.what());
    if (!more.empty()) failed.add_context(more);
    return std::current_exception();
  } catch (const std::exception& failed) {
    const std::string said = failed.what();
    const std::string more = explain(said);
    return more.empty() ? error : std::make_exception_ptr(std::runtime_error(said + "\n" + more));
  } catch (...) {
    return error;
  }
}

// For as long as a bucket is sent: its parameters' gradients as they were when it was ready.
class GradientsAsHeld {
 public:
  GradientsAsHeld(const ReducerView& reducer, const BucketLayout& layout, const std::vector<at::Tensor>& held) {
    const std::vector<at::Tensor>& parameters = reducer.parameters();
    for (size_t i = 0; i < held.size(); ++i) {
      at::Tensor& gradient = parameters[layout.slices[i].parameter].mutable_grad();
      if (!gradient.is_same(held[i])) changed_.emplace_back(&gradient, std::exchange(gradient, held[i]));
    }
  }
  ~GradientsAsHeld() {
    for (auto& [gradient, changed] : changed_) *gradient = std::move(changed);
  }
  GradientsAsHeld(const GradientsAsHeld&) = delete;
  GradientsAsHeld& operator=(const GradientsAsHeld&) = delete;

 private:
  std::vector<std::pair<at::Tensor*, at::Tensor>> changed_;
};

}  // namespace

BackwardPass::BackwardPass(const ReducerView& reducer, c10d::ProcessGroup& group,
                           const std::shared_ptr<const ControlGroups>& control_groups,
                           std::shared_ptr<const HostsOnStreams> hosts, const EngineSettings& settings,
                           const std::vector<at::Tensor>& unmanaged, const std::vector<std::string>& names,
                           const std::vector<size_t>& pending, Statistics& statistics)
    : reducer_(reducer),
      group_(group),
      control_groups_(control_groups),
      hosts_(std::move(hosts)),
      statistics_(statistics),
      views_(reducer_),
      layout_(reducer_),
      accumulator_streams_(reducer_.accumulator_streams()),
      settings_(fitted(settings, topology(), *control_groups_, group_, reducer_.parameters().front().device())),
      skip_zeros_(settings_.units.adaptive, settings_.units.adaptive.hold_steps, true),
      units_(settings_.units),
      coding_(settings_.coding, settings_.units.adaptive, topology().host_count()),
      plans_(kCachedPlans),
      sender_(group_, reducer_.parameters().front().device().type(), control_groups_, hosts_, views_,
              statistics_.messages) {
  const size_t parameters = reducer_.parameters().size() + unmanaged.size();
  TORCH_CHECK(names.size() == parameters, "ddp_hooks: expected a name for each of the module's ", parameters,
              " parameters, received ", names.size());
  sender_.set_adds_up_in_hosts(settings_.plan.adds_up_in_hosts);
  const PartsOfPrologue parts{reducer_, views_, layout_, unmanaged, names, statistics_.exchanges};
  const auto tell = [this](bool nothing) {
    return coding_.tell(units_.objections(nothing), nothing ? nullptr : last_coded_.get());
  };
  prologue_ = std::make_unique<BackwardPrologue>(parts, pending, control_groups_, settings_.agreement, tell);
  for (size_t i : pending) {
    if (i < reducer_.parameters().size()) reducer_.note_used(i);
  }
}

void BackwardPass::configure(const EngineSettings& settings, std::shared_ptr<const HostsOnStreams> hosts) {
  TORCH_CHECK(!step_ && !has_early_exchange(),
              "ddp_hooks: expected a change of policy between two steps, received one during a backward pass");
  hosts_ = std::move(hosts);
  settings_ = fitted(settings, topology(), *control_groups_, group_, reducer_.parameters().front().device());
  skip_zeros_ = {settings_.units.adaptive, settings_.units.adaptive.hold_steps, true};
  units_ = UnitsDetector(settings_.units);
  coding_ = CodingRule(settings_.coding, settings_.units.adaptive, topology().host_count());
  sender_.set_adds_up_in_hosts(settings_.plan.adds_up_in_hosts);
  // With the layout that stands; before the first step there is none yet.
  units_.use_layout(*layout_);
  plans_.clear();
  sender_.drop();
  step_number_ = 0;
  rebuild_timer_.restart();
}

std::pair<std::unique_ptr<BackwardPrologue>, std::shared_ptr<Step>> BackwardPass::close() {
  // Messages of a pass that broke off may still come back, when buckets hold plain DDP's gradients.
  const bool in_backward = !reducer_.is_gone() && reducer_.in_backward();
  std::shared_ptr<Step> broken = in_backward ? std::exchange(step_, nullptr) : forward_begins();
  // Not into buckets that a forward pass has had made anew since the last step.
  if (!reducer_.is_gone()) views_.forget();
  sender_.drop();
  hosts_.reset();
  return {std::move(prologue_), std::move(broken)};
}

std::shared_ptr<Step> BackwardPass::finish_exchanges(int64_t started) {
  UsageAgreement& agreement = prologue_->agreement();
  const bool is_broken = step_ && !reducer_.in_backward();
  if (is_broken && step_->asked) agreement.take_back(*std::exchange(step_->asked, std::nullopt));
  if (!has_early_exchange()) refresh_layout();
  agreement.finish(layout_.hash(), started);
  return is_broken ? forward_begins() : nullptr;
}

std::shared_ptr<Step> BackwardPass::forward_begins() {
  // What has come back since its last bucket left is done with it; of a pass that then broke off, the rest may come.
  if (const auto last = last_step_.lock()) last->has_failed = true;
  if (step_) sender_.drop();
  return std::exchange(step_, nullptr);
}

void BackwardPass::forward_done(const std::vector<at::Tensor>& outputs, bool synchronises,
                                const std::function<void()>& reached,
                                const std::function<void(size_t)>& unmanaged_reported) {
  TORCH_CHECK(
      settings_.rebuild_after == 0 || !reducer_.finalizes_manually(),
      "ddp_hooks: expected rebuild_after or DDP's require_manual_backward_finalization, received both: rebuild_after "
      "rebuilds the Reducer at the end of backward, when gradients that are finalized manually are still in flight; "
      "leave rebuild_after out of the policy, and call ddp_hooks.rebuild(ddp) on every rank after "
      "finalize_backward()");
  prologue_->forward_done(outputs, synchronises, reached, unmanaged_reported);
  // A search of the graph is for those whom it spares something.
  if (!synchronises || group_.getSize() == 1 || !reducer_.parameters().front().is_cpu()) return;
  looked_up_->forget();
  if (units_.may_choose()) looked_up_->watch(outputs);
}

bool BackwardPass::outputs_reached(bool takes_gradients) {
  refresh_layout();
  return prologue_->outputs_reached(takes_gradients);
}

void BackwardPass::gradient_reported(size_t parameter, bool copies_early) {
  if (!reducer_.expects_backward()) {
    // It has noted a gradient here, and looked at the placeholder.
    if (views_.is_detached(parameter)) reducer_.forget_use_without_gradient(parameter);
    return prologue_->unused().accumulated(parameter);
  }
  if (!copies_early) return;
  // Before the step opens, nobody knows how a gradient will travel.
  if (!step_ || step_->error || !reducer_.is_final(parameter)) return;
  const Stopwatch stopwatch;
  const at::NoGradGuard no_grad;
  sender_.copy_into_bucket_early(*step_, parameter);
  statistics_.hook_seconds += stopwatch.seconds();
}

void BackwardPass::take_bucket(c10d::GradBucket& bucket, bool shadow, const Future& future) {
  if (step_ && bucket.getIndex() == 0 && !reducer_.learns_static_graph()) {
    step_->break_off();
    step_.reset();
    sender_.drop();
  }
  const bool first = !step_;
  if (first) step_ = std::make_shared<Step>();
  // Buckets are counted here, because in the first pass of a static graph the Reducer numbers every bucket 0.
  const auto index = static_cast<uint32_t>(step_->buckets.size());
  step_->buckets.emplace_back(bucket.getBuffer(), future);
  if (first) {
    TORCH_CHECK(bucket.getIndex() == 0, "ddp_hooks: expected the first bucket of a backward pass, received bucket ",
                bucket.getIndex(), "; register the hook before backward() begins");
    begin_step(shadow);
  }
  if (step_->error) std::rethrow_exception(step_->error);
  check_bucket(index);
  hold(index);
  if (index < step_->opens_with) return;
  const bool opens = index == step_->opens_with;
  if (opens) open_step();
  send_buckets(opens ? 0 : index, index);
  if (index + 1 == layout_->buckets.size()) close_step();
}

void BackwardPass::fail(const Future& future, const Explain& explain) {
  const bool is_known = step_ && step_->error;
  const std::exception_ptr error = is_known ? step_->error : explained(std::current_exception(), explain);
  step_ ? step_->fail(error) : future->setError(error);
  // Collectives that are still under way keep their own references.
  sender_.drop();
}

void BackwardPass::bucket_taken() {
  if (!step_ || step_->buckets.size() < layout_->buckets.size()) return;
  last_step_ = step_;
  step_.reset();
}

void BackwardPass::check_bucket(uint32_t bucket) {
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
void BackwardPass::wait_for_gradients(uint32_t bucket) const {
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

void BackwardPass::prepare_gradients(uint32_t bucket) {
  wait_for_gradients(bucket);
  fill_views(bucket);
  note_unannounced(bucket);
  // Before the bucket is sent, because then gradients are where autograd has left them. Alone nobody asks.
  const BucketLayout& layout = layout_->buckets[bucket];
  if (layout.sparse || group_.getSize() == 1) return;
  units_.look(layout, step_->buckets[bucket].flat(), views_, step_->agreed, step_number_);
}

void BackwardPass::hold(uint32_t bucket) {
  const std::vector<at::Tensor>& parameters = reducer_.parameters();
  std::vector<at::Tensor>& gradients = step_->held.emplace_back();
  for (const ParameterSlice& slice : layout_->buckets[bucket].slices) {
    gradients.push_back(parameters[slice.parameter].grad());
  }
}

// What is known of these buckets, and what is found out meanwhile about them or earlier ones. The last one is ready.
void BackwardPass::send_buckets(uint32_t first, uint32_t ready) {
  Step& step = *step_;
  for (uint32_t bucket = first; bucket <= ready; ++bucket) {
    std::optional<GradientsAsHeld> as_held;
    if (bucket < ready) as_held.emplace(reducer_, layout_->buckets[bucket], step.held[bucket]);
    if (!step.shadow) prepare_gradients(bucket);
    send_bucket(bucket, ready);
    if (!has_yet_to_send(bucket)) step.held[bucket].clear();
  }
  if (!step.units) return;
  step.units->advance(ready, step.local, step.agreed,
                      [&](const SettledUnits& settled) { return send_settled(settled); });
}

void BackwardPass::send_bucket(uint32_t bucket, uint32_t ready) {
  Step& step = *step_;
  const BucketPlan& plan = step.plan->buckets[bucket];
  const bool is_sparse = layout_->buckets[bucket].sparse;
  const bool settles_later = step.units && step.units->concerns(bucket);
  settles_later ? step.buckets[bucket].hold() : sender_.count(layout_->buckets[bucket], plan);
  is_sparse ? sender_.send_sparse(step_, bucket) : send(bucket, plan, {});
  if (!settles_later) return;
  const at::Tensor flat = is_sparse ? at::Tensor() : step.buckets[bucket].flat();
  step.units->scan(bucket, ready, flat, step.local, step.agreed);
}

// Some of what leaves with this bucket may be of earlier ones.
void BackwardPass::send(uint32_t bucket, const BucketPlan& plan, const Places& divided) {
  std::list<GradientsAsHeld> as_held;
  std::optional<size_t> last;
  const auto hold_on = [&](size_t place) {
    // Nothing has happened yet to what has just become ready; and what is divided is held by itself.
    if (place + 1 >= step_->buckets.size() || std::exchange(last, place) == place) return;
    as_held.emplace_back(reducer_, layout_->buckets[place], step_->held[place]);
  };
  hold_on(bucket);
  for (const Message& message : plan.launches) {
    for (const Stretch& stretch : message.stretches) hold_on(stretch.place);
  }
  sender_.send(step_, *layout_, bucket, plan, divided);
}

bool BackwardPass::has_yet_to_send(uint32_t bucket) const {
  const std::vector<ParameterSlice>& slices = layout_->buckets[bucket].slices;
  return std::any_of(slices.begin(), slices.end(), [&](const ParameterSlice& slice) {
    return step_->used.test(slice.parameter) && views_.is_detached(slice.parameter);
  });
}

// Called by `UnitsOfStep::advance` with each bucket whose units are agreed on. What is divided into units gets a place
// of its own behind those of the buckets: `.grad`, where it is read and written.
std::vector<double> BackwardPass::send_settled(const SettledUnits& settled) {
  Step& step = *step_;
  const size_t bucket_count = layout_->buckets.size();
  std::vector<GradientToSend> gradients;
  Places divided;
  for (const GradientInUnits& of : settled.gradients) {
    const Stretch in_bucket{settled.bucket, of.offset, of.units.slice_length};
    const Stretch by_itself{bucket_count + divided.size(), 0, of.units.slice_length};
    gradients.push_back({of.is_divided ? by_itself : in_bucket, of.units});
    if (!of.is_divided) continue;
    const bool divides = views_.is_averaged_by_division(of.parameter);
    divided.push_back({of.gradient.flat, of.gradient.offset, step.divisor, divides});
  }
  // On CPUs, masks of units are those of hosts already.
  const Contributors by_host = hosts_ ? hosts_->topology().by_host(settled.contributors) : Contributors();
  const Contributors& who = hosts_ ? by_host : settled.contributors;
  BucketPlan plan = std::move(step.planner->plan(settled.bucket, {std::move(gradients)}, settled.used, who).front());
  BucketInFlight& bucket = step.buckets[settled.bucket];
  sender_.count(layout_->buckets[settled.bucket], plan);
  send(settled.bucket, plan, divided);
  bucket.release();
  return std::move(plan.sent);
}

// What travels from those who contribute, by what was agreed, would leave out a gradient that nobody announced.
void BackwardPass::note_unannounced(uint32_t bucket) {
  Step& step = *step_;
  if (step.plan->direct.count() == 0) return;
  for (const ParameterSlice& slice : layout_->buckets[bucket].slices) {
    if (!step.plan->direct.test(slice.parameter)) continue;
    // Not what this rank uses: it may have taken up masks that an earlier pass, which failed, had sent.
    if (step.contributors.by_rank()[static_cast<size_t>(group_.getRank())].test(slice.parameter)) continue;
    if (!views_.has_gradient(slice.parameter)) continue;
    step.unannounced = slice.parameter;
    // What comes from the others is written here, and the Reducer wants to find it in .grad.
    if (reducer_.gradients_are_views()) views_.fill(slice.parameter);
  }
}

void BackwardPass::fill_views(uint32_t bucket) {
  const Step& step = *step_;
  // Alone nothing is sent, and the Reducer copies what it finds in the bucket.
  const bool all_used = group_.getSize() == 1;
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

void BackwardPass::begin_step(bool shadow) {
  refuse_capture(step_->buckets.front().buffer().device());
  refresh_layout();
  TORCH_CHECK(reducer_.process_group().get() == &group_,
              "ddp_hooks: the module's process group was replaced; wrap the module and register again on every rank");
  reducer_.wait_for_used_map();
  reducer_.unmark_used_map_reduced();
  ++step_number_;
  statistics_.steps += 1;
  for (const BucketLayout& bucket : layout_->buckets) statistics_.dense_bytes += bucket.bytes();
  step_->shadow = shadow;
  step_->asked = prologue_->first_bucket_ready(shadow);
  if (!step_->asked->exchange) return;  // there is nothing to wait for
  step_->opens_with = std::max<uint32_t>(layout_->buckets_within(*settings_.opening_bytes), 1) - 1;
}

void BackwardPass::open_step() {
  const AgreedUsage usage = agree();
  ++agreed_steps_;
  keep_untouched();
  // Alone there is nobody to send to, whatever is used.
  if (group_.getSize() == 1) return plan_parameters(prologue_->agreement().nothing(), Contributors());
  choose_units(usage, step_number_ - 1);
  if (step_->units && step_->units->chosen().whole) {
    return plan_parameters(prologue_->agreement().nothing(), Contributors());
  }
  // A rank that contributes what its mask does not say would not be heard.
  const bool direct = settings_.plan.direct.transports.direct && usage.nothing_left_over && step_->nobody_joined;
  plan_parameters(step_->agreed, direct ? topology().by_host(step_->contributors) : Contributors());
}

// Waits for the other ranks.
AgreedUsage BackwardPass::agree() {
  Step& step = *step_;
  const size_t reduced_count = reducer_.parameters().size();
  step.divisor = reducer_.divisor();
  step.copied_early = UsageMask(reduced_count);
  AgreedUsage usage = prologue_->agreement().agree(*std::exchange(step.asked, std::nullopt));
  step.local = usage.here;
  step.agreed = step.used = usage.anywhere;
  step.nobody_joined = usage.nobody_joined;
  step.settings = settings_.plan;
  step.settings.direct.transports.coded = coding_.choose(step_number_ - 1, usage.objections);
  step.contributors = usage.contributors;
  step.unannounced = usage.unannounced;
  for (size_t i = reduced_count; i < prologue_->agreement().joined_bit(); ++i) {
    if (step.agreed.test(i)) step.unmanaged.push_back(i - reduced_count);
  }
  return usage;
}

// The gradients that no rank has used, which the Reducer is about to overwrite.
void BackwardPass::keep_untouched() {
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
void BackwardPass::choose_units(const AgreedUsage& usage, int64_t step_number) {
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
  step.planner.emplace(*layout_, chosen.divided, step.settings);
  const bool is_on_cpu = step.buckets.front().buffer().is_cpu();
  const DetectedStep detected{
      *layout_,
      layout_.hash(),
      prologue_->agreement(),
      views_,
      {!usage.same_everywhere, !is_on_cpu, is_on_cpu ? layout_->buckets_within(kFirstBytes) : 0},
      step.shadow};
  step.units.emplace(detected, *looked_up_, units_, std::move(chosen), step_number);
}

void BackwardPass::plan_parameters(const UsageMask& to_send, const Contributors& who) {
  const UsageMask divided = step_->units ? step_->units->chosen().divided : prologue_->agreement().nothing();
  const PlanCache::Key key{to_send, divided, who, step_->settings.direct.transports.coded};
  step_->plan = plans_.find(key);
  (step_->plan ? statistics_.plan_cache_hits : statistics_.plan_cache_misses) += 1;
  if (step_->plan) return;
  RECORD_FUNCTION("ddp_hooks::plan", std::vector<c10::IValue>());
  step_->plan = std::make_shared<ReductionPlan>(make_reduction_plan(*layout_, to_send, divided, who, step_->settings));
  plans_.insert(key, step_->plan);
}

void BackwardPass::refresh_layout() {
  if (!layout_.refresh()) return;
  units_.use_layout(*layout_);
  views_.forget();
  plans_.clear();
  sender_.drop();
}

void BackwardPass::close_step() {
  Step& step = *step_;
  step.closed = true;
  put_back_dropped();
  record_usage();
  statistics_.coded_steps += step.coded_messages > 0;
  last_coded_ = step.coded;
  if (step.units && step.units->chosen().whole) {
    skip_zeros_.observe(step_number_ - 1, static_cast<double>(step.units->zero_bytes()),
                        static_cast<double>(step.units->whole_bytes()));
  }
  prologue_->unused().step_closed();
  looked_up_->forget();
  step.rebuild = is_time_to_rebuild();
  if (step.nobody_joined) reducer_.mark_used_map_reduced(step.used);
}

// What the Reducer does not make of its bucket: averages are written into it, or it is zero on every rank.
void BackwardPass::put_back_dropped() {
  for (size_t bucket = 0; bucket < step_->held.size(); ++bucket) {
    const std::vector<at::Tensor>& held = step_->held[bucket];
    for (size_t i = 0; i < held.size(); ++i) {
      const size_t parameter = layout_->buckets[bucket].slices[i].parameter;
      if (!held[i].defined() || !step_->used.test(parameter) || !views_.is_detached(parameter)) continue;
      reducer_.parameters()[parameter].mutable_grad() = held[i];
    }
  }
  // Here, and not where the step's last message comes back.
  step_->held.clear();
}

void BackwardPass::record_usage() {
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

bool BackwardPass::is_time_to_rebuild() {
  // A new Reducer would learn a static graph anew, in whatever pass comes next; under no_sync() torch cannot.
  if (settings_.rebuild_after == 0 || reducer_.has_static_graph()) return false;
  bool pays = !step_->unmanaged.empty();
  for (size_t i = 0; i < reducer_.parameters().size() && !pays; ++i) pays = !step_->used.test(i);
  // A joined rank runs no backward pass, so there is no end at which it could rebuild.
  pays = pays && !step_->used.test(prologue_->agreement().joined_bit());
  return rebuild_timer_.step_closed(step_->used.hash(), pays, settings_.rebuild_after);
}

}  // namespace ddp_hooks
