#include "engine/engine.h"

#include <torch/csrc/Export.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "agreement/control_groups.h"
#include "bindings/rooms.h"
#include "engine/statistics.h"
#include "transport/hosts_on_streams.h"

namespace py = pybind11;

// As in torch/csrc/jit/python/pybind_utils.h, which takes longer to compile than all the rest of this.
namespace torch::jit {
TORCH_PYTHON_API py::object toPyObject(c10::IValue value);
}

namespace ddp_hooks {
namespace {

// What DDP takes from a hook that it calls through Python: a Python object, here always a tensor. (The holder that
// torch has for this links to symbols that its libraries do not export.)
class TensorObject : public c10::ivalue::PyObjectHolder {
 public:
  explicit TensorObject(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  ~TensorObject() override {
    PyObject* const object = object_;
    if (object == nullptr) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(object);
  }
  // Made when it is asked for, with the GIL: a thread of the process group, in which a bucket completes, need not come
  // for that.
  PyObject* getPyObject() override {
    if (object_ == nullptr) object_ = py::cast(tensor_).release().ptr();
    return object_;
  }
  c10::InferredType tryToInferType() override { return c10::InferredType(c10::TensorType::get()); }
  c10::IValue toIValue(const c10::TypePtr&, std::optional<int32_t>) override { return tensor_; }
  std::string toStr() override { return "a bucket of averaged gradients"; }
  std::vector<at::Tensor> extractTensors() override { return {tensor_}; }

 private:
  at::Tensor tensor_;
  std::atomic<PyObject*> object_{nullptr};  // whoever lets go last asks without the GIL whether there is one
};

// A torch.futures.Future.
py::object to_python(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  return torch::jit::toPyObject(future->then(
      [](c10::ivalue::Future& done) -> c10::IValue {
        return c10::IValue(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(
            c10::make_intrusive<TensorObject>(done.value().toTensor())));
      },
      c10::PyObjectType::get()));
}

// A failed future is how a hook reports an error; raising would leave the Reducer unusable.
py::object failed_future(const std::string& message) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->setError(std::make_exception_ptr(std::runtime_error(message)));
  return to_python(future);
}

// To be called, copied and dropped without the GIL.
std::function<void()> without_gil(py::function function) {
  // Shared, because a std::function is copied, and a Python object's count may not change without the GIL.
  auto held = std::shared_ptr<py::function>(new py::function(std::move(function)), [](py::function* function) {
    py::gil_scoped_acquire gil;
    delete function;
  });
  return [held] {
    py::gil_scoped_acquire gil;
    (*held)();
  };
}

// The same for one that is asked for words; an error of its own is none.
std::function<std::string(const std::string&)> asked_without_gil(py::function function) {
  auto held = std::shared_ptr<py::function>(new py::function(std::move(function)), [](py::function* function) {
    py::gil_scoped_acquire gil;
    delete function;
  });
  return [held](const std::string& said) {
    py::gil_scoped_acquire gil;
    try {
      return (*held)(said).cast<std::string>();
    } catch (const std::exception&) {
      return std::string();
    }
  };
}

}  // namespace

void bind_engine(py::module_& m) {
  py::class_<EngineSettings>(m, "EngineSettings")
      .def(py::init([](bool skip_unused, When skip_zeros, When skip_zero_rows, When coded, double least_coded_saving,
                       const UnitSettings& units, const PlanSettings& plan, const AdaptiveSettings& adaptive,
                       int64_t rebuild_after, uint64_t configuration, std::optional<int64_t> opening_bytes) {
             return EngineSettings{.agreement = {.skip_unused = skip_unused, .configuration = configuration},
                                   .skip_zeros = skip_zeros,
                                   .units = {skip_zero_rows, units, adaptive},
                                   .coding = {coded, least_coded_saving},
                                   .plan = plan,
                                   .rebuild_after = rebuild_after,
                                   .opening_bytes = opening_bytes};
           }),
           py::kw_only(), py::arg("skip_unused"), py::arg("skip_zeros"), py::arg("skip_zero_rows"), py::arg("coded"),
           py::arg("least_coded_saving"), py::arg("units"), py::arg("plan"), py::arg("adaptive"),
           py::arg("rebuild_after"), py::arg("configuration"), py::arg("opening_bytes") = py::none());

  py::class_<Statistics>(m, "Statistics")
      .def_readonly("steps", &Statistics::steps)
      .def_readonly("skip_zeros_steps", &Statistics::skip_zeros_steps)
      .def_readonly("skip_zero_rows_steps", &Statistics::skip_zero_rows_steps)
      .def_readonly("units_agreed_on", &Statistics::units_agreed_on)
      .def_readonly("units_sent", &Statistics::units_sent)
      .def_readonly("coded_steps", &Statistics::coded_steps)
      .def_property_readonly("buckets_whole", [](const Statistics& s) { return s.messages.buckets_whole; })
      .def_property_readonly("buckets_packed", [](const Statistics& s) { return s.messages.buckets_packed; })
      .def_property_readonly("buckets_skipped", [](const Statistics& s) { return s.messages.buckets_skipped; })
      .def_property_readonly("messages", [](const Statistics& s) { return s.messages.messages; })
      .def_readonly("dense_bytes", &Statistics::dense_bytes)
      .def_property_readonly("payload_bytes", [](const Statistics& s) { return s.messages.payload_bytes; })
      .def_property_readonly("broadcast_bytes", [](const Statistics& s) { return s.messages.broadcast_bytes; })
      .def_property_readonly("owner_bytes", [](const Statistics& s) { return s.messages.owner_bytes; })
      .def_property_readonly("coded_bytes", [](const Statistics& s) { return s.messages.coded_bytes; })
      .def_property_readonly("uncoded_bytes", [](const Statistics& s) { return s.messages.uncoded_bytes; })
      .def_property_readonly("sent_bytes", [](const Statistics& s) { return s.messages.sent_bytes; })
      .def_property_readonly("mask_bytes",
                             [](const Statistics& s) { return s.exchanges.mask_bytes + s.messages.size_bytes; })
      .def_property_readonly("exchanges", [](const Statistics& s) { return s.exchanges.exchanges; })
      .def_readonly("plan_cache_hits", &Statistics::plan_cache_hits)
      .def_readonly("plan_cache_misses", &Statistics::plan_cache_misses)
      .def_property_readonly("exchange_wait_seconds", [](const Statistics& s) { return s.exchanges.wait_seconds; })
      .def_readonly("hook_seconds", &Statistics::hook_seconds);

  // Whatever locks the engine lets go of the GIL first: a bucket may complete, and take the GIL, with the engine
  // locked.
  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](const py::object& reducer, std::shared_ptr<ControlGroups> control_groups,
                       std::shared_ptr<HostsOnStreams> hosts, const EngineSettings& settings,
                       std::vector<at::Tensor> unmanaged_parameters, std::vector<std::string> names,
                       const std::vector<size_t>& pending) {
             return Engine::make(reducer.cast<std::shared_ptr<c10d::Reducer>>(), std::move(control_groups),
                                 std::move(hosts), settings, std::move(unmanaged_parameters), std::move(names),
                                 pending);
           }),
           py::kw_only(), py::arg("reducer"), py::arg("control_groups"), py::arg("hosts"), py::arg("settings"),
           py::arg("unmanaged_parameters"), py::arg("names"), py::arg("pending"))
      .def(
          "configure",
          [](Engine& engine, const EngineSettings& settings, std::shared_ptr<HostsOnStreams> hosts) {
            engine.configure(settings, std::move(hosts));
          },
          py::arg("settings"), py::arg("hosts"), py::call_guard<py::gil_scoped_release>())
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
      .def("forward_begins", &Engine::forward_begins, py::call_guard<py::gil_scoped_release>())
      .def("forward_done", &Engine::forward_done, py::call_guard<py::gil_scoped_release>())
      .def("has_early_exchange", &Engine::has_early_exchange, py::call_guard<py::gil_scoped_release>())
      .def("exchanges_started", &Engine::exchanges_started, py::call_guard<py::gil_scoped_release>())
      .def("finish_exchanges", &Engine::finish_exchanges, py::call_guard<py::gil_scoped_release>())
      .def("declare_unused", &Engine::declare_unused, py::call_guard<py::gil_scoped_release>())
      .def(
          "set_callbacks",
          [](Engine& engine, py::function rebuild, py::function tell_unregistered, py::function explain) {
            EngineCallbacks held{without_gil(std::move(rebuild)), without_gil(std::move(tell_unregistered)),
                                 asked_without_gil(std::move(explain))};
            py::gil_scoped_release no_gil;
            engine.set_callbacks(std::move(held));
          },
          py::kw_only(), py::arg("rebuild"), py::arg("tell_unregistered"), py::arg("explain"))
      // Without a lock, so they keep the GIL.
      .def("seconds_in_hook", &Engine::seconds_in_hook)
      .def("agreed_steps", &Engine::agreed_steps)
      .def("register_natively", &Engine::register_natively, py::call_guard<py::gil_scoped_release>())
      .def("close", &Engine::close, py::kw_only(), py::arg("remove_hook"), py::arg("dying"),
           py::call_guard<py::gil_scoped_release>())
      .def("pending", &Engine::pending, py::call_guard<py::gil_scoped_release>())
      .def("awaits_backward", &Engine::awaits_backward, py::call_guard<py::gil_scoped_release>())
      .def("statistics", &Engine::statistics, py::call_guard<py::gil_scoped_release>())
      .def("reset_statistics", &Engine::reset_statistics, py::call_guard<py::gil_scoped_release>())
      .def(
          "usage",
          [](const Engine& engine) {
            Usage usage = engine.usage();
            std::vector<std::tuple<size_t, int64_t, int64_t, int64_t, std::vector<int64_t>>> units;
            for (const UnitCounts& counts : usage.units) {
              units.emplace_back(counts.parameter, counts.units, counts.here, counts.anywhere, counts.by_rank);
            }
            // For each parameter how many ranks contributed, and which; the latter only as far as it is known.
            std::vector<std::pair<int64_t, RankSet>> who;
            for (size_t i = 0; usage.contributors.are_known() && i < usage.here.size(); ++i) {
              who.emplace_back(usage.contributors.count(i), usage.contributors.ranks(i));
            }
            return std::make_tuple(std::move(usage.here), std::move(usage.anywhere), std::move(units), std::move(who));
          },
          py::call_guard<py::gil_scoped_release>());
  m.def("failed_future", &failed_future);
}

}  // namespace ddp_hooks
