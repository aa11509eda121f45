// Which parameters a forward pass leaves out because they are frozen, or because the user declared it.
//
// DDP without a graph search waits for every parameter; this is what the engine tells it about those that will not
// report. Indices are those of the engine: the Reducer's parameters, then the late ones.
// Always holds: what `absent` says was true when the last synchronising forward pass ended, and is forgotten when the
// step that it belongs to closes, so that a forward pass that could not be watched never meets an older one's answer.
// Thread-safety: none; the engine locks. Ranks may differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "usage_mask.h"

namespace ddp_hooks {

class Absence {
 public:
  explicit Absence(std::vector<at::Tensor> parameters);

  // What forward passes from now on do not use, whether it is frozen or not.
  void declare(const std::vector<size_t>& parameters);

  // At the end of a forward pass in grad mode; the second under no_sync().
  void synchronising_forward_done();
  void accumulating_forward_done();

  bool is_absent(size_t parameter) const { return absent_.test(parameter); }
  // Absent, and without a gradient from an earlier pass under no_sync() that still has to travel.
  bool has_nothing_to_send(size_t parameter) const;

  // The absent ones among the first `count` parameters, once for each forward pass: they are to be marked ready then.
  // From then on a declared one that receives a gradient makes backward fail with an error that names it.
  std::vector<size_t> take_to_mark(size_t count, const std::vector<std::string>& names);

  void step_closed();

 private:
  void drop_guards();

  const std::vector<at::Tensor> parameters_;
  UsageMask declared_;
  UsageMask absent_;
  UsageMask accumulated_;  // may have got a gradient under no_sync() since the last step
  bool taken_ = false;
  std::vector<std::pair<size_t, unsigned>> guards_;
};

}  // namespace ddp_hooks
