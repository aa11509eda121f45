#include "transport/shard_units.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "kernels/packing.h"
#include "kernels/unit_scan.h"

namespace ddp_hooks {
namespace {

bool is_sent(const uint8_t* mask, int64_t unit) {
  return (mask[unit / 8] >> (unit % 8) & 1) != 0;
}

void send(uint8_t* mask, int64_t unit) {
  mask[unit / 8] = static_cast<uint8_t>(mask[unit / 8] | 1 << (unit % 8));
}

// A -0.0 keeps its sign where all ranks have one.
bool is_zero(const UnitScanResult& result, int64_t unit) {
  return (result.nonzero[static_cast<size_t>(unit / 64)] >> (unit % 64) & 1) == 0 &&
         !std::binary_search(result.negative_zeros.begin(), result.negative_zeros.end(), static_cast<uint32_t>(unit));
}

// Calls `act(begin, end)` for each run of units that are sent, in elements.
template <typename Act>
void for_each_run(const std::vector<int64_t>& ends, const uint8_t* mask, const Act& act) {
  const auto count = static_cast<int64_t>(ends.size());
  for (int64_t unit = 0; unit < count; ++unit) {
    if (!is_sent(mask, unit)) continue;
    const int64_t begin = unit == 0 ? 0 : ends[static_cast<size_t>(unit - 1)];
    while (unit + 1 < count && is_sent(mask, unit + 1)) ++unit;
    act(begin, ends[static_cast<size_t>(unit)]);
  }
}

// Where a sender's next unit lies in what was received.
struct Cursor {
  const uint8_t* mask;
  int64_t at;  // elements
  bool sends = false;

  bool is_own() const { return mask == nullptr; }
  // Whether the unit is sent where the one before was not, or the other way round.
  bool enter(int64_t unit) { return std::exchange(sends, is_own() || is_sent(mask, unit)) != sends; }
  void leave(int64_t numel) {
    if (!is_own() && sends) at += numel;
  }
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

int64_t ShardUnits::choose(const at::Tensor& flat, const std::vector<Part>& parts,
                           const ShardQuestion& question) const {
  TORCH_CHECK(question.known_zero.empty() || question.known_zero.size() == stretches_.size(), "ddp_hooks: expected ",
              stretches_.size(), " flags, received ", question.known_zero.size());
  std::vector<UnitsToScan> scans;
  for (const Part& part : parts) {
    check_range(flat, part.offset, numel_);
    int64_t begin = part.offset;
    for (size_t i = 0; i < stretches_.size(); ++i) {
      const Units& units = stretches_[i];
      if (question.zeros && !question.is_known_zero(i)) {
        scans.push_back({{flat, begin, units.slice_length}, units.length, std::nullopt});
      }
      begin += units.slice_length;
    }
  }
  PendingUnitScan scan = start_unit_scan(scans);
  auto result = scan.wait().begin();
  int64_t chosen = 0;
  for (const Part& part : parts) {
    std::memset(part.mask, 0, static_cast<size_t>(mask_bytes()));
    int64_t unit = 0;
    for (size_t i = 0; i < stretches_.size(); ++i) {
      const int64_t first = unit;
      unit += stretches_[i].count();
      if (question.is_known_zero(i)) continue;
      for (int64_t u = first; u < unit; ++u) {
        if (question.zeros && is_zero(*result, u - first)) continue;
        send(part.mask, u);
        ++chosen;
      }
      if (question.zeros) ++result;
    }
  }
  return chosen;
}

int64_t ShardUnits::sent_elements(const uint8_t* mask) const {
  int64_t elements = 0;
  for_each_run(ends_, mask, [&](int64_t begin, int64_t end) { elements += end - begin; });
  return elements;
}

void ShardUnits::append_slices(const at::Tensor& flat, int64_t offset, const uint8_t* mask,
                               std::vector<BorrowedSlice>& slices) const {
  for_each_run(ends_, mask,
               [&](int64_t begin, int64_t end) { slices.push_back({&flat, offset + begin, end - begin}); });
}

void ShardUnits::sum(const at::Tensor& to, const at::Tensor& packed, const std::vector<Received>& received) const {
  check_range(to, 0, numel_);
  const int64_t element_size = to.element_size();
  std::vector<Cursor> cursors;
  cursors.reserve(received.size());
  for (const Received& each : received) cursors.push_back({each.mask, each.offset});

  // Runs of units that the same ranks have sent are added up at once.
  std::vector<SliceSum> sums;
  int64_t run_begin = 0, unit_begin = 0;
  Contributions contributions;
  const auto end_run = [&](int64_t end) {
    if (end == run_begin) return;
    if (contributions.empty()) {
      to.narrow(0, run_begin, end - run_begin).zero_();
    } else {
      const bool adds_zero = contributions.size() < cursors.size();
      sums.push_back({{&to, run_begin, end - run_begin}, std::move(contributions), 1, adds_zero});
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
        if (cursor.sends) contributions.push_back({cursor.at * element_size, cursor.is_own()});
      }
    }
    for (Cursor& cursor : cursors) cursor.leave(unit_end - unit_begin);
    unit_begin = unit_end;
  }
  end_run(unit_begin);
  sum_contributions(packed.view(at::kByte), sums);
}

}  // namespace ddp_hooks
