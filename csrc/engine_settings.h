// How an engine decides what to send. Every rank must agree on all of it.
#pragma once

#include <cstdint>

#include "values_probe.h"
#include "wire_plan.h"

namespace ddp_hooks {

enum class ValuesDetector : uint8_t { kOff, kOn, kAdaptive };

struct EngineSettings {
  bool graph_detector = true;
  ValuesDetector values_detector = ValuesDetector::kOff;
  PlanSettings plan;
  ProbeSettings probe;
  // When the agreed set of used parameters has not changed for this many steps, and something is unused, the engine
  // asks for the Reducer to be made anew; 0 for never.
  int64_t rebuild_after_steps = 0;
  // Identifies policy, world and model; ranks with different ones must not exchange masks.
  uint64_t configuration = 0;
};

}  // namespace ddp_hooks
