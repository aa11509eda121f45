#include "transport/unit_plan.h"

#include <utility>

namespace ddp_hooks {
namespace {

// The used units of a gradient, as runs that travel alike.
struct Runs {
  std::vector<UnitRun> reduced;
  std::vector<DirectStretch> direct;
};

void add_reduced(Runs& runs, const UnitRun& run) {
  if (!runs.reduced.empty()) {
    UnitRun& last = runs.reduced.back();
    if (last.offset + last.length == run.offset) {
      last.length += run.length;
      return;
    }
  }
  runs.reduced.push_back(run);
}

void add_direct(Runs& runs, const UnitRun& run, RankSet ranks) {
  if (!runs.direct.empty()) {
    auto& [last, last_ranks] = runs.direct.back();
    if (last.offset + last.length == run.offset && last_ranks == ranks) {
      last.length += run.length;
      return;
    }
  }
  runs.direct.push_back({{run.gradient, run.offset, run.length}, ranks});
}

Runs runs_of(size_t index, const Units& units, const UsageMask& used, const Contributors& contributors,
             const Transports& transports) {
  if (travels_whole(units, cost_of(units, used, contributors, transports).elements)) {
    return {{{index, 0, units.slice_length}}, {}};
  }
  Runs runs;
  for_each_used(units, used, [&](int64_t unit, size_t bit) {
    const UnitRun run{index, units.begin(unit), units.end(unit) - units.begin(unit)};
    const RankSet ranks = contributors.are_known() ? contributors.ranks(bit) : 0;
    if (transport_for(ranks, transports) == Transport::kAllReduce) {
      add_reduced(runs, run);
    } else {
      add_direct(runs, run, ranks);
    }
  });
  return runs;
}

std::vector<UnitMessage> pack(const std::vector<UnitRun>& runs, int64_t element_bytes, const PlanSettings& settings) {
  std::vector<UnitMessage> messages;
  UnitMessage open;
  const auto close = [&] {
    if (open.runs.empty()) return;
    open.in_place = open.runs.size() == 1;
    messages.push_back(std::exchange(open, {}));
  };
  for (const UnitRun& run : runs) {
    if (run.length * element_bytes >= settings.in_place_bytes) {
      messages.push_back({{run}, run.length, true});
      continue;
    }
    open.runs.push_back(run);
    open.numel += run.length;
    if (open.numel * element_bytes >= settings.pack_bytes) close();
  }
  close();
  return messages;
}

}  // namespace

UnitPlan make_unit_plan(const std::vector<Units>& gradients, const UsageMask& used, const Contributors& contributors,
                        int64_t element_bytes, const PlanSettings& settings) {
  std::vector<UnitRun> reduced;
  std::vector<DirectStretch> direct;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const Runs runs = runs_of(i, gradients[i], used, contributors, settings.direct.transports);
    reduced.insert(reduced.end(), runs.reduced.begin(), runs.reduced.end());
    direct.insert(direct.end(), runs.direct.begin(), runs.direct.end());
  }
  return {pack(reduced, element_bytes, settings), make_direct_messages(direct, element_bytes, settings.direct)};
}

}  // namespace ddp_hooks
