#include "engine.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "nonzero_scan.h"
#include "slice_copy.h"
#include "step.h"

namespace ddp_hooks {
namespace {

// Models that switch between a handful of branches on each of a few ranks need some dozens.
constexpr size_t kCachedPlans = 64;

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

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

int64_t payload_of(const at::Tensor& tensor) {
  if (!tensor.is_sparse()) return static_cast<int64_t>(tensor.nbytes());
  return static_cast<int64_t>(tensor._indices().nbytes() + tensor._values().nbytes());
}

// Runs `on_success` and then counts the message off on each of its buckets; a failed collective fails them instead.
// `step` keeps the buckets alive; they are not looked up in it, because the engine may be adding to it meanwhile.
void complete_with(const c10::intrusive_ptr<c10d::Work>& work, const std::shared_ptr<Step>& step,
                   std::vector<BucketInFlight*> buckets, std::function<void(c10::ivalue::Future&)> on_success) {
  work->getFuture()->addCallback(
      [step, buckets = std::move(buckets), on_success = std::move(on_success)](c10::ivalue::Future& future) {
        std::exception_ptr error = future.hasError() ? future.exception_ptr() : nullptr;
        if (!error) {
          try {
            on_success(future);
          } catch (...) {
            error = std::current_exception();
          }
        }
        for (BucketInFlight* bucket : buckets) error ? bucket->fail(error) : bucket->message_done();
      });
}

}  // namespace

Engine::Engine(std::weak_ptr<c10d::Reducer> reducer, c10::intrusive_ptr<c10d::ProcessGroup> control_group,
               const EngineSettings& settings, std::vector<std::string> names)
    : reducer_(std::move(reducer)),
      settings_(settings),
      names_(std::move(names)),
      data_group_(reducer_.process_group()),
      exchange_(std::move(control_group)),
      probe_(settings.probe),
      plans_(kCachedPlans) {
  TORCH_CHECK(names_.size() == reducer_.parameters().size(), "ddp_hooks: expected a name for each of the ",
              reducer_.parameters().size(), " parameters of the Reducer, received ", names_.size());
}

Engine::~Engine() = default;

c10::intrusive_ptr<c10::ivalue::Future> Engine::run(c10d::GradBucket& bucket) {
  const Stopwatch stopwatch;
  // A joined rank runs the hook outside of any backward pass and does not hold the Reducer's mutex.
  std::unique_lock<std::mutex> reducer_lock;
  Future future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  try {
    const bool shadow = !reducer_.in_backward();
    if (shadow) reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    const double waited_before = statistics_.exchange_wait_seconds;
    const at::NoGradGuard no_grad;
    try {
      take_bucket(bucket, shadow, future);
    } catch (...) {
      if (!step_) throw;
      step_->fail(std::current_exception());
      // Collectives that are still under way keep their own references.
      staging_.clear();
    }
    if (step_ && step_->buckets.size() >= layout_.buckets.size()) step_.reset();
    statistics_.hook_seconds += stopwatch.seconds() - (statistics_.exchange_wait_seconds - waited_before);
  } catch (...) {
    if (!future->completed()) future->setError(std::current_exception());
  }
  return future;
}

void Engine::take_bucket(c10d::GradBucket& bucket, bool shadow, const Future& future) {
  attached_ = true;
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
  if (step_->planner) {
    start_values_exchange(index);
    if (index > 0) settle_values(index - 1);
    if (index + 1 == layout_.buckets.size()) {
      settle_values(index);
      usage_ = {step_->local, step_->agreed};
      probe_.observe(step_number_ - 1, step_->used_bytes, step_->zero_bytes);
    }
  } else {
    send(index, step_->plan->buckets[index]);
  }
}

void Engine::open_step(bool shadow) {
  refresh_layout();
  TORCH_CHECK(reducer_.process_group() == data_group_,
              "ddp_hooks: the module's process group was replaced; make a new SkipUnusedState on every rank");
  const int64_t step_number = step_number_++;
  statistics_.steps += 1;
  for (const BucketLayout& bucket : layout_.buckets) statistics_.dense_bytes += bucket.bytes();

  Step& step = *step_;
  step.shadow = shadow;
  step.factor = 1.0 / reducer_.divisor();
  step.agreed = agree_on_usage();
  usage_ = {step.local, step.agreed};

  const bool alone = data_group_->getSize() == 1;
  const bool values = settings_.values_detector == ValuesDetector::kOn ||
                      (settings_.values_detector == ValuesDetector::kAdaptive && probe_.wants_values(step_number));
  if (values && !alone) {
    statistics_.values_steps += 1;
    step.planner.emplace(layout_, settings_.plan);
    return;
  }
  // Alone there is nobody to send to, whatever is used.
  const UsageMask to_send = alone ? UsageMask(layout_.parameter_count) : step.agreed;
  step.plan = plans_.find(to_send);
  (step.plan ? statistics_.plan_cache_hits : statistics_.plan_cache_misses) += 1;
  if (!step.plan) {
    step.plan = std::make_shared<WirePlan>(make_wire_plan(layout_, to_send, settings_.plan));
    plans_.insert(to_send, step.plan);
  }
}

void Engine::refresh_layout() {
  // The Reducer rebuilds its buckets once, between two steps.
  if (!layout_.buckets.empty() && layout_is_rebuilt_ == reducer_.has_rebuilt_buckets()) return;
  layout_is_rebuilt_ = reducer_.has_rebuilt_buckets();
  layout_ = reducer_.layout();
  layout_hash_ = layout_.hash();
  plans_.clear();
  staging_.clear();
}

bool Engine::graph_detector_applies() const {
  return settings_.graph_detector && (reducer_.finds_unused_parameters() || reducer_.is_static_graph());
}

UsageMask Engine::agree_on_usage() {
  Step& step = *step_;
  std::unique_ptr<PendingExchange> exchange = std::move(early_exchange_);
  if (early_error_) std::rethrow_exception(std::exchange(early_error_, nullptr));

  const size_t parameters = layout_.parameter_count;
  // Without a graph search DDP demands a gradient for every parameter, so there is nothing to agree on. A joined rank
  // has no gradients to contribute.
  const bool searched = graph_detector_applies();
  step.local = step.shadow ? UsageMask(parameters) : searched ? reducer_.local_usage() : UsageMask(parameters, true);
  if (!searched) return UsageMask(parameters, true);
  if (data_group_->getSize() == 1) return step.local;
  if (!exchange) exchange = start_exchange(step.local, 0);
  if (!step.local.is_subset_of(exchange->local())) {
    for (size_t i = 0; i < parameters; ++i) {
      TORCH_CHECK(!step.local.test(i) || exchange->local().test(i), "ddp_hooks: parameter '", names_[i],
                  "' was unused when the backward pass began and has a gradient now: expected the set of used "
                  "parameters to stand by then. Gradients made by hand during backward are not supported");
    }
  }
  return timed_wait(*exchange);
}

std::unique_ptr<PendingExchange> Engine::start_exchange(UsageMask local, uint64_t phase) {
  auto exchange = exchange_.start(std::move(local), {settings_.configuration, layout_hash_, phase});
  statistics_.exchanges += 1;
  statistics_.mask_bytes += exchange->message_bytes();
  return exchange;
}

UsageMask Engine::timed_wait(PendingExchange& exchange) {
  RECORD_FUNCTION("ddp_hooks::wait_for_masks", std::vector<c10::IValue>());
  const Stopwatch stopwatch;
  UsageMask agreed = exchange.wait();
  statistics_.exchange_wait_seconds += stopwatch.seconds();
  return agreed;
}

void Engine::start_values_exchange(uint32_t bucket) {
  RECORD_FUNCTION("ddp_hooks::scan", std::vector<c10::IValue>());
  Step& step = *step_;
  ValuesOfBucket& values = step.values.emplace_back();
  const BucketLayout& layout = layout_.buckets[bucket];
  if (layout.sparse || !any_used(layout, step.agreed)) return;

  const at::Tensor flat = step.buckets[bucket].flat();
  UsageMask nonzero(layout.slices.size());
  for (uint32_t i = 0; i < layout.slices.size(); ++i) {
    const ParameterSlice& slice = layout.slices[i];
    // A joined rank's buckets are all zeros; so are undefined gradients, which the Reducer fills in.
    if (step.shadow || !step.agreed.test(slice.parameter)) continue;
    if (!step.local.test(slice.parameter) && !reducer_.has_gradient(slice.parameter)) continue;
    const ScanResult result = nonzero_scan(flat, slice.offset, slice.length);
    if (result.any_nonzero) {
      nonzero.set(i);
      continue;
    }
    step.local.clear(slice.parameter);
    if (result.any_negative_zero) values.negative_zeros.push_back(i);
  }
  values.exchange = start_exchange(std::move(nonzero), bucket + 1);
}

void Engine::settle_values(uint32_t bucket) {
  Step& step = *step_;
  ValuesOfBucket& values = step.values[bucket];
  const BucketLayout& layout = layout_.buckets[bucket];
  if (values.exchange) {
    const UsageMask nonzero = timed_wait(*values.exchange);
    const int64_t before = used_bytes(layout, step.agreed);
    for (uint32_t i = 0; i < layout.slices.size(); ++i) {
      if (!nonzero.test(i)) step.agreed.clear(layout.slices[i].parameter);
    }
    step.used_bytes += before;
    step.zero_bytes += before - used_bytes(layout, step.agreed);
    // The sum of zeros of either sign depends on who adds it up; +0.0 is the same on every rank.
    const at::Tensor flat = step.buckets[bucket].flat();
    for (uint32_t i : values.negative_zeros) {
      if (!nonzero.test(i)) flat.narrow(0, layout.slices[i].offset, layout.slices[i].length).zero_();
    }
  }
  send(bucket, step.planner->add_bucket(bucket, step.agreed));
}

void Engine::send(uint32_t index, const BucketPlan& plan) {
  Step& step = *step_;
  BucketInFlight& bucket = step.buckets[index];
  // Passes through even with nobody to send to: the all-reduce leaves it coalesced, as plain DDP does.
  const bool sparse = layout_.buckets[index].sparse;
  bucket.expect_messages(plan.messages_touching + (sparse ? 1 : 0));
  const Disposition disposition = sparse ? Disposition::kWhole : plan.disposition;
  statistics_.buckets_skipped += disposition == Disposition::kSkipped;
  statistics_.buckets_packed += disposition == Disposition::kPacked;
  statistics_.buckets_whole += disposition == Disposition::kWhole;
  statistics_.messages += static_cast<int64_t>(plan.launches.size()) + (sparse ? 1 : 0);

  if (sparse) {
    at::Tensor gradient = bucket.buffer();
    gradient.mul_(step.factor);
    statistics_.dense_bytes += payload_of(gradient);
    statistics_.payload_bytes += payload_of(gradient);
    std::vector<at::Tensor> tensors{gradient};
    complete_with(data_group_->allreduce(tensors), step_, {&bucket}, [&bucket](c10::ivalue::Future& future) {
      bucket.set_result(future.value().toTensorVector().front());
    });
  }
  for (const Message& message : plan.launches) {
    if (message.in_place) {
      const Slice& slice = message.slices.front();
      at::Tensor view = step.buckets[slice.bucket].flat().narrow(0, slice.offset, slice.length);
      view.mul_(step.factor);
      statistics_.payload_bytes += payload_of(view);
      std::vector<at::Tensor> tensors{view};
      complete_with(data_group_->allreduce(tensors), step_, {&step.buckets[slice.bucket]}, [](c10::ivalue::Future&) {});
      continue;
    }
    std::vector<SliceOfTensor> slices;
    std::vector<BucketInFlight*> buckets;
    for (const Slice& slice : message.slices) {
      BucketInFlight* from = &step.buckets[slice.bucket];
      slices.push_back({from->flat(), slice.offset, slice.length});
      if (buckets.empty() || buckets.back() != from) buckets.push_back(from);
    }
    if (step.next_staging == staging_.size()) staging_.emplace_back();
    at::Tensor& staging = staging_[step.next_staging++];
    const at::TensorOptions options = slices.front().flat.options();
    if (!staging.defined() || staging.numel() < message.numel || staging.dtype() != options.dtype() ||
        staging.device() != options.device()) {
      staging = at::empty({message.numel}, options);
    }
    const at::Tensor packed = staging.narrow(0, 0, message.numel);
    {
      RECORD_FUNCTION("ddp_hooks::gather", std::vector<c10::IValue>());
      gather_scaled(packed, slices, step.factor);
    }
    statistics_.payload_bytes += payload_of(packed);
    std::vector<at::Tensor> tensors{packed};
    complete_with(data_group_->allreduce(tensors), step_, std::move(buckets),
                  [packed, slices = std::move(slices)](c10::ivalue::Future&) {
                    RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
                    scatter(packed, slices);
                  });
  }
}

void Engine::watch_outputs(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    // A hook on a leaf would stay for good.
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([engine = weak_from_this()](const at::Tensor&) {
      if (auto self = engine.lock()) self->outputs_reached();
    });
  }
}

// Only an optimisation: whether and when it starts the exchange, each rank decides for itself. What it must not do is
// start one for a backward pass that never reaches the buckets, because the other ranks would not take part.
void Engine::outputs_reached() noexcept {
  try {
    // Before the first bucket it is not known that the hook was registered at all.
    if (!attached_ || data_group_->getSize() == 1) return;
    auto reducer_lock = reducer_.lock();
    std::lock_guard lock(mutex_);
    if (!graph_detector_applies() || !reducer_.expects_backward() || reducer_.in_backward()) return;
    if (reducer_.learns_static_graph() || layout_is_rebuilt_ != reducer_.has_rebuilt_buckets()) return;
    // torch.autograd.grad() and backward(inputs=...) may stop short of the parameters.
    const auto* restricted = torch::autograd::get_current_graph_task_exec_info();
    if (restricted != nullptr && !restricted->empty()) return;
    const int graph_task = torch::autograd::get_current_graph_task_id();
    if (early_exchange_ && early_graph_task_ == graph_task) return;
    UsageMask local = reducer_.local_usage();
    if (local.count() == 0) return;
    early_exchange_ = start_exchange(std::move(local), 0);
    early_graph_task_ = graph_task;
  } catch (...) {
    early_error_ = std::current_exception();
  }
}

void Engine::configure(const EngineSettings& settings) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!step_ && !early_exchange_,
              "ddp_hooks: expected a change of policy between two steps, received one during a backward pass");
  settings_ = settings;
  probe_ = ValuesProbe(settings.probe);
  plans_.clear();
  staging_.clear();
  step_number_ = 0;
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
