#include "plan/reduction_plan.h"

#include <algorithm>
#include <utility>

namespace ddp_hooks {
namespace {

// Calls `act(stretch, contributors)` for each used unit, in order.
template <typename Act>
void for_each_stretch(const GradientToSend& gradient, const UsageMask& used, const Contributors& contributors,
                      const Act& act) {
  const Units& units = gradient.units;
  for_each_used(units, used, [&](int64_t unit, size_t bit) {
    const Stretch& place = gradient.place;
    act(Stretch{place.place, place.offset + units.begin(unit), units.end(unit) - units.begin(unit)},
        contributors.are_known() ? contributors.ranks(bit) : 0);
  });
}

bool is_divided(const GradientToSend& gradient) {
  return gradient.units.count() > 1;
}

// A run and the runs after it that small gaps separate from it.
struct JoinedRuns {
  size_t first = 0;  // of the bucket's runs
  size_t count = 0;
  Stretch span;
};

// The mean of both neighbours bounds the sum of the gaps sent: each run is counted half for the gap on either side.
template <typename MayBeSent>
std::vector<JoinedRuns> join_runs(const std::vector<Stretch>& runs, double gap_fraction, const MayBeSent& may_be_sent) {
  std::vector<JoinedRuns> joined;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (i > 0 && runs[i].place == runs[i - 1].place) {
      const Stretch gap{runs[i].place, runs[i - 1].end(), runs[i].offset - runs[i - 1].end()};
      const double mean_length = static_cast<double>(runs[i - 1].length + runs[i].length) / 2;
      if (static_cast<double>(gap.length) <= gap_fraction * mean_length && may_be_sent(gap)) {
        joined.back().count += 1;
        joined.back().span.length += gap.length + runs[i].length;
        continue;
      }
    }
    joined.push_back({i, 1, runs[i]});
  }
  return joined;
}

Message in_place_message(const BucketLayout& layout, const std::vector<Stretch>& runs, const JoinedRuns& joined) {
  Message message{{joined.span}, joined.span.length, layout.element_bytes, layout.kind, true, {}};
  for (size_t i = joined.first; i + 1 < joined.first + joined.count; ++i) {
    message.gaps.push_back({runs[i].place, runs[i].end(), runs[i + 1].offset - runs[i].end()});
  }
  return message;
}

}  // namespace

std::vector<uint32_t> buckets_of(const DirectMessage& message, size_t bucket_count, uint32_t of_divided) {
  std::vector<uint32_t> buckets;
  for (const DirectGroup& group : message.groups) {
    for (const DirectPart& part : group.parts) {
      buckets.push_back(part.place < bucket_count ? static_cast<uint32_t>(part.place) : of_divided);
    }
  }
  std::sort(buckets.begin(), buckets.end());
  buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
  return buckets;
}

// Gradients that are planned together: those of one kind of buckets, divided or not.
struct Planner::Group {
  uint64_t kind = 0;
  int64_t element_bytes = 0;
  bool divided = false;
  std::vector<GradientToSend> gradients;
  Transports transports;
  std::vector<DirectPart> direct;

  bool takes(const BucketLayout& bucket, const GradientToSend& gradient) const {
    return kind == bucket.kind && divided == is_divided(gradient);
  }
};

std::vector<Planner::Group> Planner::groups_of(uint32_t first,
                                               const std::vector<std::vector<GradientToSend>>& gradients) const {
  std::vector<Group> groups;
  for (size_t b = 0; b < gradients.size(); ++b) {
    const BucketLayout& bucket = layout_.buckets[first + b];
    if (bucket.sparse) continue;
    for (const GradientToSend& gradient : gradients[b]) {
      auto group =
          std::find_if(groups.begin(), groups.end(), [&](const Group& of) { return of.takes(bucket, gradient); });
      if (group == groups.end()) {
        group = groups.insert(group, {bucket.kind, bucket.element_bytes, is_divided(gradient), {}, {}, {}});
      }
      group->gradients.push_back(gradient);
    }
  }
  return groups;
}

// What of a group need not go round a ring: of two hosts, if nothing is coded, what one of them contributes.
Transports Planner::choose(const Group& group, const UsageMask& used, const Contributors& contributors) const {
  DirectSettings settings = settings_.direct;
  Transports& allowed = settings.transports;
  // Numbers of 64 bits gain next to nothing.
  constexpr int64_t kMostCodedElementBytes = 4;
  if (group.element_bytes > kMostCodedElementBytes) allowed.coded.reset();
  if (!contributors.are_known() || !allowed.direct) return {allowed.world_size, false, false};
  std::vector<DirectPart> candidates;
  for (const GradientToSend& gradient : group.gradients) {
    for_each_stretch(gradient, used, contributors, [&](const Stretch& stretch, RankSet ranks) {
      if (transport_for(ranks, allowed) != Transport::kAllReduce) append(candidates, {stretch, ranks});
    });
  }
  return choose_transports(candidates, group.element_bytes, settings, !settings_.adds_up_in_hosts && !group.divided);
}

std::vector<BucketPlan> Planner::plan(uint32_t first, const std::vector<std::vector<GradientToSend>>& gradients,
                                      const UsageMask& used, const Contributors& contributors) {
  std::vector<BucketPlan> plans(gradients.size());
  std::vector<Group> groups = groups_of(first, gradients);
  for (Group& group : groups) group.transports = choose(group, used, contributors);
  for (size_t b = 0; b < gradients.size(); ++b) {
    BucketPlan& plan = plans[b];
    const BucketLayout& bucket = layout_.buckets[first + b];
    plan.sent.resize(gradients[b].size());
    std::vector<Stretch> runs;
    bool has_divided = false;
    for (Group& group : groups) {
      Transports uncoded = group.transports;
      uncoded.coded.reset();
      for (size_t i = 0; i < gradients[b].size(); ++i) {
        const GradientToSend& gradient = gradients[b][i];
        if (bucket.sparse || !group.takes(bucket, gradient)) continue;
        has_divided = has_divided || group.divided;
        if (!group.divided) plan.is_coded = group.transports.coded.has_value() && !settings_.adds_up_in_hosts;
        plan.sent[i] = count_sent(gradient.units, used, contributors, uncoded);
        // If many rows are used, all of them are sent, in one run.
        if (group.divided &&
            travels_whole(gradient.units, count_sent(gradient.units, used, contributors, group.transports))) {
          plan.sent[i] = static_cast<double>(gradient.place.length);
          append(runs, gradient.place);
          continue;
        }
        for_each_stretch(gradient, used, contributors, [&](const Stretch& stretch, RankSet ranks) {
          if (transport_for(ranks, group.transports) == Transport::kAllReduce) return append(runs, stretch);
          const DirectPart part{stretch, ranks};
          append(group.direct, part);
          if (lies_in_bucket(part)) append(plan.not_reduced, part);
        });
      }
    }
    add_runs(first + static_cast<uint32_t>(b), runs, plan);
    // The bucket's other gradients may be in another plan.
    if (has_divided) plan.disposition = Disposition::kPacked;
  }
  for (const Group& group : groups) {
    for (DirectMessage& message :
         make_direct_messages(group.direct, group.element_bytes, group.transports, settings_.direct)) {
      size_t last = 0;
      for (const size_t bucket : buckets_of(message, layout_.buckets.size(), first)) {
        last = bucket - first;
        BucketPlan& plan = plans[last];
        ++plan.messages_touching;
        const bool is_whole =
            plan.not_reduced.size() == 1 && plan.not_reduced.front().length == layout_.buckets[bucket].numel;
        plan.disposition = is_whole ? Disposition::kWhole : Disposition::kPacked;
      }
      plans[last].direct.push_back(std::move(message));
    }
  }
  return plans;
}

void Planner::add_runs(uint32_t bucket, const std::vector<Stretch>& runs, BucketPlan& plan) {
  const BucketLayout& layout = layout_.buckets[bucket];
  // A gap in the bucket may be sent if nothing in it travels otherwise; one in a divided gradient never is.
  const auto may_be_sent = [&](const Stretch& gap) {
    if (!lies_in_bucket(gap)) return false;
    const std::vector<ParameterSlice> slices = parameters_in(layout, gap);
    return std::none_of(slices.begin(), slices.end(),
                        [&](const ParameterSlice& slice) { return divided_.test(slice.parameter); }) &&
           std::none_of(plan.not_reduced.begin(), plan.not_reduced.end(),
                        [&](const DirectPart& part) { return part.offset < gap.end() && gap.offset < part.end(); });
  };
  int64_t sent = 0;
  bool is_in_open = false;
  // What is copied anyway is better left out.
  const double gap_fraction = settings_.adds_up_in_hosts ? 0 : settings_.gap_fraction;
  const std::vector<JoinedRuns> joined_runs = join_runs(runs, gap_fraction, may_be_sent);
  const bool may_be_in_place = !settings_.one_message_per_bucket || joined_runs.size() == 1;
  for (const JoinedRuns& joined : joined_runs) {
    if (may_be_in_place && joined.span.length * layout.element_bytes >= settings_.in_place_bytes) {
      plan.launches.push_back(in_place_message(layout, runs, joined));
      ++plan.messages_touching;
      sent += joined.span.length;
      continue;
    }
    for (size_t i = joined.first; i < joined.first + joined.count; ++i) {
      Message& message = open_message(layout);
      message.stretches.push_back(runs[i]);
      message.numel += runs[i].length;
      sent += runs[i].length;
      if (!std::exchange(is_in_open, true)) ++plan.messages_touching;
      // A divided gradient may hold much more than fits a message; what lies in a bucket leaves with that. Where a
      // bucket is one message, any length fits.
      if (lies_in_bucket(runs[i]) || settings_.one_message_per_bucket) continue;
      if (message.numel * message.element_bytes < settings_.pack_bytes) continue;
      close(false, plan);
      is_in_open = false;
    }
  }
  if (!runs.empty()) plan.disposition = sent == layout.numel ? Disposition::kWhole : Disposition::kPacked;
  close(bucket + 1 == layout_.buckets.size(), plan);
}

Message& Planner::open_message(const BucketLayout& layout) {
  for (Message& message : open_) {
    if (message.kind == layout.kind) return message;
  }
  open_.push_back({{}, 0, layout.element_bytes, layout.kind, false, {}});
  return open_.back();
}

void Planner::close(bool all, BucketPlan& plan) {
  std::vector<Message> still_open;
  // Divided gradients are known only while their bucket is sent.
  const auto lies_by_itself = [&](const Stretch& stretch) { return !lies_in_bucket(stretch); };
  for (Message& message : open_) {
    const bool is_full = message.numel * message.element_bytes >= settings_.pack_bytes;
    if (!all && !is_full && std::none_of(message.stretches.begin(), message.stretches.end(), lies_by_itself)) {
      still_open.push_back(std::move(message));
      continue;
    }
    message.in_place = message.stretches.size() == 1;
    plan.launches.push_back(std::move(message));
  }
  open_ = std::move(still_open);
}

std::vector<GradientToSend> whole_gradients(uint32_t bucket, const LayoutOfBuckets& layout, const UsageMask& used) {
  std::vector<GradientToSend> gradients;
  for (const ParameterSlice& slice : layout.buckets[bucket].slices) {
    if (slice.length == 0 || !used.test(slice.parameter)) continue;
    gradients.push_back({{bucket, slice.offset, slice.length}, {slice.length, slice.length, slice.parameter}});
  }
  return gradients;
}

ReductionPlan make_reduction_plan(const LayoutOfBuckets& layout, const UsageMask& agreed, const UsageMask& divided,
                                  const Contributors& contributors, const PlanSettings& settings) {
  const UsageMask none(layout.parameter_count);
  ReductionPlan plan{{}, none, none, none};
  std::vector<std::vector<GradientToSend>> gradients;
  for (uint32_t b = 0; b < layout.buckets.size(); ++b) gradients.push_back(whole_gradients(b, layout, agreed));
  plan.buckets = Planner(layout, divided, settings).plan(0, gradients, agreed, contributors);
  const auto set = [&](const Stretch& stretch, UsageMask& mask) {
    for (const ParameterSlice& slice : parameters_in(layout.buckets[stretch.place], stretch)) {
      if (agreed.test(slice.parameter)) mask.set(slice.parameter);
    }
  };
  for (const BucketPlan& bucket : plan.buckets) {
    for (const DirectPart& part : bucket.not_reduced) {
      set(part, plan.direct);
      if (bucket.is_coded) set(part, plan.coded);
    }
    for (const Message& message : bucket.launches) {
      if (!message.in_place && !settings.adds_up_in_hosts) continue;
      for (const Stretch& stretch : message.stretches) set(stretch, plan.in_place);
    }
  }
  plan.in_place.merge(plan.direct);
  if (plan.buckets.empty()) return plan;
  // The last bucket closed what nothing could join any more; that was known earlier, so let it leave earlier.
  std::vector<Message> closed_last = std::move(plan.buckets.back().launches);
  plan.buckets.back().launches.clear();
  for (Message& message : closed_last) {
    plan.buckets[message.stretches.back().place].launches.push_back(std::move(message));
  }
  return plan;
}

}  // namespace ddp_hooks
