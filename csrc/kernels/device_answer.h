// What a scan on a device answers: words of the device, and what the host reads of them once they have been copied.
//
// Keeps nothing of what was scanned: who starts the scan holds it until the answer was waited for, or is gone, or
// records it on the scan's stream. Thread-safety: none.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include <cstdint>

namespace ddp_hooks {

class DeviceAnswer {
 public:
  DeviceAnswer(c10::Device device, int64_t words)
      : on_device_(at::empty({words}, at::TensorOptions().dtype(at::kInt).device(device))),
        on_host_(at::empty({words}, at::TensorOptions().dtype(at::kInt).pinned_memory(true))),
        copied_(device.type()) {}
  DeviceAnswer(const DeviceAnswer&) = delete;
  DeviceAnswer& operator=(const DeviceAnswer&) = delete;

  // The device may still write to the host's words when nobody has waited, because the pass failed, say. Memory that is
  // given back too early would be somebody else's by then.
  ~DeviceAnswer() {
    if (!under_way_) return;
    try {
      copied_.synchronize();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the device is lost, and with it whatever it would have written
    }
  }

  uint32_t* device_words() { return static_cast<uint32_t*>(on_device_.data_ptr()); }
  uint32_t* host_words() { return static_cast<uint32_t*>(on_host_.data_ptr()); }
  int64_t words() const { return on_host_.numel(); }

  // What fills the words and copies them has been put on the stream.
  void started_on(const c10::Stream& stream) {
    copied_.record(stream);
    under_way_ = true;
  }

  // Waits for that, and for nothing later; no stream is synchronised.
  const uint32_t* wait() {
    copied_.synchronize();
    under_way_ = false;
    return host_words();
  }

 private:
  at::Tensor on_device_;
  at::Tensor on_host_;
  c10::Event copied_;
  bool under_way_ = false;
};

}  // namespace ddp_hooks
