// Decides in which steps an adaptive policy reads the gradients' values.
//
// Starts with `skip_zeros` off and probes it for one step now and then; the pause doubles while probes find nothing. A
// step in which all-zero gradients made up at least `min_zero_fraction` of the bytes keeps it on
// for another `hold_steps` steps.
//
// Every rank must agree on everything that goes in: the step number and bytes counted from agreed masks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace ddp_hooks {

struct ProbeSettings {
  double min_zero_fraction = 0;
  int64_t hold_steps = 32;         // for so many more, once it has paid
  int64_t first_pause_steps = 16;  // before the first probe; doubled after each one in vain
  int64_t longest_pause_steps = 1024;
};

// Of a policy's setting.
enum class When : uint8_t { kOff, kOn, kAdaptive };

// A user may write "for ever" as a very large number of steps.
inline int64_t saturating_sum(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return a > kMost - b ? kMost : a + b;
}

class ValuesProbe {
 public:
  explicit ValuesProbe(const ProbeSettings& settings)
      : settings_(settings), pause_(settings.first_pause_steps), next_probe_(settings.first_pause_steps) {}

  bool wants_values(int64_t step) const { return step < on_until_ || step >= next_probe_; }

  // What a step with `skip_zeros` found: bytes that `skip_unused` would have sent, and how many of them
  // belonged to gradients that were zero on every rank. False if it was asked in vain: neither did that pay, nor was
  // it still on from a step in which it did.
  bool observe(int64_t step, int64_t used_bytes, int64_t zero_bytes) {
    const bool pays = zero_bytes > 0 &&
                      static_cast<double>(zero_bytes) >= settings_.min_zero_fraction * static_cast<double>(used_bytes);
    if (pays) {
      on_until_ = saturating_sum(step + 1, settings_.hold_steps);
      pause_ = settings_.first_pause_steps;
    }
    const bool in_vain = step >= on_until_;
    if (in_vain) pause_ = std::min(saturating_sum(pause_, pause_), settings_.longest_pause_steps);
    next_probe_ = saturating_sum(std::max(on_until_, step + 1), pause_);
    return !in_vain;
  }

 private:
  ProbeSettings settings_;
  int64_t on_until_ = 0;  // on in steps below this one
  int64_t pause_;
  int64_t next_probe_;
};

}  // namespace ddp_hooks
