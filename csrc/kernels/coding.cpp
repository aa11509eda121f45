#include "kernels/coding.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/coded_block.h"
#include "kernels/cpu/addition.h"
#include "kernels/cpu/coding.h"
#include "kernels/cpu/elements.h"

namespace ddp_hooks {
namespace {

using namespace coding;

// How a message of so many values is divided.
struct Division {
  int64_t blocks;
  int64_t sections;
  int64_t block_bytes;  // of values
  int64_t rest_bytes;   // of values that fill no block

  Division(int64_t count, ElementType type)
      : blocks(count / kBlockNumbers),
        sections((blocks + kSectionBlocks - 1) / kSectionBlocks),
        block_bytes(kBlockNumbers * element_bytes(type)),
        rest_bytes(count % kBlockNumbers * element_bytes(type)) {}

  int blocks_of(int64_t section) const {
    return static_cast<int>(std::min<int64_t>(blocks - section * kSectionBlocks, kSectionBlocks));
  }
};

// More than any section has.
constexpr int32_t kNoForm = 1 << 24;

int lower_bits_of(ElementType type) {
  return type == ElementType::kBFloat16 ? 0 : type == ElementType::kFloat16 ? 3 : 16;
}

// Bytes of the body of a block of each form without a bitmap.
using BodyBytes = std::array<int32_t, 256>;

BodyBytes body_bytes_of(ElementType type) {
  BodyBytes bytes;
  for (int i = 0; i < 256; ++i) {
    const auto form = static_cast<uint8_t>(i);
    const bool is_known = !is_special(form) && lower_bits(lower_form_of(form)) <= lower_bits_of(type);
    bytes[i] = is_known ? body_bytes(form, kBlockNumbers) : kNoForm;
  }
  bytes[kRaw] = static_cast<int32_t>(kBlockNumbers * element_bytes(type));
  bytes[kAllZero] = 0;
  return bytes;
}

const BodyBytes& body_bytes_by_form(ElementType type) {
  static const std::array<BodyBytes, 4> kByType = [] {
    std::array<BodyBytes, 4> all;
    for (int i = 0; i < 4; ++i) all[i] = body_bytes_of(static_cast<ElementType>(i));
    return all;
  }();
  return kByType[static_cast<size_t>(type)];
}

// The bytes that the blocks of a section take, or kNoForm and more if one is of no form that there is. If there is no
// room for all of their bitmaps, more than it has.
int64_t section_bytes(const char* section, int64_t bytes, int blocks, const BodyBytes& by_form) {
  const auto form_of = [&](int i) { return cpu::load_element<uint8_t>(section, kHeadBytes * i + 1); };
  const int64_t head_bytes = int64_t{blocks} * kHeadBytes;
  int64_t total = head_bytes;
  int bitmaps = 0;
  for (int i = 0; i < blocks; ++i) {
    total += by_form[form_of(i)];
    bitmaps += has_bitmap(form_of(i)) ? 1 : 0;
  }
  if (bitmaps == 0 || total >= kNoForm) return total;
  if (head_bytes + bitmaps * kBitmapBytes > bytes) return head_bytes + bitmaps * kBitmapBytes;
  const char* bitmap = section + bytes;
  for (int i = 0; i < blocks; ++i) {
    const uint8_t form = form_of(i);
    if (!has_bitmap(form)) continue;
    bitmap -= kBitmapBytes;
    total += kBitmapBytes + body_bytes(form, std::popcount(cpu::load_element<uint32_t>(bitmap, 0))) - by_form[form];
  }
  return total;
}

// Throws unless sizes and forms account for each byte of the message.
void check_message(const char* coded, int64_t bytes, int64_t count, ElementType type) {
  const Division division(count, type);
  const int64_t table_bytes = division.sections * kSizeBytes;
  const int64_t least = table_bytes + division.blocks * kHeadBytes + division.rest_bytes;
  TORCH_CHECK(bytes >= least, "ddp_hooks: expected a coded message of at least ", least, " bytes for ", count,
              " values, received ", bytes, " bytes");
  const BodyBytes& by_form = body_bytes_by_form(type);
  int64_t position = table_bytes;
  for (int64_t i = 0; i < division.sections; ++i) {
    const int64_t size = cpu::load_element<uint16_t>(coded, i);
    const int blocks = division.blocks_of(i);
    TORCH_CHECK(size >= blocks * kHeadBytes && size <= bytes - division.rest_bytes - position,
                "ddp_hooks: expected sections of a coded message that add up to its ", bytes, " bytes, received ", size,
                " bytes for section ", i, " at byte ", position);
    const int64_t needed = section_bytes(coded + position, size, blocks, by_form);
    TORCH_CHECK(needed < kNoForm, "ddp_hooks: expected known forms of blocks in section ", i,
                " of a coded message, received another one");
    TORCH_CHECK(needed == size, "ddp_hooks: expected ", needed, " bytes for the blocks in section ", i,
                " of a coded message, received ", size);
    position += size;
  }
  TORCH_CHECK(position + division.rest_bytes == bytes, "ddp_hooks: expected a coded message of ",
              position + division.rest_bytes, " bytes for ", count, " values, received ", bytes, " bytes");
}

template <typename T>
void add_values(char* to, const char* from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    cpu::store_element(to, i, cpu::add_terms(cpu::load_element<T>(to, i), cpu::load_element<T>(from, i)));
  }
}

void add_rest(char* to, const char* from, int64_t count, ElementType type) {
  switch (type) {
    case ElementType::kFloat32:
      return add_values<float>(to, from, count);
    case ElementType::kFloat64:
      return add_values<double>(to, from, count);
    case ElementType::kFloat16:
      return add_values<c10::Half>(to, from, count);
    case ElementType::kBFloat16:
      return add_values<c10::BFloat16>(to, from, count);
  }
}

}  // namespace

int64_t most_coded_bytes(int64_t count, ElementType type) {
  const Division division(count, type);
  return division.sections * kSizeBytes + division.blocks * (kHeadBytes + division.block_bytes) + division.rest_bytes;
}

int64_t encode(const void* values, int64_t count, ElementType type, char* to) {
  const Division division(count, type);
  const cpu::EncodeSection encode_section = cpu::section_coder(type).encode;
  const char* from = static_cast<const char*>(values);
  char* at = to + division.sections * kSizeBytes;
  for (int64_t i = 0; i < division.sections; ++i) {
    const int blocks = division.blocks_of(i);
    char* const end = encode_section(from, blocks, at);
    cpu::store_element(to, i, static_cast<uint16_t>(end - at));
    from += blocks * division.block_bytes;
    at = end;
  }
  // An empty tensor may have no address at all, which memcpy must not be given even for nothing.
  if (division.rest_bytes != 0) std::memcpy(at, from, static_cast<size_t>(division.rest_bytes));
  return at + division.rest_bytes - to;
}

void decode(const char* coded, int64_t bytes, int64_t count, ElementType type, void* to, bool adds) {
  check_message(coded, bytes, count, type);
  const Division division(count, type);
  const cpu::DecodeSection decode_section = cpu::section_coder(type).decode;
  char* at = static_cast<char*>(to);
  const char* from = coded + division.sections * kSizeBytes;
  for (int64_t i = 0; i < division.sections; ++i) {
    const int blocks = division.blocks_of(i);
    const char* const end = from + cpu::load_element<uint16_t>(coded, i);
    decode_section({from, end, coded + bytes}, blocks, at, adds);
    at += blocks * division.block_bytes;
    from = end;
  }
  if (division.rest_bytes == 0) return;
  if (adds) {
    add_rest(at, from, count % kBlockNumbers, type);
  } else {
    std::memcpy(at, from, static_cast<size_t>(division.rest_bytes));
  }
}

}  // namespace ddp_hooks
