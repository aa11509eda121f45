#include "layout/transports.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "agreement/ordered_group.h"
#include "layout/units.h"
#include "plan/direct_plan.h"
#include "testing/parts.h"
#include "transport/launch.h"
#include "transport/unmanaged_gradients.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

class Done : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

// A rank of a group as large as a test likes, which sums what the ranks hand over.
class OneOfMany : public c10d::Backend {
 public:
  using AllReduce = std::function<void(at::Tensor)>;
  OneOfMany(int rank, int size, AllReduce all_reduce) : Backend(rank, size), all_reduce_(std::move(all_reduce)) {}
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    all_reduce_(tensors.front());
    return c10::make_intrusive<Done>();
  }

 private:
  AllReduce all_reduce_;
};

// A gloo group whose next collective sends something else than it is given, as if memory or a link had altered it.
class Altering : public c10d::Backend {
 public:
  using Alter = std::function<void(at::Tensor)>;
  explicit Altering(c10::intrusive_ptr<c10d::Backend> group)
      : Backend(group->getRank(), group->getSize()), group_(std::move(group)) {}

  // Of the bytes that are sent, with the GIL.
  void alter_next(Alter alter) { alter_ = std::move(alter); }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& received, at::Tensor& sent,
                                               std::vector<int64_t>& received_sizes, std::vector<int64_t>& sent_sizes,
                                               const c10d::AllToAllOptions& options) override {
    alter(sent);
    return group_->alltoall_base(received, sent, received_sizes, sent_sizes, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& received, at::Tensor& sent,
                                                 const c10d::AllgatherOptions& options) override {
    alter(sent);
    return group_->_allgather_base(received, sent, options);
  }

 private:
  void alter(const at::Tensor& sent) {
    if (!alter_) return;
    py::gil_scoped_acquire gil;
    std::exchange(alter_, nullptr)(sent);
  }

  const c10::intrusive_ptr<c10d::Backend> group_;
  Alter alter_;
};

// What is told an error is told its text.
using Told = std::function<void(std::optional<std::string>)>;

std::optional<std::string> text_of(const std::exception_ptr& error) {
  if (!error) return std::nullopt;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& failed) {
    return failed.what();
  }
}

// Without collectives: what is started is called, with the GIL, as everything here.
void bind_ordered_group(py::module_& m) {
  py::class_<OrderedGroup>(m, "OrderedGroup")
      .def(py::init(
          [] { return std::make_unique<OrderedGroup>(c10::make_intrusive<OneOfMany>(0, 1, OneOfMany::AllReduce())); }))
      .def("take_turn", &OrderedGroup::take_turn)
      .def("start",
           [](OrderedGroup& group, int64_t turn, const std::function<void()>& start, const Told& then) {
             group.start(
                 turn,
                 [start](c10d::Backend&) {
                   start();
                   return c10::make_intrusive<Done>();
                 },
                 [then](const OrderedGroup::WorkPointer&, const std::exception_ptr& error) { then(text_of(error)); });
           })
      .def("fail", [](OrderedGroup& group,
                      const std::string& reason) { group.fail(std::make_exception_ptr(std::runtime_error(reason))); })
      .def("has_failed", &OrderedGroup::has_failed);
}

}  // namespace

void bind_transports(py::module_& m) {
  bind_ordered_group(m);
  m.def("elements_in_units", &elements_in);
  py::class_<Altering, c10d::Backend, c10::intrusive_ptr<Altering>>(m, "Altering")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>())
      .def("alter_next", &Altering::alter_next);
  // Of a message, of elements of so many bytes: the payload of its contributions, and that of its sums.
  m.def("bytes_of_direct_message", [](const DirectMessage& message, int64_t element_bytes) {
    const MessageBytes bytes = bytes_of(message, element_bytes);
    return std::make_pair(bytes.contributions, bytes.sums);
  });
  m.def("contribution_bytes", &contribution_bytes);
  py::enum_<Transport>(m, "Transport")
      .value("ALL_REDUCE", Transport::kAllReduce)
      .value("BROADCAST", Transport::kBroadcast)
      .value("BY_OWNER", Transport::kByOwner);
  m.def(
      "transport_for",
      [](RankSet contributors, int world_size, bool owners, const std::optional<CodedParts>& coded) {
        return transport_for(contributors, {world_size, true, owners, coded});
      },
      py::arg("contributors"), py::arg("world_size"), py::arg("owners"), py::arg("coded") = py::none());
  m.def("backend_name", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group, const c10::Device& device) {
    return backend_name(*group, device.type());
  });
  m.def("is_on_streams", [](const std::string& backend_name, const c10::Device& device) {
    return is_on_streams(backend_name, device.type());
  });

  m.def("average_unmanaged_gradients",
        [](OneOfMany::AllReduce all_reduce, int rank, int ranks,
           const std::vector<std::pair<at::Tensor, bool>>& gradients, double factor, bool wait) {
          std::vector<UnmanagedGradient> unmanaged;
          for (const auto& [parameter, used] : gradients) unmanaged.push_back({parameter, used});
          const auto group = c10::make_intrusive<OneOfMany>(rank, ranks, std::move(all_reduce));
          const UnmanagedMessages sent = average_unmanaged_gradients(*group, nullptr, unmanaged, factor, wait);
          return std::make_tuple(sent.messages, sent.gradient_bytes, sent.flag_bytes);
        });
}

}  // namespace ddp_hooks
