// The one place that looks inside DDP's Reducer.
//
// A view of a Reducer that somebody else owns. Reads protected members through pointers to members formed in a derived
// class, which is legal C++, but ties the extension to the torch it was compiled against.
//
// Thread-safety: the Reducer's own mutex guards what is read here. It is held by the caller whenever DDP runs the hook
// in a backward pass; everybody else takes `lock()`.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>
#include <vector>

#include "layout/bucket_layout.h"
#include "layout/usage_mask.h"

namespace ddp_hooks {

// Where a bucket keeps what the Reducer needs to know about one parameter; stays valid until the buckets are rebuilt.
struct BucketView {
  at::Tensor& variable;      // whose .grad is read and written
  at::Tensor* view;          // its part of the bucket, in the variable's shape; null while the bucket has no memory
  const at::Tensor& bucket;  // flat, of the variable's dtype; undefined without memory, or before a sparse gradient
  int64_t offset = 0;        // elements
  bool sparse = false;
};

// The node of the graph that accumulates into a parameter's .grad; torch's versions differ in the kind of pointer.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// Keeps the Reducer alive for as long as its mutex is held.
class ReducerLock {
 public:
  ReducerLock() = default;
  explicit ReducerLock(std::shared_ptr<c10d::Reducer> reducer, std::mutex& mutex)
      : reducer_(std::move(reducer)), lock_(mutex) {}

 private:
  std::shared_ptr<c10d::Reducer> reducer_;
  std::unique_lock<std::mutex> lock_;
};

class ReducerView {
 public:
  explicit ReducerView(std::weak_ptr<c10d::Reducer> reducer) : reducer_(std::move(reducer)) {}

  bool is_gone() const { return reducer_.expired(); }
  // Gone when the Reducer is.
  std::weak_ptr<void> lifetime() const { return reducer_; }

  // Everything below throws c10::Error once the DDP module is gone.

  ReducerLock lock() const;

  // What does not change while the module lives.
  const std::vector<at::Tensor>& parameters() const;
  const std::vector<Accumulator>& accumulators() const;
  // On which gradients are accumulated, on a device. One, as a rule: that on which the accumulators were made.
  std::vector<c10::Stream> accumulator_streams() const;
  bool skips_unused_by_local_list() const;
  bool gradients_are_views() const;
  // DistributedDataParallel(batched_grad_copy=True), where torch has it: without a hook the Reducer would copy all
  // gradients of a bucket at once and then divide the bucket.
  bool copies_in_batches() const;
  // DistributedDataParallel(lazy_bucket_allocation=True), where torch has it: a dense bucket gets its memory when the
  // first of its gradients comes, and loses it at the end of the pass.
  bool allocates_lazily() const;
  // DistributedDataParallel.require_manual_backward_finalization, where torch has it: the user finalises the pass,
  // after backward or from one of its hooks. May change between two passes.
  bool finalizes_manually() const;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group() const;

  // A forward pass has asked for a synchronised backward pass that has not been finished.
  bool expects_backward() const;
  // Some parameter has been marked ready in the running backward pass. False in the shadow pass of a rank that has
  // joined (`ddp.join()`), which runs hooks without any backward pass.
  bool in_backward() const;
  bool has_static_graph() const;
  // static_graph=True before the unused parameters are known: they are found in the first backward pass, after all
  // gradients.
  bool learns_static_graph() const;
  // Those in grad mode that are to be followed by a synchronised backward pass, compiled ones included.
  int64_t forward_passes() const;

  // What the gradients have to be divided by; join() may change it from step to step.
  int divisor() const;

  // The Reducer searches the autograd graph in each forward pass, knows what is unused, and leaves its .grad alone.
  // Otherwise it expects every parameter to be marked ready, and gives each of them a .grad.
  bool searches_graph() const;

  // Whether the last forward pass's graph leads to any parameter; meaningful where the Reducer searches the graph. If
  // not, it will not reduce anything.
  bool reaches_parameters() const;

  // Those that the last search did not reach, with a static graph the first one; none where nobody searched.
  std::vector<size_t> unreached() const;

  // Clears bit i of `usage` when this rank has no gradient to contribute for parameter i, neither from this backward
  // pass nor from one under no_sync() since the last synchronised one, as far as the Reducer knows. Reads no gradient.
  void clear_unused(UsageMask& usage) const;

  // Whether the Reducer, where it searches the graph, has noted parameter i as used since the last synchronised pass.
  bool used_since_synchronised(size_t parameter) const;
  // Has it note so, of what a Reducer before it had noted. Call it between two passes.
  void note_used(size_t parameter) const;

  // The Reducer notes a parameter as used when it reports and its view's variable has a gradient. Where a placeholder
  // stood there, this puts the note right: without a gradient of its own the parameter was not used.
  void forget_use_without_gradient(size_t parameter) const;

  // At the end of a pass the Reducer all-reduces its map of used parameters, to tell what nobody used. Where this rank
  // has not used a parameter it waits for the result on the host, also for a device's. If what this rank has not used
  // is outside `used` altogether, the map says already what it is about to say everywhere, and this keeps the Reducer
  // from waiting. Call it before the last bucket is handed back.
  void mark_used_map_reduced(const UsageMask& used) const;
  // Waits for the map's all-reduce, where the Reducer has started one: on a device its stream does, not the host.
  // After a pass anybody may ask the Reducer for the reduced map.
  void wait_for_used_map() const;
  // The Reducer unsettles its map only if its pass did not fail. Call it when the next pass opens, after waiting for
  // the map's all-reduce, which the next one would overtake.
  void unmark_used_map_reduced() const;
  // A rank that has joined sends what its Reducer's last pass left in the map that is all-reduced. A Reducer that has
  // had none has memory there that nobody has written to: this makes zeros of it, which say that nothing was used.
  void initialize_used_map() const;
  // The Reducer neither all-reduces its map nor waits for it until what this returns has gone. Call it before the last
  // bucket is handed back, where the Reducer searches the graph, and let go of it before the Reducer's own last act.
  // Thread-safety: may be let go of in any thread, without the Reducer's mutex and without the GIL.
  std::shared_ptr<void> leave_out_used_map() const;

  // The Reducer hands each bucket's parameters to hooks from a list that it makes once, which has placeholders in it if
  // a native hook was called first.
  void forget_parameters_of_buckets() const;

  // Whether some graph that has not been freed leads to parameter i, so that a backward pass may give it a gradient.
  // May be true without one, where somebody else holds the parameter's accumulator. `holders` says how often it is held
  // by us.
  bool is_in_a_graph(size_t parameter, int64_t holders) const;

  // Whether parameter i will report no more in this backward pass; it may do so several times with a static graph.
  bool is_final(size_t parameter) const;

  // Parameters that were not marked ready in the running backward pass.
  std::vector<size_t> awaited() const;

  // Says that parameter i will get no gradient in this backward pass. Takes the Reducer's mutex, and may run the hook.
  void mark_ready(size_t parameter) const;

  // Whether the slice of a parameter can hold anything but zeros; the Reducer fills in zeros for undefined gradients.
  bool has_gradient(size_t parameter) const;

  bool has_rebuilt_buckets() const;
  LayoutOfBuckets layout() const;
  BucketView bucket_view(size_t parameter) const;

  bool has_hook() const;
  void register_hook(std::unique_ptr<c10d::CommHookInterface> hook) const;
  // From then on the Reducer averages gradients by itself, as before a hook was registered. The hook may be Python's,
  // so let it go where no lock is held.
  std::unique_ptr<c10d::CommHookInterface> take_hook() const;

 private:
  std::shared_ptr<c10d::Reducer> get() const;
  std::weak_ptr<c10d::Reducer> reducer_;
};

}  // namespace ddp_hooks
