// How what does not go round a ring travels: a pure function of (stretches, contributors, settings).
//
// A ring all-reduce moves each byte 2 (n - 1) times over a link, whoever contributes. What k < n ranks contribute is
// *broadcast* by these, and every rank adds it up; or one of them *owns* it: it receives the contributions of the
// others, adds them up, and sends the sum to all others (layout/transports.h says which, and what either takes). Both
// add in the order of the ranks. What is broadcast leaves at once. Contributions and sums may be coded; then how many
// bytes they take is known only when they are (transport/coded_sender.h), and here they count as many as expected.
//
// What a rank has to send decides how long it takes, so parts go to the contributor with the least to send so far. What
// is broadcast has no owner, but is dealt out as well: messages are put together by that. Messages are cut small and
// hold a segment of each rank's, so that links carry both directions at once.
//
// Always holds: every stretch is in the messages exactly once, perhaps cut; the owner of a part is one of its
// contributors. Thread-safety: none needed; these are functions. Every rank must agree on all that goes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/contributors.h"
#include "layout/stretch.h"
#include "layout/transports.h"

namespace ddp_hooks {

struct DirectSettings {
  Transports transports;                 // what may leave the all-reduces
  int64_t segment_bytes = 1;             // what one rank owns of one message
  int64_t min_direct_bytes = 256 << 10;  // with less to send than this, of a bucket's rows or a step's parameters,
                                         // nothing leaves the all-reduces
  // Which part of its bytes the rank that sends the most has to save by sums, and twice as much where all-reduces copy
  // nothing.
  double min_owner_saving = 0.13;
};

// A stretch by how it travels.
struct DirectPart : Stretch {
  RankSet contributors = 0;

  // Whether what follows in the same place may travel with it as one.
  bool continues_in(const DirectPart& next) const {
    return Stretch::continues_in(next) && contributors == next.contributors;
  }
};

// What one rank owns of a message, or has been dealt of one that is broadcast.
struct DirectGroup {
  int owner = 0;
  int64_t numel = 0;
  std::vector<DirectPart> parts;
};

struct DirectMessage {
  // All-reduced is only what ranks of a host have added up before (plan/shares.h).
  Transport transport = Transport::kBroadcast;
  std::vector<DirectGroup> groups;  // by owner, ascending; of those that own something
  int64_t numel = 0;
  // What each rank has for all others, by rank: what it broadcasts, or the sums that it owns. An all-gather brings it
  // to them where all have about as much, otherwise an all-to-all; on two ranks the faster of both.
  std::vector<int64_t> for_all_bytes;
  bool is_gathered = false;
  bool is_coded = false;  // all sizes here are those before that

  bool is_summed() const { return transport == Transport::kByOwner; }
};

// Whether an all-gather brings to all what each rank has for them. It takes as much of every rank as of the one with
// the most; so not if that is much more than they have. Two ranks swap.
bool is_gathered(const std::vector<int64_t>& bytes_by_rank);

// What a rank contributes to a group, in bytes.
int64_t contribution_bytes(const DirectGroup& group, int rank, int64_t element_bytes);

// Fills in what each of so many ranks has for all others, and how that reaches them.
void complete(DirectMessage& message, int world_size, int64_t element_bytes);

// What the message is worth in a ring's bytes: what it carries, once; but what more than two ranks broadcast counts
// half for each of them, and of what owners sum, contributions and sums count half each. Before it is coded.
struct MessageBytes {
  int64_t contributions = 0;
  int64_t sums = 0;
};
MessageBytes bytes_of(const DirectMessage& message, int64_t element_bytes);

// What shall leave the all-reduces of these, which may, by the bytes of the rank that sends the most. `in_place`: if
// none does, all-reduces copy nothing.
Transports choose_transports(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                             const DirectSettings& settings, bool in_place);

// For stretches of elements of one size; those `transports` all-reduce none of them. What leaves at once comes first.
std::vector<DirectMessage> make_direct_messages(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                                                const Transports& transports, const DirectSettings& settings);

}  // namespace ddp_hooks
