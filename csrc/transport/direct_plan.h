// How travels what only some ranks contribute: a pure function of (stretches, contributors, world size, settings).
//
// A ring all-reduce moves each byte 2 (n - 1) times over a link, whoever contributes. Of k contributors among n ranks
// fewer do: with one, what it has needs no sum and is *broadcast*, n - 1 times over a link; with several, one of them
// *owns* a part, receives the others' contributions, sums them in the order of the ranks and broadcasts the sum, n + k
// - 2 times. With all of them that is the ring's number, and the ring it is, too, where nobody knows who contributes.
//
// What a rank has to send decides how long it takes. So, where owners are allowed, a load balancer gives them parts by
// load, and what one rank would broadcast much more of than the others, another one owns a part of, receives once and
// broadcasts. Messages are cut small and hold a segment of each rank's, so that links carry both directions at once.
//
// Always holds: every stretch is in the messages exactly once, perhaps cut; the owner of a part with several
// contributors is one of them. Thread-safety: none needed; these are functions. Every rank must agree on all that goes
// in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/contributors.h"
#include "layout/transports.h"

namespace ddp_hooks {

struct DirectSettings {
  bool allowed = false;
  Transports transports;
  int64_t segment_bytes = 1;  // what one rank sends in one message
  int64_t min_bytes = 0;      // with less to send than this, nothing leaves the all-reduces
};

struct DirectPart {
  size_t place = 0;    // which bucket, or whatever else the caller counts in
  int64_t offset = 0;  // elements
  int64_t length = 0;  // elements, > 0
};

struct DirectStretch {
  DirectPart part;
  RankSet contributors = 0;
};

// Parts that the same ranks contribute and the same rank owns; they lie one after the other in what is sent.
struct DirectGroup {
  RankSet contributors = 0;
  int owner = 0;  // who broadcasts it, or sums it first
  int64_t numel = 0;
  std::vector<DirectPart> parts;
};

struct DirectMessage {
  Transport transport = Transport::kBroadcast;  // of all of it
  std::vector<DirectGroup> groups;
  int64_t numel = 0;
};

// What the rank with the most to send then sends, against what each would send of these in all-reduces. 1 or more where
// one rank has too much of it, or others would pass on too much in one piece.
double busiest_rank(const std::vector<DirectStretch>& stretches, int64_t element_bytes, const DirectSettings& settings);

// For stretches of elements of one size, none of which is to be all-reduced.
std::vector<DirectMessage> make_direct_messages(const std::vector<DirectStretch>& stretches, int64_t element_bytes,
                                                const DirectSettings& settings);

}  // namespace ddp_hooks
