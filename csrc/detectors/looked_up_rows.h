// Which rows of an embedding's gradient can hold a non-zero: those that its forward pass looked up.
//
// Where an embedding's node in the graph has made a gradient, all other rows of that are the zeros it began with. The
// node is watched, and what it has made is known again by its memory and by how often that was written to. So a
// gradient that something was added to, that was copied, changed by a hook or made by somebody else is another memory
// or another version of it, and nothing is known of its rows. What is written past torch's versions (`.data`, NumPy,
// collectives) is not seen so. Therefore the node has to hand on to the parameter's accumulator and nobody else, and
// nothing of the user's may stand between these two, neither then nor when the rows are asked for
// (`hands_on_unchanged`).
//
// Keeps no memory alive: a gradient that somebody else refers to is copied by autograd. Thread-safety: locks; nodes
// tell in the threads that run backward. Ranks may differ: what is known saves looking, and changes no answer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace ddp_hooks {

class LookedUpRows : public std::enable_shared_from_this<LookedUpRows> {
 public:
  // Watches every embedding that leads to the outputs. What is set on the graph goes with it.
  void watch(const std::vector<at::Tensor>& outputs);

  // Nothing is known any more.
  void forget();

  // The units (of `unit_length` elements) of the parameter's gradient `flat` that can hold a non-zero, bit u % 64 of
  // word u / 64, where that is known; all others are +0.0. Empty where it is not.
  std::vector<uint64_t> units_of(const at::Tensor& parameter, const at::Tensor& flat, int64_t unit_length) const;

  // From the node: it has made `gradient` of the parameter, of what was looked up at `indices`.
  void note(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& indices);

 private:
  struct Gradient {
    const c10::TensorImpl* parameter = nullptr;  // compared, never followed
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    uint32_t version = 0;
    at::ScalarType type = at::kFloat;
    int64_t row_length = 0;
    int64_t length = 0;
    std::vector<int64_t> rows;  // in no order
  };
  mutable std::mutex mutex_;
  std::vector<Gradient> gradients_;
};

}  // namespace ddp_hooks
