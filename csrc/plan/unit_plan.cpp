#include "plan/unit_plan.h"

#include <utility>

namespace ddp_hooks {
namespace {

// The used units of a gradient, as runs that travel alike.
struct Runs {
  std::vector<Stretch> reduced;
  std::vector<DirectPart> direct;
};

Runs runs_of(size_t index, const Units& units, const UsageMask& used, const Contributors& contributors,
             const Transports& transports) {
  Runs runs;
  const bool asks = contributors.are_known() && transports.direct;
  for_each_used(units, used, [&](int64_t unit, size_t bit) {
    const Stretch run{index, units.begin(unit), units.end(unit) - units.begin(unit)};
    const RankSet ranks = asks ? contributors.ranks(bit) : 0;
    const Width width = width_of(units, unit, used);
    if (transport_for(ranks, width, transports) == Transport::kAllReduce) {
      append(runs.reduced, run);
    } else {
      append(runs.direct, {run, ranks, width});
    }
  });
  return runs;
}

// `runs`: by gradient, with all transports that the settings allow.
Transports transports_of_units(const std::vector<Units>& gradients, const UsageMask& used,
                               const std::vector<Runs>& runs, int64_t element_bytes, const DirectSettings& settings) {
  std::vector<DirectPart> candidates;
  WhileReduced while_reduced = WhileReduced::kInPlaceTogether;
  for (size_t i = 0; i < gradients.size(); ++i) {
    candidates.insert(candidates.end(), runs[i].direct.begin(), runs[i].direct.end());
    const auto used_elements = static_cast<double>(elements_in(gradients[i], used));
    if (!travels_whole(gradients[i], used_elements)) while_reduced = WhileReduced::kPacked;
  }
  return choose_transports(candidates, element_bytes, settings, while_reduced);
}

std::vector<Message> pack(const std::vector<Stretch>& runs, int64_t element_bytes, const PlanSettings& settings) {
  std::vector<Message> messages;
  Message open;
  const auto close = [&] {
    if (open.stretches.empty()) return;
    open.in_place = open.stretches.size() == 1;
    messages.push_back(std::exchange(open, {}));
  };
  for (const Stretch& run : runs) {
    if (run.length * element_bytes >= settings.in_place_bytes) {
      messages.push_back({{run}, run.length, element_bytes, 0, true, {}});
      continue;
    }
    open.stretches.push_back(run);
    open.numel += run.length;
    if (open.numel * element_bytes >= settings.pack_bytes) close();
  }
  close();
  return messages;
}

}  // namespace

UnitPlan make_unit_plan(const std::vector<Units>& gradients, const UsageMask& used, const Contributors& contributors,
                        int64_t element_bytes, const PlanSettings& settings) {
  Transports transports = settings.direct.transports;
  if (!contributors.are_known()) transports = {transports.world_size, false, false};
  const auto find_runs = [&] {
    std::vector<Runs> runs;
    for (size_t i = 0; i < gradients.size(); ++i) {
      runs.push_back(runs_of(i, gradients[i], used, contributors, transports));
    }
    return runs;
  };
  std::vector<Runs> runs = find_runs();
  if (contributors.are_known()) {
    const Transports chosen = transports_of_units(gradients, used, runs, element_bytes, settings.direct);
    if (chosen != std::exchange(transports, chosen)) runs = find_runs();
  }
  UnitPlan plan;
  std::vector<Stretch> reduced;
  std::vector<DirectPart> direct;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const Units& units = gradients[i];
    const SentElements sent = count_sent(units, used, contributors, transports);
    if (travels_whole(units, sent.elements)) {
      const auto all = static_cast<double>(units.slice_length);
      plan.sent.push_back({all, all});
      reduced.push_back({i, 0, units.slice_length});
      continue;
    }
    plan.sent.push_back(sent);
    reduced.insert(reduced.end(), runs[i].reduced.begin(), runs[i].reduced.end());
    direct.insert(direct.end(), runs[i].direct.begin(), runs[i].direct.end());
  }
  plan.reduced = pack(reduced, element_bytes, settings);
  plan.direct = make_direct_messages(direct, element_bytes, transports, settings.direct);
  return plan;
}

}  // namespace ddp_hooks
