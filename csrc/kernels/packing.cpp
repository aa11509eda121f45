#include "kernels/packing.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cpu/contribution_sum.h"
#include "kernels/cpu/slice_copy.h"
#include "kernels/devices.h"
#include "kernels/slice_reader.h"

namespace ddp_hooks {
namespace {

void check_buffer(const at::Tensor& buffer, const char* what) {
  TORCH_CHECK(buffer.scalar_type() == at::kByte, "ddp_hooks: expected ", what, " of uint8, received ",
              buffer.scalar_type());
  check_range(buffer, 0, buffer.numel());
}

void check_sum(const SliceSum& sum, SliceReader& reader, int64_t received_bytes) {
  reader.look_at(sum.to);
  TORCH_CHECK(!sum.contributions.empty(), "ddp_hooks: expected at least one contribution, received none");
  int64_t own = 0;
  for (const Contribution& each : sum.contributions) {
    if (each.own) {
      ++own;
      continue;
    }
    const int64_t bytes = sum.to.length * reader.element_bytes();
    TORCH_CHECK(each.offset >= 0 && each.offset + bytes <= received_bytes, "ddp_hooks: expected contributions within ",
                received_bytes, " bytes, received offset ", each.offset, " and ", bytes, " bytes");
  }
  TORCH_CHECK(own <= 1, "ddp_hooks: expected one contribution that lies in the slice itself, received ", own);
}

void pack_on_cpu(char* to, const PackedSlice& packed, const char* from, ElementType type) {
  const auto& [slice, divisor, divides] = packed;
  if (divisor == 1) {
    cpu::copy(to, from, slice.length, type);
  } else if (divides) {
    cpu::copy_divided(to, from, slice.length, type, divisor);
  } else {
    cpu::copy_scaled(to, from, slice.length, type, 1 / divisor);
  }
}

void check_place(const char* address, int64_t number_bytes) {
  TORCH_CHECK(reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(number_bytes) == 0,
              "ddp_hooks: expected packed numbers of ", number_bytes, " bytes at multiples of that, received address ",
              static_cast<const void*>(address));
}

void pack_on_device(const at::Tensor& to, const std::vector<PackedSlice>& from) {
  if (from.empty()) return;
  const c10::DeviceGuard guard(to.device());
  const ElementType type = element_type_of(*from.front().slice.flat);
  char* position = static_cast<char*>(to.data_ptr());
  check_place(position, element_bytes(type));
  SliceReader reader(to.device());
  std::vector<SliceOfMemory> slices;
  slices.reserve(from.size());
  for (size_t i = 0; i < from.size(); ++i) {
    const auto& [slice, divisor, divides] = from[i];
    TORCH_CHECK(element_type_of(*slice.flat) == type, "ddp_hooks: expected slices of one type, received one of ",
                slice.flat->scalar_type());
    check_aligned(*slice.flat);
    reader.look_at(slice);
    slices.push_back({reader.address(), slice.length * element_bytes(type)});
    if (i + 1 < from.size() && from[i + 1].divisor == divisor) continue;
    // A launch scales all of its slices alike.
    const char* error = kernels_of(to.device())
                            .gather_scaled(position, slices.data(), slices.size(), type, 1 / divisor,
                                           current_stream_handle(to.device()));
    check_launch(error, to.device(), "pack gradients");
    for (const SliceOfMemory& packed : slices) position += packed.bytes;
    slices.clear();
  }
}

// What the sums of a launch have in common.
struct KindOfSum {
  ElementType type;
  double divisor;
  bool adds_zero;
  bool operator==(const KindOfSum&) const = default;
};

void sum_alike_on_device(const char* packed, const std::vector<const SliceSum*>& sums, const KindOfSum& kind,
                         c10::Device device) {
  std::vector<SliceToSum> slices;
  slices.reserve(sums.size());
  const int64_t element_size = element_bytes(kind.type);
  SliceReader reader(device);
  for (const SliceSum* sum : sums) {
    check_aligned(*sum->to.flat);
    reader.look_at(sum->to);
    for (const Contribution& each : sum->contributions) {
      if (!each.own) check_place(packed + each.offset, element_size);
    }
    slices.push_back(
        {reader.address(), sum->to.length * element_size, sum->contributions.data(), sum->contributions.size()});
  }
  const char* error = kernels_of(device).sum_terms(packed, slices.data(), slices.size(), kind.type, 1 / kind.divisor,
                                                   kind.adds_zero, current_stream_handle(device));
  check_launch(error, device, "add gradients");
}

void sum_on_device(const char* packed, const std::vector<SliceSum>& sums, c10::Device device) {
  const c10::DeviceGuard guard(device);
  // Kinds may alternate, so that one kind after the other takes fewer launches. There are few kinds.
  std::vector<std::pair<KindOfSum, std::vector<const SliceSum*>>> kinds;
  for (const SliceSum& sum : sums) {
    const KindOfSum kind{element_type_of(*sum.to.flat), sum.divisor, sum.adds_zero};
    auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& each) { return each.first == kind; });
    if (found == kinds.end()) found = kinds.insert(found, {kind, {}});
    found->second.push_back(&sum);
  }
  for (const auto& [kind, alike] : kinds) sum_alike_on_device(packed, alike, kind, device);
}

}  // namespace

void pack(const at::Tensor& to, const std::vector<PackedSlice>& from) {
  check_device(to.device());
  check_buffer(to, "a buffer");
  SliceReader reader(to.device());
  int64_t total = 0;
  for (const PackedSlice& each : from) {
    reader.look_at(each.slice);
    total += each.slice.length * reader.element_bytes();
  }
  TORCH_CHECK(total <= to.numel(), "ddp_hooks: expected a buffer of at least ", total, " bytes, received ", to.numel());
  if (!to.is_cpu()) return pack_on_device(to, from);
  char* position = static_cast<char*>(to.data_ptr());
  for (const PackedSlice& each : from) {
    reader.look_at(each.slice);
    pack_on_cpu(position, each, reader.address(), reader.type());
    position += each.slice.length * reader.element_bytes();
  }
}

void sum_contributions(const at::Tensor& packed, const std::vector<SliceSum>& sums) {
  if (sums.empty()) return;
  const c10::Device device = sums.front().to.flat->device();
  check_device(device);
  if (packed.defined()) {
    check_buffer(packed, "received data");
    TORCH_CHECK(packed.device() == device, "ddp_hooks: expected received data on ", device, ", received ",
                packed.device());
  }
  const int64_t received_bytes = packed.defined() ? packed.numel() : 0;
  SliceReader reader(device);
  for (const SliceSum& sum : sums) check_sum(sum, reader, received_bytes);
  const char* received = packed.defined() ? static_cast<const char*>(packed.data_ptr()) : nullptr;
  if (!device.is_cpu()) return sum_on_device(received, sums, device);
  std::vector<const char*> terms;
  for (const SliceSum& sum : sums) {
    reader.look_at(sum.to);
    char* const to = reader.address();
    terms.clear();
    for (const Contribution& each : sum.contributions) terms.push_back(each.own ? to : received + each.offset);
    cpu::sum_terms(to, terms.data(), terms.size(), sum.to.length, reader.type(), 1 / sum.divisor, sum.adds_zero);
  }
}

}  // namespace ddp_hooks
