// When the Reducer is worth making anew: when the same parameters were used for so many steps in a row, and not all.
//
// Every rank must agree on everything that goes in.
#pragma once

#include <cstdint>

namespace ddp_hooks {

class RebuildTimer {
 public:
  void restart() {
    steps_ = 0;
    patience_ = 1;
  }

  // A step has closed in which the parameters used had this hash. `pays`: a new Reducer would know fewer of them, or
  // more. Whether it has done so for `wanted_steps` now. If nothing comes of it, because what is unused is not frozen
  // on every rank, it may later; so it is tried again, after twice as many steps each time. A new Reducer has a new
  // timer.
  bool step_closed(uint64_t hash, bool pays, int64_t wanted_steps) {
    if (hash != hash_ || !pays) restart();
    hash_ = hash;
    if (!pays || ++steps_ < wanted_steps * patience_) return false;
    steps_ = 0;
    patience_ *= 2;
    return true;
  }

 private:
  uint64_t hash_ = 0;
  int64_t steps_ = 0;
  int64_t patience_ = 1;
};

}  // namespace ddp_hooks
