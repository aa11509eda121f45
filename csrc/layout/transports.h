// How a gradient travels, by who contributes to it, and how often each of its bytes crosses a link.
//
// A ring all-reduce of n ranks moves each byte 2 (n - 1) times over some link. What k of them contribute can be
// *broadcast*: each of the k sends it to all others, and everybody adds it up, in k (n - 1) transfers. Or one of the k,
// its *owner*, receives what the others have, adds it up, and sends the sum to all, in n + k - 2 transfers. What one
// rank alone contributes is broadcast in n - 1. Where messages are coded, a contribution counts as a part of a
// transfer, and a sum as another part; a ring cannot carry coded numbers.
//
// Thread-safety: none needed; these are functions. Every rank must agree on all that goes in.
#pragma once

#include <cstdint>
#include <optional>

#include "layout/contributors.h"
#include "layout/units.h"

namespace ddp_hooks {

enum class Transport : uint8_t { kAllReduce, kBroadcast, kByOwner };

// Which part of its bytes a coded message is expected to take.
struct CodedParts {
  double contribution = 1;
  double sum = 1;

  bool operator==(const CodedParts&) const = default;
};

// What may leave the all-reduces.
struct Transports {
  int world_size = 1;
  bool direct = false;                   // broadcasts
  bool owners = false;                   // sums by owner, if also `direct`
  std::optional<CodedParts> coded = {};  // what leaves them is coded

  bool operator==(const Transports&) const = default;
};

// The one with the fewest transfers; all-reduce where nobody knows who contributes.
Transport transport_for(RankSet contributors, const Transports& transports);

// Its transfers, as a part of those of an all-reduce: 1 for that, 1/2 for what one rank alone contributes.
double relative_cost(RankSet contributors, const Transports& transports);

// How many elements are sent of a gradient, each counted at its relative cost.
double count_sent(const Units& units, const UsageMask& used, const Contributors& who, const Transports& transports);

}  // namespace ddp_hooks
