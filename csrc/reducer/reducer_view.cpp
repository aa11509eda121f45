#include "reducer/reducer_view.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace ddp_hooks {
namespace {

// Private members, which no derived class can name. Access is not checked where a template is instantiated explicitly.
template <std::unique_ptr<c10d::CommHookInterface> c10d::Reducer::* kMember>
struct PrivateHook {
  friend std::unique_ptr<c10d::CommHookInterface>& hook_of(c10d::Reducer& r) { return r.*kMember; }
};
std::unique_ptr<c10d::CommHookInterface>& hook_of(c10d::Reducer& r);
template struct PrivateHook<&c10d::Reducer::comm_hook_>;

template <std::unordered_set<size_t> c10d::Reducer::* kMember>
struct PrivateSet {
  friend const std::unordered_set<size_t>& marked_ready(c10d::Reducer& r) { return r.*kMember; }
};
const std::unordered_set<size_t>& marked_ready(c10d::Reducer& r);
template struct PrivateSet<&c10d::Reducer::perIterationReadyParams_>;

using ParametersOfBuckets = std::unordered_map<size_t, std::vector<at::Tensor>>;
template <ParametersOfBuckets c10d::Reducer::* kMember>
struct PrivateMap {
  friend ParametersOfBuckets& parameters_of_buckets(c10d::Reducer& r) { return r.*kMember; }
};
ParametersOfBuckets& parameters_of_buckets(c10d::Reducer& r);
template struct PrivateMap<&c10d::Reducer::cached_variables_for_bucket_>;

// Never instantiated: it is only the scope in which pointers to the Reducer's protected members can be formed.
struct Members : c10d::Reducer {
  static auto& mutex(c10d::Reducer& r) { return r.*(&Members::mutex_); }
  static auto& parameters(c10d::Reducer& r) { return r.*(&Members::params_); }
  static auto& accumulators(c10d::Reducer& r) { return r.*(&Members::grad_accumulators_); }
  static auto& process_group(c10d::Reducer& r) { return r.*(&Members::process_group_); }
  static auto& expects_hooks(c10d::Reducer& r) { return r.*(&Members::expect_autograd_hooks_); }
  static auto& requires_finalize(c10d::Reducer& r) { return r.*(&Members::require_finalize_); }
  static auto& finds_unused(c10d::Reducer& r) { return r.*(&Members::find_unused_parameters_); }
  static auto& skips_unused(c10d::Reducer& r) { return r.*(&Members::skip_all_reduce_unused_params_); }
  static auto& unused(c10d::Reducer& r) { return r.*(&Members::unused_parameters_); }
  static auto& used_map(c10d::Reducer& r) { return r.*(&Members::local_used_map_); }
  static auto& used_map_is_reduced(c10d::Reducer& r) { return r.*(&Members::local_used_map_reduced_); }
  static auto& used_map_work(c10d::Reducer& r) { return r.*(&Members::local_used_work_); }
  static auto& static_graph(c10d::Reducer& r) { return r.*(&Members::static_graph_); }
  static auto& forward_passes(c10d::Reducer& r) { return r.*(&Members::num_iterations_); }
  static auto& backward_passes(c10d::Reducer& r) { return r.*(&Members::num_bwd_calls_); }
  static auto& backward_has_begun(c10d::Reducer& r) { return r.*(&Members::first_autograd_hook_called_); }
  static auto& divisor(c10d::Reducer& r) { return r.*(&Members::div_factor_); }
  static auto& calls_left(c10d::Reducer& r) { return r.*(&Members::numGradHooksTriggeredMapPerIteration_); }
  static auto& rebuilt(c10d::Reducer& r) { return r.*(&Members::has_rebuilt_bucket_); }

  static auto& views(c10d::Reducer& r) { return r.*(&Members::gradient_as_bucket_view_); }

  // Not every torch has it.
  template <typename Scope = Members>
  static bool batched(c10d::Reducer& r) {
    if constexpr (requires { &Scope::batched_grad_copy_; }) return r.*(&Scope::batched_grad_copy_);
    return false;
  }

  template <typename Scope = Members>
  static bool lazy(c10d::Reducer& r) {
    if constexpr (requires { &Scope::lazy_bucket_allocation_; }) return r.*(&Scope::lazy_bucket_allocation_);
    return false;
  }

  template <typename Scope = Members>
  static bool manual(c10d::Reducer& r) {
    if constexpr (requires { &Scope::is_manual_finalization_required_; }) {
      return r.*(&Scope::is_manual_finalization_required_);
    }
    return false;
  }

  static BucketView bucket_view(c10d::Reducer& r, size_t parameter) {
    const auto& place = (r.*(&Members::variable_locators_))[parameter];
    auto& bucket = (r.*(&Members::buckets_))[place.bucket_index];
    const size_t i = place.intra_bucket_index;
    if (bucket.expect_sparse_gradient) return {bucket.variables[i], &bucket.gradients, bucket.gradients, 0, true};
    at::Tensor* view = bucket.gradients.defined() ? &bucket.bucket_views_in[i] : nullptr;
    return {bucket.variables[i], view, bucket.gradients, static_cast<int64_t>(bucket.offsets[i]), false};
  }

  static LayoutOfBuckets layout(c10d::Reducer& r) {
    LayoutOfBuckets layout;
    layout.parameter_count = parameters(r).size();
    for (const auto& bucket : r.*(&Members::buckets_)) {
      BucketLayout& entry = layout.buckets.emplace_back();
      const at::Tensor& first = bucket.variables.front();
      // A complex bucket reaches a hook as its real view: twice as many elements of half the size.
      const int64_t parts = first.is_complex() ? 2 : 1;
      entry.element_bytes = static_cast<int64_t>(first.element_size()) / parts;
      entry.kind = static_cast<uint64_t>(c10::toRealValueType(first.scalar_type())) << kDtypeShift |
                   static_cast<uint64_t>(static_cast<uint8_t>(first.device().type())) << kDeviceTypeShift |
                   static_cast<uint16_t>(first.device().index());
      entry.sparse = bucket.expect_sparse_gradient;
      if (entry.sparse) {
        entry.slices.push_back({static_cast<uint32_t>(bucket.variable_indices.front()), 0, 0, 0});
        continue;
      }
      for (size_t i = 0; i < bucket.variables.size(); ++i) {
        const size_t parameter = bucket.variable_indices[i];
        const auto length = static_cast<int64_t>(bucket.lengths[i]) * parts;
        // Not of what stands in the view, which may be detached.
        const at::Tensor& variable = parameters(r)[parameter];
        const int64_t rows = variable.dim() > 0 ? variable.size(0) : 0;
        entry.slices.push_back({static_cast<uint32_t>(parameter), static_cast<int64_t>(bucket.offsets[i]) * parts,
                                length, rows > 0 ? length / rows : 0});
        entry.numel += entry.slices.back().length;
      }
    }
    return layout;
  }
};

}  // namespace

std::shared_ptr<c10d::Reducer> ReducerView::get() const {
  auto reducer = reducer_.lock();
  TORCH_CHECK(reducer,
              "ddp_hooks: the DistributedDataParallel module of this state no longer exists, or its Reducer "
              "was replaced; make a new SkipUnusedState for the new module");
  return reducer;
}

ReducerLock ReducerView::lock() const {
  auto reducer = get();
  std::mutex& mutex = Members::mutex(*reducer);
  return ReducerLock(std::move(reducer), mutex);
}

const std::vector<at::Tensor>& ReducerView::parameters() const {
  return Members::parameters(*get());
}
const std::vector<Accumulator>& ReducerView::accumulators() const {
  return Members::accumulators(*get());
}

std::vector<c10::Stream> ReducerView::accumulator_streams() const {
  std::vector<c10::Stream> streams;
  for (const Accumulator& accumulator : accumulators()) {
    const auto& input = accumulator->input_metadata(0);
    if (input.device().is_cpu() || std::find(streams.begin(), streams.end(), input.stream()) != streams.end()) continue;
    streams.push_back(input.stream());
  }
  return streams;
}
bool ReducerView::skips_unused_by_local_list() const {
  return Members::skips_unused(*get());
}
bool ReducerView::gradients_are_views() const {
  return Members::views(*get());
}
bool ReducerView::copies_in_batches() const {
  return Members::batched(*get());
}
bool ReducerView::allocates_lazily() const {
  return Members::lazy(*get());
}
bool ReducerView::finalizes_manually() const {
  return Members::manual(*get());
}
c10::intrusive_ptr<c10d::ProcessGroup> ReducerView::process_group() const {
  return Members::process_group(*get());
}
bool ReducerView::expects_backward() const {
  return Members::expects_hooks(*get());
}
bool ReducerView::in_backward() const {
  return Members::requires_finalize(*get());
}
bool ReducerView::has_rebuilt_buckets() const {
  return Members::rebuilt(*get());
}
LayoutOfBuckets ReducerView::layout() const {
  return Members::layout(*get());
}

BucketView ReducerView::bucket_view(size_t parameter) const {
  return Members::bucket_view(*get(), parameter);
}

bool ReducerView::has_static_graph() const {
  return Members::static_graph(*get());
}

bool ReducerView::learns_static_graph() const {
  auto reducer = get();
  if (!Members::static_graph(*reducer)) return false;
  const auto passes = Members::backward_passes(*reducer);
  return passes == 0 || (passes == 1 && Members::backward_has_begun(*reducer));
}

int64_t ReducerView::forward_passes() const {
  return Members::forward_passes(*get());
}

int ReducerView::divisor() const {
  auto reducer = get();
  const int divisor = Members::divisor(*reducer);
  // Unset where no gradient has been marked ready: in the shadow pass of a joined rank, whose result nobody reads.
  return divisor > 0 ? divisor : Members::process_group(*reducer)->getSize();
}

bool ReducerView::searches_graph() const {
  auto reducer = get();
  return Members::finds_unused(*reducer) && !Members::static_graph(*reducer);
}

bool ReducerView::reaches_parameters() const {
  auto reducer = get();
  return Members::unused(*reducer).size() < Members::parameters(*reducer).size();
}

std::vector<size_t> ReducerView::unreached() const {
  return Members::unused(*get());
}

void ReducerView::clear_unused(UsageMask& usage) const {
  auto reducer = get();
  const bool searches = searches_graph();
  if (!searches && !Members::static_graph(*reducer)) return;
  // The Reducer's own map of what was used since the last synchronised pass, which decides whose .grad it will write.
  // With a static graph it is not reset from step to step, and the list of unused parameters is all there is.
  const int32_t* used_since_sync = searches ? Members::used_map(*reducer).const_data_ptr<int32_t>() : nullptr;
  for (size_t index : Members::unused(*reducer)) {
    if (used_since_sync == nullptr || used_since_sync[index] == 0) usage.clear(index);
  }
}

void ReducerView::forget_parameters_of_buckets() const {
  parameters_of_buckets(*get()).clear();
}

bool ReducerView::used_since_synchronised(size_t parameter) const {
  auto reducer = get();
  return searches_graph() && Members::used_map(*reducer).const_data_ptr<int32_t>()[parameter] != 0;
}

void ReducerView::note_used(size_t parameter) const {
  auto reducer = get();
  if (searches_graph()) Members::used_map(*reducer).mutable_data_ptr<int32_t>()[parameter] = 1;
}

void ReducerView::forget_use_without_gradient(size_t parameter) const {
  auto reducer = get();
  if (searches_graph() && !has_gradient(parameter)) {
    Members::used_map(*reducer).mutable_data_ptr<int32_t>()[parameter] = 0;
  }
}

void ReducerView::mark_used_map_reduced(const UsageMask& used) const {
  auto reducer = get();
  if (!searches_graph()) return;
  const size_t count = parameters().size();
  const auto* used_here = Members::used_map(*reducer).const_data_ptr<int32_t>();
  for (size_t i = 0; i < count; ++i) {
    if (used_here[i] == 0 && used.test(i)) return;
  }
  Members::used_map_is_reduced(*reducer) = true;
}

void ReducerView::wait_for_used_map() const {
  if (!searches_graph()) return;
  if (const auto work = Members::used_map_work(*get())) work->wait();
}

void ReducerView::unmark_used_map_reduced() const {
  if (searches_graph()) Members::used_map_is_reduced(*get()) = false;
}

void ReducerView::initialize_used_map() const {
  auto reducer = get();
  const at::Tensor map = reducer->get_local_used_map_on_device();
  if (map.defined() && !Members::used_map_work(*reducer)) map.zero_();
}

std::shared_ptr<void> ReducerView::leave_out_used_map() const {
  auto reducer = get();
  // Buckets that did not fail are copied out first, and would wait for the all-reduce.
  Members::used_map_is_reduced(*reducer) = true;
  // That of the pass before, which was waited for when this one opened.
  Members::used_map_work(*reducer).reset();
  // A static graph has no use for the map. Between the last bucket and the end of the pass the Reducer asks for nothing
  // else that depends on it.
  const auto set = [](c10d::Reducer& r, bool value) {
    std::atomic_ref<bool>(Members::static_graph(r)).store(value, std::memory_order_relaxed);
  };
  set(*reducer, true);
  return std::shared_ptr<void>(nullptr, [set, held = reducer_](void*) {
    if (const auto reducer = held.lock()) set(*reducer, false);
  });
}

bool ReducerView::is_in_a_graph(size_t parameter, int64_t holders) const {
  // The Reducer holds each accumulator twice: by itself, and with the hook that it has set on it.
  constexpr int64_t kHeldByReducer = 2;
  return static_cast<int64_t>(accumulators()[parameter].use_count()) > kHeldByReducer + holders;
}

bool ReducerView::is_final(size_t parameter) const {
  auto reducer = get();
  return !Members::static_graph(*reducer) || Members::calls_left(*reducer)[parameter] == 0;
}

std::vector<size_t> ReducerView::awaited() const {
  auto reducer = get();
  std::vector<size_t> awaited;
  for (size_t i = 0; i < Members::parameters(*reducer).size(); ++i) {
    if (marked_ready(*reducer).count(i) == 0) awaited.push_back(i);
  }
  return awaited;
}

void ReducerView::mark_ready(size_t parameter) const {
  auto reducer = get();
  int calls = 1;
  if (Members::static_graph(*reducer)) {
    // A static graph counts how often each parameter reports in a pass.
    auto lock = this->lock();
    calls = Members::calls_left(*reducer)[parameter];
  }
  for (int call = 0; call < calls; ++call) reducer->autograd_hook(parameter);
}

bool ReducerView::has_gradient(size_t parameter) const {
  return parameters()[parameter].grad().defined();
}

bool ReducerView::has_hook() const {
  return hook_of(*get()) != nullptr;
}

std::unique_ptr<c10d::CommHookInterface> ReducerView::take_hook() const {
  return std::move(hook_of(*get()));
}

void ReducerView::register_hook(std::unique_ptr<c10d::CommHookInterface> hook) const {
  get()->register_comm_hook(std::move(hook));
}

}  // namespace ddp_hooks
