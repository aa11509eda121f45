// The engine as a communication hook that the Reducer calls natively, without Python and its GIL.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "engine/engine.h"

namespace ddp_hooks {

class SkipUnusedHook : public c10d::CppCommHookInterface<std::shared_ptr<Engine>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override { return state_->run(bucket); }
};

}  // namespace ddp_hooks
