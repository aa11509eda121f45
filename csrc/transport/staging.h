// Memory that messages are put together in, kept from step to step.
//
// Always holds: what a step took is nobody else's until the step is over. If one of its messages has not come back
// well, no later step has it: what has failed, or was under way beside it, may still write there. Messages under way
// keep their own reference; on a device, memory is not reused before work on the stream that has taken it is through.
// Thread-safety: none; the engine locks. Ranks may differ.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/launch.h"
#include "transport/step_in_flight.h"

namespace ddp_hooks {

class Staging {
 public:
  at::Tensor take(StepInFlight& step, int64_t numel, const at::TensorOptions& options) {
    if (step.next_staging == 0) begin(step);
    if (step.next_staging == buffers_.size()) buffers_.emplace_back();
    at::Tensor& buffer = buffers_[step.next_staging++];
    if (!buffer.defined() || buffer.numel() < numel || buffer.dtype() != options.dtype() ||
        buffer.device() != options.device()) {
      buffer = at::empty({numel}, options);
    }
    // It may belong to another stream: that of an earlier step, or of a completion in which this was first taken.
    keep_for_stream(buffer);
    return buffer.narrow(0, 0, numel);
  }

  void drop() { buffers_.clear(); }

 private:
  void begin(const StepInFlight& step) {
    if (messages_not_back_ && *messages_not_back_ != 0) drop();
    messages_not_back_ = step.messages_not_back;
  }

  std::vector<at::Tensor> buffers_;                          // in the order in which a step takes them
  std::shared_ptr<std::atomic<int64_t>> messages_not_back_;  // of the step that took them last
};

}  // namespace ddp_hooks
