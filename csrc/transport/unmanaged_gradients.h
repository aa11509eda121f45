// Averages gradients that DDP's Reducer does not know: those of parameters that were frozen when the Reducer was made,
// with the module or anew, and unfrozen later.
//
// The slow path, right in every case: after backward, one message for each dtype and device, nothing overlaps. Each
// parameter has a flag sent along, so that what no rank gave a gradient is left alone, as DDP leaves it. On a device
// whose collectives are put on streams, gradients stay there, and the host waits for the flags only, which travel from
// host to host.
// Every rank must agree on: the parameters, the agreed mask, the factor, the number of ranks, whether there is a group
// on streams.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ddp_hooks {

struct UnmanagedGradient {
  at::Tensor parameter;
  bool used;  // it got a gradient here in this step
};

// What was handed to the group.
struct UnmanagedMessages {
  int64_t messages = 0;
  int64_t gradient_bytes = 0;
  int64_t flag_bytes = 0;
  std::optional<size_t> sparse;  // the gradient that was not sent, because here it is a sparse one
};

// Sums over the ranks of `group`, times `factor`, the gradients that some rank used; a rank that did not use one
// contributes what its .grad holds, as in DDP, or zeros. It waits for the result and writes it to every .grad but
// sparse ones. Without `wait`, on a rank that has joined, it contributes zeros and leaves every .grad as it is.
// `on_streams` carries the gradients that are not on the CPU; null where nothing does, or a rank has joined, which
// comes here earlier than the others and would change the order of that group's messages.
UnmanagedMessages average_unmanaged_gradients(c10d::Backend& group, c10d::ProcessGroup* on_streams,
                                              const std::vector<UnmanagedGradient>& gradients, double factor,
                                              bool wait);

}  // namespace ddp_hooks
