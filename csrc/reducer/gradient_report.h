// Somebody to be told about the gradients of one parameter: before autograd accumulates one, or after it has, and after
// DDP's Reducer has been told.
//
// Both stand on the parameter's accumulator, the node of the graph that writes .grad, and not on the parameter itself,
// where setting a hook from C++ throws away those that Python has set.
// Always holds: nobody is told any more once this is gone. Thread-safety: make and destroy these outside of backward
// passes; they tell in the thread that runs the parameter's part of the pass, without the GIL.
#pragma once

#include <functional>

#include "reducer/reducer_view.h"

namespace ddp_hooks {

// Told when a gradient has been accumulated.
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

// Told when a gradient has come and is about to be accumulated; what it throws makes the backward pass fail, and else
// the gradient is handed on as it is.
class GradientGuard {
 public:
  static bool is_one(const torch::autograd::FunctionPreHook& hook);

  GradientGuard(Accumulator accumulator, std::function<void()> guard);
  ~GradientGuard();
  GradientGuard(GradientGuard&&) = default;
  GradientGuard& operator=(GradientGuard&&) = delete;
  GradientGuard(const GradientGuard&) = delete;
  GradientGuard& operator=(const GradientGuard&) = delete;

 private:
  Accumulator accumulator_;
  torch::autograd::FunctionPreHook* hook_ = nullptr;
};

}  // namespace ddp_hooks
