// Which bytes of which gradients travel together, and how: a pure function of (bucket layout, units, agreed mask,
// settings).
//
// A gradient is a list of units; a parameter that is not divided has one. Those that some rank uses are planned. A
// *run* is a maximal stretch of used units that lie next to each other: of one gradient after the other in a bucket,
// or within a gradient that is divided, which is sent from where it lies. Long runs travel in place, with no copy, a
// message each, but on a device only if a bucket has one; the others are packed, and those of several buckets share a
// message, so that many nearly empty buckets do not cost many latencies. A message leaves when the last bucket it draws
// from is ready; messages that leave with the same bucket leave in the order of the plan. A divided gradient that is
// used nearly whole travels whole.
//
// What few ranks contribute, or what is coded, does not go round a ring, see direct_plan.h.
//
// Always holds: every used unit is in exactly one message; a message draws from buckets of one kind only; what is sent
// beside used units is zero on every rank, and within a bucket stays under `gap_fraction` of them.
// Thread-safety: none. Every rank must agree on all inputs; nothing else goes in.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/bucket_layout.h"
#include "layout/contributors.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "plan/direct_plan.h"

namespace ddp_hooks {

struct PlanSettings {
  // A run of at least this many bytes travels in place.
  int64_t in_place_bytes = 0;
  // Packed runs leave when this many bytes have come together, or nothing more can join them.
  int64_t pack_bytes = 0;
  // Where collectives cost more than copies: of several runs of a bucket none travels in place, so that all-reduces are
  // no more than buckets.
  bool one_message_per_bucket = false;
  // A gap between two runs of a bucket is sent along when it is at most this fraction of the two runs' mean length and
  // the whole then travels in place.
  double gap_fraction = 1.0 / 128;
  DirectSettings direct;
  // Hosts have several ranks, which add up what lies in their buckets, scaled, before anything leaves (plan/shares.h).
  bool adds_up_in_hosts = false;
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
  std::vector<DirectMessage> direct;  // and then these
  // What of the bucket itself is in direct messages, of this or a later bucket.
  std::vector<DirectPart> not_reduced;
  // How many messages, of this bucket's or of a later bucket's launches, carry parts of this bucket.
  int32_t messages_touching = 0;
  Disposition disposition = Disposition::kSkipped;
  bool is_coded = false;     // so that contributions in the bucket are, unscaled
  std::vector<double> sent;  // by gradient, how many elements, each counted at its relative cost before it is coded
};

// A gradient and its units, whose bits stand in the mask that is planned for.
struct GradientToSend {
  // All of it. Places below the number of buckets are buckets; a divided gradient has a place of its own.
  Stretch place;
  Units units;
};

// Plans all buckets at once, or one after the other, where detectors learn what a bucket holds only when it is ready.
// Packed messages stay open from one call to the next, but for those with divided gradients.
class Planner {
 public:
  // `divided`: parameters that travel otherwise, so that no gap may hold one.
  Planner(const LayoutOfBuckets& layout, const UsageMask& divided, const PlanSettings& settings)
      : layout_(layout), divided_(divided), settings_(settings) {}

  // Of the buckets from `first` on, by bucket, in the order in which the gradients lie; divided ones only one bucket at
  // a time. Buckets come in order, each once; after the last one every message has been closed.
  std::vector<BucketPlan> plan(uint32_t first, const std::vector<std::vector<GradientToSend>>& gradients,
                               const UsageMask& used, const Contributors& contributors);

 private:
  struct Group;
  std::vector<Group> groups_of(uint32_t first, const std::vector<std::vector<GradientToSend>>& gradients) const;
  Transports choose(const Group& group, const UsageMask& used, const Contributors& contributors) const;
  bool lies_in_bucket(const Stretch& stretch) const { return stretch.place < layout_.buckets.size(); }
  void add_runs(uint32_t bucket, const std::vector<Stretch>& runs, BucketPlan& plan);
  Message& open_message(const BucketLayout& layout);
  void close(bool all, BucketPlan& plan);

  const LayoutOfBuckets& layout_;
  const UsageMask divided_;
  const PlanSettings settings_;
  // In order of their first stretch. A handful at most: one for each dtype and device.
  std::vector<Message> open_;
};

// Those of a bucket's parameters that are `used`, each a unit with the bit of its parameter.
std::vector<GradientToSend> whole_gradients(uint32_t bucket, const LayoutOfBuckets& layout, const UsageMask& used);

// What a step knows of its buckets before the first one leaves.
struct ReductionPlan {
  std::vector<BucketPlan> buckets;
  UsageMask in_place;  // the parameters that travel from where they lie in their buckets, or are added up there
  UsageMask direct;    // those that are not all-reduced,
  UsageMask coded;     // and of these those whose contributions are coded
};

// Of parameters that are a unit each. Packed messages leave with the last bucket that adds to them instead of with the
// last of all. `contributors`: of parameters.
ReductionPlan make_reduction_plan(const LayoutOfBuckets& layout, const UsageMask& agreed, const UsageMask& divided,
                                  const Contributors& contributors, const PlanSettings& settings);

// The buckets that a message has parts of, ascending; divided gradients are those of the bucket `of_divided`.
std::vector<uint32_t> buckets_of(const DirectMessage& message, size_t bucket_count, uint32_t of_divided);

}  // namespace ddp_hooks
