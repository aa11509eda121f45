// Two process groups, both carried by gloo.
//
// One puts its collectives on a stream of its own, as NCCL does. A collective waits for what the caller's stream has
// been given, and its work is complete, for the host, when it is put there: wait() makes the caller's stream wait.
// Tensors are recorded on the group's stream. A collective that is not asynchronous is put on the caller's own stream,
// and nothing is recorded. Whatever their streams, a group's collectives begin in the order in which they were put.
//
// Sums are gloo's, in the order of its ring, so they are those of the CPU; what is averaged is multiplied first.
//
// The other does as gloo with CUDA tensors, and calls itself that. A collective copies its tensors to pinned memory, a
// thread carries it out there, puts the copies back on a stream from a pool, and completes the work, whose
// future knows no streams. Then the thread's stream waits for the copies, and nobody else's but by wait(). Plain DDP,
// which asks the future, gets wrong gradients from that where it trains on another stream than the default one.

#include "process_group.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "costs.h"
#include "counts.h"
#include "memory.h"
#include "operators.h"
#include "queues.h"

namespace pretend {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

constexpr StreamId kFirstStream = 100;
constexpr StreamId kFirstHostStream = 1'000'000;
constexpr StreamId kHostStreams = 8;
std::atomic<bool> host_collectives_finish_at_once{false};
std::atomic<int> collectives_until_failure{0};

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

// The work of gloo's own does its copy in wait(), and is not complete before.
class ReduceScatterWork final : public Work {
 public:
  ReduceScatterWork(c10::intrusive_ptr<Work> all_reduce, at::Tensor part, at::Tensor output)
      : all_reduce_(std::move(all_reduce)), part_(std::move(part)), output_(std::move(output)) {}
  bool isCompleted() override { return all_reduce_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    all_reduce_->wait(timeout);
    output_.copy_(part_);
    return true;
  }

 private:
  const c10::intrusive_ptr<Work> all_reduce_;
  const at::Tensor part_, output_;
};

c10::intrusive_ptr<Work> all_reduce(c10d::Backend& gloo, Tensors& tensors, c10d::AllreduceOptions options) {
  if (options.reduceOp == c10d::ReduceOp::AVG) {
    // As NCCL does.
    for (at::Tensor& tensor : tensors) tensor.mul_(1.0 / gloo.getSize());
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  return gloo.allreduce(tensors, options);
}

// The collectives that are asked for, whatever becomes of them.
class CarriedGroup : public c10d::Backend {
 public:
  explicit CarriedGroup(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return put(c10d::OpType::ALLREDUCE, tensors, tensors, options.asyncOp,
               [options](c10d::Backend& gloo, Tensors& in, Tensors&) { return all_reduce(gloo, in, options); });
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return put(c10d::OpType::BROADCAST, tensors, tensors, options.asyncOp,
               [options](c10d::Backend& gloo, Tensors& in, Tensors&) { return gloo.broadcast(in, options); });
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    return put(c10d::OpType::ALLGATHER, inputs, outputs.front(), options.asyncOp,
               [options](c10d::Backend& gloo, Tensors& in, Tensors& out) {
                 std::vector<Tensors> outs{out};
                 return gloo.allgather(outs, in, options);
               });
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    return put(c10d::OpType::_ALLGATHER_BASE, {input}, {output}, options.asyncOp,
               [options](c10d::Backend& gloo, Tensors& in, Tensors& out) {
                 return gloo._allgather_base(out.front(), in.front(), options);
               });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    return put(c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output}, options.asyncOp,
               [op = options.reduceOp](c10d::Backend& gloo, Tensors& in, Tensors& out) {
                 Tensors sums{in.front().flatten().clone()};
                 c10d::AllreduceOptions summing;
                 summing.reduceOp = op;
                 const int64_t length = out.front().numel();
                 const at::Tensor part = sums.front().narrow(0, gloo.getRank() * length, length).view_as(out.front());
                 return c10::make_intrusive<ReduceScatterWork>(all_reduce(gloo, sums, summing), part, out.front());
               });
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    return put(c10d::OpType::ALLTOALL_BASE, {input}, {output}, options.asyncOp,
               [options, output_sizes, input_sizes](c10d::Backend& gloo, Tensors& in, Tensors& out) mutable {
                 return gloo.alltoall_base(out.front(), in.front(), output_sizes, input_sizes, options);
               });
  }

 protected:
  using Start = std::function<c10::intrusive_ptr<Work>(c10d::Backend&, Tensors&, Tensors&)>;

  // `start` is given the inputs and outputs as gloo takes them.
  virtual c10::intrusive_ptr<Work> put(c10d::OpType type, const Tensors& inputs, const Tensors& outputs,
                                       bool is_asynchronous, Start start) = 0;

  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

class QueuedGroup final : public CarriedGroup {
 public:
  explicit QueuedGroup(const c10::intrusive_ptr<c10d::Backend>& gloo) : CarriedGroup(gloo), stream_(next_stream()) {}

  const std::string getBackendName() const override { return "pretend"; }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    ++Counts::get().host_waits;
    std::unique_lock lock(mutex_);
    const std::map<StreamId, Ticket> ends = ends_;
    lock.unlock();
    for (const auto& [stream, end] : ends) Queues::get().synchronize(end);
    return gloo_->barrier(options);
  }

 private:
  static StreamId next_stream() {
    static std::atomic<StreamId> next{kFirstStream};
    return next++;
  }

  // As a ring over the hosts carries it.
  static double seconds_of(c10d::OpType type, double bytes) {
    const Costs& costs = Costs::get();
    const double others = costs.hosts - 1;
    double share = 1;
    if (type == c10d::OpType::ALLREDUCE) share = 2 * others / costs.hosts;
    if (type == c10d::OpType::ALLGATHER || type == c10d::OpType::_ALLGATHER_BASE) share = others;
    const bool is_reduce_scatter = type == c10d::OpType::_REDUCE_SCATTER_BASE;
    if (is_reduce_scatter || type == c10d::OpType::ALLTOALL_BASE) share = others / costs.hosts;
    return costs.latency + share * bytes / costs.link;
  }

  c10::intrusive_ptr<Work> put(c10d::OpType type, const Tensors& inputs, const Tensors& outputs, bool is_asynchronous,
                               Start start) override {
    TORCH_CHECK(--collectives_until_failure != 0, "failed on purpose");
    uint64_t bytes = 0;
    for (const at::Tensor& tensor : inputs) bytes += tensor.nbytes();
    Counts::get().add_collective(c10d::opTypeToString(type), getSize(), bytes);
    Queues& queues = Queues::get();
    const StreamId stream = is_asynchronous ? stream_ : current_stream();
    if (is_asynchronous) {
      queues.wait(stream_, queues.ticket(current_stream()));
      for (const Tensors* some : {&inputs, &outputs}) {
        for (const at::Tensor& tensor : *some) record_on_stream(tensor.storage().data_ptr(), stream_);
      }
    }
    struct UnderWay {
      Tensors inputs, outputs;
      c10::intrusive_ptr<Work> work;
    };
    auto under_way = std::make_shared<UnderWay>(UnderWay{all_as_cpu(inputs), all_as_cpu(outputs), nullptr});
    std::vector<Use> uses;
    for (const at::Tensor& tensor : inputs) uses.push_back(use_of(tensor, false));
    for (const at::Tensor& tensor : outputs) uses.push_back(use_of(tensor, true));
    const std::lock_guard lock(mutex_);
    const auto run = [gloo = gloo_, begun = begun_, number = put_++, under_way, start = std::move(start)] {
      if (!under_way->work) {
        if (*begun != number) return false;
        ++*begun;
        under_way->work = start(*gloo, under_way->inputs, under_way->outputs);
      }
      if (!under_way->work->isCompleted()) return false;
      under_way->work->wait();  // throws what went wrong
      return true;
    };
    const std::string name = c10d::opTypeToString(type);
    const auto given = static_cast<double>(bytes);
    const double host_seconds = Costs::get().collective_launch;
    const Ticket work =
        put_work(stream, name, uses, run, {seconds_of(type, given), host_seconds, given, name, getSize()});
    ends_[stream] = work;
    return c10::make_intrusive<QueuedWork>(getRank(), type, work, stream, outputs);
  }

  const StreamId stream_;
  std::mutex mutex_;
  uint64_t put_ = 0;  // collectives
  std::map<StreamId, Ticket> ends_;
  const std::shared_ptr<std::atomic<uint64_t>> begun_ = std::make_shared<std::atomic<uint64_t>>(0);
};

// Of a group that copies to the host: done when its thread says so.
class HostWork final : public Work {
 public:
  HostWork(int rank, c10d::OpType type, Tensors outputs)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return !future_->hasError(); }
  void synchronize() override {
    ++Counts::get().stream_waits;
    Queues::get().wait(current_stream(), copied_);
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    ++Counts::get().host_waits;
    future_->wait();
    future_->value();  // throws what went wrong
    synchronize();
    return true;
  }
  void blockCurrentStream() override { wait(std::chrono::milliseconds(0)); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void finish(Ticket copied) {
    copied_ = copied;
    synchronize();
    future_->markCompleted(c10::IValue(outputs_));
  }
  void fail() { future_->setError(std::current_exception()); }

 private:
  const Tensors outputs_;
  Ticket copied_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class HostGroup final : public CarriedGroup {
 public:
  explicit HostGroup(const c10::intrusive_ptr<c10d::Backend>& gloo) : CarriedGroup(gloo) {
    std::thread([waiting = waiting_] { run(*waiting); }).detach();
  }
  ~HostGroup() override {
    const std::lock_guard lock(waiting_->mutex);
    waiting_->closed = true;
    waiting_->changed.notify_all();
  }

  const std::string getBackendName() const override { return "gloo"; }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  struct Waiting {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> collectives;
    bool closed = false;
  };

  // The thread may outlive the group, which nobody may have to wait for.
  static void run(Waiting& waiting) {
    std::unique_lock lock(waiting.mutex);
    while (true) {
      waiting.changed.wait(lock, [&] { return waiting.closed || !waiting.collectives.empty(); });
      if (waiting.collectives.empty()) return;
      std::function<void()> next = std::move(waiting.collectives.front());
      waiting.collectives.pop_front();
      lock.unlock();
      next();
      next = nullptr;
      lock.lock();
    }
  }

  c10::intrusive_ptr<Work> put(c10d::OpType type, const Tensors& inputs, const Tensors& outputs,
                               bool /*is_asynchronous*/, Start start) override {
    static std::atomic<StreamId> next{0};
    ++Counts::get().collectives;
    Queues& queues = Queues::get();
    const StreamId stream = kFirstHostStream + next++ % kHostStreams;
    queues.wait(stream, queues.ticket(current_stream()));
    const auto pinned = [&](const Tensors& tensors) {
      Tensors copies;
      for (const at::Tensor& tensor : tensors) {
        record_on_stream(tensor.storage().data_ptr(), stream);
        copies.push_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true)));
        const Tensors pair{as_cpu(tensor), copies.back()};
        put_work(stream, "a copy to the host", {use_of(tensor, false)}, [pair] { return copy(pair[0], pair[1]); });
      }
      return copies;
    };
    Tensors in = pinned(inputs);
    const bool is_in_place = &inputs == &outputs;
    Tensors out = is_in_place ? in : pinned(outputs);
    auto work = c10::make_intrusive<HostWork>(getRank(), type, outputs);
    const Ticket ready = queues.ticket(stream);
    std::unique_lock lock(waiting_->mutex);
    waiting_->collectives.push_back([gloo = gloo_, work, in, out, ready, stream, aliases = all_as_cpu(outputs),
                                     start = std::move(start)]() mutable {
      Queues& queues = Queues::get();
      try {
        queues.synchronize(ready);
        start(*gloo, in, out)->wait();
        for (size_t i = 0; i < out.size(); ++i) {
          const Tensors pair{out[i], aliases[i]};
          put_work(stream, "a copy back", {use_of(aliases[i], true)}, [pair] { return copy(pair[0], pair[1]); });
        }
      } catch (...) {
        return work->fail();
      }
      work->finish(queues.ticket(stream));
    });
    waiting_->changed.notify_all();
    lock.unlock();
    if (host_collectives_finish_at_once) work->getFuture()->wait();
    return work;
  }

  static bool copy(const at::Tensor& from, const at::Tensor& to) {
    const at::NoGradGuard no_grad;
    at::Tensor(to).copy_(from);
    return true;
  }

  const std::shared_ptr<Waiting> waiting_ = std::make_shared<Waiting>();
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<QueuedGroup>(gloo);
}

c10::intrusive_ptr<c10d::Backend> make_host_group(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<HostGroup>(gloo);
}

void finish_host_collectives_at_once(bool at_once) {
  host_collectives_finish_at_once = at_once;
}

void fail_collective(int number) {
  collectives_until_failure = number;
}

}  // namespace pretend
