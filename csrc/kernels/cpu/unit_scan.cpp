#include "kernels/cpu/unit_scan.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/narrowing.h"
#include "kernels/narrow_forms.h"

namespace ddp_hooks::cpu {
namespace {

constexpr int64_t kLineBytes = 64;
// Large enough that the test between blocks costs nothing.
constexpr int64_t kBlockBytes = 1024;
// How many units ahead memory is asked for. Units that begin with a non-zero are left at once, and far from one another
// no prefetcher foresees the next.
constexpr int64_t kUnitsAhead = 16;

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

// The OR of a stretch of a unit that has a line at least.
uint64_t bits_of_block(const char* unit, int64_t begin, int64_t end) {
  Line line;
  int64_t at = begin;
  for (; at + kLineBytes <= end; at += kLineBytes) line.merge(unit + at);
  if (at < end) line.merge(unit + end - kLineBytes);
  return line.bits();
}

// The OR of a unit, or if it holds a non-zero, of enough of it to tell.
uint64_t bits_of_unit(const char* unit, int64_t bytes, uint64_t magnitude) {
  if (bytes < kLineBytes) return bits_of_few(unit, bytes);
  uint64_t bits = bits_of_block(unit, 0, kLineBytes);
  for (int64_t begin = kLineBytes; begin < bytes && (bits & magnitude) == 0; begin += kBlockBytes) {
    bits |= bits_of_block(unit, begin, std::min(bytes, begin + kBlockBytes));
  }
  return bits;
}

// What is looked for in units of some type.
struct Question {
  int64_t element_bytes;
  uint64_t magnitude;
  size_t forms = 0;  // narrow ones, if widths are asked for
  // Bits that are zero in all numbers that the form holds.
  std::array<uint64_t, 2> never_set{};
  // Tells where those bits alone do not.
  std::array<LostBits, 2> lost{};
};

Question question_of(ElementType type, bool widths) {
  Question question{element_bytes(type), ~sign_bits(type)};
  if (!widths) return question;
  const auto in_eight_bytes = [](uint32_t bits) { return uint64_t{bits} << 32 | bits; };
  if (type == ElementType::kFloat32) {
    question.forms = 2;
    question.never_set = {in_eight_bytes(BFloat16Form::kNeverSet), in_eight_bytes(Float16Form::kNeverSet)};
    question.lost = {nullptr, lost_bits(Width::kFloat16)};
  } else if (type == ElementType::kFloat64) {
    question.forms = 1;
    question.never_set[0] = Float32Form::kNeverSet;
    question.lost[0] = lost_bits(Width::kFloat32);
  }
  return question;
}

struct Answer {
  uint64_t bits = 0;  // the OR of the unit, or of enough of it to tell
  std::array<bool, 2> inexact{};
};

Answer ask(const char* unit, int64_t bytes, const Question& question) {
  if (question.forms == 0) {
    const uint64_t bits = bits_of_unit(unit, bytes, question.magnitude);
    const bool is_nonzero = (bits & question.magnitude) != 0;
    return {bits, {is_nonzero, is_nonzero}};
  }
  Answer answer;
  // A line, and if that leaves it open, a block at a time, which is in a cache when it is looked at once more.
  for (int64_t begin = 0, end = 0; begin < bytes; begin = end) {
    end = std::min(bytes, begin == 0 ? kLineBytes : begin + kBlockBytes);
    const uint64_t bits = bytes < kLineBytes ? bits_of_few(unit, bytes) : bits_of_block(unit, begin, end);
    answer.bits |= bits;
    if ((bits & question.magnitude) == 0) continue;
    bool any_exact = false;
    for (size_t k = 0; k < question.forms; ++k) {
      if (answer.inexact[k]) continue;
      answer.inexact[k] =
          (bits & question.never_set[k]) != 0 ||
          (question.lost[k] != nullptr && question.lost[k](unit + begin, (end - begin) / question.element_bytes) != 0);
      any_exact |= !answer.inexact[k];
    }
    if (!any_exact) break;
  }
  if (question.forms == 1) answer.inexact[1] = (answer.bits & question.magnitude) != 0;
  return answer;
}

// `visit(units, look_at)` calls `look_at` with the units that are to be read, in ascending order.
template <typename Visit>
UnitScanResult scan(const void* data, int64_t numel, int64_t unit_length, ElementType type, bool widths,
                    const Visit& visit) {
  UnitScanResult result;
  if (numel == 0) return result;
  const Question question = question_of(type, widths);
  const int64_t total_bytes = numel * element_bytes(type);
  // A unit may be said to be longer than everything, in as many bytes as no number counts.
  const int64_t unit_bytes = std::min(unit_length, numel) * element_bytes(type);
  const int64_t units = (total_bytes - 1) / unit_bytes + 1;
  result.nonzero.resize(static_cast<size_t>((units + 63) / 64));
  if (widths) result.inexact.fill(result.nonzero);
  visit(units, [&](int64_t index) {
    const char* unit = static_cast<const char*>(data) + index * unit_bytes;
    __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(unit) + kUnitsAhead * unit_bytes));
    const Answer answer = ask(unit, std::min(unit_bytes, total_bytes - index * unit_bytes), question);
    if (answer.bits == 0) return;
    if ((answer.bits & question.magnitude) == 0) {
      result.negative_zeros.push_back(static_cast<uint32_t>(index));
      return;
    }
    const auto word = static_cast<size_t>(index / 64);
    const uint64_t bit = uint64_t{1} << (index % 64);
    result.nonzero[word] |= bit;
    if (!widths) return;
    for (size_t k = 0; k < answer.inexact.size(); ++k) {
      if (answer.inexact[k]) result.inexact[k][word] |= bit;
    }
  });
  return result;
}

}  // namespace

UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type, bool widths) {
  return scan(data, numel, unit_length, type, widths, [](int64_t units, const auto& look_at) {
    for (int64_t index = 0; index < units; ++index) look_at(index);
  });
}

UnitScanResult unit_scan(const void* data, int64_t numel, int64_t unit_length, ElementType type,
                         const std::vector<uint64_t>& candidates, bool widths) {
  return scan(data, numel, unit_length, type, widths, [&](int64_t units, const auto& look_at) {
    for (size_t word = 0; word < candidates.size(); ++word) {
      for (uint64_t left = candidates[word]; left != 0; left &= left - 1) {
        const int64_t index = static_cast<int64_t>(word) * 64 + std::countr_zero(left);
        if (index < units) look_at(index);
      }
    }
  });
}

UnitFindings scan_unit(const void* data, int64_t numel, ElementType type, bool widths) {
  if (numel == 0) return {};
  const Question question = question_of(type, widths);
  const Answer answer = ask(static_cast<const char*>(data), numel * question.element_bytes, question);
  return {(answer.bits & question.magnitude) != 0, answer.bits != 0, answer.inexact};
}

}  // namespace ddp_hooks::cpu
