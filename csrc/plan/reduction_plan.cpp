#include "plan/reduction_plan.h"

#include <algorithm>
#include <utility>

namespace ddp_hooks {
namespace {

// The bucket's used slices, adjacent ones joined; empty parameters have nothing to send.
std::vector<Stretch> used_runs(uint32_t bucket, const BucketLayout& layout, const UsageMask& agreed) {
  std::vector<Stretch> runs;
  for (const ParameterSlice& slice : layout.slices) {
    if (slice.length == 0 || !agreed.test(slice.parameter)) continue;
    append(runs, {bucket, slice.offset, slice.length});
  }
  return runs;
}

int64_t total_length(const std::vector<Stretch>& runs) {
  int64_t total = 0;
  for (const Stretch& run : runs) total += run.length;
  return total;
}

// A run and the runs after it that small gaps separate from it.
struct JoinedRuns {
  size_t first = 0;  // of the bucket's runs
  size_t count = 0;
  Stretch span;
};

// The mean of both neighbours bounds the sum of the gaps sent: each run is counted half for the gap on either side.
std::vector<JoinedRuns> join_runs(const BucketLayout& layout, const std::vector<Stretch>& runs,
                                  const UsageMask& divided, double gap_fraction) {
  const auto holds_divided = [&](const Stretch& gap) {
    const std::vector<ParameterSlice> slices = parameters_in(layout, gap);
    return std::any_of(slices.begin(), slices.end(),
                       [&](const ParameterSlice& slice) { return divided.test(slice.parameter); });
  };

  std::vector<JoinedRuns> joined;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (i > 0) {
      const int64_t end = runs[i - 1].end();
      const int64_t gap = runs[i].offset - end;
      const double mean_length = static_cast<double>(runs[i - 1].length + runs[i].length) / 2;
      if (static_cast<double>(gap) <= gap_fraction * mean_length && !holds_divided({runs[i].place, end, gap})) {
        joined.back().count += 1;
        joined.back().span.length += gap + runs[i].length;
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

// Of one kind of buckets.
std::vector<DirectPart> direct_stretches(const LayoutOfBuckets& layout, uint64_t kind, const UsageMask& direct,
                                         const Contributors& contributors) {
  std::vector<DirectPart> stretches;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    if (layout.buckets[b].kind != kind) continue;
    for (const ParameterSlice& slice : layout.buckets[b].slices) {
      if (!direct.test(slice.parameter)) continue;
      append(stretches, {{b, slice.offset, slice.length}, contributors.ranks(slice.parameter)});
    }
  }
  return stretches;
}

std::vector<std::pair<uint64_t, int64_t>> kinds_of(const LayoutOfBuckets& layout) {
  std::vector<std::pair<uint64_t, int64_t>> kinds;
  for (const BucketLayout& bucket : layout.buckets) {
    const std::pair<uint64_t, int64_t> kind{bucket.kind, bucket.element_bytes};
    if (!bucket.sparse && std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
  }
  return kinds;
}

// The parameters that need not go round a ring.
UsageMask choose_direct(const LayoutOfBuckets& layout, const UsageMask& agreed, const UsageMask& divided,
                        const Contributors& contributors, const DirectSettings& settings) {
  UsageMask direct(layout.parameter_count);
  if (!settings.transports.direct || !contributors.are_known()) return direct;
  const auto set_direct = [&](uint64_t kind, const Transports& transports, UsageMask& mask) {
    for (const BucketLayout& bucket : layout.buckets) {
      if (bucket.kind != kind || bucket.sparse) continue;
      for (const ParameterSlice& slice : bucket.slices) {
        const size_t parameter = slice.parameter;
        if (slice.length == 0 || !agreed.test(parameter) || divided.test(parameter)) continue;
        if (transport_for(contributors.ranks(parameter), Width::kFull, transports) != Transport::kAllReduce)
          mask.set(parameter);
      }
    }
  };
  for (const auto& [kind, element_bytes] : kinds_of(layout)) {
    UsageMask candidates(layout.parameter_count);
    set_direct(kind, settings.transports, candidates);
    const std::vector<DirectPart> stretches = direct_stretches(layout, kind, candidates, contributors);
    set_direct(kind, choose_transports(stretches, element_bytes, settings, WhileReduced::kInPlace), direct);
  }
  return direct;
}

void add_direct_messages(const LayoutOfBuckets& layout, const Contributors& contributors,
                         const DirectSettings& settings, ReductionPlan& plan) {
  for (const auto& [kind, element_bytes] : kinds_of(layout)) {
    const std::vector<DirectPart> stretches = direct_stretches(layout, kind, plan.direct, contributors);
    for (DirectMessage& message : make_direct_messages(stretches, element_bytes, settings.transports, settings)) {
      const std::vector<uint32_t> buckets = buckets_of(message);
      for (const uint32_t bucket : buckets) {
        ++plan.buckets[bucket].messages_touching;
        plan.buckets[bucket].disposition = Disposition::kPacked;
      }
      plan.buckets[buckets.back()].direct.push_back(std::move(message));
    }
  }
}

}  // namespace

std::vector<uint32_t> buckets_of(const DirectMessage& message) {
  std::vector<uint32_t> buckets;
  for (const DirectGroup& group : message.groups) {
    for (const DirectPart& part : group.parts) buckets.push_back(static_cast<uint32_t>(part.place));
  }
  std::sort(buckets.begin(), buckets.end());
  buckets.erase(std::unique(buckets.begin(), buckets.end()), buckets.end());
  return buckets;
}

Message& ReductionPlanner::open_message(const BucketLayout& layout) {
  for (Message& message : open_) {
    if (message.kind == layout.kind) return message;
  }
  open_.push_back({{}, 0, layout.element_bytes, layout.kind, false, {}});
  return open_.back();
}

BucketPlan ReductionPlanner::add_bucket(uint32_t bucket, const UsageMask& agreed) {
  const BucketLayout& layout = layout_.buckets[bucket];
  BucketPlan plan;
  const std::vector<Stretch> runs = used_runs(bucket, layout, agreed);
  std::vector<Stretch> leftovers;
  int64_t sent = 0;
  for (const JoinedRuns& joined : join_runs(layout, runs, divided_, settings_.gap_fraction)) {
    if (joined.span.length * layout.element_bytes >= settings_.in_place_bytes) {
      plan.launches.push_back(in_place_message(layout, runs, joined));
      ++plan.messages_touching;
      sent += joined.span.length;
    } else {
      const auto first = runs.begin() + static_cast<std::ptrdiff_t>(joined.first);
      leftovers.insert(leftovers.end(), first, first + static_cast<std::ptrdiff_t>(joined.count));
    }
  }
  sent += total_length(leftovers);
  if (!runs.empty()) plan.disposition = sent == layout.numel ? Disposition::kWhole : Disposition::kPacked;
  if (!leftovers.empty()) {
    Message& message = open_message(layout);
    message.stretches.insert(message.stretches.end(), leftovers.begin(), leftovers.end());
    message.numel += total_length(leftovers);
    ++plan.messages_touching;
  }
  const bool last = bucket + 1 == layout_.buckets.size();
  std::vector<Message> still_open;
  for (Message& message : open_) {
    if (last || message.numel * message.element_bytes >= settings_.pack_bytes) {
      message.in_place = message.stretches.size() == 1;
      plan.launches.push_back(std::move(message));
    } else {
      still_open.push_back(std::move(message));
    }
  }
  open_ = std::move(still_open);
  return plan;
}

ReductionPlan make_reduction_plan(const LayoutOfBuckets& layout, const UsageMask& agreed, const UsageMask& divided,
                                  const Contributors& contributors, const PlanSettings& settings) {
  ReductionPlan plan;
  plan.direct = choose_direct(layout, agreed, divided, contributors, settings.direct);
  UsageMask otherwise = divided, reduced = agreed;
  for (size_t i = 0; i < layout.parameter_count; ++i) {
    if (!plan.direct.test(i)) continue;
    otherwise.set(i);
    reduced.clear(i);
  }
  ReductionPlanner planner(layout, otherwise, settings);
  plan.in_place = plan.direct;
  for (uint32_t b = 0; b < layout.buckets.size(); ++b) {
    plan.buckets.push_back(planner.add_bucket(b, reduced));
    for (const Message& message : plan.buckets.back().launches) {
      if (!message.in_place) continue;
      const Stretch& stretch = message.stretches.front();
      for (const ParameterSlice& slice : parameters_in(layout.buckets[stretch.place], stretch)) {
        if (agreed.test(slice.parameter)) plan.in_place.set(slice.parameter);
      }
    }
  }
  if (plan.buckets.empty()) return plan;
  if (plan.direct.count() > 0) add_direct_messages(layout, contributors, settings.direct, plan);
  // The last bucket closed what nothing could join any more; that was known earlier, so let it leave earlier.
  std::vector<Message> closed_last = std::move(plan.buckets.back().launches);
  plan.buckets.back().launches.clear();
  for (Message& message : closed_last) {
    plan.buckets[message.stretches.back().place].launches.push_back(std::move(message));
  }
  return plan;
}

}  // namespace ddp_hooks
