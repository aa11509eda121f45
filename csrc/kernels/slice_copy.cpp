#include "kernels/slice_copy.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include "kernels/cpu/slice_copy.h"
#include "kernels/devices.h"
#include "kernels/slice_reader.h"

namespace ddp_hooks {
namespace {

char* address(const at::Tensor& flat, int64_t element) {
  return static_cast<char*>(flat.data_ptr()) + element * flat.element_size();
}

// Throws unless the slices are of the message's dtype, on its device, and fill exactly its elements.
void check_fit(const at::Tensor& message, const std::vector<BorrowedSlice>& slices) {
  check_device(message.device());
  SliceReader reader(message.device());
  const at::Tensor* seen = nullptr;
  int64_t total = 0;
  for (const BorrowedSlice& slice : slices) {
    reader.look_at(slice);
    TORCH_CHECK(slice.flat == seen || slice.flat->scalar_type() == message.scalar_type(),
                "ddp_hooks: expected slices of ", message.scalar_type(), ", received ", slice.flat->scalar_type());
    seen = slice.flat;
    total += slice.length;
  }
  check_range(message, 0, message.numel());
  TORCH_CHECK(total == message.numel(), "ddp_hooks: expected slices of ", message.numel(), " elements, received ",
              total);
}

template <typename Element>
void add(char* to, const char* from, int64_t length) {
  auto* sums = reinterpret_cast<Element*>(to);
  const auto* terms = reinterpret_cast<const Element*>(from);
  for (int64_t i = 0; i < length; ++i) sums[i] += terms[i];
}

// An operator of torch's for each range would take longer than what it adds where ranges are rows.
void add_on_cpu(const at::Tensor& message, const at::Tensor& to, const std::vector<Range>& ranges) {
  const auto add_elements = [type = element_type_of(message)] {
    switch (type) {
      case ElementType::kFloat64:
        return add<double>;
      case ElementType::kFloat16:
        return add<c10::Half>;
      case ElementType::kBFloat16:
        return add<c10::BFloat16>;
      case ElementType::kFloat32:
        break;
    }
    return add<float>;
  }();
  int64_t position = 0;
  for (const Range& range : ranges) {
    add_elements(address(to, range.offset), address(message, position), range.length);
    position += range.length;
  }
}

std::vector<SliceOfMemory> addresses(const std::vector<BorrowedSlice>& slices) {
  std::vector<SliceOfMemory> memory;
  memory.reserve(slices.size());
  for (const BorrowedSlice& slice : slices) {
    check_aligned(*slice.flat);
    memory.push_back({address(*slice.flat, slice.offset), slice.length * slice.flat->element_size()});
  }
  return memory;
}

// Calls `copy(address, address in the message, length)` for each.
template <typename Copy>
void for_each_on_cpu(const at::Tensor& message, const std::vector<BorrowedSlice>& slices, const Copy& copy) {
  SliceReader reader(message.device());
  char* in_message = static_cast<char*>(message.data_ptr());
  for (const BorrowedSlice& slice : slices) {
    reader.look_at(slice);
    copy(reader.address(), in_message, slice.length);
    in_message += slice.length * reader.element_bytes();
  }
}

}  // namespace

std::vector<BorrowedSlice> borrow(const std::vector<SliceOfTensor>& slices) {
  std::vector<BorrowedSlice> borrowed;
  borrowed.reserve(slices.size());
  for (const SliceOfTensor& slice : slices) borrowed.push_back(borrow(slice));
  return borrowed;
}

char* address_of(const SliceOfTensor& slice) {
  return address(slice.flat, slice.offset);
}

void check_range(const at::Tensor& flat, int64_t offset, int64_t length) {
  TORCH_CHECK(flat.dim() == 1 && flat.is_contiguous(), "ddp_hooks: expected a flat, contiguous tensor, received sizes ",
              flat.sizes(), " and strides ", flat.strides());
  TORCH_CHECK(offset >= 0 && length >= 0 && offset + length <= flat.numel(), "ddp_hooks: expected a range within ",
              flat.numel(), " elements, received offset ", offset, " and length ", length);
}

void check_aligned(const at::Tensor& flat) {
  TORCH_CHECK(reinterpret_cast<uintptr_t>(flat.data_ptr()) % static_cast<uintptr_t>(flat.element_size()) == 0,
              "ddp_hooks: expected elements of ", flat.element_size(), " bytes at multiples of that, received address ",
              flat.data_ptr());
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

void gather_scaled(const at::Tensor& message, const std::vector<BorrowedSlice>& slices, double factor) {
  check_fit(message, slices);
  const ElementType type = element_type_of(message);
  if (!message.is_cpu()) {
    const c10::DeviceGuard guard(message.device());
    check_aligned(message);
    const std::vector<SliceOfMemory> memory = addresses(slices);
    const char* error = kernels_of(message.device())
                            .gather_scaled(message.data_ptr(), memory.data(), memory.size(), type, factor,
                                           current_stream_handle(message.device()));
    return check_launch(error, message.device(), "gather gradients");
  }
  for_each_on_cpu(message, slices, [&](const char* from, char* to, int64_t length) {
    cpu::copy_scaled(to, from, length, type, factor);
  });
}

void gather_divided(const at::Tensor& message, const std::vector<BorrowedSlice>& slices, double divisor) {
  if (!message.is_cpu()) return gather_scaled(message, slices, 1 / divisor);
  check_fit(message, slices);
  const ElementType type = element_type_of(message);
  for_each_on_cpu(message, slices, [&](const char* from, char* to, int64_t length) {
    cpu::copy_divided(to, from, length, type, divisor);
  });
}

void scatter(const at::Tensor& message, const std::vector<BorrowedSlice>& slices) {
  check_fit(message, slices);
  const ElementType type = element_type_of(message);
  if (!message.is_cpu()) {
    const c10::DeviceGuard guard(message.device());
    check_aligned(message);
    const std::vector<SliceOfMemory> memory = addresses(slices);
    const char* error =
        kernels_of(message.device())
            .scatter(message.data_ptr(), memory.data(), memory.size(), current_stream_handle(message.device()));
    return check_launch(error, message.device(), "scatter gradients");
  }
  for_each_on_cpu(message, slices,
                  [&](char* to, const char* from, int64_t length) { cpu::copy(to, from, length, type); });
}

void scatter_add(const at::Tensor& message, const at::Tensor& to, const std::vector<Range>& ranges) {
  std::vector<BorrowedSlice> slices;
  slices.reserve(ranges.size());
  for (const Range& range : ranges) slices.push_back({&to, range.offset, range.length});
  check_fit(message, slices);
  if (message.is_cpu()) return add_on_cpu(message, to, ranges);
  // A device does it for all ranges in three launches.
  const at::Tensor terms = at::zeros_like(to);
  for (BorrowedSlice& slice : slices) slice.flat = &terms;
  scatter(message, slices);
  at::Tensor(to).add_(terms);
}

}  // namespace ddp_hooks
