// What the engine counts.
#pragma once

#include <cstdint>

namespace ddp_hooks {

// Since the last reset. All but the seconds, and the bytes of sparse gradients, are the same on every rank.
struct Statistics {
  int64_t steps = 0;
  int64_t values_steps = 0;
  int64_t buckets_whole = 0;
  int64_t buckets_packed = 0;
  int64_t buckets_skipped = 0;
  int64_t messages = 0;
  int64_t dense_bytes = 0;    // what plain DDP would have handed to its all-reduce
  int64_t payload_bytes = 0;  // what was handed to it
  int64_t mask_bytes = 0;
  int64_t exchanges = 0;
  int64_t plan_cache_hits = 0;
  int64_t plan_cache_misses = 0;
  double exchange_wait_seconds = 0;  // the backward pass stood still for the agreed mask
  double hook_seconds = 0;           // spent in the hook besides
};

}  // namespace ddp_hooks
