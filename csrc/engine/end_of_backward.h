// What is called at the end of a backward pass, behind the Reducer's own last act.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <string>
#include <utility>

namespace ddp_hooks {

// Calls `callback` at the end of this backward pass, after whatever is queued now, or by the Reducer when it returns
// from where it is. Not in a pass that fails.
inline void queue_last(std::function<void()> callback) {
  auto& autograd = torch::autograd::Engine::get_default_engine();
  autograd.queue_callback([&autograd, callback = std::move(callback)] { autograd.queue_callback(callback); });
}

// To be raised at the end of this backward pass by a rank that is wrong alone. What is queued behind an error is never
// called, and other ranks may wait for it: an expectation's verdict, another module's unmanaged gradients.
inline void queue_error(std::string message) {
  queue_last([message = std::move(message)] { TORCH_CHECK(false, message); });
}

}  // namespace ddp_hooks
