#include "testing/emulation.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "kernels/cuda/lanes.h"
#include "kernels/cuda/samples.h"
#include "kernels/cuda/units.h"

namespace ddp_hooks::cuda {
namespace {

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

// A warp whose lanes take turns.
struct PlayedWarp {
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
template <typename Number, typename BitsOfNumber, typename WideNumber>
struct HostNumber {
  using Bits = BitsOfNumber;
  using Wide = WideNumber;
  static Bits scale(Bits bits, Wide factor) {
    Number number;
    std::memcpy(&number, &bits, sizeof(Bits));
    number = static_cast<Number>(static_cast<Wide>(number) * factor);
    std::memcpy(&bits, &number, sizeof(Bits));
    return bits;
  }
};

// Runs `lane_of_stretch(address in the slice, position in the message, bytes, lane)` for every lane of every launch.
template <typename LaneOfStretch>
EmulatedRun run_lanes(char* message, const std::vector<SliceOfMemory>& slices, const LaneOfStretch& lane_of_stretch) {
  EmulatedRun run;
  const char* end_of_previous = message;
  for_each_table(slices.data(), slices.size(), message, [&](const auto& table, size_t) -> const char* {
    if (table.message != end_of_previous) throw std::logic_error("a launch does not go on where the last one ended");
    end_of_previous = table.message + table.begin[table.count];
    run.launches += 1;
    const int64_t chunks = chunk_count(table);
    run.chunks += chunks;
    // Blocks are launched whole, so some warps find nothing left to do.
    const int64_t warps = (chunks + kWarpsPerBlock - 1) / kWarpsPerBlock * kWarpsPerBlock;
    for (int64_t warp = 0; warp < warps; ++warp) {
      visit_chunk(table, warp, [&](int, char* address, int64_t position, int bytes) {
        if (bytes <= 0 || bytes > kLargestChunkBytes) throw std::logic_error("a stretch of the wrong size");
        for (int lane = 0; lane < kWarpLanes; ++lane) lane_of_stretch(address, table.message + position, bytes, lane);
      });
    }
    return nullptr;
  });
  return run;
}

template <int kElementBytes, typename Transform>
EmulatedRun move(char* message, const std::vector<SliceOfMemory>& slices, bool to_message, const Transform& transform) {
  CheckedMemory memory;
  int64_t total = 0;
  for (const SliceOfMemory& slice : slices) {
    memory.allow(slice.address, slice.bytes);
    total += slice.bytes;
  }
  memory.allow(message, total);
  memory.seal();
  EmulatedRun run = run_lanes(message, slices, [&](char* address, char* in_message, int bytes, int lane) {
    move_stretch<kElementBytes>(to_message ? in_message : address, to_message ? address : in_message, bytes, lane,
                                memory, transform);
  });
  if (memory.bytes_written() != static_cast<size_t>(total)) throw std::logic_error("some bytes were not written");
  run.widest_word_bytes = memory.widest();
  return run;
}

template <typename Number>
EmulatedRun scale(char* message, const std::vector<SliceOfMemory>& slices, double factor) {
  return move<sizeof(typename Number::Bits)>(message, slices, true,
                                             ScaleBy<Number>{static_cast<typename Number::Wide>(factor)});
}

}  // namespace

EmulatedRun emulate_gather_scaled(char* message, const std::vector<SliceOfMemory>& slices, ElementType type,
                                  double factor) {
  if (factor == 1) return move<1>(message, slices, true, Keep{});
  switch (type) {
    case ElementType::kFloat32:
      return scale<HostNumber<float, uint32_t, float>>(message, slices, factor);
    case ElementType::kFloat64:
      return scale<HostNumber<double, uint64_t, double>>(message, slices, factor);
    case ElementType::kFloat16:
      return scale<HostNumber<c10::Half, uint16_t, float>>(message, slices, factor);
    default:
      return scale<HostNumber<c10::BFloat16, uint16_t, float>>(message, slices, factor);
  }
}

EmulatedRun emulate_scatter(char* message, const std::vector<SliceOfMemory>& slices) {
  return move<1>(message, slices, false, Keep{});
}

EmulatedRun emulate_nonzero_scan(const std::vector<SliceOfMemory>& slices, ElementType type,
                                 std::vector<uint32_t>& flags) {
  CheckedMemory memory;
  for (const SliceOfMemory& slice : slices) memory.allow(slice.address, slice.bytes);
  memory.seal();
  const ScanMasks masks = scan_masks(element_bytes(type));
  flags.assign(slices.size(), 0);
  EmulatedRun run;
  for_each_table(slices.data(), slices.size(), nullptr, [&](const auto& table, size_t first) -> const char* {
    run.launches += 1;
    run.chunks += chunk_count(table);
    for (int64_t chunk = 0; chunk < chunk_count(table); ++chunk) {
      visit_chunk(table, chunk, [&](int slice, const char* address, int64_t, int bytes) {
        uint32_t& flag = flags[first + static_cast<size_t>(slice)];
        if ((flag & kFoundNonzero) != 0) return;
        uint32_t found = 0;
        for (int lane = 0; lane < kWarpLanes; ++lane) {
          found |= found_in(bits_of_stretch(address, bytes, lane, memory), masks);
        }
        flag |= found;
      });
    }
    return nullptr;
  });
  run.widest_word_bytes = memory.widest();
  return run;
}

EmulatedRun emulate_unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type,
                              cpu::UnitScanResult& result) {
  CheckedMemory memory;
  memory.allow(slice.address, slice.bytes);
  memory.seal();
  const Units units = divide_units(slice.address, slice.bytes, unit_bytes);
  const int64_t words = words_of_bitmap(units.count);
  // Behind each bitmap a word that nobody may touch.
  std::vector<uint32_t> nonzero_units(static_cast<size_t>(words + 1)), negative_zero_units(nonzero_units);
  EmulatedRun run;
  run.launches = 1;
  run.chunks = portion_count(units);
  const int64_t warps = (run.chunks + kWarpsPerBlock - 1) / kWarpsPerBlock * kWarpsPerBlock;
  for (int64_t warp = 0; warp < warps; ++warp) {
    const Portion portion = portion_of_warp(units, warp);
    if (portion.bytes > kLargestPortionBytes || portion.units > kUnitsPerWord ||
        portion.first_unit % kUnitsPerWord + portion.units > kUnitsPerWord) {
      throw std::logic_error("a portion of the wrong size");
    }
    scan_portion(portion, scan_masks(element_bytes(type)), PlayedWarp{}, memory, nonzero_units.data(),
                 negative_zero_units.data());
  }
  if ((nonzero_units.back() | negative_zero_units.back()) != 0) throw std::logic_error("a bit past the bitmap");
  nonzero_units.pop_back();
  nonzero_units.insert(nonzero_units.end(), negative_zero_units.begin(), negative_zero_units.end() - 1);
  result = read_bitmaps(nonzero_units.data(), units.count);
  run.widest_word_bytes = memory.widest();
  run.sectors_loaded = memory.sectors_loaded();
  return run;
}

EmulatedRun emulate_unit_sample(const std::vector<UnitsOfMemory>& slices, ElementType type,
                                std::vector<int64_t>& zeros) {
  CheckedMemory memory;
  for (const UnitsOfMemory& slice : slices) memory.allow(slice.address, slice.bytes);
  memory.seal();
  zeros.clear();
  EmulatedRun run;
  for_each_sample_table(slices.data(), slices.size(), [&](const auto& table, size_t first) -> const char* {
    if (first != zeros.size()) throw std::logic_error("a launch does not go on where the last one ended");
    run.launches += 1;
    run.chunks += warp_count(table);
    // Behind the words one that nobody may touch.
    std::vector<uint32_t> words(static_cast<size_t>(table.count) * kWordsPerSample + 1);
    // More warps than the table has, as in blocks that are launched whole.
    for (int64_t warp = 0; warp < warp_count(table) + kWarpsPerBlock; ++warp) {
      look_at_unit(sampled_unit_of_warp(table, warp), scan_masks(element_bytes(type)), PlayedWarp{}, memory,
                   words.data());
    }
    if (words.back() != 0) throw std::logic_error("a bit past the words");
    for (int32_t i = 0; i < table.count; ++i) {
      zeros.push_back(count_zeros(words.data() + i * kWordsPerSample, count_units(table.slices[i])));
    }
    return nullptr;
  });
  run.widest_word_bytes = memory.widest();
  run.sectors_loaded = memory.sectors_loaded();
  return run;
}

}  // namespace ddp_hooks::cuda
