// One synchronised backward pass, from its first bucket on.
//
// It *opens* with the first bucket or a later one, by the layout alone: then the agreed mask is waited for, and what
// was *held* until then is sent. Until then no bucket has left.
//
// Thread-safety: none; the engine locks. What others share of it stands in StepInFlight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "agreement/usage_agreement.h"
#include "detectors/units_of_step.h"
#include "layout/usage_mask.h"
#include "plan/reduction_plan.h"
#include "transport/step_in_flight.h"

namespace ddp_hooks {

struct Step : StepInFlight {
  std::optional<AskedUsage> asked;  // until it opens
  uint32_t opens_with = 0;          // this bucket
  // The gradients of each bucket, by its slices, until all of them have been sent: a user may drop some before that.
  std::vector<std::vector<at::Tensor>> held;
  UsageMask local;
  UsageMask used;  // as `skip_unused` agreed; `agreed` is what of it travels in buckets
  // Parameters that no rank used, each with its .grad, which the Reducer is about to overwrite.
  std::vector<std::pair<at::Tensor, at::Tensor>> untouched;
  std::vector<size_t> unmanaged;  // of the unmanaged parameters, those that some rank may have a gradient for
  // Where some parameters are agreed on by units: what is found, and the plan that grows with it.
  std::optional<UnitsOfStep> units;
  std::optional<Planner> planner;
  PlanSettings settings;              // with what coded messages are expected to take, where messages are coded
  std::optional<size_t> unannounced;  // a parameter with a gradient that was not sent
  bool rebuild = false;               // the Reducer is to be made anew after this backward pass
  bool closed = false;                // all messages have been started, but for owners' sums
};

}  // namespace ddp_hooks
