// Which parameters a forward pass leaves out because they are frozen, or because the user declared it.
//
// DDP without a graph search waits for every parameter; this is what the engine tells it about those that will not
// report. Indices are those of the engine: the Reducer's parameters, then the late ones.
// Always holds: what `absent` says was true when the last synchronising forward pass ended. It is forgotten when the
// step that it belongs to closes, or another forward pass has begun that could not be watched. Thread-safety: none; the
// engine locks. Ranks may differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "usage_mask.h"

namespace ddp_hooks {

class Absence {
 public:
  explicit Absence(std::vector<at::Tensor> parameters);
  ~Absence();
  Absence(const Absence&) = delete;
  Absence& operator=(const Absence&) = delete;

  // What forward passes from now on do not use, whether it is frozen or not.
  void declare(const std::vector<size_t>& parameters);

  // At the end of a forward pass in grad mode, the `number`th that Reducer has seen; the second under no_sync().
  void synchronising_forward_done(int64_t number);
  void accumulating_forward_done();
  // To be called before any of the questions below, with the number of the last forward pass.
  void forget_unless_of(int64_t number);

  bool is_absent(size_t parameter) const { return absent_.test(parameter); }
  // Absent, and without a gradient from an earlier pass under no_sync() that still has to travel.
  bool has_nothing_to_send(size_t parameter) const;

  // The absent ones among the first `count` parameters, once for each forward pass: they are to be marked ready then.
  // From then on a declared one that receives a gradient makes backward fail with an error that names it.
  std::vector<size_t> take_to_mark(size_t count, const std::vector<std::string>& names);

  void step_closed();

 private:
  void guard(size_t parameter, const std::string& name);
  void disarm();

  const std::vector<at::Tensor> parameters_;
  UsageMask declared_;
  UsageMask absent_;
  UsageMask accumulated_;  // may have got a gradient under no_sync() since the last step
  int64_t forward_number_ = 0;
  bool taken_ = false;
  UsageMask guarded_;  // has a hook, which torch would never let go of, so there is one for good
  // Those that are to receive no gradient now; the hooks look here and may outlive this.
  const std::shared_ptr<UsageMask> armed_;
};

}  // namespace ddp_hooks
