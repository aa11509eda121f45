// A message on its way for some buckets of a step: what is common to all transports.
//
// Thread-safety: completions run in the process group's threads and touch the launch's step only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "kernels/slice_copy.h"
#include "transport/step_in_flight.h"

namespace ddp_hooks {

// With what has failed, or null.
using OnEnd = std::function<void(const std::exception_ptr& error)>;

// The step keeps the buckets alive; they are not looked up in it, because the engine may be adding to it meanwhile.
struct Launch {
  std::shared_ptr<StepInFlight> step;
  std::vector<BucketInFlight*> buckets;
  OnEnd ended = {};  // of a message that is a part of another one's way; may be empty
};

// What the group calls its backend for a type of device; empty where it has none, as one that is written in Python. The
// same on every rank.
std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device_type);
// Whether a backend of this name puts the collectives of such devices on their streams, as NCCL does, and can average.
bool is_on_streams(const std::string& backend_name, c10::DeviceType device_type);

// Refuses a collective on a device whose completion would not run here and now.
void check_is_complete(c10d::Work& work, c10d::ProcessGroup& group, c10::Device device);

using OnSuccess = std::function<void(c10::ivalue::Future&)>;

// When the collective is back, runs `on_success`, unless it has failed, and then `on_end`.
void when_back(const c10::intrusive_ptr<c10d::Work>& work, c10::Device device, std::shared_ptr<StepInFlight> step,
               OnSuccess on_success, OnEnd on_end);
// The same for what is written into buckets, unless their step has failed; counts the message off on each, or fails
// them, and tells who waits for its end.
void when_back(const c10::intrusive_ptr<c10d::Work>& work, c10::Device device, const Launch& launch,
               OnSuccess on_success);
void end_message(const Launch& launch, const std::exception_ptr& error);

// `to` = the slices, one after the other, scaled: divided where plain DDP divides, otherwise times 1/divisor.
void gather(const at::Tensor& to, const std::vector<BorrowedSlice>& from, double divisor, bool divides);

// Completions on a device run on a stream of their own; memory that they read or write may not be reused before they
// have. Gradients are held by their parameters, unless somebody drops them within backward.
void keep_for_stream(const at::Tensor& tensor);  // which may be undefined

// Since the last reset; the same on every rank, but for the bytes of sparse gradients and what each sends.
struct MessageStatistics {
  int64_t buckets_whole = 0;
  int64_t buckets_packed = 0;
  int64_t buckets_skipped = 0;
  int64_t messages = 0;
  int64_t payload_bytes = 0;    // of gradients, however they travel; so many
  int64_t broadcast_bytes = 0;  // of them were broadcast,
  int64_t owner_bytes = 0;      // and so many summed by owners;
  int64_t coded_bytes = 0;      // so many travelled coded,
  int64_t uncoded_bytes = 0;    // and were so many before that;
  int64_t size_bytes = 0;       // by which ranks told each other how long coded messages are
  int64_t sent_bytes = 0;       // by this rank; in all-reduces as a ring would

  MessageStatistics& operator+=(const MessageStatistics& other);
};

}  // namespace ddp_hooks
