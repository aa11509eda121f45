// When the Reducer is worth making anew: when the same parameters were used for so many steps in a row, and not all.
//
// Every rank must agree on everything that goes in.
#pragma once

#include <cstdint>

namespace ddp_hooks {

class RebuildTimer {
 public:
  void restart() { steps_ = 0; }

  // A step has closed in which the parameters used had this hash. `pays`: a new Reducer would know fewer of them, or
  // more. Whether it has done so for `wanted_steps` now.
  bool step_closed(uint64_t hash, bool pays, int64_t wanted_steps) {
    const bool same = hash == hash_;
    hash_ = hash;
    steps_ = !pays ? 0 : same ? steps_ + 1 : 1;
    return pays && steps_ == wanted_steps;
  }

 private:
  uint64_t hash_ = 0;
  int64_t steps_ = 0;
};

}  // namespace ddp_hooks
