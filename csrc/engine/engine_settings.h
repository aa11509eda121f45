// How an engine decides what to send: the settings of the rooms below it. Every rank must agree on all of it.
#pragma once

#include <cstdint>

#include "agreement/usage_agreement.h"
#include "detectors/adaptive_rule.h"
#include "detectors/coding_rule.h"
#include "detectors/units_detector.h"
#include "plan/reduction_plan.h"

namespace ddp_hooks {

struct EngineSettings {
  AgreementSettings agreement;
  When skip_zeros = When::kOff;
  UnitsSettings units;
  CodingSettings coding;
  PlanSettings plan;
  // When the agreed set of used parameters has not changed for this many steps, and something is unused, the engine
  // asks for the Reducer to be made anew; 0 for never.
  int64_t rebuild_after = 0;
};

}  // namespace ddp_hooks
