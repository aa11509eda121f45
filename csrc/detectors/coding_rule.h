// In which steps messages are coded, and in which part of their bytes they are expected to travel.
//
// Each rank tells with a step's usage mask what the messages that it coded in the step before took, on two scales, one
// for contributions and one for sums: bit i is set where that is more than i/64 of what they were. Merged by OR, as
// masks are, that is the most of any rank. What it says of a step decides about the next one. Without coded messages
// there is nothing to tell; then a step is coded now and then to find out.
//
// Thread-safety: none; the engine locks. Ranks differ in what they tell. Every rank must agree on everything else: the
// settings, the merged scales, the step number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "detectors/adaptive_rule.h"
#include "layout/transports.h"
#include "layout/usage_mask.h"
#include "transport/step_in_flight.h"

namespace ddp_hooks {

struct CodingSettings {
  When coded = When::kOff;
  // Which part of a ring's transfers it has to save, where it is adaptive.
  double least_saving = 0;
};

class CodingRule {
 public:
  CodingRule(const CodingSettings& settings, const AdaptiveSettings& adaptive, int world_size);

  bool is_off() const { return settings_.coded == When::kOff; }

  // The mask with the scales behind it, from a new word on; without them if nothing is ever coded. `last` is what the
  // step before has coded, null for nothing.
  UsageMask tell(UsageMask mask, const StepInFlight::CodedBytes* last) const;

  // To be called once a step, with every rank's mask; without words if there was no exchange. What messages are
  // expected to take; nothing if they are not coded.
  std::optional<CodedParts> choose(int64_t step, const UsageMask& told);

 private:
  CodingSettings settings_;
  int world_size_;
  AdaptiveRule rule_;
  CodedParts expected_;
};

}  // namespace ddp_hooks
