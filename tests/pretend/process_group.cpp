// A process group whose collectives are put on a stream of its own, as NCCL's are, and carried by gloo.
//
// A collective waits for what the caller's stream has been given, and its work is complete, for the host, when it is
// put there: wait() makes the caller's stream wait. Tensors are recorded on the group's stream.

#include "process_group.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <memory>
#include <utility>

#include "counts.h"
#include "memory.h"
#include "operators.h"
#include "queues.h"

namespace pretend {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

constexpr StreamId kFirstStream = 100;

c10::Stream stream_with(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, 0), id);
}

class QueuedWork final : public Work {
 public:
  QueuedWork(int rank, c10d::OpType type, Ticket ticket, StreamId stream, Tensors outputs)
      : Work(rank, type), ticket_(ticket), outputs_(std::move(outputs)) {
    const std::vector<c10::Device> devices{c10::Device(c10::kPrivateUse1, 0)};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    const c10::StreamGuard guard(stream_with(stream));
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return Queues::get().is_through(ticket_); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    ++Counts::get().stream_waits;
    Queues::get().wait(current_stream(), ticket_);
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const Ticket ticket_;
  const Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors all_as_cpu(const Tensors& tensors) {
  Tensors aliases;
  for (const at::Tensor& tensor : tensors) aliases.push_back(as_cpu(tensor));
  return aliases;
}

class QueuedGroup final : public c10d::Backend {
 public:
  explicit QueuedGroup(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(next_stream()) {}

  const std::string getBackendName() const override { return "pretend"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return put(c10d::OpType::ALLREDUCE, tensors, tensors, [options](c10d::Backend& gloo, Tensors& in, Tensors&) {
      c10d::AllreduceOptions summing = options;
      if (options.reduceOp == c10d::ReduceOp::AVG) {
        // As NCCL does.
        for (at::Tensor& tensor : in) tensor.mul_(1.0 / gloo.getSize());
        summing.reduceOp = c10d::ReduceOp::SUM;
      }
      return gloo.allreduce(in, summing);
    });
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return put(c10d::OpType::BROADCAST, tensors, tensors,
               [options](c10d::Backend& gloo, Tensors& in, Tensors&) { return gloo.broadcast(in, options); });
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    return put(c10d::OpType::ALLGATHER, inputs, outputs.front(),
               [options](c10d::Backend& gloo, Tensors& in, Tensors& out) {
                 std::vector<Tensors> outs{out};
                 return gloo.allgather(outs, in, options);
               });
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    return put(c10d::OpType::_ALLGATHER_BASE, {input}, {output},
               [options](c10d::Backend& gloo, Tensors& in, Tensors& out) {
                 return gloo._allgather_base(out.front(), in.front(), options);
               });
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    return put(c10d::OpType::ALLTOALL_BASE, {input}, {output},
               [options, output_sizes, input_sizes](c10d::Backend& gloo, Tensors& in, Tensors& out) mutable {
                 return gloo.alltoall_base(out.front(), in.front(), output_sizes, input_sizes, options);
               });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    ++Counts::get().host_waits;
    Queues::get().synchronize(Queues::get().ticket(stream_));
    return gloo_->barrier(options);
  }

 private:
  using Start = std::function<c10::intrusive_ptr<Work>(c10d::Backend&, Tensors&, Tensors&)>;

  static StreamId next_stream() {
    static std::atomic<StreamId> next{kFirstStream};
    return next++;
  }

  c10::intrusive_ptr<Work> put(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, Start start) {
    ++Counts::get().collectives;
    Queues& queues = Queues::get();
    queues.wait(stream_, queues.ticket(current_stream()));
    for (const Tensors* some : {&inputs, &outputs}) {
      for (const at::Tensor& tensor : *some) record_on_stream(tensor.storage().data_ptr(), stream_);
    }
    struct UnderWay {
      Tensors inputs, outputs;
      c10::intrusive_ptr<Work> work;
    };
    auto under_way = std::make_shared<UnderWay>(UnderWay{all_as_cpu(inputs), all_as_cpu(outputs), nullptr});
    queues.put(stream_, [gloo = gloo_, under_way, start = std::move(start)] {
      if (!under_way->work) under_way->work = start(*gloo, under_way->inputs, under_way->outputs);
      if (!under_way->work->isCompleted()) return false;
      under_way->work->wait();  // throws what went wrong
      return true;
    });
    return c10::make_intrusive<QueuedWork>(getRank(), type, queues.ticket(stream_), stream_, outputs);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const StreamId stream_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<QueuedGroup>(gloo);
}

}  // namespace pretend
