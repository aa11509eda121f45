// How an engine decides what to send: the settings of the rooms below it. Every rank must agree on all of it.
#pragma once

#include <cstdint>
#include <optional>

#include "agreement/usage_agreement.h"
#include "detectors/adaptive_rule.h"
#include "detectors/coding_rule.h"
#include "detectors/units_detector.h"
#include "plan/reduction_plan.h"

namespace ddp_hooks {

// While the first gradients come the link has little to carry, and a host that waits has nothing queued on its device.
constexpr int64_t kFirstBytes = 8 << 20;

struct EngineSettings {
  AgreementSettings agreement;
  When skip_zeros = When::kOff;
  UnitsSettings units;
  CodingSettings coding;
  PlanSettings plan;
  // When the agreed set of used parameters has not changed for this many steps, and something is unused, the engine
  // asks for the Reducer to be made anew; 0 for never.
  int64_t rebuild_after = 0;
  // A step opens, and waits for the agreed mask, with the bucket that completes so many bytes of gradients. Without a
  // number, that is the first bucket on the CPU, and `kFirstBytes` on a device.
  std::optional<int64_t> opening_bytes;
};

}  // namespace ddp_hooks
