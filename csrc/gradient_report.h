// Somebody to be told whenever autograd has accumulated a gradient into one parameter, after DDP's Reducer has been.
//
// Always holds: nobody is told any more once this is gone. Thread-safety: make and destroy it outside of backward
// passes; the report comes in the thread that runs the parameter's part of the pass, without the GIL.
#pragma once

#include <functional>

#include "reducer_view.h"

namespace ddp_hooks {

class GradientReport {
 public:
  GradientReport(Accumulator accumulator, std::function<void()> report);
  ~GradientReport();
  GradientReport(GradientReport&&) = default;
  GradientReport& operator=(GradientReport&&) = delete;
  GradientReport(const GradientReport&) = delete;
  GradientReport& operator=(const GradientReport&) = delete;

 private:
  Accumulator accumulator_;
  uintptr_t key_ = 0;
};

}  // namespace ddp_hooks
