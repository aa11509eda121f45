#include "kernels/cpu/coding.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/coded_block.h"
#include "kernels/coded_float64.h"
#include "kernels/cpu/coding_avx2.h"
#include "kernels/cpu/coding_sections.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/instructions.h"

namespace ddp_hooks::cpu {
namespace {

using namespace coding;

// A byte of each stored word, eight at a time: without vectors, a plane is made from eight bytes by a multiplication.
struct Row {
  uint64_t of[kBlockNumbers / 8] = {};

  template <typename ByteOf>
  static Row make(const ByteOf& byte_of) {
    uint8_t bytes[kBlockNumbers];
    for (int i = 0; i < kBlockNumbers; ++i) bytes[i] = byte_of(i);
    Row row;
    std::memcpy(row.of, bytes, kBlockNumbers);
    return row;
  }
  void unpack(uint8_t* bytes) const { std::memcpy(bytes, of, kBlockNumbers); }

  // The bits of this place, the first byte's lowest.
  uint32_t plane(int place) const {
    uint32_t bits = 0;
    for (int i = 0; i < kBlockNumbers / 8; ++i) {
      const uint64_t one_each = of[i] >> place & 0x0101010101010101;
      bits |= static_cast<uint32_t>(one_each * 0x0102040810204080 >> 56) << 8 * i;
    }
    return bits;
  }
  void set_plane(int place, uint32_t bits) {
    for (int i = 0; i < kBlockNumbers / 8; ++i) {
      const uint64_t where = uint64_t{bits >> 8 * i & 0xff} * 0x0101010101010101 & 0x8040201008040201;
      of[i] |= ((where + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101) << place;
    }
  }
};

DDP_HOOKS_ALWAYS_INLINE void put_row(char*& to, const Row& row, int count) {
  std::memcpy(to, row.of, static_cast<size_t>(count));
  to += count;
}
DDP_HOOKS_ALWAYS_INLINE Row load_row(const char*& from, int count) {
  Row row;
  std::memcpy(row.of, from, static_cast<size_t>(count));
  from += count;
  return row;
}

DDP_HOOKS_ALWAYS_INLINE void put_plane(char*& to, uint32_t plane, int count) {
  std::memcpy(to, &plane, static_cast<size_t>(plane_bytes(count)));
  to += plane_bytes(count);
}
DDP_HOOKS_ALWAYS_INLINE uint32_t load_plane(const char*& from, int count) {
  uint32_t plane = 0;
  std::memcpy(&plane, from, static_cast<size_t>(plane_bytes(count)));
  from += plane_bytes(count);
  return plane;
}

DDP_HOOKS_ALWAYS_INLINE void put_body(const uint32_t* words, const uint8_t* exponents, uint8_t largest, uint8_t form,
                                      int count, char*& to) {
  const uint32_t used = count == kBlockNumbers ? ~uint32_t{0} : (uint32_t{1} << count) - 1;
  put_row(to, Row::make([&](int i) { return upper_of(words[i]); }), count);
  const Row distances =
      Row::make([&](int i) { return exponents[i] == 0 ? 0xff : static_cast<uint8_t>(largest - exponents[i]); });
  for (int plane = 0; plane < planes_of(form); ++plane) put_plane(to, used & distances.plane(plane), count);
  const int lower = lower_bits(lower_form_of(form));
  for (int bit = 0; bit < lower; bit += 8) {
    const Row row = Row::make([&](int i) { return static_cast<uint8_t>(words[i] >> (8 - bit)); });
    if (lower - bit >= 8) {
      put_row(to, row, count);
    } else {
      for (int i = 0; i < lower - bit; ++i) put_plane(to, used & row.plane(7 - i), count);
    }
  }
}

// Returns false if the block has to be stored as it is.
bool encode_block(const uint32_t* words, SectionWriter& writer) {
  uint32_t any = 0;
  int zeros = 0;
  for (int i = 0; i < kBlockNumbers; ++i) {
    any |= words[i];
    zeros += words[i] == 0 ? 1 : 0;
  }
  if (any == 0) {
    writer.put_head(0, kAllZero);
    return true;
  }
  int count = kBlockNumbers;
  uint32_t nonzero = ~uint32_t{0};
  uint32_t stored[kBlockNumbers];
  if (zeros > kMostZeros) {
    count = 0, nonzero = 0;
    for (int i = 0; i < kBlockNumbers; ++i) {
      if (words[i] == 0) continue;
      stored[count++] = words[i];
      nonzero |= uint32_t{1} << i;
    }
    // Copies change neither exponents nor lower bits.
    std::fill(stored + count, stored + kBlockNumbers, stored[0]);
    words = stored;
  }
  uint8_t exponents[kBlockNumbers];
  for (int i = 0; i < kBlockNumbers; ++i) exponents[i] = exponent_of(words[i]);
  uint8_t largest = 0, smallest = 0xff, least = 0xff;
  for (int i = 0; i < kBlockNumbers; ++i) {
    largest = std::max(largest, exponents[i]);
    least = std::min(least, exponents[i]);
    smallest = std::min<uint8_t>(smallest, exponents[i] == 0 ? 0xff : exponents[i]);
  }
  const bool has_exponent_zero = least == 0 && largest != 0;
  const int planes = planes_for(largest, smallest, has_exponent_zero);
  if (planes > kMostPlanes) return false;
  const int lower_form = lower_form_for((any & 0xffff) == 0 ? 0 : 16 - std::countr_zero(any));
  uint8_t form = static_cast<uint8_t>(planes | lower_form << kLowerShift);
  if (has_exponent_zero) form |= kHasExponentZero;
  if (zeros > kMostZeros) {
    form |= kHasBitmap;
    writer.put_bitmap(nonzero);
  }
  writer.put_head(largest, form);
  // Copies of a fixed length take no calls.
  if (count == kBlockNumbers) {
    put_body(words, exponents, largest, form, kBlockNumbers, writer.body);
  } else {
    put_body(words, exponents, largest, form, count, writer.body);
  }
  return true;
}

// Writes the words that are stored, one after the other, and something behind them.
DDP_HOOKS_ALWAYS_INLINE void decode_stored(const char*& from, uint8_t largest, uint8_t form, int count,
                                           uint32_t* words) {
  uint8_t upper[kBlockNumbers], distances[kBlockNumbers], bytes[kBlockNumbers];
  load_row(from, count).unpack(upper);
  Row row;
  for (int plane = 0; plane < planes_of(form); ++plane) row.set_plane(plane, load_plane(from, count));
  row.unpack(distances);
  // More than any distance where it stands for nothing.
  const int of_zero = (form & kHasExponentZero) != 0 ? (1 << planes_of(form)) - 1 : 0x80;
  for (int i = 0; i < kBlockNumbers; ++i) {
    const uint8_t exponent = distances[i] == of_zero ? 0 : static_cast<uint8_t>(largest - distances[i]);
    words[i] = join_word(exponent, upper[i], 0);
  }
  const int lower = lower_bits(lower_form_of(form));
  for (int bit = 0; bit < lower; bit += 8) {
    row = {};
    if (lower - bit >= 8) {
      row = load_row(from, count);
    } else {
      for (int i = 0; i < lower - bit; ++i) row.set_plane(7 - i, load_plane(from, count));
    }
    row.unpack(bytes);
    for (int i = 0; i < kBlockNumbers; ++i) words[i] |= uint32_t{bytes[i]} << (8 - bit);
  }
}

void decode_block(SectionReader& reader, uint8_t largest, uint8_t form, uint32_t* words) {
  if (!has_bitmap(form)) return decode_stored(reader.body, largest, form, kBlockNumbers, words);
  const uint32_t nonzero = reader.take_bitmap();
  uint32_t stored[kBlockNumbers];
  decode_stored(reader.body, largest, form, std::popcount(nonzero), stored);
  for (int i = 0, next = 0; i < kBlockNumbers; ++i) words[i] = (nonzero >> i & 1) != 0 ? stored[next++] : 0;
}

// What follows are the types of numbers. to_words() returns false if the block has to be stored as it is.

struct Float32Numbers {
  using Number = float;
  static bool to_words(const char* block, uint32_t* words) {
    std::memcpy(words, block, 4 * kBlockNumbers);
    return true;
  }
  static void from_words(const uint32_t* words, char* block) { std::memcpy(block, words, 4 * kBlockNumbers); }
};

struct Float64Numbers {
  using Number = double;
  static bool to_words(const char* block, uint32_t* words) {
    uint64_t lost = 0;
    for (int i = 0; i < kBlockNumbers; ++i) {
      const auto bits = load_element<uint64_t>(block, i);
      lost |= lost_of_float64(bits);
      words[i] = word_of_float64(bits);
    }
    return lost == 0;
  }
  static void from_words(const uint32_t* words, char* block) {
    for (int i = 0; i < kBlockNumbers; ++i) store_element(block, i, float64_of_word(words[i]));
  }
};

template <typename T, uint32_t (*kWordOf)(uint16_t), uint16_t (*kOfWord)(uint32_t)>
struct ShortNumbers {
  using Number = T;
  static bool to_words(const char* block, uint32_t* words) {
    for (int i = 0; i < kBlockNumbers; ++i) words[i] = kWordOf(load_element<uint16_t>(block, i));
    return true;
  }
  static void from_words(const uint32_t* words, char* block) {
    for (int i = 0; i < kBlockNumbers; ++i) store_element(block, i, kOfWord(words[i]));
  }
};

template <typename Numbers>
char* encode_section(const char* values, int blocks, char* to) {
  constexpr int kBytes = kBlockNumbers * static_cast<int>(sizeof(typename Numbers::Number));
  SectionWriter writer(to, blocks);
  for (int i = 0; i < blocks; ++i, values += kBytes) {
    uint32_t words[kBlockNumbers];
    if (!Numbers::to_words(values, words) || !encode_block(words, writer)) writer.put_raw(values, kBytes);
  }
  return writer.finish();
}

template <typename Numbers>
void decode_section(const Section& section, int blocks, char* to, bool adds) {
  using Number = typename Numbers::Number;
  constexpr int kBytes = kBlockNumbers * static_cast<int>(sizeof(Number));
  SectionReader reader(section, blocks);
  for (int i = 0; i < blocks; ++i, to += kBytes) {
    const uint8_t largest = reader.take_largest();
    const uint8_t form = reader.take_form();
    if (form == kAllZero) {
      put_zeros<Number>(to, adds);
    } else if (form == kRaw) {
      put_block<Number>(to, reader.body, adds);
      reader.body += kBytes;
    } else {
      uint32_t words[kBlockNumbers];
      decode_block(reader, largest, form, words);
      char block[kBytes];
      Numbers::from_words(words, block);
      put_block<Number>(to, block, adds);
    }
  }
}

template <typename Numbers>
constexpr SectionCoder kPortable = {encode_section<Numbers>, decode_section<Numbers>};

}  // namespace

SectionCoder section_coder(ElementType type) {
#if DDP_HOOKS_HAS_AVX2_KERNELS
  if (uses_avx2() && type != ElementType::kFloat64) return section_coder_with_avx2(type);
#endif
  switch (type) {
    case ElementType::kFloat32:
      return kPortable<Float32Numbers>;
    case ElementType::kFloat64:
      return kPortable<Float64Numbers>;
    case ElementType::kFloat16:
      return kPortable<ShortNumbers<c10::Half, word_of_float16, float16_of_word>>;
    case ElementType::kBFloat16:
      break;
  }
  return kPortable<ShortNumbers<c10::BFloat16, word_of_bfloat16, bfloat16_of_word>>;
}

}  // namespace ddp_hooks::cpu
