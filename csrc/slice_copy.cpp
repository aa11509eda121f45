#include "slice_copy.h"

#include <c10/util/Exception.h>

#include "cpu/slice_copy.h"

namespace ddp_hooks {
namespace {

char* address(const at::Tensor& flat, int64_t element) {
  return static_cast<char*>(flat.data_ptr()) + element * flat.element_size();
}

void check_cpu(const at::Tensor& flat) {
  TORCH_CHECK(flat.is_cpu(), "ddp_hooks: expected gradients on the CPU, received ", flat.device(),
              "; this build has no path for that device");
}

// Throws unless the slices are of the message's dtype and fill exactly its elements.
void check_fit(const at::Tensor& message, const std::vector<SliceOfTensor>& slices) {
  int64_t total = 0;
  for (const SliceOfTensor& slice : slices) {
    check_cpu(slice.flat);
    check_range(slice.flat, slice.offset, slice.length);
    TORCH_CHECK(slice.flat.scalar_type() == message.scalar_type(), "ddp_hooks: expected slices of ",
                message.scalar_type(), ", received ", slice.flat.scalar_type());
    total += slice.length;
  }
  check_cpu(message);
  check_range(message, 0, message.numel());
  TORCH_CHECK(total == message.numel(), "ddp_hooks: expected slices of ", message.numel(), " elements, received ",
              total);
}

}  // namespace

void check_range(const at::Tensor& flat, int64_t offset, int64_t length) {
  TORCH_CHECK(flat.dim() == 1 && flat.is_contiguous(), "ddp_hooks: expected a flat, contiguous tensor, received sizes ",
              flat.sizes(), " and strides ", flat.strides());
  TORCH_CHECK(offset >= 0 && length >= 0 && offset + length <= flat.numel(), "ddp_hooks: expected a range within ",
              flat.numel(), " elements, received offset ", offset, " and length ", length);
}

ElementType element_type_of(const at::Tensor& flat) {
  switch (flat.scalar_type()) {
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    default:
      TORCH_CHECK(false, "ddp_hooks: expected gradients of float32, float64, float16 or bfloat16, received ",
                  flat.scalar_type());
  }
}

void gather_scaled(const at::Tensor& message, const std::vector<SliceOfTensor>& slices, double factor) {
  check_fit(message, slices);
  const ElementType type = element_type_of(message);
  int64_t position = 0;
  for (const SliceOfTensor& slice : slices) {
    cpu::copy_scaled(address(message, position), address(slice.flat, slice.offset), slice.length, type, factor);
    position += slice.length;
  }
}

void scatter(const at::Tensor& message, const std::vector<SliceOfTensor>& slices) {
  check_fit(message, slices);
  const ElementType type = element_type_of(message);
  int64_t position = 0;
  for (const SliceOfTensor& slice : slices) {
    cpu::copy(address(slice.flat, slice.offset), address(message, position), slice.length, type);
    position += slice.length;
  }
}

}  // namespace ddp_hooks
