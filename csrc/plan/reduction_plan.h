// Which bytes of which buckets travel together: a pure function of (bucket layout, agreed mask, settings).
//
// A *run* is a maximal stretch of used slices that lie next to each other in one bucket. Large runs travel where they
// lie, with no copy, a message each; the leftovers are gathered, and leftovers of several buckets share a message, so
// that many nearly empty buckets do not cost many latencies. A message leaves when the last bucket it draws from is
// ready; messages that leave with the same bucket leave in the order of the plan.
//
// What few ranks contribute does not go round a ring, see direct_plan.h. Parameters that are agreed on by units are no
// part of this: they travel beside it, see unit_plan.h.
//
// Always holds: every used parameter's slice is covered exactly once; a message draws from buckets of one kind only;
// what is sent beyond the used slices stays under `gap_fraction` of them, bucket by bucket.
// Thread-safety: none. Every rank must agree on all inputs; nothing else goes in.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/bucket_layout.h"
#include "layout/contributors.h"
#include "layout/usage_mask.h"
#include "plan/direct_plan.h"

namespace ddp_hooks {

struct PlanSettings {
  // A run of at least this many bytes travels in place.
  int64_t in_place_bytes = 0;
  // Gathered leftovers leave when this many bytes have come together, or nothing more can join them.
  int64_t pack_bytes = 0;
  // A gap between two runs of a bucket is sent along when it is at most this fraction of the two runs' mean length and
  // the whole then travels in place.
  double gap_fraction = 1.0 / 128;
  DirectSettings direct;
};

// An all-reduce.
struct Message {
  std::vector<Stretch> stretches;
  int64_t numel = 0;
  int64_t element_bytes = 0;
  uint64_t kind = 0;
  // One stretch, sent from where it lies and received there.
  bool in_place = false;
  // Stretches of it that nobody used and that travel only to keep it in one piece; they come back as they were.
  std::vector<Stretch> gaps;
};

enum class Disposition : uint8_t { kSkipped, kPacked, kWhole };

struct BucketPlan {
  std::vector<Message> launches;      // leave when this bucket is ready,
  std::vector<DirectMessage> direct;  // and then these; their places are buckets
  // How many messages, of this bucket's or of a later bucket's launches, carry slices of this bucket.
  int32_t messages_touching = 0;
  Disposition disposition = Disposition::kSkipped;
};

struct ReductionPlan {
  std::vector<BucketPlan> buckets;
  UsageMask in_place;  // the parameters that travel from where they lie in their buckets
  UsageMask direct;    // those that are not all-reduced
};

// Plans bucket by bucket, for detectors that learn a bucket's mask only when it is ready. Leftovers stay open from one
// bucket to the next.
class ReductionPlanner {
 public:
  // `divided`: parameters that travel otherwise meanwhile, so that no gap may hold one.
  ReductionPlanner(const LayoutOfBuckets& layout, const UsageMask& divided, const PlanSettings& settings)
      : layout_(layout), divided_(divided), settings_(settings) {}

  // Buckets come in order, each once; after the last one every message has been closed.
  BucketPlan add_bucket(uint32_t bucket, const UsageMask& agreed);

 private:
  Message& open_message(const BucketLayout& layout);

  const LayoutOfBuckets& layout_;
  const UsageMask divided_;
  const PlanSettings settings_;
  // In order of their first slice. A handful at most: one for each dtype and device.
  std::vector<Message> open_;
};

// The whole plan at once. Leftovers leave with the last bucket that adds to them instead of with the last of all.
ReductionPlan make_reduction_plan(const LayoutOfBuckets& layout, const UsageMask& agreed, const UsageMask& divided,
                                  const Contributors& contributors, const PlanSettings& settings);

// Those that a message has parts of, ascending.
std::vector<uint32_t> buckets_of(const DirectMessage& message);

}  // namespace ddp_hooks
