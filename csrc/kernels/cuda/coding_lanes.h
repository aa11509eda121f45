// What a warp does to code a section of a message, and to check and decode one: a block is a warp, a value a lane.
//
// A plane of bits is one ballot. All bytes are those that the CPU makes; docs/internals/protocol.md has the format.
// A section's place in the message is the sum of the sizes before it, which every warp adds up for itself. So coding
// takes two launches, one for the sizes and one that writes, and decoding two, one that checks and one that writes.
//
// `Warp` says how lanes communicate: each(value of a lane) gives values whose lane reads its own with at(lane); votes
// and reductions take functions of a lane. `Memory` as in lanes.h. On the device they are the hardware's own, in tests
// loops over lanes (played_kernels.h). Whatever is no function of a lane is the same for all lanes. Thread-safety: pure
// functions but for what is written.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/coded_block.h"
#include "kernels/coded_float64.h"
#include "kernels/cuda/lanes.h"
#include "kernels/element_type.h"

namespace ddp_hooks::cuda {

static_assert(coding::kBlockNumbers == kWarpLanes);

// Values and the message that they are coded to or from.
struct CodedMessage {
  char* values;
  char* coded;
  int64_t coded_bytes;  // of a message that was received
  int64_t count;
  ElementType type;
};

DDP_HOOKS_HOST_DEVICE int64_t blocks_of(const CodedMessage& message) {
  return message.count / coding::kBlockNumbers;
}
DDP_HOOKS_HOST_DEVICE int64_t sections_of(const CodedMessage& message) {
  return (blocks_of(message) + coding::kSectionBlocks - 1) / coding::kSectionBlocks;
}
DDP_HOOKS_HOST_DEVICE int bytes_of_element(ElementType type) {
  return type == ElementType::kFloat64 ? 8 : type == ElementType::kFloat32 ? 4 : 2;
}
DDP_HOOKS_HOST_DEVICE int rest_bytes_of(const CodedMessage& message) {
  return static_cast<int>(message.count % coding::kBlockNumbers) * bytes_of_element(message.type);
}

// How many warps a launch takes: one a section. The last one has the values that fill no block, too.
inline int64_t section_count(const CodedMessage& message) {
  const int64_t sections = sections_of(message);
  return sections == 0 ? 1 : sections;
}

// The blocks of a section; none beyond the last.
DDP_HOOKS_HOST_DEVICE int blocks_in_section(const CodedMessage& message, int64_t section) {
  const int64_t left = blocks_of(message) - section * coding::kSectionBlocks;
  return left <= 0 ? 0 : left < coding::kSectionBlocks ? static_cast<int>(left) : coding::kSectionBlocks;
}
DDP_HOOKS_HOST_DEVICE bool has_rest(const CodedMessage& message, int64_t section) {
  const int64_t sections = sections_of(message);
  return section == (sections == 0 ? 0 : sections - 1);
}

template <typename Bits, typename Memory>
DDP_HOOKS_HOST_DEVICE Bits load_bits(const char* from, Memory& memory) {
  return memory.template load<Word<sizeof(Bits)>>(from).units[0];
}
template <typename Bits, typename Memory>
DDP_HOOKS_HOST_DEVICE void store_bits(char* to, Bits bits, Memory& memory) {
  Word<sizeof(Bits)> word;
  word.units[0] = bits;
  memory.store(to, word);
}

// Bits at any address.
template <typename Bits, typename Memory>
DDP_HOOKS_HOST_DEVICE Bits load_value(const char* from, Memory& memory) {
  Bits bits = 0;
  for (int i = 0; i < static_cast<int>(sizeof(Bits)); ++i) {
    bits |= static_cast<Bits>(Bits{load_bits<unsigned char>(from + i, memory)} << 8 * i);
  }
  return bits;
}

template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void copy_bytes(char* to, const char* from, int bytes, const Warp& warp, Memory& memory) {
  for (int begin = 0; begin < bytes; begin += kWarpLanes) {
    warp.for_lanes(bytes - begin, [&](int lane) {
      store_bits(to + begin + lane, load_bits<unsigned char>(from + begin + lane, memory), memory);
    });
  }
}

// A value as a word, and whether that is exact.
struct WordOfValue {
  uint32_t word;
  bool is_exact;
};

template <typename Memory>
DDP_HOOKS_HOST_DEVICE WordOfValue load_word_of_value(const char* from, ElementType type, Memory& memory) {
  switch (type) {
    case ElementType::kFloat32:
      return {load_bits<uint32_t>(from, memory), true};
    case ElementType::kFloat16:
      return {coding::word_of_float16(load_bits<uint16_t>(from, memory)), true};
    case ElementType::kBFloat16:
      return {coding::word_of_bfloat16(load_bits<uint16_t>(from, memory)), true};
    case ElementType::kFloat64:
      break;
  }
  const auto bits = load_bits<uint64_t>(from, memory);
  return {coding::word_of_float64(bits), coding::lost_of_float64(bits) == 0};
}

// The value of a word. `Bits` holds a number of the type.
template <typename Bits>
DDP_HOOKS_HOST_DEVICE Bits value_of_word(uint32_t word, ElementType type) {
  if constexpr (sizeof(Bits) == 8) {
    return coding::float64_of_word(word);
  } else if constexpr (sizeof(Bits) == 4) {
    return word;
  } else {
    return type == ElementType::kFloat16 ? coding::float16_of_word(word) : coding::bfloat16_of_word(word);
  }
}

DDP_HOOKS_HOST_DEVICE int count_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return __builtin_popcount(bits);
#endif
}

// Which bit is the one with so many set bits below it; some bit if there is none.
DDP_HOOKS_HOST_DEVICE int place_of_set_bit(uint32_t bits, int rank) {
  int place = 0;
  for (int half = 16; half != 0; half /= 2) {
    const uint32_t lower = bits & ((uint32_t{1} << half) - 1);
    const int below = count_bits(lower);
    if (rank < below) {
      bits = lower;
    } else {
      rank -= below;
      bits >>= half;
      place += half;
    }
  }
  return place;
}

// A block that is to be coded. `words` are the stored ones, by lane, the first `count` lanes.
template <typename Words>
struct BlockToCode {
  Words words;
  uint32_t nonzero;
  int count;
  uint8_t largest;
  uint8_t form;
  int body_bytes;
};

template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE auto look_at_block(const CodedMessage& message, int64_t block, const Warp& warp, Memory& memory) {
  using namespace coding;
  const int element_bytes = bytes_of_element(message.type);
  const char* const from = message.values + block * kBlockNumbers * element_bytes;
  const auto values =
      warp.each([&](int lane) { return load_word_of_value(from + lane * element_bytes, message.type, memory); });
  const auto words = warp.each([&](int lane) { return values.at(lane).word; });
  const uint32_t inexact = warp.vote_on([&](int lane) { return !values.at(lane).is_exact; });
  const uint32_t nonzero =
      warp.vote_on([&](int lane) { return values.at(lane).word != 0 || !values.at(lane).is_exact; });
  BlockToCode<std::decay_t<decltype(words)>> coded{words, nonzero, kBlockNumbers,
                                                   0,     kRaw,    kBlockNumbers * element_bytes};
  if (inexact != 0) return coded;
  if (nonzero == 0) {
    coded.form = kAllZero;
    coded.body_bytes = 0;
    return coded;
  }
  uint8_t bitmap = 0;
  if (count_bits(nonzero) < kBlockNumbers - kMostZeros) {
    coded.count = count_bits(nonzero);
    coded.words = warp.fetch(words, [&](int lane) { return place_of_set_bit(nonzero, lane); });
    bitmap = kHasBitmap;
  }
  const auto exponent = [&](int lane) { return lane < coded.count ? exponent_of(coded.words.at(lane)) : 0; };
  const auto is_zero = [&](int lane) { return lane < coded.count && exponent(lane) == 0; };
  const auto largest = static_cast<int>(warp.largest([&](int lane) { return uint32_t(exponent(lane)); }));
  // The smallest that is not 0, as the largest of what is missing.
  const int smallest =
      255 - static_cast<int>(warp.largest([&](int lane) { return exponent(lane) == 0 ? 0u : 255u - exponent(lane); }));
  const bool has_exponent_zero = largest != 0 && warp.vote_on(is_zero) != 0;
  const int planes = planes_for(largest, smallest, has_exponent_zero);
  if (planes > kMostPlanes) return coded;
  const uint32_t lower =
      warp.any_bits([&](int lane) { return lane < coded.count ? coded.words.at(lane) & 0xffffu : 0u; });
  int lower_bits = 0;
  while (lower_bits < 16 && (lower & ((1u << (16 - lower_bits)) - 1)) != 0) ++lower_bits;
  coded.largest = static_cast<uint8_t>(largest);
  coded.form = static_cast<uint8_t>(planes | (has_exponent_zero ? kHasExponentZero : 0) |
                                    lower_form_for(lower_bits) << kLowerShift | bitmap);
  coded.body_bytes = body_bytes(coded.form, coded.count);
  return coded;
}

// Stores a section's size in front of the message.
template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void size_section(const CodedMessage& message, int64_t section, const Warp& warp,
                                        Memory& memory) {
  using namespace coding;
  const int blocks = blocks_in_section(message, section);
  if (blocks == 0) return;
  int bytes = blocks * kHeadBytes;
  for (int i = 0; i < blocks; ++i) {
    const auto block = look_at_block(message, section * kSectionBlocks + i, warp, memory);
    bytes += block.body_bytes + (has_bitmap(block.form) ? kBitmapBytes : 0);
  }
  warp.for_lanes(kSizeBytes, [&](int lane) {
    store_bits(message.coded + section * kSizeBytes + lane, static_cast<unsigned char>(bytes >> 8 * lane), memory);
  });
}

template <typename Memory>
DDP_HOOKS_HOST_DEVICE int size_of_section(const CodedMessage& message, int64_t section, Memory& memory) {
  return load_value<uint16_t>(message.coded + section * coding::kSizeBytes, memory);
}

// Bytes into the message at which a section begins.
template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE int64_t place_of_section(const CodedMessage& message, int64_t section, const Warp& warp,
                                               Memory& memory) {
  return sections_of(message) * coding::kSizeBytes + warp.sum([&](int lane) {
    int64_t bytes = 0;
    for (int64_t i = lane; i < section; i += kWarpLanes) bytes += size_of_section(message, i, memory);
    return bytes;
  });
}

// Writes a plane, a byte a lane.
template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void put_plane(char* to, uint32_t plane, int count, const Warp& warp, Memory& memory) {
  warp.for_lanes(coding::plane_bytes(count),
                 [&](int lane) { store_bits(to + lane, static_cast<unsigned char>(plane >> 8 * lane), memory); });
}

template <typename Warp, typename Memory, typename Words>
DDP_HOOKS_HOST_DEVICE void put_body(char* to, const BlockToCode<Words>& block, const Warp& warp, Memory& memory) {
  using namespace coding;
  const int count = block.count, bytes = plane_bytes(count);
  warp.for_lanes(count, [&](int lane) { store_bits(to + lane, upper_of(block.words.at(lane)), memory); });
  to += count;
  const int planes = planes_of(block.form);
  for (int plane = 0; plane < planes; ++plane, to += bytes) {
    const uint32_t bits = warp.vote_on([&](int lane) {
      const int exponent = exponent_of(block.words.at(lane));
      // All bits of an exponent of 0 among others.
      const int distance = exponent == 0 && block.largest != 0 ? (1 << kMostPlanes) - 1 : block.largest - exponent;
      return lane < count && (distance >> plane & 1) != 0;
    });
    put_plane(to, bits, count, warp, memory);
  }
  const int lower = lower_bits(lower_form_of(block.form)), rows = lower / 8;
  for (int row = 0; row < rows; ++row, to += count) {
    warp.for_lanes(count, [&](int lane) {
      store_bits(to + lane, static_cast<unsigned char>(block.words.at(lane) >> (8 - 8 * row)), memory);
    });
  }
  for (int bit = 8 * rows; bit < lower; ++bit, to += bytes) {
    const uint32_t bits =
        warp.vote_on([&](int lane) { return lane < count && (block.words.at(lane) >> (15 - bit) & 1) != 0; });
    put_plane(to, bits, count, warp, memory);
  }
}

// Writes a section, where sizes say that it lies. The last one also writes the values that fill no block, and how many
// bytes the message has, as two words of 32 bits.
template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void write_section(const CodedMessage& message, int64_t section, uint32_t* message_bytes,
                                         const Warp& warp, Memory& memory) {
  using namespace coding;
  const int blocks = blocks_in_section(message, section);
  if (blocks == 0 && !has_rest(message, section)) return;
  const int block_bytes = kBlockNumbers * bytes_of_element(message.type);
  char* head = message.coded + place_of_section(message, section, warp, memory);
  char* body = head + blocks * kHeadBytes;
  char* const end = blocks == 0 ? body : head + size_of_section(message, section, memory);
  char* bitmap = end;
  for (int i = 0; i < blocks; ++i, head += kHeadBytes) {
    const int64_t number = section * kSectionBlocks + i;
    const auto block = look_at_block(message, number, warp, memory);
    warp.for_lanes(kHeadBytes,
                   [&](int lane) { store_bits(head + lane, lane == 0 ? block.largest : block.form, memory); });
    if (block.form == kRaw) {
      copy_bytes(body, message.values + number * block_bytes, block_bytes, warp, memory);
    } else if (block.form != kAllZero) {
      put_body(body, block, warp, memory);
    }
    if (has_bitmap(block.form)) {
      bitmap -= kBitmapBytes;
      put_plane(bitmap, block.nonzero, kBlockNumbers, warp, memory);
    }
    body += block.body_bytes;
  }
  if (!has_rest(message, section)) return;
  const int rest_bytes = rest_bytes_of(message);
  copy_bytes(end, message.values + blocks_of(message) * block_bytes, rest_bytes, warp, memory);
  const int64_t bytes = end + rest_bytes - message.coded;
  warp.for_lanes(2, [&](int lane) { message_bytes[lane] = static_cast<uint32_t>(bytes >> 32 * lane); });
}

// What may be wrong with a message that was received.
constexpr uint32_t kWrongSize = 1;
constexpr uint32_t kUnknownForm = 2;

// Bytes of a block's body and bitmap, or -1 if it has no form that there is. `bitmap` is where it lies, if it has one
// and there is room for it.
template <typename Memory>
DDP_HOOKS_HOST_DEVICE int bytes_of_block(ElementType type, uint8_t form, const char* bitmap, Memory& memory) {
  using namespace coding;
  if (form == kAllZero) return 0;
  if (form == kRaw) return kBlockNumbers * bytes_of_element(type);
  if (is_special(form)) return -1;
  const int most = type == ElementType::kBFloat16 ? 0 : type == ElementType::kFloat16 ? 3 : 16;
  if (lower_bits(lower_form_of(form)) > most) return -1;
  if (!has_bitmap(form)) return body_bytes(form, kBlockNumbers);
  return kBitmapBytes + body_bytes(form, count_bits(load_value<uint32_t>(bitmap, memory)));
}

// Sets bits of `wrong` unless the sizes and forms of a section account for each of its bytes, and it lies within the
// message; the last section, unless all of them account for each byte of the message. Reads nothing outside of it.
template <typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void check_section(const CodedMessage& message, int64_t section, uint32_t* wrong,
                                         const Warp& warp, Memory& memory) {
  using namespace coding;
  const int blocks = blocks_in_section(message, section);
  if (blocks == 0 && !has_rest(message, section)) return;
  const int64_t end_of_sections = message.coded_bytes - rest_bytes_of(message);
  if (sections_of(message) * kSizeBytes > end_of_sections) return warp.merge(wrong, kWrongSize);
  const int64_t begin = place_of_section(message, section, warp, memory);
  const int64_t size = blocks == 0 ? 0 : size_of_section(message, section, memory);
  if (has_rest(message, section) && begin + size != end_of_sections) warp.merge(wrong, kWrongSize);
  if (begin + size > end_of_sections || blocks * kHeadBytes > size) return warp.merge(wrong, kWrongSize);
  const char* const head = message.coded + begin;
  const char* const body = head + blocks * kHeadBytes;
  const char* bitmap = head + size;
  int64_t bytes = blocks * kHeadBytes;
  for (int i = 0; i < blocks; ++i) {
    const uint8_t form = load_bits<unsigned char>(head + kHeadBytes * i + 1, memory);
    if (has_bitmap(form)) {
      if (bitmap - body < kBitmapBytes) return warp.merge(wrong, kWrongSize);
      bitmap -= kBitmapBytes;
    }
    const int of_block = bytes_of_block(message.type, form, bitmap, memory);
    if (of_block < 0) return warp.merge(wrong, kUnknownForm);
    bytes += of_block;
  }
  if (bytes != size) warp.merge(wrong, kWrongSize);
}

// The word that a lane stored in a body, if its bit in `nonzero` is set.
template <typename Memory>
DDP_HOOKS_HOST_DEVICE uint32_t load_word_of_body(const char* body, uint8_t largest, uint8_t form, uint32_t nonzero,
                                                 int lane, Memory& memory) {
  using namespace coding;
  if ((nonzero >> lane & 1) == 0) return 0;
  const int count = count_bits(nonzero), bytes = plane_bytes(count);
  const int rank = count_bits(nonzero & ((uint32_t{1} << lane) - 1));
  const auto load_bit = [&](const char* plane) {
    return uint32_t{load_bits<unsigned char>(plane + rank / 8, memory)} >> rank % 8 & 1;
  };
  const uint8_t upper = load_bits<unsigned char>(body + rank, memory);
  body += count;
  const int planes = planes_of(form);
  uint32_t distance = 0;
  for (int plane = 0; plane < planes; ++plane, body += bytes) distance |= load_bit(body) << plane;
  const bool is_zero = (form & kHasExponentZero) != 0 && distance == (uint32_t{1} << planes) - 1;
  const int lower_count = lower_bits(lower_form_of(form)), rows = lower_count / 8;
  uint32_t lower = 0;
  for (int row = 0; row < rows; ++row, body += count) {
    lower |= uint32_t{load_bits<unsigned char>(body + rank, memory)} << (8 - 8 * row);
  }
  for (int bit = 8 * rows; bit < lower_count; ++bit, body += bytes) lower |= load_bit(body) << (15 - bit);
  return join_word(is_zero ? 0 : static_cast<uint8_t>(largest - distance), upper, lower);
}

// `Number` as in packing_lanes.h.
template <typename Number, typename Memory>
DDP_HOOKS_HOST_DEVICE void put_value(char* to, typename Number::Bits bits, bool adds, Memory& memory) {
  if (adds) {
    bits = Number::add(load_bits<typename Number::Bits>(to, memory), bits);
    // The NaN of sums is always the same, wherever they are added up.
    if (Number::widen(bits) != Number::widen(bits)) bits = Number::kNan;
  }
  store_bits(to, bits, memory);
}

// Writes the values of a section that was checked, or adds them; the last section, those that fill no block, too.
template <typename Number, typename Warp, typename Memory>
DDP_HOOKS_HOST_DEVICE void decode_section(const CodedMessage& message, int64_t section, bool adds,
                                          const uint32_t* wrong, const Warp& warp, Memory& memory) {
  using namespace coding;
  using Bits = typename Number::Bits;
  constexpr int kBytes = sizeof(Bits);
  const int blocks = blocks_in_section(message, section);
  if (*wrong != 0 || (blocks == 0 && !has_rest(message, section))) return;
  const char* head = message.coded + place_of_section(message, section, warp, memory);
  const char* body = head + blocks * kHeadBytes;
  const char* const end = blocks == 0 ? body : head + size_of_section(message, section, memory);
  const char* bitmap = end;
  char* to = message.values + section * kSectionBlocks * kBlockNumbers * kBytes;
  for (int i = 0; i < blocks; ++i, head += kHeadBytes, to += kBlockNumbers * kBytes) {
    const uint8_t largest = load_bits<unsigned char>(head, memory);
    const uint8_t form = load_bits<unsigned char>(head + 1, memory);
    uint32_t nonzero = form == kAllZero ? 0 : ~uint32_t{0};
    if (has_bitmap(form)) {
      bitmap -= kBitmapBytes;
      nonzero = load_value<uint32_t>(bitmap, memory);
    }
    warp.for_lanes(kBlockNumbers, [&](int lane) {
      const Bits bits = form == kRaw ? load_value<Bits>(body + lane * kBytes, memory)
                                     : value_of_word<Bits>(
                                           load_word_of_body(body, largest, form, nonzero, lane, memory), message.type);
      put_value<Number>(to + lane * kBytes, bits, adds, memory);
    });
    body += form == kRaw ? kBlockNumbers * kBytes : form == kAllZero ? 0 : body_bytes(form, count_bits(nonzero));
  }
  if (!has_rest(message, section)) return;
  warp.for_lanes(static_cast<int>(message.count % kBlockNumbers), [&](int lane) {
    put_value<Number>(to + lane * kBytes, load_value<Bits>(end + lane * kBytes, memory), adds, memory);
  });
}

}  // namespace ddp_hooks::cuda
