#include "transport/message_sender.h"

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <deque>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "plan/shares.h"

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
                         const BucketPlan& plan, const Places& divided) {
  BucketInFlight& bucket = step->buckets[index];
  bucket.expect_messages(plan.messages_touching);
  prepare_direct(*step, layout.buckets[index], plan);
  if (adds_up_in_hosts_) return send_between_hosts(step, layout, index, plan, divided);
  for (const Message& message : plan.launches) {
    if (!message.in_place) {
      send_packed(step, layout, index, message, divided);
    } else if (const size_t place = message.stretches.front().place; place < layout.buckets.size()) {
      send_in_place(step, layout.buckets[place], message);
    } else {
      send_where_it_lies(step, bucket, divided[place - layout.buckets.size()], message);
    }
  }
  std::vector<OutgoingMessage> coded;
  for (const DirectMessage& message : plan.direct) {
    OutgoingMessage outgoing = direct_message(step, layout, index, message, divided);
    if (message.is_coded) {
      coded.push_back(std::move(outgoing));
    } else {
      hosts_on_streams_ ? hosts_.send(std::move(outgoing)) : direct_.send(std::move(outgoing));
    }
  }
  coded_.send(std::move(coded));
}

void MessageSender::send_between_hosts(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout,
                                       uint32_t index, const BucketPlan& plan, const Places& divided) {
  // Steps of one message overlap with those of others.
  constexpr int64_t kMostBytes = 4 << 20;
  for (const Message& message : plan.launches) {
    for (const Stretch& stretch : message.stretches) {
      if (stretch.place < layout.buckets.size()) {
        copy_into_bucket(*step, layout.buckets[stretch.place], stretch, true);
      }
    }
    std::vector<BucketInFlight*> planned;
    for (const DirectMessage& part : between_hosts(message, topology().host_count(), kMostBytes)) {
      OutgoingMessage outgoing = direct_message(step, layout, index, part, divided);
      for (BucketInFlight* bucket : outgoing.launch.buckets) {
        bucket->hold();
        if (std::find(planned.begin(), planned.end(), bucket) == planned.end()) planned.push_back(bucket);
      }
      hosts_.send(std::move(outgoing));
    }
    // The plan has counted the message once.
    for (BucketInFlight* bucket : planned) bucket->release();
  }
  for (const DirectMessage& message : plan.direct) {
    hosts_.send(direct_message(step, layout, index, message, divided));
  }
}

void MessageSender::count(const BucketLayout& layout, const BucketPlan& plan) {
  const Disposition disposition = layout.sparse ? Disposition::kWhole : plan.disposition;
  statistics_.buckets_skipped += disposition == Disposition::kSkipped;
  statistics_.buckets_packed += disposition == Disposition::kPacked;
  statistics_.buckets_whole += disposition == Disposition::kWhole;
}

// What this rank contributes is copied into the bucket, and scaled unless it is coded; into the other views comes what
// others contribute.
void MessageSender::prepare_direct(const StepInFlight& step, const BucketLayout& layout, const BucketPlan& plan) {
  const int here = topology().host_of(group_.getRank());
  for (const DirectPart& part : plan.not_reduced) {
    if (contains(part.contributors, here)) {
      copy_into_bucket(step, layout, part, !plan.is_coded);
      continue;
    }
    for (const ParameterSlice& slice : parameters_in(layout, part)) {
      if (views_.is_detached(slice.parameter)) views_.restore(slice.parameter);
    }
  }
}

OutgoingMessage MessageSender::direct_message(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout,
                                              uint32_t index, const DirectMessage& message,
                                              const Places& divided) const {
  const size_t bucket_count = layout.buckets.size();
  std::vector<BucketInFlight*> buckets;
  for (const uint32_t bucket : buckets_of(message, bucket_count, index)) buckets.push_back(&step->buckets[bucket]);
  Places places(bucket_count + divided.size());  // those that the message has parts of
  for (const DirectGroup& group : message.groups) {
    for (const DirectPart& part : group.parts) {
      Place& place = places[part.place];
      if (place.flat.defined()) continue;
      // What is in a bucket has been scaled, if it is not coded as it is.
      const double divisor = message.is_coded && !adds_up_in_hosts_ ? step->divisor : 1;
      place = part.place < bucket_count ? Place{step->buckets[part.place].flat(), 0, divisor}
                                        : divided[part.place - bucket_count];
    }
  }
  return {{step, std::move(buckets)}, message, std::move(places)};
}

// A run of a divided gradient.
void MessageSender::send_where_it_lies(const std::shared_ptr<StepInFlight>& step, BucketInFlight& bucket,
                                       const Place& place, const Message& message) {
  const Stretch& run = message.stretches.front();
  const at::Tensor view = place.flat.narrow(0, place.offset + run.offset, run.length);
  const bool averages = group_averages(*step, view);
  if (!averages) scale(view, place.divisor, place.divides);
  all_reduce(view, averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM, {step, {&bucket}},
             [](c10::ivalue::Future&) {});
}

// Even with nobody to send to: the all-reduce leaves it coalesced, as plain DDP does.
void MessageSender::send_sparse(const std::shared_ptr<StepInFlight>& step, uint32_t index) {
  BucketInFlight& bucket = step->buckets[index];
  bucket.expect_messages(1);
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
    const bool divides = views_.is_averaged_by_division(slice.parameter);
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
  const double divisor = step.plan->coded.test(parameter) ? 1 : step.divisor;
  gather(views_.place(parameter), {{&gradient, 0, gradient.numel()}}, divisor,
         views_.is_averaged_by_division(parameter));
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
                                uint32_t index, const Message& message, const Places& divided) {
  // Slices borrow tensors: of many rows each would count a reference.
  struct Sources {
    std::vector<BorrowedSlice> slices;
    int64_t numel = 0;
    double divisor = 1;
    bool divides = false;
  };
  std::vector<Sources> sources;
  const auto add = [&](const BorrowedSlice& slice, double divisor, bool divides) {
    if (sources.empty() || sources.back().divides != divides || sources.back().divisor != divisor) {
      sources.push_back({{}, 0, divisor, divides});
    }
    Sources& from = sources.back();
    from.numel += slice.length;
    if (!from.slices.empty() && from.slices.back().continues_in(slice)) {
      from.slices.back().length += slice.length;
    } else {
      from.slices.push_back(slice);
    }
  };
  std::deque<at::Tensor> gradients;  // that lie elsewhere than in the bucket
  const auto places = std::make_shared<std::deque<Place>>();
  std::vector<at::Tensor> kept;
  std::vector<BorrowedSlice> to;
  std::vector<BucketInFlight*> buckets;
  size_t last_place = 0;
  for (const Stretch& stretch : message.stretches) {
    const bool is_divided = stretch.place >= layout.buckets.size();
    BucketInFlight* bucket = &step->buckets[is_divided ? index : stretch.place];
    if (buckets.empty() || buckets.back() != bucket) buckets.push_back(bucket);
    if (places->empty() || std::exchange(last_place, stretch.place) != stretch.place) {
      places->push_back(is_divided ? divided[stretch.place - layout.buckets.size()] : Place{bucket->flat()});
      last_place = stretch.place;
      if (is_divided) kept.push_back(places->back().flat);
    }
    const Place& place = places->back();
    to.push_back(place.slice(stretch));
    if (is_divided) {
      add(to.back(), place.divisor, place.divides);
      continue;
    }
    for (const ParameterSlice& part : parameters_in(layout.buckets[stretch.place], stretch)) {
      const at::Tensor gradient = take_gradient(*step, part.parameter);
      const at::Tensor& flat = gradient.defined() ? gradients.emplace_back(gradient) : place.flat;
      add({&flat, gradient.defined() ? 0 : part.offset, part.length}, step->divisor,
          views_.is_averaged_by_division(part.parameter));
    }
  }
  const at::Tensor packed = staging_.take(*step, message.numel, places->front().flat.options());
  // Scaled on the way, so an average would save no pass here, and NCCL has fewer algorithms for it than for a sum.
  int64_t position = 0;
  for (const Sources& from : sources) {
    gather(packed.narrow(0, position, from.numel), from.slices, from.divisor, from.divides);
    position += from.numel;
  }
  all_reduce(packed, c10d::ReduceOp::SUM, {step, std::move(buckets)},
             [packed, places, kept = std::move(kept), to = std::move(to)](c10::ivalue::Future&) {
               RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
               scatter(packed, to);
               keep_for_stream(packed);
               for (const at::Tensor& gradient : kept) keep_for_stream(gradient);
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
