// The outputs of the last forward pass that is to be followed by a synchronised backward pass.
//
// Always holds: nothing of it stays on an output once the graphs that lead there are gone. Thread-safety: none; the
// engine locks. Ranks may differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace ddp_hooks {

class OutputWatch {
 public:
  // `reached` is called, in a thread of autograd, whenever a backward pass comes to one of the outputs of forward pass
  // `number`, for as long as there are any.
  void watch(const std::vector<at::Tensor>& outputs, int64_t number, const std::function<void()>& reached);

  // Whether a backward pass may still come out of forward pass `number`; also where that was not watched.
  bool may_come(int64_t number) const;

 private:
  int64_t number_ = 0;
  bool sees_all_ = false;
  std::weak_ptr<void> graphs_;  // lives as long as the graphs of the outputs
};

}  // namespace ddp_hooks
