#include "transport/coded_message.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "kernels/coding.h"
#include "kernels/packing.h"

namespace ddp_hooks {
namespace {

char* address_of(const BorrowedSlice& slice) {
  check_range(*slice.flat, slice.offset, slice.length);
  return static_cast<char*>(slice.flat->data_ptr()) + slice.offset * slice.flat->element_size();
}

}  // namespace

int64_t write_message(const std::vector<BorrowedSlice>& slices, bool is_coded, const at::Tensor& to) {
  int64_t count = 0;
  std::vector<PackedSlice> packed;
  packed.reserve(slices.size());
  for (const BorrowedSlice& slice : slices) {
    packed.push_back({slice});
    count += slice.length;
  }
  if (count == 0) return 0;
  const at::Tensor& flat = *slices.front().flat;
  const int64_t bytes = count * flat.element_size();
  if (!is_coded) {
    RECORD_FUNCTION("ddp_hooks::pack", std::vector<c10::IValue>());
    pack(to, packed);
    return bytes;
  }
  RECORD_FUNCTION("ddp_hooks::encode", std::vector<c10::IValue>());
  const ElementType type = element_type_of(flat);
  check_range(to, 0, most_coded_bytes(count, type));
  auto* const coded = static_cast<char*>(to.data_ptr());
  if (slices.size() == 1) return encode(address_of(slices.front()), count, type, coded);
  const at::Tensor gathered = at::empty({bytes}, at::kByte);
  pack(gathered, packed);
  return encode(gathered.const_data_ptr(), count, type, coded);
}

void read_message(const at::Tensor& received, int64_t begin, int64_t bytes, const BorrowedSlice& to, bool is_coded,
                  const std::function<std::string()>& describe) {
  if (to.length == 0) return;
  RECORD_FUNCTION("ddp_hooks::decode", std::vector<c10::IValue>());
  check_range(received, begin, bytes);
  const char* const message = static_cast<const char*>(received.const_data_ptr()) + begin;
  char* const numbers = address_of(to);
  if (!is_coded) {
    std::memcpy(numbers, message, static_cast<size_t>(bytes));
    return;
  }
  try {
    decode(message, bytes, to.length, element_type_of(*to.flat), numbers, false);
  } catch (c10::Error& error) {
    error.add_context("in " + describe());
    throw;
  }
}

}  // namespace ddp_hooks
