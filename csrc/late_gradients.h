// Averages gradients that DDP's Reducer does not know: those of parameters that were frozen when the Reducer was made,
// with the module or anew, and thawed later.
//
// The slow path, right in every case: after backward, one message for each dtype and device, nothing overlaps. Each
// parameter brings a flag along, so that what no rank gave a gradient is left alone, as DDP leaves it.
// Every rank must agree on: the parameters, the agreed mask and the factor.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace ddp_hooks {

// What was handed to the group.
struct LateMessages {
  int64_t messages = 0;
  int64_t gradient_bytes = 0;
  int64_t flag_bytes = 0;
};

// Averages the gradients of `parameters` over the ranks of `group` and waits for the result. `contribute` is false on a
// rank that has joined: it takes part with zeros, keeps its own gradients and does not wait.
LateMessages average_late_gradients(c10d::Backend& group, const std::vector<at::Tensor>& parameters, double factor,
                                    bool contribute);

}  // namespace ddp_hooks
