#include "kernels/tensor_digests.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>

namespace ddp_hooks {
namespace {

constexpr int64_t kCopyBytes = 16 << 20;

// The elements in row-major order, as they are in memory.
at::Tensor plain(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "hash_tensors: expected strided tensors, received one with layout ",
              tensor.layout());
  return tensor.detach().resolve_conj().resolve_neg();
}

// Part of a tensor in a copy.
struct Piece {
  size_t tensor;
  int64_t bytes;
};

// A copy to the host under way, and what it holds.
class CopyToHost {
 public:
  explicit CopyToHost(c10::Device device) : device_(device), copied_(device.type()) {}

  int64_t room() const { return kCopyBytes - bytes_; }

  void add(size_t tensor, at::Tensor bytes) {
    pieces_.push_back({tensor, bytes.numel()});
    bytes_ += bytes.numel();
    sources_.push_back(std::move(bytes));
  }

  void start() {
    if (pieces_.empty()) return;
    if (!on_host_.defined()) {
      on_host_ = at::empty({kCopyBytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    }
    const at::Tensor together = sources_.size() == 1 ? sources_.front() : at::cat(sources_);
    on_host_.narrow(0, 0, bytes_).copy_(together, /*non_blocking=*/true);
    copied_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    sources_.clear();
  }

  // Waits for what start() has put on the stream.
  void hash_into(std::vector<HashInPieces>& hashes) {
    if (pieces_.empty()) return;
    copied_.synchronize();
    const auto* position = static_cast<const char*>(on_host_.const_data_ptr());
    for (const Piece& piece : pieces_) {
      hashes[piece.tensor].add(position, static_cast<size_t>(piece.bytes));
      position += piece.bytes;
    }
    pieces_.clear();
    bytes_ = 0;
  }

 private:
  const c10::Device device_;
  at::Tensor on_host_;
  std::vector<at::Tensor> sources_;
  std::vector<Piece> pieces_;
  int64_t bytes_ = 0;
  c10::Event copied_;
};

void hash_on_device(c10::Device device, const std::vector<at::Tensor>& tensors, const std::vector<size_t>& chosen,
                    std::vector<HashInPieces>& hashes) {
  const c10::OptionalDeviceGuard guard(device);
  std::array<CopyToHost, 2> copies{CopyToHost(device), CopyToHost(device)};
  size_t filling = 0;
  const auto next = [&] {
    copies[filling].start();
    filling = 1 - filling;
    copies[filling].hash_into(hashes);
  };
  for (const size_t index : chosen) {
    const at::Tensor tensor = plain(tensors[index]).contiguous();
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    for (int64_t done = 0; done < bytes;) {
      if (copies[filling].room() < static_cast<int64_t>(kHashBlockBytes)) next();
      int64_t some = std::min(bytes - done, copies[filling].room());
      if (done + some < bytes) some -= some % static_cast<int64_t>(kHashBlockBytes);
      at::Tensor piece = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device));
      const int64_t offset = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size()) + done;
      piece.set_(tensor.storage(), offset, {some}, {1});
      copies[filling].add(index, std::move(piece));
      done += some;
    }
  }
  next();
  next();
}

}  // namespace

std::vector<Digest> digests_of(const std::vector<at::Tensor>& tensors) {
  const std::optional<c10::DeviceType> accelerator = at::getAccelerator();
  std::vector<HashInPieces> hashes(tensors.size());
  std::map<c10::DeviceIndex, std::vector<size_t>> on_accelerators;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (accelerator == tensors[i].device().type()) {
      on_accelerators[tensors[i].device().index()].push_back(i);
      continue;
    }
    const at::Tensor tensor = plain(tensors[i]).to(at::kCPU).contiguous();
    hashes[i].add(tensor.const_data_ptr(), tensor.nbytes());
  }
  for (const auto& [index, chosen] : on_accelerators) {
    hash_on_device(c10::Device(*accelerator, index), tensors, chosen, hashes);
  }
  std::vector<Digest> digests;
  for (const HashInPieces& hash : hashes) digests.push_back(hash.finish());
  return digests;
}

}  // namespace ddp_hooks
