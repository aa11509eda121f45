#include "transport/message_sender.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

namespace ddp_hooks {
namespace {

// Not `mul_` with a Scalar: ATen makes that the first factor, and rounds it to the tensor's dtype on the CPU. In 16
// bits, all gradients would be off by what 1/n is.
void scale(at::Tensor run, double divisor, bool divides) {
  if (divisor == 1) return;
  RECORD_FUNCTION("ddp_hooks::scale", std::vector<c10::IValue>());
  divides ? run.div_(divisor) : at::mul_out(run, run, at::native::wrapped_scalar_tensor(1 / divisor));
}

// Neighbouring parameters of a bucket that get ready to be sent in one go.
struct BucketRun {
  enum class Treatment : uint8_t {
    kLeave,   // lies in the bucket, scaled
    kScale,   // lies in the bucket
    kGather,  // lies elsewhere: is copied here, scaled
  };

  int64_t begin = 0;
  int64_t end = 0;
  Treatment treatment = Treatment::kLeave;
  bool divides = false;
  std::vector<SliceOfTensor> gradients;

  bool takes(int64_t offset, Treatment next, bool next_divides) const {
    return offset == end && next == treatment && next_divides == divides;
  }

  void make_ready(const at::Tensor& flat, double divisor) const {
    const at::Tensor here = flat.narrow(0, begin, end - begin);
    if (treatment == Treatment::kGather) gather(here, borrow(gradients), divisor, divides);
    if (treatment == Treatment::kScale) scale(here, divisor, divides);
  }
};

}  // namespace

int64_t payload_bytes(const at::Tensor& tensor) {
  if (!tensor.is_sparse()) return static_cast<int64_t>(tensor.nbytes());
  return static_cast<int64_t>(tensor._indices().nbytes() + tensor._values().nbytes());
}

void MessageSender::send(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout, uint32_t index,
                         const BucketPlan& plan, bool divided) {
  BucketInFlight& bucket = step->buckets[index];
  // Passes through even with nobody to send to: the all-reduce leaves it coalesced, as plain DDP does.
  const bool sparse = layout.buckets[index].sparse;
  bucket.expect_messages(plan.messages_touching + (sparse ? 1 : 0));
  if (!divided) {  // otherwise it is counted with its units
    const Disposition disposition = sparse ? Disposition::kWhole : plan.disposition;
    statistics_.buckets_skipped += disposition == Disposition::kSkipped;
    statistics_.buckets_packed += disposition == Disposition::kPacked;
    statistics_.buckets_whole += disposition == Disposition::kWhole;
  }
  if (step->plan) prepare_direct(*step, layout.buckets[index], index, *step->plan);
  if (sparse) send_sparse(step, bucket);
  for (const Message& message : plan.launches) {
    if (message.in_place) {
      send_in_place(step, layout.buckets[message.stretches.front().place], message);
    } else {
      send_packed(step, layout, message);
    }
  }
  for (const DirectMessage& message : plan.direct) send_direct(step, message);
}

// What this rank contributes is copied into the bucket, scaled; into the other views comes what others contribute.
void MessageSender::prepare_direct(const StepInFlight& step, const BucketLayout& layout, uint32_t bucket,
                                   const ReductionPlan& plan) {
  if (plan.direct.count() == 0) return;
  for (const ParameterSlice& slice : layout.slices) {
    if (slice.length == 0 || !plan.direct.test(slice.parameter)) continue;
    if (contains(step.contributors.ranks(slice.parameter), group_.getRank())) {
      copy_into_bucket(step, layout, {bucket, slice.offset, slice.length}, true);
    } else if (views_.is_detached(slice.parameter)) {
      views_.restore(slice.parameter);
    }
  }
}

void MessageSender::send_direct(const std::shared_ptr<StepInFlight>& step, const DirectMessage& message) {
  Places places(step->buckets.size());
  std::vector<BucketInFlight*> buckets;
  for (const uint32_t bucket : buckets_of(message)) {
    buckets.push_back(&step->buckets[bucket]);
    places[bucket].flat = step->buckets[bucket].flat();
  }
  direct_.send({step, std::move(buckets)}, message, std::move(places));
}

void MessageSender::send_units(const std::shared_ptr<StepInFlight>& step, uint32_t index, const Places& gradients,
                               const UnitPlan& plan) {
  BucketInFlight& bucket = step->buckets[index];
  bucket.expect_messages(static_cast<int32_t>(plan.reduced.size() + plan.direct.size()));
  statistics_.buckets_packed += 1;
  for (const Message& message : plan.reduced) send_unit_message(step, bucket, gradients, message);
  for (const DirectMessage& message : plan.direct) {
    Places places(gradients.size());  // those that the message has parts of
    for (const DirectGroup& group : message.groups) {
      for (const DirectPart& part : group.parts) places[part.place] = gradients[part.place];
    }
    direct_.send({step, {&bucket}}, message, std::move(places));
  }
  bucket.release();
}

void MessageSender::send_unit_message(const std::shared_ptr<StepInFlight>& step, BucketInFlight& bucket,
                                      const Places& gradients, const Message& message) {
  if (message.in_place) {
    const Stretch& run = message.stretches.front();
    const Place& place = gradients[run.place];
    const at::Tensor view = place.flat.narrow(0, place.offset + run.offset, run.length);
    const bool averages = group_averages(*step, view);
    if (!averages) scale(view, place.divisor, place.divides);
    all_reduce(view, averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, {step, {&bucket}},
               [](c10::ivalue::Future&) {});
    return;
  }
  Places places(gradients.size());  // those that the message has runs of
  const at::Tensor packed = staging_.take(*step, message.numel, gradients.front().flat.options());
  // Runs of one gradient after the other; each gradient is scaled in its own way.
  int64_t position = 0;
  for (size_t first = 0; first < message.stretches.size();) {
    const size_t gradient = message.stretches[first].place;
    const Place& place = places[gradient] = gradients[gradient];
    const int64_t begin = position;
    std::vector<BorrowedSlice> from;
    for (; first < message.stretches.size() && message.stretches[first].place == gradient; ++first) {
      from.push_back(place.slice(message.stretches[first]));
      position += from.back().length;
    }
    gather(packed.narrow(0, begin, position - begin), from, place.divisor, place.divides);
  }
  all_reduce(packed, c10d::ReduceOp::SUM, {step, {&bucket}},
             [packed, runs = message.stretches, places = std::move(places)](c10::ivalue::Future&) {
               RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
               std::vector<BorrowedSlice> to;
               to.reserve(runs.size());
               for (const Stretch& run : runs) to.push_back(places[run.place].slice(run));
               scatter(packed, to);
               keep_for_stream(packed);
               for (const Place& place : places) keep_for_stream(place.flat);
             });
}

void MessageSender::send_sparse(const std::shared_ptr<StepInFlight>& step, BucketInFlight& bucket) {
  at::Tensor gradient = bucket.buffer();
  gradient.div_(step->divisor);
  all_reduce(gradient, c10d::ReduceOp::SUM, {step, {&bucket}},
             [&bucket](c10::ivalue::Future& future) { bucket.set_result(future.value().toTensorVector().front()); });
}

void MessageSender::send_in_place(const std::shared_ptr<StepInFlight>& step, const BucketLayout& layout,
                                  const Message& message) {
  const Stretch& slice = message.stretches.front();
  BucketInFlight& bucket = step->buckets[slice.place];
  std::vector<std::pair<at::Tensor, at::Tensor>> gaps;
  for (const Stretch& gap : message.gaps) {
    const at::Tensor unused = bucket.flat().narrow(0, gap.offset, gap.length);
    gaps.emplace_back(unused, unused.clone());
    // What lies here may be anything, such as NaN in memory that nobody has written to; plain DDP sends zeros.
    unused.zero_();
  }
  const at::Tensor view = bucket.flat().narrow(0, slice.offset, slice.length);
  const bool averages = group_averages(*step, view);
  copy_into_bucket(*step, layout, slice, !averages);
  all_reduce(view, averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, {step, {&bucket}},
             [gaps = std::move(gaps)](c10::ivalue::Future&) {
               for (const auto& [gap, content] : gaps) {
                 gap.copy_(content);
                 keep_for_stream(content);
               }
             });
}

// Copies the gradients of a slice of a bucket into it, scaled unless the group does that: neighbours that lie elsewhere
// in one copy, those that lie in the bucket already where they are.
void MessageSender::copy_into_bucket(const StepInFlight& step, const BucketLayout& layout, const Stretch& sent,
                                     bool scales) {
  using Treatment = BucketRun::Treatment;
  const at::Tensor flat = step.buckets[sent.place].flat();
  const double divisor = scales ? step.divisor : 1;
  BucketRun run;
  run.begin = run.end = sent.offset;
  for (const ParameterSlice& slice : parameters_in(layout, sent)) {
    at::Tensor gradient;
    Treatment treatment = Treatment::kLeave;
    if (step.copied_early.test(slice.parameter)) {
      views_.restore(slice.parameter);
    } else if (step.agreed.test(slice.parameter)) {
      gradient = take_gradient(step, slice.parameter);
      treatment = gradient.defined() ? Treatment::kGather : Treatment::kScale;
    }
    const bool divides = views_.is_divided(slice.parameter);
    if (!run.takes(slice.offset, treatment, divides)) {
      run.make_ready(flat, divisor);
      run = {slice.offset, slice.offset, treatment, divides, {}};
    }
    run.end = slice.offset + slice.length;
    if (gradient.defined()) run.gradients.push_back({gradient, 0, slice.length});
  }
  run.make_ready(flat, divisor);
}

void MessageSender::copy_into_bucket_early(StepInFlight& step, size_t parameter) {
  if (!step.plan || !step.plan->in_place.test(parameter) || !views_.is_detached(parameter)) return;
  const at::Tensor gradient = views_.find(parameter);
  if (!gradient.defined()) return;
  gather(views_.place(parameter), {{&gradient, 0, gradient.numel()}}, step.divisor, views_.is_divided(parameter));
  step.copied_early.set(parameter);
}

// Restores the parameter's view. The gradient, flat, if it is to be taken from elsewhere; undefined if it lies in the
// bucket.
at::Tensor MessageSender::take_gradient(const StepInFlight& step, size_t parameter) {
  if (step.shadow || !views_.is_detached(parameter)) return {};
  at::Tensor gradient = views_.find_or_fill(parameter);
  views_.restore(parameter);
  return gradient;
}

bool MessageSender::group_averages(const StepInFlight& step, const at::Tensor& tensor) const {
  // Saves a pass over gradients that lie in the bucket already. NCCL's average multiplies with 1/n before it sums, as
  // we do, but with 1/n rounded to the tensor's dtype; in 16 bits that is off by more than the rounding of a product.
  // Decided by what was agreed, not by the divisor, which a rank that has joined does not know.
  return is_on_streams_ && tensor.element_size() >= 4 && step.nobody_joined;
}

void MessageSender::send_packed(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout,
                                const Message& message) {
  struct Sources {
    std::vector<SliceOfTensor> slices;
    int64_t numel = 0;
    bool divides = false;
  };
  std::vector<Sources> sources;
  std::vector<SliceOfTensor> to;
  std::vector<BucketInFlight*> buckets;
  for (const Stretch& slice : message.stretches) {
    BucketInFlight* bucket = &step->buckets[slice.place];
    if (buckets.empty() || buckets.back() != bucket) buckets.push_back(bucket);
    const at::Tensor flat = bucket->flat();
    to.push_back({flat, slice.offset, slice.length});
    for (const ParameterSlice& part : parameters_in(layout.buckets[slice.place], slice)) {
      const bool divides = views_.is_divided(part.parameter);
      if (sources.empty() || sources.back().divides != divides) sources.push_back({{}, 0, divides});
      Sources& from = sources.back();
      from.numel += part.length;
      const at::Tensor gradient = take_gradient(*step, part.parameter);
      if (gradient.defined()) {
        from.slices.push_back({gradient, 0, part.length});
      } else {
        append(from.slices, SliceOfTensor{flat, part.offset, part.length});
      }
    }
  }
  const at::Tensor packed = staging_.take(*step, message.numel, to.front().flat.options());
  // Scaled on the way, so an average would save no pass here, and NCCL has fewer algorithms for it than for a sum.
  int64_t position = 0;
  for (const Sources& from : sources) {
    gather(packed.narrow(0, position, from.numel), borrow(from.slices), step->divisor, from.divides);
    position += from.numel;
  }
  all_reduce(packed, c10d::ReduceOp::SUM, {step, std::move(buckets)},
             [packed, to = std::move(to)](c10::ivalue::Future&) {
               RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
               scatter(packed, borrow(to));
               keep_for_stream(packed);
             });
}

void MessageSender::all_reduce(const at::Tensor& tensor, c10d::ReduceOp operation, Launch launch,
                               OnSuccess on_success) {
  RECORD_FUNCTION("ddp_hooks::all_reduce", std::vector<c10::IValue>());
  statistics_.messages += 1;
  const int64_t bytes = payload_bytes(tensor);
  statistics_.payload_bytes += bytes;
  statistics_.sent_bytes += 2 * (group_.getSize() - 1) * bytes / group_.getSize();
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = std::move(operation);
  when_back(group_.allreduce(tensors, options), tensor.device(), std::move(launch), std::move(on_success));
}

}  // namespace ddp_hooks
