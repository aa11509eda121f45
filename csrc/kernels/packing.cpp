#include "kernels/packing.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstring>

#include "kernels/cpu/contribution_sum.h"
#include "kernels/cpu/narrowing.h"
#include "kernels/devices.h"

namespace ddp_hooks {
namespace {

void check_buffer(const at::Tensor& buffer, const char* what) {
  TORCH_CHECK(buffer.scalar_type() == at::kByte, "ddp_hooks: expected ", what, " of uint8, received ",
              buffer.scalar_type());
  check_range(buffer, 0, buffer.numel());
}

void check_slice(const SliceOfTensor& slice, c10::Device device) {
  TORCH_CHECK(slice.flat.device() == device, "ddp_hooks: expected slices on ", device, ", received ",
              slice.flat.device());
  check_range(slice.flat, slice.offset, slice.length);
}

void check_width(Width width, ElementType type) {
  const std::array<Width, 2> narrow = narrow_widths(type);
  TORCH_CHECK(width == Width::kFull || width == narrow[0] || width == narrow[1],
              "ddp_hooks: expected a width for elements of ", element_bytes(type), " bytes, received form ",
              static_cast<int>(width));
}

// Returns the element type.
ElementType check_sum(const SliceSum& sum, c10::Device device, int64_t received_bytes) {
  check_slice(sum.to, device);
  const ElementType type = element_type_of(sum.to.flat);
  TORCH_CHECK(!sum.contributions.empty(), "ddp_hooks: expected a contribution at least, received none");
  int64_t own = 0;
  for (const Contribution& each : sum.contributions) {
    if (each.own) {
      ++own;
      continue;
    }
    check_width(each.width, type);
    const int64_t bytes = sum.to.length * bytes_of_number(each.width, element_bytes(type));
    TORCH_CHECK(each.offset >= 0 && each.offset + bytes <= received_bytes, "ddp_hooks: expected contributions within ",
                received_bytes, " bytes, received offset ", each.offset, " and ", bytes, " bytes");
  }
  TORCH_CHECK(own <= 1, "ddp_hooks: expected one contribution that lies in the slice itself, received ", own);
  return type;
}

}  // namespace

void pack(const at::Tensor& to, const std::vector<PackedSlice>& from) {
  check_device(to.device());
  check_buffer(to, "a buffer");
  int64_t total = 0;
  for (const auto& [slice, width] : from) {
    check_slice(slice, to.device());
    check_width(width, element_type_of(slice.flat));
    total += packed_bytes(slice.length, width, slice.flat.element_size());
  }
  TORCH_CHECK(total <= to.numel(), "ddp_hooks: expected a buffer of ", total, " bytes at least, received ", to.numel());
  char* position = static_cast<char*>(to.data_ptr());
  for (const auto& [slice, width] : from) {
    const int64_t element_size = slice.flat.element_size();
    cpu::narrow(position, address_of(slice), slice.length, element_type_of(slice.flat), width);
    char* const end = position + slice.length * bytes_of_number(width, element_size);
    position += packed_bytes(slice.length, width, element_size);
    for (char* padding = end; padding != position; ++padding) *padding = 0;
  }
}

void sum_contributions(const at::Tensor& packed, const std::vector<SliceSum>& sums) {
  if (sums.empty()) return;
  const c10::Device device = sums.front().to.flat.device();
  check_device(device);
  const char* received = nullptr;
  int64_t received_bytes = 0;
  if (packed.defined()) {
    check_buffer(packed, "what was received");
    TORCH_CHECK(packed.device() == device, "ddp_hooks: expected what was received on ", device, ", received ",
                packed.device());
    received = static_cast<const char*>(packed.data_ptr());
    received_bytes = packed.numel();
  }
  std::vector<cpu::Term> terms;
  for (const SliceSum& sum : sums) {
    const ElementType type = check_sum(sum, device, received_bytes);
    char* const to = address_of(sum.to);
    terms.clear();
    for (const Contribution& each : sum.contributions) {
      terms.push_back(each.own ? cpu::Term{to, Width::kFull} : cpu::Term{received + each.offset, each.width});
    }
    cpu::sum_terms(to, terms.data(), terms.size(), sum.to.length, type, {sum.divisor, sum.divides}, sum.adds_zero);
  }
}

}  // namespace ddp_hooks
