// How a gradient travels, by who contributes to it, and how often each of its bytes then crosses a link.
//
// A ring all-reduce of n ranks moves each byte 2 (n - 1) times over some link. What k of them contribute one of these,
// its *owner*, receives, sums, and sends to all the others, in n + k - 2 transfers; with one contributor there is
// nothing to receive, and n - 1 are left.
//
// Thread-safety: none needed; these are functions. Every rank must agree on all that goes in.
#pragma once

#include <cstdint>

#include "layout/contributors.h"
#include "layout/units.h"

namespace ddp_hooks {

enum class Transport : uint8_t { kAllReduce, kByOwner };

// What may leave the all-reduces.
struct Transports {
  int world_size = 1;
  bool alone = false;  // what one rank alone contributes
  bool sums = false;   // and what several do, which its owner sums
};

// The one with fewer transfers; all-reduce where nobody knows who contributes.
Transport transport_for(RankSet contributors, const Transports& transports);

// Its transfers, as a part of those of an all-reduce: 1 for that, 1/2 for what one rank alone contributes.
double relative_cost(RankSet contributors, const Transports& transports);

// What the used units come to: elements, each counted at its relative cost.
double cost_of(const Units& units, const UsageMask& used, const Contributors& who, const Transports& transports);

}  // namespace ddp_hooks
