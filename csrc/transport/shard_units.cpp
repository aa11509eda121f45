#include "transport/shard_units.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/unit_scan.h"

namespace ddp_hooks {
namespace {

UnitCode code_at(const uint8_t* codes, int64_t unit) {
  return static_cast<UnitCode>(codes[unit / 4] >> (unit % 4 * 2) & 3);
}

void set_code(uint8_t* codes, int64_t unit, UnitCode code) {
  codes[unit / 4] = static_cast<uint8_t>(codes[unit / 4] | static_cast<uint8_t>(code) << (unit % 4 * 2));
}

Width width_of(UnitCode code, ElementType type) {
  if (code == UnitCode::kFull) return Width::kFull;
  const Width width = narrow_widths(type)[code == UnitCode::kFirstNarrow ? 0 : 1];
  TORCH_CHECK(width != Width::kFull, "ddp_hooks: expected the code of a unit of ", element_bytes(type),
              " byte numbers, received ", static_cast<int>(code), ": the message is corrupted");
  return width;
}

bool is_set(const std::vector<uint64_t>& words, int64_t bit) {
  return (words[static_cast<size_t>(bit / 64)] >> (bit % 64) & 1) != 0;
}

// Calls `act(begin, end, code)` for each run of units with the same code, in elements; what is not sent is left out.
template <typename Act>
void for_each_run(const std::vector<int64_t>& ends, const uint8_t* codes, const Act& act) {
  const auto count = static_cast<int64_t>(ends.size());
  int64_t begin = 0;
  for (int64_t unit = 0; unit < count;) {
    const UnitCode code = code_at(codes, unit);
    int64_t last = unit;
    while (last + 1 < count && code_at(codes, last + 1) == code) ++last;
    const int64_t end = ends[static_cast<size_t>(last)];
    if (code != UnitCode::kNothing) act(begin, end, code);
    begin = end;
    unit = last + 1;
  }
}

// Where a sender's next unit lies in what was received.
class Cursor {
 public:
  Cursor(const ShardUnits::Received& received, ElementType type)
      : codes_(received.codes), at_(received.offset), run_begin_(received.offset), type_(type) {}

  bool is_own() const { return codes_ == nullptr; }
  UnitCode code() const { return code_; }
  // Of the unit that was entered last.
  Contribution contribution() const { return {at_, is_own() ? Width::kFull : width_of(code_, type_), is_own()}; }

  // Whether the unit has another code than the one before.
  bool enter(int64_t unit) {
    const UnitCode next = is_own() ? UnitCode::kFull : code_at(codes_, unit);
    if (next == code_ && unit > 0) return false;
    // A run ends at a multiple of the full width.
    const int64_t size = element_bytes(type_);
    at_ = run_begin_ = run_begin_ + (at_ - run_begin_ + size - 1) / size * size;
    code_ = next;
    return true;
  }

  void leave(int64_t numel) {
    if (!is_own() && code_ != UnitCode::kNothing) {
      at_ += numel * bytes_of_number(width_of(code_, type_), element_bytes(type_));
    }
  }

 private:
  const uint8_t* codes_;
  int64_t at_, run_begin_;
  ElementType type_;
  UnitCode code_ = UnitCode::kNothing;
};

}  // namespace

ShardUnits::ShardUnits(std::vector<Units> stretches) : stretches_(std::move(stretches)) {
  for (const Units& units : stretches_) {
    TORCH_CHECK(units.slice_length > 0 && units.length > 0,
                "ddp_hooks: expected stretches and units of at least one element, received ", units.slice_length,
                " and ", units.length);
    for (int64_t unit = 0; unit < units.count(); ++unit) ends_.push_back(numel_ + units.end(unit));
    numel_ += units.slice_length;
  }
}

ShardFindings ShardUnits::choose(const at::Tensor& flat, int64_t offset, const ShardQuestion& question,
                                 uint8_t* codes) const {
  TORCH_CHECK(flat.is_cpu(), "ddp_hooks: expected a tensor on the CPU, received one on ", flat.device());
  TORCH_CHECK(question.known_zero.empty() || question.known_zero.size() == stretches_.size(), "ddp_hooks: expected ",
              stretches_.size(), " flags, received ", question.known_zero.size());
  check_range(flat, offset, numel_);
  const ElementType type = element_type_of(flat);
  const bool widths = question.widths && narrow_widths(type)[0] != Width::kFull;
  std::memset(codes, 0, static_cast<size_t>(code_bytes()));
  ShardFindings findings;
  int64_t unit = 0;
  for (size_t i = 0; i < stretches_.size(); ++i) {
    const int64_t length = stretches_[i].slice_length, units = stretches_[i].count();
    if (!question.known_zero.empty() && question.known_zero[i] != 0) {
      // Left at kNothing.
    } else if (!question.zeros && !widths) {
      for (int64_t u = 0; u < units; ++u) set_code(codes, unit + u, UnitCode::kFull);
    } else {
      PendingUnitScan scan = start_unit_scan({flat, offset, length}, stretches_[i].length, widths);
      const UnitScanResult& result = scan.wait();
      const std::vector<uint32_t>& signed_zeros = result.negative_zeros;
      for (int64_t u = 0; u < units; ++u) {
        // A -0.0 keeps its sign where all ranks have one.
        const bool is_nothing = question.zeros && !is_set(result.nonzero, u) &&
                                !std::binary_search(signed_zeros.begin(), signed_zeros.end(), static_cast<uint32_t>(u));
        UnitCode code = UnitCode::kFull;
        if (is_nothing) {
          code = UnitCode::kNothing;
        } else if (widths && !is_set(result.inexact[0], u)) {
          code = UnitCode::kFirstNarrow;
        } else if (widths && narrow_widths(type)[1] != Width::kFull && !is_set(result.inexact[1], u)) {
          code = UnitCode::kSecondNarrow;
        }
        set_code(codes, unit + u, code);
      }
    }
    for (int64_t u = unit; u < unit + units; ++u) {
      const UnitCode code = code_at(codes, u);
      findings.units_sent += code != UnitCode::kNothing;
      findings.units_narrow += code == UnitCode::kFirstNarrow || code == UnitCode::kSecondNarrow;
    }
    unit += units;
    offset += length;
  }
  for_each_run(ends_, codes, [&](int64_t begin, int64_t end, UnitCode code) {
    const int64_t bytes = ddp_hooks::packed_bytes(end - begin, width_of(code, type), element_bytes(type));
    findings.bytes += bytes;
    if (code != UnitCode::kFull) findings.narrow_bytes += bytes;
  });
  return findings;
}

int64_t ShardUnits::packed_bytes(const uint8_t* codes, ElementType type) const {
  int64_t bytes = 0;
  for_each_run(ends_, codes, [&](int64_t begin, int64_t end, UnitCode code) {
    bytes += ddp_hooks::packed_bytes(end - begin, width_of(code, type), element_bytes(type));
  });
  return bytes;
}

void ShardUnits::append_slices(const at::Tensor& flat, int64_t offset, const uint8_t* codes,
                               std::vector<PackedSlice>& slices) const {
  const ElementType type = element_type_of(flat);
  for_each_run(ends_, codes, [&](int64_t begin, int64_t end, UnitCode code) {
    slices.push_back({{&flat, offset + begin, end - begin}, width_of(code, type)});
  });
}

void ShardUnits::sum(const at::Tensor& to, const at::Tensor& packed, const std::vector<Received>& received) const {
  check_range(to, 0, numel_);
  const ElementType type = element_type_of(to);
  std::vector<Cursor> cursors;
  cursors.reserve(received.size());
  for (const Received& each : received) cursors.emplace_back(each, type);

  // Runs of units with the same code on every sender are added up at once.
  std::vector<SliceSum> sums;
  int64_t run_begin = 0, unit_begin = 0;
  Contributions contributions;
  const auto end_run = [&](int64_t end) {
    if (end == run_begin) return;
    if (contributions.empty()) {
      to.narrow(0, run_begin, end - run_begin).zero_();
    } else {
      const bool adds_zero = contributions.size() < cursors.size();
      sums.push_back({{&to, run_begin, end - run_begin}, std::move(contributions), 1, false, adds_zero});
    }
    contributions.clear();
    run_begin = end;
  };
  for (int64_t unit = 0; unit < count(); ++unit) {
    const int64_t unit_end = ends_[static_cast<size_t>(unit)];
    bool changed = unit == 0;
    for (Cursor& cursor : cursors) changed |= cursor.enter(unit);
    if (changed) {
      end_run(unit_begin);
      for (const Cursor& cursor : cursors) {
        if (cursor.code() != UnitCode::kNothing) contributions.push_back(cursor.contribution());
      }
    }
    for (Cursor& cursor : cursors) cursor.leave(unit_end - unit_begin);
    unit_begin = unit_end;
  }
  end_run(unit_begin);
  sum_contributions(packed, sums);
}

}  // namespace ddp_hooks
