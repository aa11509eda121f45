#include "group.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace emulated {
namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;

c10::intrusive_ptr<c10::ivalue::Future> future_of_tensors(std::vector<c10::Device> devices) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
}

// Complete on the host when it is made; `wait` makes the caller's stream wait.
class StreamWork final : public Work {
 public:
  StreamWork(int rank, c10d::OpType type, c10::Stream stream, Tensors outputs)
      : Work(rank, type),
        outputs_(std::move(outputs)),
        end_(stream.device_type()),
        future_(future_of_tensors({stream.device()})) {
    const c10::StreamGuard guard(stream);
    end_.record(stream);
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    end_.block(c10::impl::VirtualGuardImpl(end_.device_type()).getStream(outputs_.front().device()));
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const Tensors outputs_;
  c10::Event end_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class HostWork final : public Work {
 public:
  HostWork(int rank, c10d::OpType type, Tensors outputs)
      : Work(rank, type), outputs_(std::move(outputs)), future_(future_of_tensors({})) {}
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { future_->wait(); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    synchronize();
    return true;
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void finish() { future_->markCompleted(c10::IValue(outputs_)); }

 private:
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Ends the collectives of a group on the CPU, one after the other.
class HostQueue {
 public:
  ~HostQueue() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    lock.unlock();
    thread_.join();
  }

  void finish_later(c10::intrusive_ptr<HostWork> work) {
    const auto host_time = std::chrono::duration<double>(link().host_seconds);
    const std::lock_guard lock(mutex_);
    waiting_.emplace_back(Clock::now() + std::chrono::duration_cast<Clock::duration>(host_time), std::move(work));
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      auto [when, work] = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      std::this_thread::sleep_until(when);
      work->finish();
      work.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Clock::time_point, c10::intrusive_ptr<HostWork>>> waiting_;
  bool closed_ = false;
  std::thread thread_{[this] { run(); }};
};

class EmulatedGroup final : public c10d::Backend {
 public:
  EmulatedGroup(int rank, int size, std::string name, c10::DeviceType device, HoldUp hold_up)
      : Backend(rank, size), name_(std::move(name)), hold_up_(std::move(hold_up)) {
    if (device == c10::kCPU) {
      host_ = std::make_unique<HostQueue>();
    } else {
      const c10::impl::VirtualGuardImpl guard(device);
      stream_ = guard.getStreamFromGlobalPool(guard.getDevice(), false);
    }
  }

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds /*timeout*/) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return put(c10d::OpType::ALLREDUCE, tensors, {}, tensors, options.asyncOp, 2.0 * (getSize() - 1) / getSize());
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return put(c10d::OpType::BROADCAST, tensors, {}, tensors, options.asyncOp, 1);
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    return put(c10d::OpType::ALLGATHER, inputs, outputs.front(), outputs.front(), options.asyncOp, getSize() - 1);
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    Tensors inputs{input};
    return put(c10d::OpType::_ALLGATHER_BASE, inputs, output.view({getSize(), -1}).unbind(), {output}, options.asyncOp,
               getSize() - 1);
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& /*options*/) override {
    if (stream_) stream_->synchronize();
    auto work = c10::make_intrusive<HostWork>(getRank(), c10d::OpType::BARRIER, Tensors{});
    work->finish();
    return work;
  }

 private:
  // Copies the only input to each of `parts`, and takes what a link needs for `share` of its bytes.
  c10::intrusive_ptr<Work> put(c10d::OpType type, const Tensors& inputs, const Tensors& parts, const Tensors& outputs,
                               bool is_asynchronous, double share) {
    if (host_) {
      for (const at::Tensor& part : parts) part.copy_(inputs.front().view_as(part));
      auto work = c10::make_intrusive<HostWork>(getRank(), type, outputs);
      host_->finish_later(work);
      return work;
    }
    const c10::impl::VirtualGuardImpl guard(stream_->device_type());
    const c10::Stream caller = guard.getStream(stream_->device());
    const c10::Stream stream = is_asynchronous ? *stream_ : caller;
    if (is_asynchronous) {
      c10::Event ready(stream.device_type());
      ready.record(caller);
      ready.block(stream);
    }
    double bytes = 0;
    const c10::StreamGuard on_stream(stream);
    for (const Tensors* some : {&inputs, &outputs}) {
      for (const at::Tensor& tensor : *some) tensor.record_stream(stream);
    }
    for (const at::Tensor& input : inputs) bytes += static_cast<double>(input.nbytes());
    for (const at::Tensor& part : parts) part.copy_(inputs.front().view_as(part), true);
    hold_up_(link().latency_seconds + share * bytes / link().bytes_per_second);
    return c10::make_intrusive<StreamWork>(getRank(), type, stream, outputs);
  }

  const std::string name_;
  const HoldUp hold_up_;
  std::optional<c10::Stream> stream_;  // of a device
  std::unique_ptr<HostQueue> host_;    // of the CPU
};

}  // namespace

Link& link() {
  static Link the_link;
  return the_link;
}

c10::intrusive_ptr<c10d::Backend> make_group(int rank, int size, std::string name, c10::DeviceType device,
                                             HoldUp hold_up) {
  return c10::make_intrusive<EmulatedGroup>(rank, size, std::move(name), device, std::move(hold_up));
}

}  // namespace emulated
