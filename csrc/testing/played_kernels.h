// Kernels, played on the CPU: warps and lanes take turns, with the CPU's arithmetic.
//
// Tables, chunks, portions, samples and lanes are the kernels' own (kernels/cuda/*.h); only launches, arithmetic on
// numbers and votes of a warp are played. Each access is checked: it must be aligned to its width, as a GPU demands,
// lie in memory that was allowed, and no byte may be written twice. The first violation throws std::logic_error. Slow.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "kernels/cuda/coding_lanes.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/samples.h"
#include "testing/emulation.h"

namespace ddp_hooks::cuda {

// Stretches of memory that may be read or written, and which of their bytes have been written.
class CheckedMemory {
 public:
  void allow(const char* begin, int64_t bytes) {
    if (bytes > 0) allowed_.push_back({begin, begin + bytes});
  }

  // To be called before the accesses.
  void seal() {
    std::sort(allowed_.begin(), allowed_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    std::vector<Range> merged;
    for (const Range& range : allowed_) {
      if (!merged.empty() && range.begin <= merged.back().end) {
        merged.back().end = std::max(merged.back().end, range.end);
      } else {
        merged.push_back(range);
      }
    }
    allowed_ = std::move(merged);
  }

  template <typename T>
  T load(const char* from) {
    check(from, sizeof(T), "load");
    sectors_loaded_.insert(reinterpret_cast<uintptr_t>(from) / kSectorBytes);
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }

  template <typename T>
  void store(char* to, const T& value) {
    check(to, sizeof(T), "store");
    for (size_t i = 0; i < sizeof(T); ++i) {
      if (!written_.insert(to + i).second) throw std::logic_error("a byte is written twice");
    }
    std::memcpy(to, &value, sizeof(T));
  }

  size_t bytes_written() const { return written_.size(); }
  int64_t widest() const { return widest_; }
  int64_t sectors_loaded() const { return static_cast<int64_t>(sectors_loaded_.size()); }

 private:
  struct Range {
    const char* begin;
    const char* end;
  };

  void check(const char* address, size_t bytes, const char* what) {
    widest_ = std::max(widest_, static_cast<int64_t>(bytes));
    const std::string access = std::string(what) + " of " + std::to_string(bytes) + " bytes";
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0) throw std::logic_error(access + " is not aligned");
    const auto after = std::upper_bound(allowed_.begin(), allowed_.end(), address,
                                        [](const char* a, const Range& range) { return a < range.begin; });
    if (after == allowed_.begin() || address + bytes > std::prev(after)->end) {
      throw std::logic_error(access + " is out of bounds");
    }
  }

  std::vector<Range> allowed_;
  std::set<const char*> written_;
  int64_t widest_ = 0;
  std::unordered_set<uintptr_t> sectors_loaded_;
};

// A value of each lane.
template <typename T>
struct PlayedValues {
  T of[kWarpLanes];
  const T& at(int lane) const { return of[lane]; }
};

// A warp whose lanes take turns.
struct PlayedWarp {
  template <typename OfLane>
  auto each(const OfLane& of_lane) const {
    PlayedValues<decltype(of_lane(0))> values;
    for (int lane = 0; lane < kWarpLanes; ++lane) values.of[lane] = of_lane(lane);
    return values;
  }

  template <typename T, typename SourceOfLane>
  PlayedValues<T> fetch(const PlayedValues<T>& values, const SourceOfLane& source) const {
    return each([&](int lane) { return values.of[source(lane) % kWarpLanes]; });
  }

  template <typename OfLane>
  uint32_t vote_on(const OfLane& is_so) const {
    uint32_t votes = 0;
    for (int lane = 0; lane < kWarpLanes; ++lane) votes |= uint32_t{is_so(lane) ? 1u : 0u} << lane;
    return votes;
  }

  template <typename OfLane>
  uint32_t any_bits(const OfLane& bits) const {
    uint32_t any = 0;
    for (int lane = 0; lane < kWarpLanes; ++lane) any |= bits(lane);
    return any;
  }

  template <typename OfLane>
  uint32_t largest(const OfLane& number) const {
    uint32_t most = 0;
    for (int lane = 0; lane < kWarpLanes; ++lane) most = std::max<uint32_t>(most, number(lane));
    return most;
  }

  template <typename OfLane>
  int64_t sum(const OfLane& number) const {
    int64_t total = 0;
    for (int lane = 0; lane < kWarpLanes; ++lane) total += number(lane);
    return total;
  }

  template <typename ActOfLane>
  void for_lanes(int count, const ActOfLane& act) const {
    for (int lane = 0; lane < std::min(count, kWarpLanes); ++lane) act(lane);
  }

  template <typename FoundByLane>
  Votes vote(const FoundByLane& found_by_lane) const {
    Votes votes = {};
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      const uint32_t found = found_by_lane(lane);
      if ((found & kFoundNonzero) != 0) votes.nonzero |= uint32_t{1} << lane;
      if ((found & kFoundNegativeZero) != 0) votes.negative_zero |= uint32_t{1} << lane;
    }
    return votes;
  }

  void merge(uint32_t* word, uint32_t bits) const { *word |= bits; }
};

// What the device's kernels call Float32 and so on, with the CPU's arithmetic.
template <typename Number, typename BitsOfNumber, typename WideNumber, BitsOfNumber kNanOfSums>
struct HostNumber {
  using Bits = BitsOfNumber;
  using Wide = WideNumber;
  static constexpr Bits kNan = kNanOfSums;
  static Wide widen(Bits bits) {
    Number number;
    std::memcpy(&number, &bits, sizeof(Bits));
    return static_cast<Wide>(number);
  }
  static Bits round(Wide wide) {
    const auto number = static_cast<Number>(wide);
    Bits bits;
    std::memcpy(&bits, &number, sizeof(Bits));
    return bits;
  }
  static Bits scale(Bits bits, Wide factor) { return round(widen(bits) * factor); }
  static Bits add(Bits a, Bits b) { return round(widen(a) + widen(b)); }
};

using Float32 = HostNumber<float, uint32_t, float, 0x7fc00000>;
using Float64 = HostNumber<double, uint64_t, double, 0x7ff8000000000000>;
using Float16 = HostNumber<c10::Half, uint16_t, float, 0x7e00>;
using BFloat16 = HostNumber<c10::BFloat16, uint16_t, float, 0x7fc0>;

// Calls act(a number type) for an element type.
template <typename Act>
auto with_number(ElementType type, const Act& act) {
  switch (type) {
    case ElementType::kFloat32:
      return act(Float32{});
    case ElementType::kFloat64:
      return act(Float64{});
    case ElementType::kFloat16:
      return act(Float16{});
    case ElementType::kBFloat16:
      break;
  }
  return act(BFloat16{});
}

// How many warps a launch has for so many chunks: blocks are launched whole, so some find nothing left to do.
inline int64_t launched_warps(int64_t chunks) {
  return (chunks + kWarpsPerBlock - 1) / kWarpsPerBlock * kWarpsPerBlock;
}

// What follows are the bodies of kernels.h for all warps of a launch, under the same names.
struct Play {
  int64_t warps;
  CheckedMemory& memory;

  template <typename Table>
  void copy(const Table& table, bool to_message) const {
    move<1>(table, to_message, Keep{});
  }

  template <typename Number, typename Table>
  void gather_scaled(const Table& table, typename Number::Wide factor) const {
    move<sizeof(typename Number::Bits)>(table, true, ScaleBy<Number>{factor});
  }

  template <typename Number, typename Table>
  void sum(const Table& table, const AdditionOf<Number>& addition) const {
    each_lane_of_stretches(table, [&](int slice, int64_t offset, int64_t, int bytes, int lane) {
      sum_stretch<Number>(table, slice, offset, bytes, lane, memory, addition);
    });
  }

  template <typename Table>
  void scan_units(const Table& table, const ScanMasks& masks, uint32_t* bitmaps) const {
    each_portion(table, bitmaps, [&](const Portion& portion, uint32_t* of_slice, int64_t words) {
      scan_portion(portion, masks, PlayedWarp{}, memory, of_slice, of_slice + words);
    });
  }

  template <typename Table>
  void sample_units(const Table& table, const ScanMasks& masks, uint32_t* words) const {
    for (int64_t warp = 0; warp < warps; ++warp) {
      look_at_unit(sampled_unit_of_warp(table, warp), masks, PlayedWarp{}, memory, words);
    }
  }

  void code_sizes(const CodedMessage& message) const {
    for (int64_t warp = 0; warp < warps; ++warp) size_section(message, warp, PlayedWarp{}, memory);
  }

  void code_sections(const CodedMessage& message, uint32_t* message_bytes) const {
    for (int64_t warp = 0; warp < warps; ++warp) write_section(message, warp, message_bytes, PlayedWarp{}, memory);
  }

  void check_coded(const CodedMessage& message, uint32_t* wrong) const {
    for (int64_t warp = 0; warp < warps; ++warp) check_section(message, warp, wrong, PlayedWarp{}, memory);
  }

  template <typename Number>
  void decode(const CodedMessage& message, bool adds, const uint32_t* wrong) const {
    for (int64_t warp = 0; warp < warps; ++warp) {
      decode_section<Number>(message, warp, adds, wrong, PlayedWarp{}, memory);
    }
  }

 private:
  template <typename Table, typename Act>
  void each_lane_of_stretches(const Table& table, const Act& act) const {
    for (int64_t warp = 0; warp < warps; ++warp) {
      visit_stretches(table, warp, [&](int slice, int64_t offset, int64_t position, int bytes) {
        if (bytes <= 0 || bytes > kLargestChunkBytes) throw std::logic_error("a stretch of the wrong size");
        for (int lane = 0; lane < kWarpLanes; ++lane) act(slice, offset, position, bytes, lane);
      });
    }
  }

  template <int kElementBytes, typename Table, typename Transform>
  void move(const Table& table, bool to_message, const Transform& transform) const {
    each_lane_of_stretches(table, [&](int slice, int64_t offset, int64_t position, int bytes, int lane) {
      char* const in_message = table.message + position;
      char* const in_slice = table.address[slice] + offset;
      move_stretch<kElementBytes>(to_message ? in_message : in_slice, to_message ? in_slice : in_message, bytes, lane,
                                  memory, transform);
    });
  }

  template <typename Table, typename Act>
  void each_portion(const Table& table, uint32_t* bitmaps, const Act& act) const {
    for (int64_t warp = 0; warp < warps; ++warp) {
      visit_units(table, warp, bitmaps, [&](const Units& units, int64_t of_units, uint32_t* of_slice) {
        const Portion portion = portion_of_warp(units, of_units);
        if (portion.bytes > kLargestPortionBytes || portion.units > kUnitsPerWord ||
            portion.first_unit % kUnitsPerWord + portion.units > kUnitsPerWord) {
          throw std::logic_error("a portion of the wrong size");
        }
        act(portion, of_slice, words_of_bitmap(units.count));
      });
    }
  }
};

}  // namespace ddp_hooks::cuda
