// Decides in which steps it pays to look at values: the one rule for zeros, for rows, for coded messages and for FSDP2.
//
// A look *pays* if it saves at least `min_zero_fraction` of what would be sent otherwise. Then `looks_after_pay`
// more looks follow. After the last of them, and after a look in vain, there is a pause, which doubles each time until
// a look pays again.
//
// Thread-safety: none. Every rank must agree on everything that goes in: the step number, and what a look saved, which
// is counted from agreed masks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace ddp_hooks {

// Of a policy's setting.
enum class When : uint8_t { kOff, kOn, kAdaptive };

struct AdaptiveSettings {
  double min_zero_fraction = 0;
  int64_t hold_steps = 32;  // of `skip_zeros`, and under FSDP2: so many looks follow one that has paid
  int64_t first_pause_steps = 16;
  int64_t longest_pause_steps = 1024;
};

class AdaptiveRule {
 public:
  // `looks_after_pay`: so many follow a look that has paid. Without `starts_paused` the first look may be in step 0.
  AdaptiveRule(const AdaptiveSettings& settings, int64_t looks_after_pay, bool starts_paused)
      : settings_(settings), looks_after_pay_(looks_after_pay), pause_(settings.first_pause_steps) {
    if (starts_paused) pause(-1);
  }

  // A look has paid, and more are to follow.
  bool is_on() const { return looks_left_ > 0; }
  bool is_due(int64_t step) const { return is_on() || step >= next_step_; }

  // What the look of a step has saved of a total. Returns whether that pays.
  bool observe(int64_t step, double saved, double total) {
    const bool pays = saved > 0 && saved >= settings_.min_zero_fraction * total;
    if (pays) {
      looks_left_ = looks_after_pay_;
      pause_ = settings_.first_pause_steps;
    } else if (is_on()) {
      --looks_left_;
    }
    if (!is_on()) pause(step);
    return pays;
  }

  // No look for a while after this step.
  void pause(int64_t step) {
    next_step_ = saturating_sum(step + 1, pause_);
    pause_ = std::min(saturating_sum(pause_, pause_), settings_.longest_pause_steps);
  }

 private:
  static int64_t saturating_sum(int64_t a, int64_t b) {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    return a > kMost - b ? kMost : a + b;
  }

  AdaptiveSettings settings_;
  int64_t looks_after_pay_;
  int64_t looks_left_ = 0;
  int64_t next_step_ = 0;
  int64_t pause_;  // the next one
};

}  // namespace ddp_hooks
