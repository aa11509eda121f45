// A backward pass before its first bucket: from the forward pass that leads to it, to what the ranks agree that it
// uses.
//
// The moments come in this order: a forward pass is done, backward reaches its outputs, gradients are accumulated, the
// first bucket opens the step, the step closes, all gradients are done. Between the second and the fourth the mask
// exchange is under way, and the Reducer's views are detached.
//
// Thread-safety: none; the engine locks, and the Reducer's mutex is held where a moment is part of a backward pass.
// Every rank must agree on: the settings, the number of parameters. Which moments come may differ from rank to rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agreement/usage_agreement.h"
#include "engine/output_watch.h"
#include "reducer/bucket_views.h"
#include "reducer/current_layout.h"
#include "reducer/reducer_view.h"
#include "reducer/unused_parameters.h"

namespace ddp_hooks {

// Whether the running backward pass may stop short of the parameters, as torch.autograd.grad() and backward(inputs=...)
// do. Distributed autograd does not, but looks the same, and keeps gradients elsewhere than in .grad, where the Reducer
// alone finds them.
bool is_restricted_pass();

// The engine's parts that a prologue works with. They have to outlive it.
struct PartsOfPrologue {
  const ReducerView& reducer;
  BucketViews& views;
  const CurrentLayout& layout;
  const std::vector<at::Tensor>& unmanaged;
  const std::vector<std::string>& names;  // of the Reducer's parameters and then of the unmanaged ones
  ExchangeStatistics& statistics;
};

class BackwardPrologue {
 public:
  // `pending` have a gradient already that no step has taken up.
  BackwardPrologue(const PartsOfPrologue& parts, const std::vector<size_t>& pending,
                   std::shared_ptr<const ControlGroups> groups, const AgreementSettings& settings,
                   UsageAgreement::Objections objections);

  // In grad mode, with the tensors among the module's outputs. `reached` is called when backward comes to one of them,
  // `unmanaged_reported` with each unmanaged parameter that gets a gradient.
  void forward_done(const std::vector<at::Tensor>& outputs, bool synchronises, const std::function<void()>& reached,
                    const std::function<void(size_t)>& unmanaged_reported);

  // Starts the mask exchange and detaches the views, where this pass will reach the Reducer. `takes_gradients`: nobody
  // but the engine reads the views. Returns whether it found parameters to be marked ready.
  bool outputs_reached(bool takes_gradients);

  // Parameters that get no gradient in this pass and have not been marked ready yet, once. Without a graph search the
  // Reducer waits for every parameter, and these will not report by themselves.
  std::vector<size_t> take_marks();
  // When all gradients have come: those that were declared unused, taken for used, and keep the Reducer waiting.
  std::vector<size_t> unready_parameters() const;

  // `shadow`: this rank has joined. What this rank asks of the others is the step's from now on: if the pass breaks
  // off, the next one asks anew.
  AskedUsage first_bucket_ready(bool shadow);

  // Whether a backward pass may still come out of the last forward pass.
  bool awaits_backward() const;

  UnusedParameters& unused() { return unused_; }
  UsageAgreement& agreement() { return agreement_; }

 private:
  bool reaches_reducer() const;
  void start_exchange();

  const ReducerView& reducer_;
  BucketViews& views_;
  const CurrentLayout& layout_;
  const std::vector<std::string>& names_;
  UnusedParameters unused_;
  UsageAgreement agreement_;
  OutputWatch outputs_;
};

}  // namespace ddp_hooks
