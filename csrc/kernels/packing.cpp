#include "kernels/packing.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstring>

#include "kernels/cpu/contribution_sum.h"
#include "kernels/cpu/narrowing.h"
#include "kernels/devices.h"

#ifdef DDP_HOOKS_WITH_CUDA
#include <c10/core/DeviceGuard.h>

#include "kernels/cuda/packing.h"
#endif

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

void check_sum(const SliceSum& sum, c10::Device device, int64_t received_bytes) {
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
}

#ifdef DDP_HOOKS_WITH_CUDA

void check_packed(const at::Tensor& buffer) {
  TORCH_CHECK(reinterpret_cast<uintptr_t>(buffer.data_ptr()) % cuda::kPackedAlignment == 0,
              "ddp_hooks: expected a buffer at a multiple of ", cuda::kPackedAlignment, " bytes, received address ",
              buffer.data_ptr());
}

void pack_on_cuda(const at::Tensor& to, const std::vector<PackedSlice>& from) {
  const c10::DeviceGuard guard(to.device());
  check_packed(to);
  std::vector<cuda::SliceToPack> slices;
  slices.reserve(from.size());
  for (const auto& [slice, width] : from) {
    check_aligned(slice.flat);
    slices.push_back({address_of(slice), slice.length, slice.flat.element_size(), width});
  }
  const char* error =
      cuda::pack(static_cast<char*>(to.data_ptr()), slices.data(), slices.size(), current_stream_handle(to.device()));
  TORCH_CHECK(error == nullptr, "ddp_hooks: CUDA could not pack gradients: ", error);
}

// The sums are of one type, divisor and way to end.
void sum_alike_on_cuda(const at::Tensor& packed, const SliceSum* sums, size_t count, ElementType type) {
  std::vector<std::vector<cuda::TermToAdd>> terms(count);
  std::vector<cuda::SliceToSum> slices;
  slices.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const SliceSum& sum = sums[i];
    check_aligned(sum.to.flat);
    for (const Contribution& each : sum.contributions) {
      TORCH_CHECK(each.own || each.offset % cuda::kPackedAlignment == 0,
                  "ddp_hooks: expected contributions at multiples of ", cuda::kPackedAlignment,
                  " bytes, received offset ", each.offset);
      terms[i].push_back({each.offset, each.width, each.own});
    }
    slices.push_back({address_of(sum.to), sum.to.length * element_bytes(type), terms[i].data(), terms[i].size()});
  }
  const char* received = packed.defined() ? static_cast<const char*>(packed.data_ptr()) : nullptr;
  const char* error = cuda::sum_terms(received, slices.data(), count, type, 1 / sums->divisor, sums->adds_zero,
                                      current_stream_handle(sums->to.flat.device()));
  TORCH_CHECK(error == nullptr, "ddp_hooks: CUDA could not add gradients: ", error);
}

void sum_on_cuda(const at::Tensor& packed, const std::vector<SliceSum>& sums) {
  const c10::DeviceGuard guard(sums.front().to.flat.device());
  if (packed.defined()) check_packed(packed);
  for (size_t begin = 0, end = 0; begin < sums.size(); begin = end) {
    const SliceSum& first = sums[begin];
    const ElementType type = element_type_of(first.to.flat);
    const auto is_alike = [&](const SliceSum& sum) {
      return element_type_of(sum.to.flat) == type && sum.divisor == first.divisor && sum.adds_zero == first.adds_zero;
    };
    for (end = begin + 1; end < sums.size() && is_alike(sums[end]);) ++end;
    sum_alike_on_cuda(packed, &first, end - begin, type);
  }
}

#endif

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
#ifdef DDP_HOOKS_WITH_CUDA
  if (to.is_cuda()) return pack_on_cuda(to, from);
#endif
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
  if (packed.defined()) {
    check_buffer(packed, "what was received");
    TORCH_CHECK(packed.device() == device, "ddp_hooks: expected what was received on ", device, ", received ",
                packed.device());
  }
  const int64_t received_bytes = packed.defined() ? packed.numel() : 0;
  for (const SliceSum& sum : sums) check_sum(sum, device, received_bytes);
#ifdef DDP_HOOKS_WITH_CUDA
  if (device.is_cuda()) return sum_on_cuda(packed, sums);
#endif
  const char* received = packed.defined() ? static_cast<const char*>(packed.data_ptr()) : nullptr;
  std::vector<cpu::Term> terms;
  for (const SliceSum& sum : sums) {
    char* const to = address_of(sum.to);
    terms.clear();
    for (const Contribution& each : sum.contributions) {
      terms.push_back(each.own ? cpu::Term{to, Width::kFull} : cpu::Term{received + each.offset, each.width});
    }
    cpu::sum_terms(to, terms.data(), terms.size(), sum.to.length, element_type_of(sum.to.flat),
                   {sum.divisor, sum.divides}, sum.adds_zero);
  }
}

}  // namespace ddp_hooks
