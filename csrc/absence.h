// Which parameters a forward pass leaves out because they are frozen, or because the user declared it.
//
// DDP without a graph search waits for every parameter; this is what the engine tells it about those that will not
// report. Indices are those of the engine: the Reducer's parameters, then the late ones.
//
// A declaration may be wrong. It is checked when backward begins, without a search: each parameter's accumulator is
// held by the graphs that lead to it, so one that nobody but the Reducer and we hold can get no gradient. A declared
// parameter of which that is not true counts as used. What enters a graph only later, in a backward pass of its own (as
// under reentrant checkpointing), is caught by a guard when its gradient comes.
//
// Always holds: what `is_absent` says was true when the last synchronising forward pass ended. It is forgotten when the
// step that it belongs to closes, or another forward pass has begun that could not be watched. Thread-safety: none; the
// engine locks. Ranks may differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gradient_report.h"
#include "reducer_view.h"
#include "usage_mask.h"

namespace ddp_hooks {

class Absence {
 public:
  // `names` are those of the Reducer's parameters and then of the `late` ones, for messages.
  Absence(const ReducerView& reducer, const std::vector<at::Tensor>& late, const std::vector<std::string>& names);

  // What forward passes from now on do not use, whether it is frozen or not.
  void declare(const std::vector<size_t>& parameters);

  // At the end of a forward pass in grad mode, the `number`th that the Reducer has seen; the second under no_sync().
  void synchronising_forward_done(int64_t number);
  void accumulating_forward_done();
  // A gradient of one of the Reducer's parameters has come in a pass that the Reducer does not reduce.
  void accumulated(size_t parameter) { accumulated_.set(parameter); }
  // To be called before any of the questions below, with the number of the last forward pass.
  void forget_unless_of(int64_t number);
  // To be called when backward begins, before any of the questions below: takes wrong declarations back. `reports` says
  // how often each of the Reducer's parameters is watched by a GradientReport.
  void check_declarations(int64_t reports);

  bool is_absent(size_t parameter) const { return absent_.test(parameter); }
  // Absent, and without a gradient from an earlier pass under no_sync() that still has to travel.
  bool has_nothing_to_send(size_t parameter) const;

  // The absent ones among the Reducer's parameters, once for each forward pass: they are to be marked ready then. From
  // then on, until the pass has ended, a declared one that receives a gradient makes backward fail with an error that
  // names it.
  std::vector<size_t> take_to_mark();

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
  UsageMask absent_;
  // Got a gradient under no_sync() since the last step; of the late ones, which nobody reports, those that may have.
  UsageMask accumulated_;
  int64_t forward_number_ = 0;
  bool checked_ = false;
  bool taken_ = false;
  std::map<size_t, GradientGuard> guards_;
  // Those that are to receive no gradient now; the guards look here.
  const std::shared_ptr<UsageMask> armed_;
};

}  // namespace ddp_hooks
