// How a block of 32 numbers is laid out in a coded message: the head, form, sizes, and the parts of a number.
//
// Neighbouring gradients have similar exponents. A block has one head with its largest exponent, and stores how far
// each exponent lies below it, in as few bits as the block needs. Sign and mantissa are stored as they are, and the
// lower bits of the mantissa only as far as some number of the block has them. docs/internals/protocol.md has the whole
// format, with an example.
//
// Every rank must agree on: all of it. For host and device alike; no torch. Thread-safety: pure functions.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace ddp_hooks::coding {

constexpr int kBlockNumbers = 32;
// Blocks are counted off into sections, whose sizes the message begins with: a section can be read by itself.
constexpr int kSectionBlocks = 128;
constexpr int kSizeBytes = 2;  // of a section's size
constexpr int kHeadBytes = 2;  // the largest exponent, and the form
constexpr int kBitmapBytes = 4;
// A block with more zeros than these stores which of its numbers are not zero, and those alone.
constexpr int kMostZeros = 4;
// Exponents take up to so many bits each; blocks that need more are stored as they are.
constexpr int kMostPlanes = 7;

// The form, the second byte of a head. Bits 0 to 2: how many bits each distance has. Bits 4 to 6: which of kLowerBits.
constexpr uint8_t kPlanesMask = 0x07;
// The largest distance that these bits can hold stands for an exponent of 0.
constexpr uint8_t kHasExponentZero = 0x08;
constexpr int kLowerShift = 4;
constexpr uint8_t kHasBitmap = 0x80;
// Two forms of their own. A block whose numbers are all +0.0 has nothing but its head.
constexpr uint8_t kRaw = 0x70;
constexpr uint8_t kAllZero = 0xf0;

// How many of the 16 lower mantissa bits are stored, the upper ones first: none for numbers that were bfloat16, three
// for float16, some for sums of few of those, all for float32.
constexpr int kLowerForms = 7;
DDP_HOOKS_HOST_DEVICE constexpr int lower_bits(int lower_form) {
  constexpr int kLowerBits[kLowerForms] = {0, 3, 5, 6, 8, 10, 16};
  return kLowerBits[lower_form];
}

// The first form that holds so many lower bits.
DDP_HOOKS_HOST_DEVICE constexpr int lower_form_for(int bits) {
  int form = 0;
  while (lower_bits(form) < bits) ++form;
  return form;
}

DDP_HOOKS_HOST_DEVICE constexpr int planes_of(uint8_t form) {
  return form & kPlanesMask;
}
DDP_HOOKS_HOST_DEVICE constexpr int lower_form_of(uint8_t form) {
  return form >> kLowerShift & 7;
}
DDP_HOOKS_HOST_DEVICE constexpr bool is_special(uint8_t form) {
  return lower_form_of(form) == kLowerForms;
}
DDP_HOOKS_HOST_DEVICE constexpr bool has_bitmap(uint8_t form) {
  return (form & kHasBitmap) != 0 && !is_special(form);
}

// Bytes of one bit of each of so many numbers.
DDP_HOOKS_HOST_DEVICE constexpr int plane_bytes(int numbers) {
  return (numbers + 7) / 8;
}

// Bytes of a block behind its head and without its bitmap, if the form is none of the special ones.
DDP_HOOKS_HOST_DEVICE constexpr int body_bytes(uint8_t form, int numbers) {
  const int lower = lower_bits(lower_form_of(form));
  return numbers * (1 + lower / 8) + plane_bytes(numbers) * (planes_of(form) + lower % 8);
}

// A number becomes a word that is laid out as a float32 is: a bfloat16 is its upper half, and a float16 has five bits
// of exponent in the place of eight. A float64 is coded as a float32 if all of its block can be. +0.0, and nothing
// else, is the word 0. The upper byte of a word's mantissa has the sign as well; the rest are its lower bits.
DDP_HOOKS_HOST_DEVICE constexpr uint32_t word_of_bfloat16(uint16_t bits) {
  return uint32_t{bits} << 16;
}
DDP_HOOKS_HOST_DEVICE constexpr uint16_t bfloat16_of_word(uint32_t word) {
  return static_cast<uint16_t>(word >> 16);
}
DDP_HOOKS_HOST_DEVICE constexpr uint32_t word_of_float16(uint16_t bits) {
  return (bits & 0x8000u) << 16 | (bits & 0x7fffu) << 13;
}
DDP_HOOKS_HOST_DEVICE constexpr uint16_t float16_of_word(uint32_t word) {
  return static_cast<uint16_t>((word >> 16 & 0x8000u) | (word >> 13 & 0x7fffu));
}

DDP_HOOKS_HOST_DEVICE constexpr uint8_t exponent_of(uint32_t word) {
  return static_cast<uint8_t>(word >> 23);
}
DDP_HOOKS_HOST_DEVICE constexpr uint8_t upper_of(uint32_t word) {
  return static_cast<uint8_t>((word >> 24 & 0x80) | (word >> 16 & 0x7f));
}
DDP_HOOKS_HOST_DEVICE constexpr uint32_t join_word(uint8_t exponent, uint8_t upper, uint32_t lower) {
  return (upper & 0x80u) << 24 | uint32_t{exponent} << 23 | (upper & 0x7fu) << 16 | lower;
}

// How many bits each distance takes, from the largest exponent and the smallest one that is not 0.
DDP_HOOKS_HOST_DEVICE int planes_for(int largest, int smallest, bool has_exponent_zero) {
  const int codes = largest == 0 ? 1 : largest - smallest + 1 + (has_exponent_zero ? 1 : 0);
  int planes = 0;
  while ((1 << planes) < codes) ++planes;
  return planes;
}

}  // namespace ddp_hooks::coding
