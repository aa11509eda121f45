// How travels *by owner* what only some ranks contribute: a pure function of (stretches, contributors, settings).
//
// A ring all-reduce moves each byte 2 (n - 1) times over a link, whoever contributes. So what k < n ranks contribute
// one of them *owns*: it receives the contributions of the others, adds them up in the order of the ranks, and sends
// the sum to all others, n + k - 2 times over a link, which is the least possible. What one rank alone contributes
// needs no sum, and leaves at once.
//
// What a rank has to send decides how long it takes, so parts go to the contributor with the least to send so far.
// Messages are cut small and hold a segment of each rank's, so that links carry both directions at once.
//
// Always holds: every stretch is in the messages exactly once, perhaps cut; the owner of a part is one of its
// contributors. Thread-safety: none needed; these are functions. Every rank must agree on all that goes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/contributors.h"
#include "layout/transports.h"

namespace ddp_hooks {

struct DirectSettings {
  Transports transports;      // what may leave the all-reduces
  int64_t segment_bytes = 1;  // what one rank owns of one message
  int64_t min_bytes = 0;      // with less to send than this, nothing leaves the all-reduces
  // What sums have to save of the busiest rank's bytes, for what all-reduces would not hide behind backward either.
  double least_saving_of_sums = 0;
};

struct DirectPart {
  size_t place = 0;    // which bucket, or whatever else the caller counts in
  int64_t offset = 0;  // elements
  int64_t length = 0;  // elements, > 0
  RankSet contributors = 0;
};

// What one rank owns of a message; parts lie one after the other in what is sent.
struct DirectGroup {
  int owner = 0;
  int64_t numel = 0;
  std::vector<DirectPart> parts;
};

struct DirectMessage {
  bool is_summed = false;           // each part has several contributors; otherwise its owner alone
  std::vector<DirectGroup> groups;  // by owner, ascending; of those that own something
  int64_t numel = 0;
};

// What shall leave the all-reduces of these, which may, by what the busiest rank sends. Sums start when backward has
// ended: where all-reduces are `hidden` behind it, they have to save twice as much.
Transports choose_transports(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                             const DirectSettings& settings, bool hidden);

// For stretches of elements of one size; none of them is to be all-reduced. What leaves at once comes first.
std::vector<DirectMessage> make_direct_messages(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                                                const DirectSettings& settings);

}  // namespace ddp_hooks
