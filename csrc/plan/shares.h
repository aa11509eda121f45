// How the ranks of a host divide a message between hosts among themselves.
//
// Each takes the same part of what every host has: it adds that part up over the ranks of its host, exchanges it with
// the ranks at the same position on the other hosts, and hands the result to its neighbours. So each byte crosses
// between two hosts once for each time that the plan, which counts hosts, says.
//
// Always holds: the shares are all of the message, in order; they differ by one element of each group at most.
// Thread-safety: none needed; these are functions. Every rank must agree on all that goes in.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/direct_plan.h"
#include "plan/reduction_plan.h"

namespace ddp_hooks {

struct Share {
  std::vector<DirectPart> parts;  // of the message, where they lie; contributors are hosts
  DirectMessage between_hosts;    // the same, one after the other in the share's own memory, which is place 0
};

std::vector<Share> divide_among(int ranks_per_host, const DirectMessage& message, int64_t element_bytes);

// The all-reduce as messages that hosts all contribute to, of at most so many bytes each.
std::vector<DirectMessage> between_hosts(const Message& message, int host_count, int64_t most_bytes);

}  // namespace ddp_hooks
