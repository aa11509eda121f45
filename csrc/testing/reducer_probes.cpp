// What tests ask of DDP's Reducer. Reads by itself, not through ReducerView, and knows torch only: when a new torch
// changes a member, this says which. Thread-safety: none; tests ask while nothing else runs.
#include <torch/csrc/utils/pybind.h>

#include <future>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "testing/parts.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

// Never instantiated, like the one in reducer_view.cpp.
struct Probe : c10d::Reducer {
  static bool is_locked(c10d::Reducer& r) {
    // In another thread, because this one may hold it.
    return std::async(std::launch::async,
                      [&r] {
                        std::unique_lock lock(r.*(&Probe::mutex_), std::try_to_lock);
                        return !lock.owns_lock();
                      })
        .get();
  }

  // For each parameter: the node's name, whether it is the one that accumulates into the parameter's .grad, and how
  // often it is held.
  static py::list accumulators(c10d::Reducer& r) {
    py::list result;
    const auto& parameters = r.*(&Probe::params_);
    const auto& nodes = r.*(&Probe::grad_accumulators_);
    for (size_t i = 0; i < nodes.size(); ++i) {
      const auto holders = static_cast<int64_t>(nodes[i].use_count());
      const auto own = torch::autograd::impl::grad_accumulator(parameters.at(i));
      result.append(py::make_tuple(nodes[i]->name(), nodes[i].get() == own.get(), holders));
    }
    return result;
  }

  static py::object used_work(c10d::Reducer& r) {
    const auto& work = r.*(&Probe::local_used_work_);
    if (!work) return py::none();
    return py::bool_(work->isCompleted());
  }

  // Torch 2.13 has it, 2.11 has not.
  template <typename Scope = Probe>
  static py::object copies_in_batches(c10d::Reducer& r) {
    if constexpr (requires { &Scope::batched_grad_copy_; }) return py::bool_(r.*(&Scope::batched_grad_copy_));
    return py::none();
  }

  // Torch 2.15 has these two.
  template <typename Scope = Probe>
  static py::object allocates_lazily(c10d::Reducer& r) {
    if constexpr (requires { &Scope::lazy_bucket_allocation_; }) return py::bool_(r.*(&Scope::lazy_bucket_allocation_));
    return py::none();
  }

  template <typename Scope = Probe>
  static py::object finalizes_manually(c10d::Reducer& r) {
    if constexpr (requires { &Scope::is_manual_finalization_required_; }) {
      return py::bool_(r.*(&Scope::is_manual_finalization_required_));
    }
    return py::none();
  }

  static py::list locators(c10d::Reducer& r) {
    py::list result;
    for (const auto& place : r.*(&Probe::variable_locators_)) {
      result.append(py::make_tuple(place.bucket_index, place.intra_bucket_index));
    }
    return result;
  }

  static py::list buckets(c10d::Reducer& r) {
    py::list result;
    for (const auto& bucket : r.*(&Probe::buckets_)) {
      py::dict entry;
      entry["variables"] = bucket.variables;
      entry["gradients"] = bucket.gradients;
      entry["bucket_views_in"] = bucket.bucket_views_in;
      entry["offsets"] = bucket.offsets;
      entry["lengths"] = bucket.lengths;
      entry["variable_indices"] = bucket.variable_indices;
      entry["expect_sparse_gradient"] = bucket.expect_sparse_gradient;
      result.append(entry);
    }
    return result;
  }

  static py::dict read(c10d::Reducer& r) {
    py::dict values;
    values["mutex_"] = is_locked(r);
    values["params_"] = r.*(&Probe::params_);
    values["grad_accumulators_"] = accumulators(r);
    values["process_group_"] = r.*(&Probe::process_group_);
    values["expect_autograd_hooks_"] = r.*(&Probe::expect_autograd_hooks_);
    values["require_finalize_"] = r.*(&Probe::require_finalize_);
    values["find_unused_parameters_"] = r.*(&Probe::find_unused_parameters_);
    values["skip_all_reduce_unused_params_"] = r.*(&Probe::skip_all_reduce_unused_params_);
    values["unused_parameters_"] = r.*(&Probe::unused_parameters_);
    const at::Tensor& used = r.*(&Probe::local_used_map_);
    values["local_used_map_"] = used.defined() ? py::cast(used.clone()) : py::none();
    values["local_used_map_reduced_"] = r.*(&Probe::local_used_map_reduced_);
    values["local_used_work_"] = used_work(r);
    values["static_graph_"] = r.*(&Probe::static_graph_);
    values["num_iterations_"] = r.*(&Probe::num_iterations_);
    values["num_bwd_calls_"] = r.*(&Probe::num_bwd_calls_);
    values["first_autograd_hook_called_"] = r.*(&Probe::first_autograd_hook_called_);
    values["div_factor_"] = r.*(&Probe::div_factor_);
    values["numGradHooksTriggeredMapPerIteration_"] = r.*(&Probe::numGradHooksTriggeredMapPerIteration_);
    values["has_rebuilt_bucket_"] = r.*(&Probe::has_rebuilt_bucket_);
    values["gradient_as_bucket_view_"] = r.*(&Probe::gradient_as_bucket_view_);
    values["batched_grad_copy_"] = copies_in_batches(r);
    values["lazy_bucket_allocation_"] = allocates_lazily(r);
    values["is_manual_finalization_required_"] = finalizes_manually(r);
    values["variable_locators_"] = locators(r);
    values["buckets_"] = buckets(r);
    return values;
  }
};

}  // namespace

void bind_reducer_probes(py::module_& m) {
  m.def("probe_reducer",
        [](const py::object& reducer) { return Probe::read(*reducer.cast<std::shared_ptr<c10d::Reducer>>()); });
}

}  // namespace ddp_hooks
