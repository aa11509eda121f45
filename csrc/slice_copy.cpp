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

}  // namespace

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
  check_cpu(message);
  const ElementType type = element_type_of(message);
  int64_t position = 0;
  for (const SliceOfTensor& slice : slices) {
    cpu::copy_scaled(address(message, position), address(slice.flat, slice.offset), slice.length, type, factor);
    position += slice.length;
  }
}

void scatter(const at::Tensor& message, const std::vector<SliceOfTensor>& slices) {
  check_cpu(message);
  const ElementType type = element_type_of(message);
  int64_t position = 0;
  for (const SliceOfTensor& slice : slices) {
    cpu::copy(address(slice.flat, slice.offset), address(message, position), slice.length, type);
    position += slice.length;
  }
}

}  // namespace ddp_hooks
