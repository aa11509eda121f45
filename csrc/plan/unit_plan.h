// Which units of which gradients travel together, and how: a pure function of (units, agreed mask, settings).
//
// A *run* is a maximal stretch of used units that lie next to each other. Long runs travel where they lie, a message
// each; the others are gathered, until a message has `pack_bytes`. A gradient that is used nearly whole travels
// whole.
//
// What few ranks contribute to, or what is narrow, does not go round a ring, see direct_plan.h.
//
// Always holds: every used unit is in exactly one message; what travels beside them is +0.0 on every rank.
// Thread-safety: none needed; it is a function. Every rank must agree on all that goes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/contributors.h"
#include "layout/units.h"
#include "layout/usage_mask.h"
#include "plan/direct_plan.h"
#include "plan/reduction_plan.h"

namespace ddp_hooks {

// Places are gradients.
struct UnitPlan {
  std::vector<Message> reduced;
  std::vector<DirectMessage> direct;
  std::vector<SentElements> sent;  // by gradient
};

// The bits that `used` has of the gradients' units are those that `Units` says.
UnitPlan make_unit_plan(const std::vector<Units>& gradients, const UsageMask& used, const Contributors& contributors,
                        int64_t element_bytes, const PlanSettings& settings);

}  // namespace ddp_hooks
