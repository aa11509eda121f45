#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "bindings/rooms.h"
#include "reducer/reducer_view.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

ReducerView view(const py::object& reducer) {
  return ReducerView(reducer.cast<std::shared_ptr<c10d::Reducer>>());
}

}  // namespace

void bind_reducer(py::module_& m) {
  m.def("reducer_parameters", [](const py::object& reducer) { return view(reducer).parameters(); });
  m.def("reducer_layout", [](const py::object& reducer) { return view(reducer).layout(); });
  m.def("reducer_is_in_backward", [](const py::object& reducer) { return view(reducer).in_backward(); });
  m.def("reducer_forward_passes", [](const py::object& reducer) { return view(reducer).forward_passes(); });
  m.def("reducer_unreached", [](const py::object& reducer) { return view(reducer).unreached(); });
  m.def("reducer_has_hook", [](const py::object& reducer) { return view(reducer).has_hook(); });
  m.def("initialize_reducer_used_map", [](const py::object& reducer) { view(reducer).initialize_used_map(); });
  m.def("reducer_skips_unused_by_local_list",
        [](const py::object& reducer) { return view(reducer).skips_unused_by_local_list(); });
}

}  // namespace ddp_hooks
