// What all ways to code a section share: where heads, bodies and bitmaps lie, and how decoded numbers are put.
//
// A section has the heads of its blocks, then their bodies, then the bitmaps of those that have one, from its end on
// backwards: so whoever reads it knows where each is.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/coded_block.h"
#include "kernels/cpu/addition.h"
#include "kernels/cpu/coding.h"
#include "kernels/cpu/elements.h"

namespace ddp_hooks::cpu {

static_assert(std::endian::native == std::endian::little, "a coded message is little-endian");

struct SectionWriter {
  char* head;
  char* body;
  int bitmap_count = 0;
  uint32_t bitmaps[coding::kSectionBlocks];

  DDP_HOOKS_ALWAYS_INLINE SectionWriter(char* to, int blocks) : head(to), body(to + coding::kHeadBytes * blocks) {}

  DDP_HOOKS_ALWAYS_INLINE void put_head(uint8_t largest, uint8_t form) {
    store_element(head, 0, largest);
    store_element(head, 1, form);
    head += coding::kHeadBytes;
  }
  DDP_HOOKS_ALWAYS_INLINE void put_raw(const char* block, int bytes) {
    put_head(0, coding::kRaw);
    std::memcpy(body, block, static_cast<size_t>(bytes));
    body += bytes;
  }
  DDP_HOOKS_ALWAYS_INLINE void put_bitmap(uint32_t bitmap) {
    bitmaps[coding::kSectionBlocks - ++bitmap_count] = bitmap;
  }

  DDP_HOOKS_ALWAYS_INLINE char* finish() {
    const auto bytes = static_cast<size_t>(bitmap_count * coding::kBitmapBytes);
    if (bytes != 0) std::memcpy(body, bitmaps + coding::kSectionBlocks - bitmap_count, bytes);
    return body + bytes;
  }
};

struct SectionReader {
  const char* head;
  const char* body;
  const char* bitmap;  // the last that was taken
  const char* end_of_message;

  DDP_HOOKS_ALWAYS_INLINE SectionReader(const Section& section, int blocks)
      : head(section.begin),
        body(section.begin + coding::kHeadBytes * blocks),
        bitmap(section.end),
        end_of_message(section.end_of_message) {}

  DDP_HOOKS_ALWAYS_INLINE uint8_t take_largest() const { return load_element<uint8_t>(head, 0); }
  DDP_HOOKS_ALWAYS_INLINE uint8_t take_form() {
    head += coding::kHeadBytes;
    return load_element<uint8_t>(head, -1);
  }
  DDP_HOOKS_ALWAYS_INLINE uint32_t take_bitmap() {
    bitmap -= coding::kBitmapBytes;
    return load_element<uint32_t>(bitmap, 0);
  }
};

// to = the numbers of a block, or to += them. Both hold a `T` each; what is added has its bits in an array of integers.
template <typename T>
DDP_HOOKS_ALWAYS_INLINE void put_block(char* to, const char* numbers, bool adds) {
  constexpr auto kBytes = static_cast<size_t>(coding::kBlockNumbers) * sizeof(T);
  if (!adds) {
    std::memcpy(to, numbers, kBytes);
    return;
  }
  DDP_HOOKS_ELEMENTS_ARE_INDEPENDENT
  for (int i = 0; i < coding::kBlockNumbers; ++i) {
    store_element<T>(to, i, add_terms(load_element<T>(to, i), load_element<T>(numbers, i)));
  }
}

// The same for a block of +0.0. Where it is added, -0.0 becomes +0.0 and a NaN the one NaN of sums.
template <typename T>
DDP_HOOKS_ALWAYS_INLINE void put_zeros(char* to, bool adds) {
  constexpr auto kBytes = static_cast<size_t>(coding::kBlockNumbers) * sizeof(T);
  if (!adds) {
    std::memset(to, 0, kBytes);
    return;
  }
  DDP_HOOKS_ELEMENTS_ARE_INDEPENDENT
  for (int i = 0; i < coding::kBlockNumbers; ++i) store_element<T>(to, i, add_terms(load_element<T>(to, i), T(0.0f)));
}

}  // namespace ddp_hooks::cpu
