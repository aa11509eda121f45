// Sends the messages of a bucket's plan. A completion writes averages back to where the gradients were read: the
// bucket, from which the Reducer writes .grad, or, for a divided parameter, .grad itself.
//
// Nothing waits in here: a message's completion counts it off on the buckets that it carries slices of.
// Thread-safety: the engine locks; completions run in the process group's threads.
// Every rank must agree on: the plan, the agreed mask.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "kernels/slice_copy.h"
#include "plan/reduction_plan.h"
#include "reducer/bucket_views.h"
#include "transport/coded_sender.h"
#include "transport/direct_sender.h"
#include "transport/host_sender.h"
#include "transport/hosts_on_streams.h"
#include "transport/launch.h"
#include "transport/staging.h"
#include "transport/step_in_flight.h"

namespace ddp_hooks {

// What a tensor adds to `payload_bytes`; of a sparse one, its indices and its values.
int64_t payload_bytes(const at::Tensor& tensor);

class MessageSender {
 public:
  // The references have to outlive every call of `send`. `device_type` is the gradients'. `hosts`: null unless ranks
  // add up in hosts, and collectives are put on streams; then what is not all-reduced goes over these.
  MessageSender(c10d::ProcessGroup& group, c10::DeviceType device_type,
                const std::shared_ptr<const ControlGroups>& control_groups,
                const std::shared_ptr<const HostsOnStreams>& hosts, BucketViews& views, MessageStatistics& statistics)
      : group_(group),
        is_on_streams_(ddp_hooks::is_on_streams(backend_name(group, device_type), device_type)),
        control_groups_(control_groups),
        hosts_on_streams_(hosts),
        views_(views),
        statistics_(statistics),
        direct_(group, is_on_streams_, control_groups, staging_, statistics),
        coded_(group.getRank(), group.getSize(), control_groups, staging_, late_),
        hosts_(group.getRank(), control_groups, hosts, staging_, late_) {}

  // Whether the group puts collectives on the gradients' streams.
  bool is_on_streams() const { return is_on_streams_; }

  // Whether ranks of a host add up everything before it leaves the host; every rank has to agree on it.
  void set_adds_up_in_hosts(bool adds_up) { adds_up_in_hosts_ = adds_up; }

  // The messages of a bucket's plan. `divided`: where the gradients lie whose places in the plan come after the
  // buckets.
  void send(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout, uint32_t bucket,
            const BucketPlan& plan, const Places& divided = {});
  // A sparse bucket, whole; its plan has no message.
  void send_sparse(const std::shared_ptr<StepInFlight>& step, uint32_t bucket);
  // Notes how the bucket travels, by the plan that says so.
  void count(const BucketLayout& layout, const BucketPlan& plan);

  // To be called when a parameter's gradient is final, which may be long before its bucket is ready: copies it to where
  // it will be sent from while it is still in the processor's cache.
  void copy_into_bucket_early(StepInFlight& step, size_t parameter);

  // What completions have counted since the last reset, beside the rest.
  MessageStatistics late_statistics() const { return late_->read(); }
  void reset_late_statistics() { late_->reset(); }

  // Lets go of the staging memory; messages under way keep theirs.
  void drop() { staging_.drop(); }

 private:
  void send_in_place(const std::shared_ptr<StepInFlight>& step, const BucketLayout& layout, const Message& message);
  void send_where_it_lies(const std::shared_ptr<StepInFlight>& step, BucketInFlight& bucket, const Place& place,
                          const Message& message);
  void send_packed(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout, uint32_t index,
                   const Message& message, const Places& divided);
  void send_between_hosts(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout, uint32_t index,
                          const BucketPlan& plan, const Places& divided);
  OutgoingMessage direct_message(const std::shared_ptr<StepInFlight>& step, const LayoutOfBuckets& layout,
                                 uint32_t index, const DirectMessage& message, const Places& divided) const;
  void prepare_direct(const StepInFlight& step, const BucketLayout& layout, const BucketPlan& plan);
  void copy_into_bucket(const StepInFlight& step, const BucketLayout& layout, const Stretch& sent, bool scales);
  at::Tensor take_gradient(const StepInFlight& step, size_t parameter);
  const Topology& topology() const {
    return hosts_on_streams_ ? hosts_on_streams_->topology() : control_groups_->topology();
  }
  bool group_averages(const StepInFlight& step, const at::Tensor& tensor) const;
  void all_reduce(const at::Tensor& tensor, c10d::ReduceOp operation, Launch launch, OnSuccess on_success);

  c10d::ProcessGroup& group_;
  const bool is_on_streams_;
  const std::shared_ptr<const ControlGroups>& control_groups_;
  const std::shared_ptr<const HostsOnStreams>& hosts_on_streams_;
  bool adds_up_in_hosts_ = false;
  BucketViews& views_;
  MessageStatistics& statistics_;
  Staging staging_;
  const std::shared_ptr<LateStatistics> late_ = std::make_shared<LateStatistics>();
  DirectSender direct_;
  CodedSender coded_;
  HostSender hosts_;
};

}  // namespace ddp_hooks
