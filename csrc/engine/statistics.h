// What the engine counts, and the rooms below it.
#pragma once

#include <cstdint>
#include <vector>

#include "agreement/usage_agreement.h"
#include "detectors/units_of_step.h"
#include "transport/message_sender.h"

namespace ddp_hooks {

// Since the last reset. All but the seconds, and the bytes of sparse gradients, are the same on every rank.
struct Statistics {
  int64_t steps = 0;
  int64_t skip_zeros_steps = 0;
  int64_t skip_zero_rows_steps = 0;  // units of some parameters were agreed on
  int64_t coded_steps = 0;           // some messages were coded
  int64_t units_agreed_on = 0;
  int64_t units_sent = 0;
  int64_t dense_bytes = 0;  // what plain DDP would have handed to its all-reduce
  int64_t plan_cache_hits = 0;
  int64_t plan_cache_misses = 0;
  double hook_seconds = 0;  // spent in the hook, but for waiting for masks
  ExchangeStatistics exchanges;
  MessageStatistics messages;
};

struct Usage {
  UsageMask here;                 // this rank contributed a gradient in the last step
  UsageMask anywhere;             // some rank did
  std::vector<UnitCounts> units;  // of the parameters that were agreed on by units
  Contributors contributors;      // of each parameter, as far as that was asked for
};

}  // namespace ddp_hooks
