// Looks at slices one after the other. Rows are many slices of few tensors, so that a tensor is asked what it is only
// where it is not that of the slice before.
//
// Thread-safety: none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

#include "kernels/slice_copy.h"

namespace ddp_hooks {

class SliceReader {
 public:
  explicit SliceReader(c10::Device device) : device_(device) {}

  // Refuses a slice elsewhere than on the device, or outside its tensor. What the others say is of the slice.
  void look_at(const BorrowedSlice& slice) {
    if (slice.flat != flat_ && (flat_ == nullptr || !flat_->is_same(*slice.flat))) look_at_tensor(*slice.flat);
    if (slice.offset < 0 || slice.length < 0 || slice.offset + slice.length > numel_) {
      check_range(*slice.flat, slice.offset, slice.length);
    }
    address_ = data_ + slice.offset * element_bytes_;
  }
  ElementType type() const { return type_; }
  int64_t element_bytes() const { return element_bytes_; }
  char* address() const { return address_; }

 private:
  void look_at_tensor(const at::Tensor& flat) {
    TORCH_CHECK(flat.device() == device_, "ddp_hooks: expected slices on ", device_, ", received ", flat.device());
    check_range(flat, 0, flat.numel());
    flat_ = &flat;
    numel_ = flat.numel();
    type_ = element_type_of(flat);
    element_bytes_ = flat.element_size();
    data_ = static_cast<char*>(flat.data_ptr());
  }

  const c10::Device device_;
  const at::Tensor* flat_ = nullptr;
  int64_t numel_ = 0;
  ElementType type_ = ElementType::kFloat32;
  int64_t element_bytes_ = 0;
  char* data_ = nullptr;
  char* address_ = nullptr;
};

}  // namespace ddp_hooks
