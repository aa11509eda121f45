#include "kernels/cpu/unit_scan.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

namespace ddp_hooks::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Large enough that the test between blocks costs nothing.
constexpr int64_t kBlockBytes = 1024;
// How many units ahead memory is asked for. Units that begin with a non-zero are left at once, and far from one another
// no prefetcher foresees the next.
constexpr int64_t kUnitsAhead = 16;
// The same within a unit, and from one to the next: processors foresee less than they could have under way.
constexpr int64_t kBytesAhead = 4096;

// Elements are taken eight bytes at a time, from a multiple of their size, so that each word has the signs at the same
// bits.
uint64_t sign_bits(ElementType type) {
  switch (element_bytes(type)) {
    case 8:
      return 0x8000000000000000u;
    case 4:
      return 0x8000000080000000u;
    default:
      return 0x8000800080008000u;
  }
}

template <typename Word>
uint64_t load(const char* from) {
  Word word;
  std::memcpy(&word, from, sizeof(Word));
  return word;
}

// Sixteen bytes in a register, as every x86-64 and AArch64 has them; a loop over words was not made into these.
using Vector [[gnu::vector_size(16)]] = uint64_t;

// The OR of stretches of kLineBytes, in as many vectors as are under way at once.
struct Line {
  Vector a = {}, b = {}, c = {}, d = {};

  void merge(const char* from) {
    Vector line[4];
    static_assert(sizeof(line) == kLineBytes);
    std::memcpy(line, from, kLineBytes);
    a |= line[0];
    b |= line[1];
    c |= line[2];
    d |= line[3];
  }

  uint64_t bits() const {
    const Vector all = (a | b) | (c | d);
    return all[0] | all[1];
  }
};

// Bytes that do not fill a word or line at the end are read once more with what lies before them: nothing is lost or
// added by that, and nothing is read outside the unit.

// The OR of less than a line.
uint64_t bits_of_few(const char* unit, int64_t bytes) {
  if (bytes >= 8) {
    uint64_t bits = load<uint64_t>(unit + bytes - 8);
    for (int64_t at = 0; at + 8 < bytes; at += 8) bits |= load<uint64_t>(unit + at);
    return bits;
  }
  // One, two or three elements of two bytes, or one of four.
  if (bytes >= 4) return load<uint32_t>(unit) | load<uint32_t>(unit + bytes - 4);
  return load<uint16_t>(unit);
}

// The OR of a line at the beginning of a unit.
uint64_t bits_of_line(const char* unit) {
  Line line;
  line.merge(unit);
  return line.bits();
}

// The OR of a stretch of a unit that has a line at least. What lies up to `expected_end` is likely to be read as well.
uint64_t bits_of_block(const char* unit, int64_t begin, int64_t end, int64_t expected_end) {
  Line line;
  int64_t at = begin;
  const int64_t foreseen = std::min(end, expected_end - kBytesAhead);
  for (; at + kLineBytes <= foreseen; at += kLineBytes) {
    __builtin_prefetch(unit + at + kBytesAhead);
    line.merge(unit + at);
  }
  for (; at + kLineBytes <= end; at += kLineBytes) line.merge(unit + at);
  if (at < end) line.merge(unit + end - kLineBytes);
  return line.bits();
}

// The OR of a unit, or if it holds a non-zero, of enough of it to tell.
uint64_t bits_of_unit(const char* unit, int64_t bytes, int64_t expected_end, uint64_t magnitude) {
  if (bytes < kLineBytes) return bits_of_few(unit, bytes);
  uint64_t bits = bits_of_line(unit);
  for (int64_t begin = kLineBytes; begin < bytes && (bits & magnitude) == 0; begin += kBlockBytes) {
    bits |= bits_of_block(unit, begin, std::min(bytes, begin + kBlockBytes), expected_end);
  }
  return bits;
}

// `visit(units, look_at)` calls `look_at` with the units that are to be read, in ascending order: all of them, unless
// they `are_chosen`.
template <typename Visit>
UnitScanResult scan(const void* data, int64_t numel, int64_t unit_length, ElementType type, bool are_chosen,
                    const Visit& visit) {
  UnitScanResult result;
  if (numel == 0) return result;
  const uint64_t magnitude = ~sign_bits(type);
  const int64_t total_bytes = numel * element_bytes(type);
  // A unit may be said to be longer than everything, in as many bytes as no number counts.
  const int64_t unit_bytes = std::min(unit_length, numel) * element_bytes(type);
  const int64_t units = (total_bytes - 1) / unit_bytes + 1;
  result.nonzero.resize(static_cast<size_t>((units + 63) / 64));
  visit(units, [&](int64_t index) {
    const char* unit = static_cast<const char*>(data) + index * unit_bytes;
    __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(unit) + kUnitsAhead * unit_bytes));
    const int64_t left = total_bytes - index * unit_bytes;
    const int64_t bytes = std::min(unit_bytes, left);
    const uint64_t bits = bits_of_unit(unit, bytes, are_chosen ? bytes : left, magnitude);
    if (bits == 0) return;
    if ((bits & magnitude) == 0) {
      result.negative_zeros.push_back(static_cast<uint32_t>(index));
    } else {
      result.nonzero[static_cast<size_t>(index / 64)] |= uint64_t{1} << (index % 64);
    }
  });
  return result;
}

}  // namespace

UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type) {
  return scan(data, numel, unit_length, type, false, [](int64_t units, const auto& look_at) {
    for (int64_t index = 0; index < units; ++index) look_at(index);
  });
}

UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type,
                         const std::vector<uint64_t>& candidates) {
  return scan(data, numel, unit_length, type, true, [&](int64_t units, const auto& look_at) {
    for (size_t word = 0; word < candidates.size(); ++word) {
      for (uint64_t left = candidates[word]; left != 0; left &= left - 1) {
        const int64_t index = static_cast<int64_t>(word) * 64 + std::countr_zero(left);
        if (index < units) look_at(index);
      }
    }
  });
}

bool holds_nonzero(const void* unit, int64_t numel, ElementType type) {
  const int64_t bytes = numel * element_bytes(type);
  const uint64_t magnitude = ~sign_bits(type);
  return numel > 0 && (bits_of_unit(static_cast<const char*>(unit), bytes, bytes, magnitude) & magnitude) != 0;
}

}  // namespace ddp_hooks::cpu
