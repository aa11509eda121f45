#include "wire/unit_plan.h"

#include <utility>

namespace ddp_hooks {
namespace {

std::vector<UnitRun> runs_of(size_t index, const Units& units, const UsageMask& used) {
  std::vector<UnitRun> runs;
  int64_t elements = 0;
  for (int64_t unit = 0; unit < units.count(); ++unit) {
    const size_t bit = units.first_bit + static_cast<size_t>(unit);
    // Most words of a mask that is worth having are empty.
    if (bit % 64 == 0 && used.words()[bit / 64] == 0) {
      unit += 63;
      continue;
    }
    if (!used.test(bit)) continue;
    const int64_t begin = units.begin(unit);
    const int64_t length = units.end(unit) - begin;
    elements += length;
    if (!runs.empty() && runs.back().offset + runs.back().length == begin) {
      runs.back().length += length;
    } else {
      runs.push_back({index, begin, length});
    }
  }
  if (travels_whole(units, elements)) return {{index, 0, units.slice_length}};
  return runs;
}

}  // namespace

std::vector<UnitMessage> make_unit_messages(const std::vector<Units>& gradients, const UsageMask& used,
                                            int64_t element_bytes, const PlanSettings& settings) {
  std::vector<UnitMessage> messages;
  UnitMessage open;
  const auto close = [&] {
    if (open.runs.empty()) return;
    open.in_place = open.runs.size() == 1;
    messages.push_back(std::exchange(open, {}));
  };
  for (size_t i = 0; i < gradients.size(); ++i) {
    for (const UnitRun& run : runs_of(i, gradients[i], used)) {
      if (run.length * element_bytes >= settings.in_place_bytes) {
        messages.push_back({{run}, run.length, true});
        continue;
      }
      open.runs.push_back(run);
      open.numel += run.length;
      if (open.numel * element_bytes >= settings.pack_bytes) close();
    }
  }
  close();
  return messages;
}

}  // namespace ddp_hooks
