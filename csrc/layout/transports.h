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
  bool direct = false;  // broadcasts
  bool owners = false;  // sums by owner, if also `direct`

  bool operator==(const Transports&) const = default;
};

// What collectives of a group take, measured when the state was made (ddp_hooks/serving/collective_costs.py); the same
// on every rank. A byte's time is for what a rank sends, in messages of the length that they have in steps: in an
// all-reduce as a ring would, in an all-to-all the rank with the most. A message's is that of one of many with nearly
// nothing in it: where they are that small, messages take the time, and not bytes. Without a measurement only bytes
// count, wherever they travel.
struct CollectiveCosts {
  double all_reduce_seconds = 0;  // a message
  double all_reduce_seconds_per_byte = 1;
  double all_to_all_seconds = 0;
  double all_to_all_seconds_per_byte = 1;
  // Of a gradient: to find that it is narrow, to pack it, to add up what arrives.
  double narrowing_seconds_per_byte = 0;
  // The same by the clock, while every rank does it: cores that ranks may have to share pack, add up and put back what
  // owners sum.
  double summing_seconds_per_byte = 0;
  // What comes on top for each part that travels apart, such as a row: it is dealt out, packed, added up and put back.
  double seconds_per_part = 0;
};

// Whether links are so slow that it can save time to send a gradient narrow.
bool narrow_pays(const CollectiveCosts& costs, int world_size);

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
