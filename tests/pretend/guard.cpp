// What torch asks of a device: its streams, events and memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "counts.h"
#include "memory.h"
#include "queues.h"

namespace pretend {
namespace {

constexpr c10::DeviceType kDevice = c10::kPrivateUse1;
constexpr int kPool = 32;  // as CUDA has

c10::Stream stream_with(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), id);
}

struct Event {
  Ticket ticket;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override { return stream_with(current_stream()); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream_with(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override {
    static std::atomic<int> next{0};
    return stream_with(1 + next++ % kPool);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_with(exchange_stream(stream.id())); }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Queues::get().is_through(Queues::get().ticket(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++Counts::get().host_waits;
    Queues::get().synchronize(Queues::get().ticket(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex /*index*/) const override {
    ++Counts::get().host_waits;
    Queues::get().synchronize_all();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    ++Counts::get().events;
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->ticket = Queues::get().ticket(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    ++Counts::get().stream_waits;
    Queues::get().wait(stream.id(), static_cast<Event*>(event)->ticket);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Queues::get().is_through(static_cast<Event*>(event)->ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    ++Counts::get().host_waits;
    Queues::get().synchronize(static_cast<Event*>(event)->ticket);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(queryEvent(start) && queryEvent(end), "pretend: an event has not come yet");
    return 1e3 * (static_cast<Event*>(end)->ticket.seconds - static_cast<Event*>(start)->ticket.seconds);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_on_stream(pointer, stream.id());
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*index*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*index*/) const override { return at::detail::createCPUGenerator(); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  c10::SetAllocator(kDevice, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace pretend
