// How a gradient travels, by who contributes to it and how wide it is, and how often each of its bytes crosses a link.
//
// A ring all-reduce of n ranks moves each byte 2 (n - 1) times over some link. What k of them contribute can be
// *broadcast*: each of the k sends it to all others, and everybody adds it up, in k (n - 1) transfers. Or one of the k,
// its *owner*, receives what the others have, adds it up, and sends the sum to all, in n + k - 2 transfers. What one
// rank alone contributes is broadcast in n - 1. Contributions may travel narrow, and then count as a part of a
// transfer; a ring carries sums, and so does the way back from an owner.
//
// Thread-safety: none needed; these are functions. Every rank must agree on all that goes in.
#pragma once

#include <cstdint>

#include "layout/contributors.h"
#include "layout/units.h"

namespace ddp_hooks {

enum class Transport : uint8_t { kAllReduce, kBroadcast, kByOwner };

// What may leave the all-reduces.
struct Transports {
  int world_size = 1;
  bool broadcasts = false;
  bool sums = false;  // by owner
};

// Which part of its bytes a contribution takes in a form.
double part_of_bytes(Width width);

// The one with the fewest transfers; all-reduce where nobody knows who contributes.
Transport transport_for(RankSet contributors, Width width, const Transports& transports);

// Its transfers, as a part of those of an all-reduce: 1 for that, 1/2 for what one rank alone contributes.
double relative_cost(RankSet contributors, Width width, const Transports& transports);

// What is sent of a gradient: elements, each counted at its relative cost.
struct SentElements {
  double elements = 0;
  double at_full_width = 0;  // the same, if nothing could travel narrow
};
SentElements count_sent(const Units& units, const UsageMask& used, const Contributors& who,
                        const Transports& transports);

}  // namespace ddp_hooks
