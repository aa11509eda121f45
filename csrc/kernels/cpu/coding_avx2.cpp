#include "kernels/cpu/coding_avx2.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/coded_block.h"
#include "kernels/cpu/coding_sections.h"
#include "kernels/cpu/instructions.h"

#if DDP_HOOKS_HAS_AVX2_KERNELS

#include <immintrin.h>

// BMI2 takes bits out of a word and puts them into one, where a bitmap says.
#define TARGET_AVX2 gnu::target("avx2,bmi2,f16c")
#define INLINE_AVX2 [[TARGET_AVX2, gnu::always_inline]] inline
#define INLINE_AVX2_LAMBDA __attribute__((target("avx2,bmi2,f16c"), always_inline))

namespace ddp_hooks::cpu {
namespace {

using namespace coding;

// The words of a block, in order.
struct Words {
  __m256i of[4];
};

// The bytes of one kind of a block, in order.
struct Rows {
  __m256i exponents;
  __m256i upper;
};
struct LowerRows {
  __m256i upper, lower;
};

// For each bitmap of 8 bits, as bytes: the place of the first, second ... set bit; and of each place how many bits are
// set below it, or what shuffles to 0 if it is not set itself.
struct Places {
  uint64_t stored[256];
  uint64_t rank[256];
};

constexpr Places kPlaces = [] {
  Places places = {};
  for (int bitmap = 0; bitmap < 256; ++bitmap) {
    int count = 0;
    for (int i = 0; i < 8; ++i) {
      const bool is_set = (bitmap >> i & 1) != 0;
      places.rank[bitmap] |= static_cast<uint64_t>(is_set ? count : 0x80) << 8 * i;
      if (is_set) places.stored[bitmap] |= static_cast<uint64_t>(i) << 8 * count++;
    }
  }
  return places;
}();

INLINE_AVX2 __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
INLINE_AVX2 void store(void* to, __m256i bytes) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), bytes);
}
INLINE_AVX2 __m256i byte(int value) {
  return _mm256_set1_epi8(static_cast<char>(value));
}
INLINE_AVX2 uint32_t bits_of(__m256i bytes) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
}
// Which bytes are such that `bits` has theirs set.
INLINE_AVX2 __m256i bytes_of_bits(uint32_t bits) {
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i here = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), spread);
  return _mm256_cmpeq_epi8(_mm256_and_si256(here, bit), bit);
}

// Which values of a block are stored. `kAll` says that all are, whatever else is said.
template <bool kAll>
struct Stored {
  uint32_t nonzero;
  int count;
  int begin[4];  // of each eight, which stored value is the first
  __m256i places;

  INLINE_AVX2 Stored(uint32_t bits, const uint64_t* table) : nonzero(bits), count(kBlockNumbers) {
    if constexpr (!kAll) {
      count = std::popcount(bits);
      begin[0] = 0;
      begin[1] = std::popcount(bits & 0xff);
      begin[2] = std::popcount(bits & 0xffff);
      begin[3] = std::popcount(bits & 0xffffff);
      const auto of = [&](int i) { return static_cast<int64_t>(table[bits >> 8 * i & 0xff]); };
      // The upper eight bytes of sixteen have higher places.
      const __m256i upper = _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808);
      places = _mm256_or_si256(_mm256_setr_epi64x(of(0), of(1), of(2), of(3)), upper);
    }
  }

  INLINE_AVX2 void put_row(char*& to, __m256i row) const {
    if constexpr (kAll) {
      store(to, row);
    } else {
      // Each eight overwrites what is too much of those before.
      const __m256i packed = _mm256_shuffle_epi8(row, places);
      const __m128i low = _mm256_castsi256_si128(packed), high = _mm256_extracti128_si256(packed, 1);
      store_element(to, 0, _mm_cvtsi128_si64(low));
      store_element(to + begin[1], 0, _mm_extract_epi64(low, 1));
      store_element(to + begin[2], 0, _mm_cvtsi128_si64(high));
      store_element(to + begin[3], 0, _mm_extract_epi64(high, 1));
    }
    to += count;
  }
  // Reads at least 8 bytes behind the last eight's first.
  INLINE_AVX2 __m256i take_row(const char*& from) const {
    const char* const at = from;
    from += count;
    if constexpr (kAll) return load(at);
    const auto eight = [&](int i) { return load_element<int64_t>(at + begin[i], 0); };
    return _mm256_shuffle_epi8(_mm256_setr_epi64x(eight(0), eight(1), eight(2), eight(3)), places);
  }

  // A plane has the highest bit of each byte.
  INLINE_AVX2 void put_plane(char* to, int index, __m256i row) const {
    const uint32_t bits = bits_of(row);
    store_element(to + index * plane_bytes(count), 0, kAll ? bits : _pext_u32(bits, nonzero));
  }
  INLINE_AVX2 __m256i load_plane(const char* from, int index) const {
    const auto bits = load_element<uint32_t>(from + index * plane_bytes(count), 0);
    return bytes_of_bits(kAll ? bits : _pdep_u32(bits, nonzero));
  }
};

// The bytes of each kind of 16 words.
struct Quads {
  __m256i of[4];

  INLINE_AVX2 explicit Quads(const Words& words) {
    const __m256i together = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                              0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int i = 0; i < 4; ++i) of[i] = _mm256_shuffle_epi8(words.of[i], together);
  }
};

INLINE_AVX2 __m256i in_order(__m256i row) {
  return _mm256_permutevar8x32_epi32(row, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE_AVX2 Rows rows_of(const Quads& quads) {
  const __m256i ab = _mm256_unpackhi_epi32(quads.of[0], quads.of[1]);
  const __m256i cd = _mm256_unpackhi_epi32(quads.of[2], quads.of[3]);
  const __m256i third = in_order(_mm256_unpacklo_epi64(ab, cd));
  const __m256i fourth = in_order(_mm256_unpackhi_epi64(ab, cd));
  const __m256i sign = byte(0x80);
  // The lowest bit of the exponent is the highest of the third byte.
  return {_mm256_sub_epi8(_mm256_add_epi8(fourth, fourth), _mm256_cmpgt_epi8(_mm256_setzero_si256(), third)),
          _mm256_or_si256(_mm256_and_si256(sign, fourth), _mm256_andnot_si256(sign, third))};
}

INLINE_AVX2 LowerRows lower_rows_of(const Quads& quads) {
  const __m256i ab = _mm256_unpacklo_epi32(quads.of[0], quads.of[1]);
  const __m256i cd = _mm256_unpacklo_epi32(quads.of[2], quads.of[3]);
  return {in_order(_mm256_unpackhi_epi64(ab, cd)), in_order(_mm256_unpacklo_epi64(ab, cd))};
}

INLINE_AVX2 Words words_of(const Rows& rows, const LowerRows& lower) {
  const __m256i sign = byte(0x80);
  const __m256i third = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(rows.exponents, 7), sign),
                                        _mm256_andnot_si256(sign, rows.upper));
  const __m256i fourth = _mm256_or_si256(_mm256_andnot_si256(sign, _mm256_srli_epi16(rows.exponents, 1)),
                                         _mm256_and_si256(sign, rows.upper));
  const __m256i low = _mm256_unpacklo_epi8(lower.lower, lower.upper);
  const __m256i low_too = _mm256_unpackhi_epi8(lower.lower, lower.upper);
  const __m256i high = _mm256_unpacklo_epi8(third, fourth), high_too = _mm256_unpackhi_epi8(third, fourth);
  // Numbers 0 to 3 and 16 to 19, and so on.
  const __m256i a = _mm256_unpacklo_epi16(low, high), b = _mm256_unpackhi_epi16(low, high);
  const __m256i c = _mm256_unpacklo_epi16(low_too, high_too), d = _mm256_unpackhi_epi16(low_too, high_too);
  return {{_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(c, d, 0x20),
           _mm256_permute2x128_si256(a, b, 0x31), _mm256_permute2x128_si256(c, d, 0x31)}};
}

INLINE_AVX2 int smallest_byte(__m256i bytes) {
  __m128i least = _mm_min_epu8(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  least = _mm_min_epu8(least, _mm_srli_epi16(least, 8));
  return _mm_cvtsi128_si32(_mm_minpos_epu16(least)) & 0xff;
}

INLINE_AVX2 uint32_t or_of(__m256i words) {
  __m128i any = _mm_or_si128(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  any = _mm_or_si128(any, _mm_shuffle_epi32(any, 0x4e));
  any = _mm_or_si128(any, _mm_shuffle_epi32(any, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(any));
}

INLINE_AVX2 __m256i any_of(const Words& words) {
  return _mm256_or_si256(_mm256_or_si256(words.of[0], words.of[1]), _mm256_or_si256(words.of[2], words.of[3]));
}

// The first form that holds so many lower bits.
constexpr std::array<uint8_t, 17> kLowerForm = [] {
  std::array<uint8_t, 17> forms = {};
  for (int bits = 0; bits <= 16; ++bits) forms[static_cast<size_t>(bits)] = static_cast<uint8_t>(lower_form_for(bits));
  return forms;
}();

// Planes are stored three or four at a time, because a branch for each would be mispredicted now and then. What is too
// many is overwritten by what follows, within the room of the block.

template <bool kAll>
INLINE_AVX2 char* put_lower(char* to, const LowerRows& rows, int lower, const Stored<kAll>& stored) {
  if (lower >= 8) stored.put_row(to, rows.upper);
  if (lower == 16) {
    stored.put_row(to, rows.lower);
    return to;
  }
  const __m256i row = lower >= 8 ? rows.lower : rows.upper;
  stored.put_plane(to, 0, row);
  stored.put_plane(to, 1, _mm256_slli_epi16(row, 1));
  stored.put_plane(to, 2, _mm256_slli_epi16(row, 2));
  if (lower % 8 > 3) {
    stored.put_plane(to, 3, _mm256_slli_epi16(row, 3));
    stored.put_plane(to, 4, _mm256_slli_epi16(row, 4));
    stored.put_plane(to, 5, _mm256_slli_epi16(row, 5));
  }
  return to + lower % 8 * plane_bytes(stored.count);
}

// Returns false if the block has to be stored as it is, and has put nothing then.
template <bool kAll, bool kMayHaveZero>
INLINE_AVX2 bool encode_stored(const Words& words, const Quads& quads, const Rows& rows, const Stored<kAll>& stored,
                               SectionWriter& writer) {
  const __m256i zero = _mm256_cmpeq_epi8(rows.exponents, _mm256_setzero_si256());
  const int largest = 0xff - smallest_byte(_mm256_xor_si256(rows.exponents, byte(0xff)));
  const int smallest = smallest_byte(kMayHaveZero ? _mm256_or_si256(rows.exponents, zero) : rows.exponents);
  const bool has_zero = kMayHaveZero && (bits_of(zero) & stored.nonzero) != 0 && largest != 0;
  const int codes = largest == 0 ? 1 : largest - smallest + 1 + (has_zero ? 1 : 0);
  const int planes = std::bit_width(static_cast<unsigned>(codes - 1));
  if (planes > kMostPlanes) return false;

  char* to = writer.body;
  stored.put_row(to, rows.upper);
  __m256i distances = _mm256_sub_epi8(byte(largest), rows.exponents);
  if (kMayHaveZero) distances = _mm256_or_si256(distances, zero);  // all bits
  stored.put_plane(to, 0, _mm256_slli_epi16(distances, 7));
  stored.put_plane(to, 1, _mm256_slli_epi16(distances, 6));
  stored.put_plane(to, 2, _mm256_slli_epi16(distances, 5));
  stored.put_plane(to, 3, _mm256_slli_epi16(distances, 4));
  if (planes > 4) {
    stored.put_plane(to, 4, _mm256_slli_epi16(distances, 3));
    stored.put_plane(to, 5, _mm256_slli_epi16(distances, 2));
    stored.put_plane(to, 6, _mm256_slli_epi16(distances, 1));
  }
  to += planes * plane_bytes(stored.count);
  auto form = static_cast<uint8_t>(planes | (has_zero ? kHasExponentZero : 0) | (kAll ? 0 : kHasBitmap));
  const __m256i any = any_of(words);
  if (_mm256_testz_si256(any, _mm256_set1_epi32(0xffff)) == 0) {
    const bool is_full = _mm256_testz_si256(any, _mm256_set1_epi32(0x3f)) == 0;
    const int lower_form =
        is_full ? kLowerForms - 1 : kLowerForm[static_cast<size_t>(16 - std::countr_zero(or_of(any)))];
    to = put_lower(to, lower_rows_of(quads), lower_bits(lower_form), stored);
    form = static_cast<uint8_t>(form | lower_form << kLowerShift);
  }
  writer.put_head(static_cast<uint8_t>(largest), form);
  if constexpr (!kAll) writer.put_bitmap(stored.nonzero);
  writer.body = to;
  return true;
}

INLINE_AVX2 uint32_t nonzero_of(const Words& words) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i a = _mm256_packs_epi32(_mm256_cmpeq_epi32(words.of[0], zero), _mm256_cmpeq_epi32(words.of[1], zero));
  const __m256i b = _mm256_packs_epi32(_mm256_cmpeq_epi32(words.of[2], zero), _mm256_cmpeq_epi32(words.of[3], zero));
  return ~bits_of(in_order(_mm256_packs_epi16(a, b)));
}

// Of a block with an exponent of 0, but not of zeros alone.
[[TARGET_AVX2, gnu::noinline]] bool encode_with_zeros(const Words& words, SectionWriter& writer) {
  const Quads quads(words);
  const Rows rows = rows_of(quads);
  const uint32_t nonzero = nonzero_of(words);
  if (std::popcount(nonzero) >= kBlockNumbers - kMostZeros) {
    return encode_stored<true, true>(words, quads, rows, Stored<true>(~uint32_t{0}, nullptr), writer);
  }
  return encode_stored<false, true>(words, quads, rows, Stored<false>(nonzero, kPlaces.stored), writer);
}

INLINE_AVX2 bool encode_block(const Words& words, SectionWriter& writer) {
  const __m256i any = any_of(words);
  if (_mm256_testz_si256(any, any) != 0) {
    writer.put_head(0, kAllZero);
    return true;
  }
  const Quads quads(words);
  const Rows rows = rows_of(quads);
  const __m256i zero = _mm256_cmpeq_epi8(rows.exponents, _mm256_setzero_si256());
  if (_mm256_testz_si256(zero, zero) == 0) return encode_with_zeros(words, writer);
  return encode_stored<true, false>(words, quads, rows, Stored<true>(~uint32_t{0}, nullptr), writer);
}

// So many bytes from the beginning of a body on may be read.
constexpr int kReadAhead = 192;

template <bool kAll>
INLINE_AVX2 Words decode_stored(const char*& from, uint8_t largest, uint8_t form, const Stored<kAll>& stored) {
  Rows rows;
  rows.upper = stored.take_row(from);
  // Planes that there are not have no bit.
  alignas(8) static constexpr uint8_t kBits[8][8] = {
      {0, 0, 0, 0, 0, 0, 0, 0}, {1, 0, 0, 0, 0, 0, 0, 0},  {1, 2, 0, 0, 0, 0, 0, 0},   {1, 2, 4, 0, 0, 0, 0, 0},
      {1, 2, 4, 8, 0, 0, 0, 0}, {1, 2, 4, 8, 16, 0, 0, 0}, {1, 2, 4, 8, 16, 32, 0, 0}, {1, 2, 4, 8, 16, 32, 64, 0}};
  const int planes = planes_of(form);
  const auto plane = [&](int i) INLINE_AVX2_LAMBDA {
    return _mm256_and_si256(stored.load_plane(from, i), byte(kBits[planes][i]));
  };
  __m256i distances = _mm256_or_si256(_mm256_or_si256(plane(0), plane(1)), _mm256_or_si256(plane(2), plane(3)));
  if (planes > 4) {
    distances = _mm256_or_si256(distances, _mm256_or_si256(plane(4), _mm256_or_si256(plane(5), plane(6))));
  }
  from += planes * plane_bytes(stored.count);
  // No distance has the highest bit set.
  const int of_zero = (form & kHasExponentZero) != 0 ? (1 << planes) - 1 : 0x80;
  rows.exponents =
      _mm256_andnot_si256(_mm256_cmpeq_epi8(distances, byte(of_zero)), _mm256_sub_epi8(byte(largest), distances));
  if constexpr (!kAll) rows.exponents = _mm256_and_si256(rows.exponents, bytes_of_bits(stored.nonzero));
  const int lower = lower_bits(lower_form_of(form));
  LowerRows lower_rows = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  if (lower >= 8) lower_rows.upper = stored.take_row(from);
  if (lower == 16) {
    lower_rows.lower = stored.take_row(from);
  } else if (lower != 0) {
    const auto lower_plane = [&](int i) INLINE_AVX2_LAMBDA {
      return _mm256_and_si256(stored.load_plane(from, i), byte(i < lower % 8 ? 0x80 >> i : 0));
    };
    __m256i row = _mm256_or_si256(lower_plane(0), _mm256_or_si256(lower_plane(1), lower_plane(2)));
    if (lower % 8 > 3) {
      row = _mm256_or_si256(row, _mm256_or_si256(lower_plane(3), _mm256_or_si256(lower_plane(4), lower_plane(5))));
    }
    from += lower % 8 * plane_bytes(stored.count);
    (lower >= 8 ? lower_rows.lower : lower_rows.upper) = row;
  }
  return words_of(rows, lower_rows);
}

[[TARGET_AVX2, gnu::noinline]] Words decode_with_bitmap(const char*& from, uint8_t largest, uint8_t form,
                                                        uint32_t nonzero) {
  return decode_stored(from, largest, form, Stored<false>(nonzero, kPlaces.rank));
}

INLINE_AVX2 Words decode_from(const char*& from, uint8_t largest, uint8_t form, uint32_t nonzero) {
  return has_bitmap(form) ? decode_with_bitmap(from, largest, form, nonzero)
                          : decode_stored(from, largest, form, Stored<true>(nonzero, nullptr));
}

// Near the end of a message, a block is copied to where more can be read.
[[TARGET_AVX2, gnu::noinline]] Words decode_last(SectionReader& reader, uint8_t largest, uint8_t form,
                                                 uint32_t nonzero) {
  char last[2 * kReadAhead] = {};
  std::memcpy(last, reader.body, static_cast<size_t>(reader.end_of_message - reader.body));
  const char* from = last;
  const Words words = decode_from(from, largest, form, nonzero);
  reader.body += from - last;
  return words;
}

INLINE_AVX2 Words decode_block(SectionReader& reader, uint8_t largest, uint8_t form) {
  const uint32_t nonzero = has_bitmap(form) ? reader.take_bitmap() : ~uint32_t{0};
  if (reader.end_of_message - reader.body < kReadAhead) return decode_last(reader, largest, form, nonzero);
  return decode_from(reader.body, largest, form, nonzero);
}

// What follows are the types of numbers.

// What add_terms makes of eight float32.
INLINE_AVX2 __m256 sum_of(__m256 a, __m256 b) {
  const __m256 sum = _mm256_add_ps(a, b);
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_blendv_ps(sum, nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
}

// Eight numbers of 16 bits, each in 32.
INLINE_AVX2 __m256i load_short(const char* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
INLINE_AVX2 void store_short(char* to, __m256i low, __m256i high) {
  store(to, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
}

struct Float32Numbers {
  using Number = float;
  INLINE_AVX2 static Words to_words(const char* block) {
    return {{load(block), load(block + 32), load(block + 64), load(block + 96)}};
  }
  INLINE_AVX2 static void put(const Words& words, char* to, bool adds) {
    for (int i = 0; i < 4; ++i, to += 32) {
      const __m256 numbers = _mm256_castsi256_ps(words.of[i]);
      store(to, adds ? _mm256_castps_si256(sum_of(_mm256_castsi256_ps(load(to)), numbers)) : words.of[i]);
    }
  }
};

struct BFloat16Numbers {
  using Number = c10::BFloat16;
  INLINE_AVX2 static Words to_words(const char* block) {
    Words words;
    for (int i = 0; i < 4; ++i) words.of[i] = _mm256_slli_epi32(load_short(block + 16 * i), 16);
    return words;
  }
  // The sum in float32, rounded to the nearest, of two to the even one.
  INLINE_AVX2 static __m256i rounded_sum(__m256i a, __m256i b) {
    const __m256i sum = _mm256_castps_si256(sum_of(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(sum, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
  INLINE_AVX2 static void put(const Words& words, char* to, bool adds) {
    Words numbers = words;
    const Words before = adds ? to_words(to) : words;
    for (int i = 0; i < 4; ++i) {
      if (adds) numbers.of[i] = rounded_sum(before.of[i], words.of[i]);
      numbers.of[i] = _mm256_srli_epi32(numbers.of[i], 16);
    }
    store_short(to, numbers.of[0], numbers.of[1]);
    store_short(to + 32, numbers.of[2], numbers.of[3]);
  }
};

struct Float16Numbers {
  using Number = c10::Half;
  INLINE_AVX2 static Words to_words(const char* block) {
    Words words;
    for (int i = 0; i < 4; ++i) {
      const __m256i bits = load_short(block + 16 * i);
      words.of[i] = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16),
                                    _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13));
    }
    return words;
  }
  INLINE_AVX2 static void put(const Words& words, char* to, bool adds) {
    __m256i bits[4];
    for (int i = 0; i < 4; ++i) {
      const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(words.of[i], 16), _mm256_set1_epi32(0x8000));
      bits[i] = _mm256_or_si256(sign, _mm256_and_si256(_mm256_srli_epi32(words.of[i], 13), _mm256_set1_epi32(0x7fff)));
    }
    char numbers[2 * kBlockNumbers];
    char* const at = adds ? numbers : to;
    store_short(at, bits[0], bits[1]);
    store_short(at + 32, bits[2], bits[3]);
    for (int i = 0; adds && i < 4; ++i) {
      const auto eight = [&](const char* from) INLINE_AVX2_LAMBDA {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i)));
      };
      const __m128i sum = _mm256_cvtps_ph(sum_of(eight(to), eight(numbers)), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * i), sum);
    }
  }
};

template <typename Numbers>
[[TARGET_AVX2]] char* encode_section(const char* values, int blocks, char* to) {
  constexpr int kBytes = kBlockNumbers * static_cast<int>(sizeof(typename Numbers::Number));
  SectionWriter writer(to, blocks);
  for (int i = 0; i < blocks; ++i, values += kBytes) {
    if (!encode_block(Numbers::to_words(values), writer)) writer.put_raw(values, kBytes);
  }
  return writer.finish();
}

template <typename Numbers>
[[TARGET_AVX2]] void decode_section(const Section& section, int blocks, char* to, bool adds) {
  using Number = typename Numbers::Number;
  constexpr int kBytes = kBlockNumbers * static_cast<int>(sizeof(Number));
  SectionReader reader(section, blocks);
  for (int i = 0; i < blocks; ++i, to += kBytes) {
    const uint8_t largest = reader.take_largest();
    const uint8_t form = reader.take_form();
    if (!is_special(form)) {
      Numbers::put(decode_block(reader, largest, form), to, adds);
    } else if (form == kAllZero) {
      const __m256i zero = _mm256_setzero_si256();
      Numbers::put({{zero, zero, zero, zero}}, to, adds);
    } else {
      put_block<Number>(to, reader.body, adds);
      reader.body += kBytes;
    }
  }
}

template <typename Numbers>
constexpr SectionCoder kCoder = {encode_section<Numbers>, decode_section<Numbers>};

}  // namespace

SectionCoder section_coder_with_avx2(ElementType type) {
  switch (type) {
    case ElementType::kFloat16:
      return kCoder<Float16Numbers>;
    case ElementType::kBFloat16:
      return kCoder<BFloat16Numbers>;
    case ElementType::kFloat32:
    case ElementType::kFloat64:  // not coded here
      break;
  }
  return kCoder<Float32Numbers>;
}

}  // namespace ddp_hooks::cpu

#endif
