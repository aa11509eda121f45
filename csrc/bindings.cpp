// The only pybind file: what Python sees of the engine, and of its parts for tests and microbenchmarks.

#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "control_groups.h"
#include "cuda/emulation.h"
#include "devices.h"
#include "engine.h"
#include "group_reference.h"
#include "nonzero_scan.h"
#include "probe_bindings.h"
#include "reducer_view.h"
#include "skip_unused_hook.h"
#include "slice_copy.h"
#include "staging_copy.h"
#include "tensor_hash.h"
#include "usage_mask.h"
#include "values_probe.h"
#include "wire_plan.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

using PythonFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;

ReducerView view(const py::object& reducer) {
  return ReducerView(reducer.cast<std::shared_ptr<c10d::Reducer>>());
}

// What DDP takes from a hook that it calls through Python: a Python object, here always a tensor. (The holder that
// torch has for this links to symbols that its libraries do not export.)
class TensorObject : public c10::ivalue::PyObjectHolder {
 public:
  explicit TensorObject(at::Tensor tensor) : tensor_(std::move(tensor)) {
    py::gil_scoped_acquire gil;
    object_ = py::cast(tensor_).release().ptr();
  }
  ~TensorObject() override {
    py::gil_scoped_acquire gil;
    Py_DECREF(object_);
  }
  PyObject* getPyObject() override { return object_; }
  c10::InferredType tryToInferType() override { return c10::InferredType(c10::TensorType::get()); }
  c10::IValue toIValue(const c10::TypePtr&, std::optional<int32_t>) override { return tensor_; }
  std::string toStr() override { return "a bucket of averaged gradients"; }
  std::vector<at::Tensor> extractTensors() override { return {tensor_}; }

 private:
  at::Tensor tensor_;
  PyObject* object_;
};

PythonFuture to_python(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  return std::make_shared<torch::jit::PythonFutureWrapper>(future->then(
      [](c10::ivalue::Future& done) -> c10::IValue {
        return c10::IValue(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(
            c10::make_intrusive<TensorObject>(done.value().toTensor())));
      },
      c10::PyObjectType::get()));
}

// A failed future is how a hook reports an error; raising would leave the Reducer unusable.
PythonFuture failed_future(const std::string& message) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->setError(std::make_exception_ptr(std::runtime_error(message)));
  return to_python(future);
}

size_t checked(const UsageMask& mask, size_t index) {
  if (index >= mask.size()) {
    throw py::index_error("usage mask of " + std::to_string(mask.size()) + " parameters: received index " +
                          std::to_string(index));
  }
  return index;
}

void bind_parts(py::module_& m) {
  py::class_<UsageMask>(m, "UsageMask")
      .def(py::init<size_t, bool>(), py::arg("size"), py::arg("used") = false)
      .def("__len__", &UsageMask::size)
      .def("test", [](const UsageMask& mask, size_t index) { return mask.test(checked(mask, index)); })
      .def("set", [](UsageMask& mask, size_t index) { mask.set(checked(mask, index)); })
      .def("clear", [](UsageMask& mask, size_t index) { mask.clear(checked(mask, index)); })
      .def("merge", &UsageMask::merge)
      .def("count", &UsageMask::count)
      .def("words", [](const UsageMask& mask) { return mask.words(); })
      .def("__eq__", [](const UsageMask& a, const UsageMask& b) { return a == b; })
      .def("indices", [](const UsageMask& mask) {
        std::vector<size_t> used;
        for (size_t i = 0; i < mask.size(); ++i) {
          if (mask.test(i)) used.push_back(i);
        }
        return used;
      });

  py::class_<PlanSettings>(m, "PlanSettings")
      .def(py::init([](int64_t in_place_bytes, int64_t pack_bytes, double gap_fraction) {
             return PlanSettings{in_place_bytes, pack_bytes, gap_fraction};
           }),
           py::kw_only(), py::arg("in_place_bytes"), py::arg("pack_bytes"), py::arg("gap_fraction"));

  py::class_<ParameterSlice>(m, "ParameterSlice")
      .def(py::init(
          [](uint32_t parameter, int64_t offset, int64_t length) { return ParameterSlice{parameter, offset, length}; }))
      .def_readonly("parameter", &ParameterSlice::parameter)
      .def_readonly("offset", &ParameterSlice::offset)
      .def_readonly("length", &ParameterSlice::length);

  py::class_<BucketLayout>(m, "BucketLayout")
      .def(py::init([](std::vector<ParameterSlice> slices, int64_t element_bytes, uint64_t kind) {
             BucketLayout bucket;
             for (const ParameterSlice& slice : slices) bucket.numel += slice.length;
             bucket.slices = std::move(slices);
             bucket.element_bytes = element_bytes;
             bucket.kind = kind;
             return bucket;
           }),
           py::arg("slices"), py::arg("element_bytes"), py::arg("kind") = 0)
      .def_readonly("slices", &BucketLayout::slices)
      .def_readonly("numel", &BucketLayout::numel)
      .def_readonly("element_bytes", &BucketLayout::element_bytes)
      .def_readonly("sparse", &BucketLayout::sparse);

  py::class_<LayoutOfBuckets>(m, "LayoutOfBuckets")
      .def(py::init([](std::vector<BucketLayout> buckets, size_t parameter_count) {
        return LayoutOfBuckets{std::move(buckets), parameter_count};
      }))
      .def_readonly("buckets", &LayoutOfBuckets::buckets)
      .def_readonly("parameter_count", &LayoutOfBuckets::parameter_count)
      .def("hash", &LayoutOfBuckets::hash);

  py::class_<Slice>(m, "Slice")
      .def_readonly("bucket", &Slice::bucket)
      .def_readonly("offset", &Slice::offset)
      .def_readonly("length", &Slice::length);
  py::class_<Message>(m, "Message")
      .def_readonly("slices", &Message::slices)
      .def_readonly("numel", &Message::numel)
      .def_readonly("kind", &Message::kind)
      .def_readonly("in_place", &Message::in_place)
      .def_readonly("gaps", &Message::gaps);
  py::enum_<Disposition>(m, "Disposition")
      .value("SKIPPED", Disposition::kSkipped)
      .value("PACKED", Disposition::kPacked)
      .value("WHOLE", Disposition::kWhole);
  py::class_<BucketPlan>(m, "BucketPlan")
      .def_readonly("launches", &BucketPlan::launches)
      .def_readonly("messages_touching", &BucketPlan::messages_touching)
      .def_readonly("disposition", &BucketPlan::disposition);
  m.def("make_wire_plan", [](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings) {
    return make_wire_plan(layout, agreed, settings).buckets;
  });
  m.def("plan_bucket_by_bucket",
        [](const LayoutOfBuckets& layout, const UsageMask& agreed, const PlanSettings& settings) {
          WirePlanner planner(layout, settings);
          std::vector<BucketPlan> plans;
          for (uint32_t b = 0; b < layout.buckets.size(); ++b) plans.push_back(planner.add_bucket(b, agreed));
          return plans;
        });

  py::class_<ProbeSettings>(m, "ProbeSettings")
      .def(py::init([](double min_zero_fraction, int64_t hold_steps, int64_t first_pause_steps,
                       int64_t longest_pause_steps) {
             return ProbeSettings{min_zero_fraction, hold_steps, first_pause_steps, longest_pause_steps};
           }),
           py::kw_only(), py::arg("min_zero_fraction"), py::arg("hold_steps"), py::arg("first_pause_steps"),
           py::arg("longest_pause_steps"));
  py::class_<ValuesProbe>(m, "ValuesProbe")
      .def(py::init<const ProbeSettings&>())
      .def("wants_values", &ValuesProbe::wants_values)
      .def("observe", &ValuesProbe::observe);

  const auto to_slices = [](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    std::vector<SliceOfTensor> slices;
    for (const auto& [offset, length] : ranges) slices.push_back({flat, offset, length});
    return slices;
  };
  m.def("gather_scaled", [to_slices](const at::Tensor& message, const at::Tensor& flat,
                                     const std::vector<std::pair<int64_t, int64_t>>& ranges,
                                     double factor) { gather_scaled(message, to_slices(flat, ranges), factor); });
  m.def("scatter", [to_slices](const at::Tensor& message, const at::Tensor& flat,
                               const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    scatter(message, to_slices(flat, ranges));
  });

  // For each slice: (any non-zero, any -0.0 if all are zero).
  py::class_<PendingScan>(m, "PendingScan")
      .def(
          "wait",
          [](PendingScan& scan) {
            std::vector<std::pair<bool, bool>> results;
            for (const ScanResult& result : scan.wait()) {
              results.emplace_back(result.any_nonzero, result.any_negative_zero);
            }
            return results;
          },
          py::call_guard<py::gil_scoped_release>());
  m.def("start_scan", [to_slices](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    return start_scan(to_slices(flat, ranges));
  });
  m.def("nonzero_scan", [](const at::Tensor& flat) {
    const ScanResult result = start_scan({{flat, 0, flat.numel()}}).wait().front();
    return std::make_pair(result.any_nonzero, result.any_negative_zero);
  });
  m.def("has_cuda", &has_cuda);
  m.def("is_capturing", [](const at::Tensor& tensor) { return is_capturing(tensor.device()); });
}

// The CUDA kernels' indexing on CPU tensors. Each function returns (launches, chunks, bytes of the widest access), the
// scan its flags besides.
void bind_emulation(py::module_& m) {
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  const auto to_memory = [](const at::Tensor& flat, const Ranges& ranges) {
    std::vector<cuda::SliceOfMemory> slices;
    for (const auto& [offset, length] : ranges) {
      check_range(flat, offset, length);
      slices.push_back(
          {static_cast<char*>(flat.data_ptr()) + offset * flat.element_size(), length * flat.element_size()});
    }
    return slices;
  };
  const auto summary = [](const cuda::EmulatedRun& run) {
    return std::make_tuple(run.launches, run.chunks, run.widest_word_bytes);
  };
  m.def("emulate_gather_scaled",
        [to_memory, summary](const at::Tensor& message, const at::Tensor& flat, const Ranges& ranges, double factor) {
          return summary(cuda::emulate_gather_scaled(static_cast<char*>(message.data_ptr()), to_memory(flat, ranges),
                                                     element_type_of(flat), factor));
        });
  m.def("emulate_scatter",
        [to_memory, summary](const at::Tensor& message, const at::Tensor& flat, const Ranges& ranges) {
          return summary(cuda::emulate_scatter(static_cast<char*>(message.data_ptr()), to_memory(flat, ranges)));
        });
  m.def("emulate_nonzero_scan", [to_memory, summary](const at::Tensor& flat, const Ranges& ranges) {
    std::vector<uint32_t> flags;
    const auto run = cuda::emulate_nonzero_scan(to_memory(flat, ranges), element_type_of(flat), flags);
    return std::make_pair(summary(run), flags);
  });
  m.attr("SLICES_PER_LAUNCH") = cuda::kLargeTable;
}

void bind_engine(py::module_& m) {
  py::enum_<ValuesDetector>(m, "ValuesDetector")
      .value("OFF", ValuesDetector::kOff)
      .value("ON", ValuesDetector::kOn)
      .value("ADAPTIVE", ValuesDetector::kAdaptive);

  py::class_<EngineSettings>(m, "EngineSettings")
      .def(py::init([](bool graph_detector, ValuesDetector values_detector, const PlanSettings& plan,
                       const ProbeSettings& probe, int64_t rebuild_after_steps, uint64_t configuration) {
             return EngineSettings{graph_detector, values_detector, plan, probe, rebuild_after_steps, configuration};
           }),
           py::kw_only(), py::arg("graph_detector"), py::arg("values_detector"), py::arg("plan"), py::arg("probe"),
           py::arg("rebuild_after_steps"), py::arg("configuration"));

  py::class_<Statistics>(m, "Statistics")
      .def_readonly("steps", &Statistics::steps)
      .def_readonly("values_steps", &Statistics::values_steps)
      .def_readonly("buckets_whole", &Statistics::buckets_whole)
      .def_readonly("buckets_packed", &Statistics::buckets_packed)
      .def_readonly("buckets_skipped", &Statistics::buckets_skipped)
      .def_readonly("messages", &Statistics::messages)
      .def_readonly("dense_bytes", &Statistics::dense_bytes)
      .def_readonly("payload_bytes", &Statistics::payload_bytes)
      .def_readonly("mask_bytes", &Statistics::mask_bytes)
      .def_readonly("exchanges", &Statistics::exchanges)
      .def_readonly("plan_cache_hits", &Statistics::plan_cache_hits)
      .def_readonly("plan_cache_misses", &Statistics::plan_cache_misses)
      .def_readonly("exchange_wait_seconds", &Statistics::exchange_wait_seconds)
      .def_readonly("hook_seconds", &Statistics::hook_seconds);

  // Whatever locks the engine lets go of the GIL first: a bucket may complete, and take the GIL, with the engine
  // locked.
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](const py::object& reducer, std::shared_ptr<ControlGroups> control_groups,
                       const EngineSettings& settings, std::vector<at::Tensor> late_parameters,
                       std::vector<std::string> names) {
             return Engine::make(reducer.cast<std::shared_ptr<c10d::Reducer>>(), std::move(control_groups), settings,
                                 std::move(late_parameters), std::move(names));
           }),
           py::kw_only(), py::arg("reducer"), py::arg("control_groups"), py::arg("settings"),
           py::arg("late_parameters"), py::arg("names"))
      .def("configure", &Engine::configure, py::call_guard<py::gil_scoped_release>())
      .def("run",
           [](Engine& engine, const py::object& bucket) {
             auto& grad_bucket = bucket.cast<c10d::GradBucket&>();
             c10::intrusive_ptr<c10::ivalue::Future> future;
             {
               py::gil_scoped_release no_gil;
               future = engine.run(grad_bucket);
             }
             return to_python(future);
           })
      .def("forward_done", &Engine::forward_done, py::call_guard<py::gil_scoped_release>())
      .def("has_early_exchange", &Engine::has_early_exchange, py::call_guard<py::gil_scoped_release>())
      .def("finish_early_exchange", &Engine::finish_early_exchange, py::call_guard<py::gil_scoped_release>())
      .def("declare_unused", &Engine::declare_unused, py::call_guard<py::gil_scoped_release>())
      .def("set_rebuild",
           [](Engine& engine, py::function rebuild) {
             // Shared, because a std::function is copied, and a Python object's count may not change without the GIL.
             auto held =
                 std::shared_ptr<py::function>(new py::function(std::move(rebuild)), [](py::function* function) {
                   py::gil_scoped_acquire gil;
                   delete function;
                 });
             engine.set_rebuild([held] {
               py::gil_scoped_acquire gil;
               (*held)();
             });
           })
      .def("register_natively", &Engine::register_natively, py::call_guard<py::gil_scoped_release>())
      .def("close", &Engine::close, py::kw_only(), py::arg("remove_hook"), py::arg("dying"),
           py::call_guard<py::gil_scoped_release>())
      .def("awaits_backward", &Engine::awaits_backward, py::call_guard<py::gil_scoped_release>())
      .def("statistics", &Engine::statistics, py::call_guard<py::gil_scoped_release>())
      .def("reset_statistics", &Engine::reset_statistics, py::call_guard<py::gil_scoped_release>())
      .def(
          "usage",
          [](const Engine& engine) {
            Usage usage = engine.usage();
            return std::make_pair(std::move(usage.here), std::move(usage.anywhere));
          },
          py::call_guard<py::gil_scoped_release>());
}

void bind_groups(py::module_& m) {
  py::class_<ControlGroups, std::shared_ptr<ControlGroups>>(m, "ControlGroups")
      .def(py::init([](int world_size, const py::object& all, const std::vector<py::object>& axes) {
             const auto to_backend = [](const py::object& group) {
               return group.is_none() ? nullptr : group.cast<c10::intrusive_ptr<c10d::Backend>>();
             };
             std::vector<c10::intrusive_ptr<c10d::Backend>> groups;
             for (const py::object& axis : axes) groups.push_back(to_backend(axis));
             return std::make_shared<ControlGroups>(world_size, to_backend(all), std::move(groups));
           }),
           py::kw_only(), py::arg("world_size"), py::arg("all"), py::arg("axes"));
  m.def(
      "wait_until_groups_are_gone",
      [](double seconds) { return wait_until_gone(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000))); },
      py::call_guard<py::gil_scoped_release>());
  m.def("keep_groups_from_now_on", &keep_groups_from_now_on, py::call_guard<py::gil_scoped_release>());
}

void bind_reducer(py::module_& m) {
  m.def("reducer_parameters", [](const py::object& reducer) { return view(reducer).parameters(); });
  m.def("reducer_layout", [](const py::object& reducer) { return view(reducer).layout(); });
  m.def("reducer_is_in_backward", [](const py::object& reducer) { return view(reducer).in_backward(); });
  m.def("reducer_has_hook", [](const py::object& reducer) { return view(reducer).has_hook(); });
  m.def("reducer_skips_unused_by_local_list",
        [](const py::object& reducer) { return view(reducer).skips_unused_by_local_list(); });
}

// Hashes what a tensor says, not how it lies in memory: its elements in row-major order, so that a channels-last tensor
// and a contiguous one with the same elements have the same digest.
Digest digest_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "hash_tensors: expected strided tensors, received one with layout ",
              tensor.layout());
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
  return hash_bytes(plain.const_data_ptr(), plain.nbytes());
}

void bind_tensor_hash(py::module_& m) {
  py::enum_<HashKernel>(m, "HashKernel")
      .value("FASTEST", HashKernel::kFastest)
      .value("PORTABLE", HashKernel::kPortable)
      .value("SSE2", HashKernel::kSse2)
      .value("AVX2", HashKernel::kAvx2);

  m.def("hash_kernel_is_supported", &is_supported);
  m.def(
      "hash_bytes",
      [](const py::bytes& data, HashKernel kernel) {
        TORCH_CHECK(is_supported(kernel), "hash_bytes: expected a kernel that this processor can run, received ",
                    static_cast<int>(kernel));
        const std::string_view view = data;
        const Digest digest = hash_bytes(view.data(), view.size(), kernel);
        return std::make_pair(digest.low, digest.high);
      },
      py::arg("data"), py::arg("kernel") = HashKernel::kFastest);
  // One row of two int64 a tensor: the low and the high half of its digest.
  m.def(
      "hash_tensors",
      [](const std::vector<at::Tensor>& tensors) {
        at::Tensor digests = at::empty({static_cast<int64_t>(tensors.size()), 2}, at::kLong);
        auto* words = digests.mutable_data_ptr<int64_t>();
        for (const at::Tensor& tensor : tensors) {
          const Digest digest = digest_of(tensor);
          *words++ = static_cast<int64_t>(digest.low);
          *words++ = static_cast<int64_t>(digest.high);
        }
        return digests;
      },
      py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

void bind_staging_copy(py::module_& m) {
  m.def("gather_tensors", &gather_tensors, py::arg("staging"), py::arg("tensors"),
        py::call_guard<py::gil_scoped_release>());
  m.def("scatter_tensors", &scatter_tensors, py::arg("staging"), py::arg("tensors"), py::arg("divisor") = 1,
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace ddp_hooks

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The compiled part of ddp_hooks.";
  py::module_::import("torch.distributed");  // registers the types that appear in the signatures
  ddp_hooks::bind_parts(m);
  ddp_hooks::bind_emulation(m);
  ddp_hooks::bind_groups(m);
  ddp_hooks::bind_engine(m);
  ddp_hooks::bind_reducer(m);
  ddp_hooks::bind_reducer_probes(m);
  ddp_hooks::bind_tensor_hash(m);
  ddp_hooks::bind_staging_copy(m);
  m.def("failed_future", &ddp_hooks::failed_future);
}
