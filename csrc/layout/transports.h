// How a gradient travels, by who contributes to it, and how often each of its bytes then crosses a link.
//
// A ring all-reduce of n ranks moves each byte 2 (n - 1) times over some link. What one rank alone contributes is
// *broadcast* to the others in n - 1 transfers. What k contribute is received by one of them, its *owner*, summed there
// and broadcast, in n + k - 2.
//
// Thread-safety: none needed; these are functions. Every rank must agree on all that goes in.
#pragma once

#include <cstdint>

#include "layout/contributors.h"
#include "layout/units.h"

namespace ddp_hooks {

enum class Transport : uint8_t { kAllReduce, kBroadcast, kByOwner };

struct Transports {
  int world_size = 1;
  bool owners = false;  // whether sums by owner are among them
};

// The one with the fewest transfers; all-reduce where nobody knows who contributes.
Transport transport_for(RankSet contributors, const Transports& transports);

// Its transfers, as a part of those of an all-reduce: 1 for that, 1/2 for a broadcast.
double relative_cost(RankSet contributors, const Transports& transports);

// What the used units come to: each element counted at its relative cost, and those that are not all-reduced.
struct UnitsCost {
  double elements = 0;
  int64_t direct_elements = 0;
};
UnitsCost cost_of(const Units& units, const UsageMask& used, const Contributors& who, const Transports& transports);

}  // namespace ddp_hooks
