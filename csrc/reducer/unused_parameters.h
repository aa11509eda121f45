// Which parameters a forward pass leaves out because they are frozen, or because the user declared it.
//
// DDP without a graph search waits for every parameter; this is what the engine tells it about those that will not
// report. Indices are those of the engine: the Reducer's parameters, then the unmanaged ones.
//
// A declaration may be wrong. It is checked when backward begins, without a search: each parameter's accumulator is
// held by the graphs that lead to it, so one that nobody but the Reducer and we hold can get no gradient. A declared
// parameter for which that is not true counts as used. What enters a graph only later, in a backward pass of its own
// (as under reentrant checkpointing), is caught by a guard when its gradient comes.
//
// Always holds: what is unused here was so when the last synchronising forward pass ended. It is forgotten when the
// step that it belongs to closes, or another forward pass has begun that could not be watched. Thread-safety: none; the
// engine locks. Ranks may differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "layout/usage_mask.h"
#include "reducer/gradient_report.h"
#include "reducer/reducer_view.h"

namespace ddp_hooks {

class UnusedParameters {
 public:
  // `names` are those of the Reducer's parameters and then of the `unmanaged` ones, for messages. `pending` have a
  // gradient already which no step has taken up; other gradients are left of earlier ones.
  UnusedParameters(const ReducerView& reducer, const std::vector<at::Tensor>& unmanaged,
                   const std::vector<std::string>& names, const std::vector<size_t>& pending);

  // What forward passes from now on do not use, whether it is frozen or not.
  void declare(const std::vector<size_t>& parameters);

  // At the end of a forward pass in grad mode, the `number`th that the Reducer has seen; the second under no_sync().
  void synchronising_forward_done(int64_t number);
  void accumulating_forward_done();
  // Has `report` called with each unmanaged parameter that gets a gradient from now on. To be called after forward
  // passes, because what is frozen has no accumulator yet.
  void watch_unmanaged(const std::function<void(size_t)>& report);

  // A gradient has come that no step has taken up: of one of the Reducer's parameters in a pass that the Reducer does
  // not reduce, of an unmanaged one in any.
  void accumulated(size_t parameter) { accumulated_.set(parameter); }
  bool has_accumulated(size_t parameter) const;
  // All parameters for which that is so between two passes, for an engine of the Reducer that comes after this one.
  std::vector<size_t> pending() const;
  // What unmanaged parameters have got was averaged.
  void unmanaged_taken_up();
  // To be called before any of the questions below, with the number of the last forward pass.
  void forget_unless_of(int64_t number);
  // To be called when backward begins, before any of the questions below: takes wrong declarations back. `reports` says
  // how often each of the Reducer's parameters is watched by a GradientReport.
  void check_declarations(int64_t reports);

  // Unused, or declared unused and in some graph, which may be none of this pass's.
  bool may_be_unreached(size_t parameter) const { return unused_.test(parameter) || taken_back_.test(parameter); }
  // Unused, and without a gradient from an earlier pass under no_sync() that still has to travel.
  bool has_nothing_to_send(size_t parameter) const;

  // Whether all that the Reducer knows is unused, so that it will not reduce anything.
  bool is_complete() const;

  // Notes, once for each forward pass, that the unused ones among the Reducer's parameters are to be marked ready;
  // returns whether there are any, or, each time, some whose declaration was taken back. From then on, until the pass
  // has ended, a declared one that receives a gradient makes backward fail with an error that names it.
  bool prepare_marks();
  // Those to be marked in the pass that follows the `number`th forward pass, once.
  std::vector<size_t> take_marks(int64_t number);
  // When all gradients of that pass have come: what the Reducer still waits for, if it was all declared. A graph that
  // leads there may be none of this pass's.
  std::vector<size_t> unready_parameters(int64_t number) const;

  void step_closed();
  void pass_ended();

 private:
  bool is_in_a_graph(size_t parameter, int64_t reports) const;
  void guard(size_t parameter);

  const ReducerView& reducer_;
  const size_t reduced_count_;
  std::vector<at::Tensor> parameters_;
  const std::vector<std::string>& names_;
  UsageMask declared_;
  UsageMask taken_back_;  // of these, those that are in a graph, perhaps not this pass's
  UsageMask unused_;
  UsageMask accumulated_;
  UsageMask taken_up_;  // unmanaged ones; what of theirs was not reported is left of earlier steps
  int64_t forward_number_ = 0;
  bool checked_ = false;
  bool prepared_ = false;
  std::vector<size_t> marks_;
  std::map<size_t, GradientReport> unmanaged_reports_;
  std::map<size_t, GradientGuard> guards_;
  // Those that are to receive no gradient now; the guards look here.
  const std::shared_ptr<UsageMask> armed_;
};

}  // namespace ddp_hooks
