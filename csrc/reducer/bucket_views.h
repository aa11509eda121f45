// The views of the Reducer's buckets, taken out of its hands for one backward pass.
//
// The Reducer copies each gradient into its view when the gradient arrives, fills the view of an unused parameter with
// zeros, and writes every view back to .grad at the end. A *detached* view holds an empty placeholder instead of the
// parameter, so the Reducer does all of this to nothing. What has to travel is put into its view by the engine, when
// the agreed mask is known: scaled in the same pass, or straight from the gradient into a message. What no rank used
// stays detached: its view and its .grad are not touched at all.
//
// Always holds: the real parameter and view of a detached view are kept here, and a view that is restored is as the
// Reducer made it. A view may stay detached from one pass to the next, whoever opens a step then: the engine fills
// detached views whenever it finds them. Thread-safety: none; the engine locks, and the Reducer's mutex is held. Ranks
// may differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "reducer/reducer_view.h"

namespace ddp_hooks {

// Whether no hook of a user's stands between what autograd has made and the parameter's .grad. Of hooks behind DDP's
// own nothing is known (docs/troubleshooting.md, Known limits).
bool hands_on_unchanged(const torch::autograd::Node& accumulator, const at::Tensor& parameter);

class BucketViews {
 public:
  explicit BucketViews(const ReducerView& reducer);

  // The Reducer may have made new buckets, where the parameters stand in their views. Where it has not, they are put
  // back.
  void forget();

  // Views of sparse gradients are never detached.
  void detach(size_t parameter);
  bool is_detached(size_t parameter) const;
  // Whether the parameter has a gradient, wherever that lies.
  bool has_gradient(size_t parameter) const { return reducer_.has_gradient(parameter); }

  // Restores a detached view without its content.
  void restore(size_t parameter);

  // All of them, when a backward pass is about to begin. Both note which gradients lie in the bucket already.
  void detach_all();
  void restore_all();
  // Restores a detached view with what the Reducer would have put there.
  void fill(size_t parameter);
  // The gradient whose elements belong into a detached view, flat and real, if there is one in the view's own order of
  // elements. Otherwise undefined.
  at::Tensor find_to_read(size_t parameter) const;
  // The same, but only where it may stay where it lies, because the Reducer does not make a view of the bucket of it.
  at::Tensor find(size_t parameter) const;
  // The same, but otherwise the view is filled.
  at::Tensor find_or_fill(size_t parameter);
  // The same, for whoever writes into the gradient before backward has ended: only one that nobody else reads. Autograd
  // hands on what it has, so that other gradients, or what is still to be differentiated, may be views of its memory;
  // and hooks behind ours, of another DDP module's Reducer for one, come for it later.
  at::Tensor find_own_or_fill(size_t parameter);
  const at::Tensor& parameter(size_t parameter) const { return reducer_.parameters()[parameter]; }
  bool is_as_autograd_left_it(size_t parameter) const;
  // The part of the bucket that belongs to a detached view, flat and real.
  at::Tensor place(size_t parameter) const;

  // Whether plain DDP divides this gradient by n, which it does where it lies in the bucket already. While it copies,
  // it multiplies with 1/n, which differs in the last bit unless n is a power of two. Where a pass was not announced,
  // what was noted last counts.
  bool is_averaged_by_division(size_t parameter) const;

 private:
  struct Entry {
    at::Tensor variable;  // the placeholder, or while it is in the view, the parameter
    at::Tensor view;      // the same
    bool detached = false;
    bool gradient_in_bucket = false;
  };
  void exchange(size_t parameter);
  bool shares_memory(size_t parameter) const;
  void note_gradients();

  const ReducerView& reducer_;
  const bool copies_in_batches_;
  std::vector<Entry> entries_;
};

}  // namespace ddp_hooks
