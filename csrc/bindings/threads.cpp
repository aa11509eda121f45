#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <vector>

#include "bindings/rooms.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

// Up to Python 3.11 a new object may start a collection, and a finalizer in it may let another thread run.
class CollectorOff {
 public:
  CollectorOff() : was_on_(PyGC_Disable() != 0) {}
  CollectorOff(const CollectorOff&) = delete;
  CollectorOff& operator=(const CollectorOff&) = delete;
  ~CollectorOff() {
    if (was_on_) PyGC_Enable();
  }

 private:
  bool was_on_;
};

using Call = std::tuple<py::object, int, int, py::object>;

// Reads a thread's calls, the innermost first, with the GIL held from the first to the last: otherwise the thread may
// leave a call while the object for its frame is made, which then refers to memory of something else. Frames hold a
// function's objects, which must not end in the thread that reads; so none is left when this returns.
std::vector<Call> read_calls(unsigned long thread, const py::object& method) {
  const CollectorOff collector_off;
  std::vector<Call> calls;
  const py::dict frames = py::module_::import("sys").attr("_current_frames")();
  const py::object key = py::cast(thread);
  py::object frame = frames.contains(key) ? py::object(frames[key]) : py::none();
  while (!frame.is_none()) {
    auto* of = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(of)));
    py::object self = py::none();
    if (code.is(method)) {
      const py::object locals = frame.attr("f_locals");
      if (locals.contains("self")) self = py::weakref(locals["self"]);
    }
    calls.emplace_back(code, frame.attr("f_lasti").cast<int>(), PyFrame_GetLineNumber(of), self);
    frame = frame.attr("f_back");
  }
  return calls;
}

}  // namespace

void bind_threads(py::module_& m) {
  m.def("read_calls", &read_calls, py::arg("thread"), py::arg("method"));
}

}  // namespace ddp_hooks
