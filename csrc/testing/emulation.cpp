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
#include "kernels/cuda/packing_lanes.h"
#include "kernels/cuda/samples.h"
#include "kernels/cuda/units.h"
#include "kernels/cuda/widths.h"

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

  template <typename FoundByLane>
  FoundInUnits combine(const FoundByLane& found_by_lane) const {
    FoundInUnits found;
    for (int lane = 0; lane < kWarpLanes; ++lane) found.merge(found_by_lane(lane));
    return found;
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

// Calls act(a number type) for an element type.
template <typename Act>
auto with_number(ElementType type, const Act& act) {
  switch (type) {
    case ElementType::kFloat32:
      return act(HostNumber<float, uint32_t, float, 0x7fc00000>{});
    case ElementType::kFloat64:
      return act(HostNumber<double, uint64_t, double, 0x7ff8000000000000>{});
    case ElementType::kFloat16:
      return act(HostNumber<c10::Half, uint16_t, float, 0x7e00>{});
    default:
      return act(HostNumber<c10::BFloat16, uint16_t, float, 0x7fc0>{});
  }
}

// How many warps a launch has for so many chunks: blocks are launched whole, so some find nothing left to do.
int64_t launched_warps(int64_t chunks) {
  return (chunks + kWarpsPerBlock - 1) / kWarpsPerBlock * kWarpsPerBlock;
}

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
    for (int64_t warp = 0; warp < launched_warps(chunks); ++warp) {
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
  return with_number(type, [&](auto number) { return scale<decltype(number)>(message, slices, factor); });
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
    const int64_t warps = warps_far_apart(chunk_count(table));
    for (int64_t warp = 0; warp < launched_warps(warps); ++warp) {
      visit_chunk(table, chunk_far_apart(warp, warps), [&](int slice, const char* address, int64_t, int bytes) {
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

EmulatedRun emulate_unit_scan(const SliceOfMemory& slice, int64_t unit_bytes, ElementType type, bool widths,
                              std::vector<uint32_t>& bitmaps) {
  CheckedMemory memory;
  memory.allow(slice.address, slice.bytes);
  memory.seal();
  const Units units = divide_units(slice.address, slice.bytes, unit_bytes);
  const int64_t words = words_of_bitmap(units.count);
  const int count = bitmap_count(type, widths);
  // Behind the bitmaps a word that nobody may touch.
  bitmaps.assign(static_cast<size_t>(count * words + 1), 0);
  EmulatedRun run;
  run.launches = 1;
  run.chunks = portion_count(units);
  for (int64_t warp = 0; warp < launched_warps(run.chunks); ++warp) {
    const Portion portion = portion_of_warp(units, warp);
    if (portion.bytes > kLargestPortionBytes || portion.units > kUnitsPerWord ||
        portion.first_unit % kUnitsPerWord + portion.units > kUnitsPerWord) {
      throw std::logic_error("a portion of the wrong size");
    }
    if (count != kBitmapsOfWidths) {
      scan_portion(portion, scan_masks(element_bytes(type)), PlayedWarp{}, memory, bitmaps.data(),
                   bitmaps.data() + words);
    } else if (type == ElementType::kFloat32) {
      scan_widths_of_portion<WidthsOfFloat32>(portion, PlayedWarp{}, memory, bitmaps.data(), words);
    } else {
      scan_widths_of_portion<WidthsOfFloat64>(portion, PlayedWarp{}, memory, bitmaps.data(), words);
    }
  }
  if (bitmaps.back() != 0) throw std::logic_error("a bit past the bitmaps");
  bitmaps.pop_back();
  for (int i = 0; i < count; ++i) {
    const auto end = bitmaps.begin() + (i + 1) * words;
    const int64_t unused = words * kUnitsPerWord - units.count;
    for (int64_t bit = 0; bit < unused; ++bit) {
      if ((*(end - 1 - bit / kUnitsPerWord) >> (kUnitsPerWord - 1 - bit % kUnitsPerWord) & 1) != 0) {
        throw std::logic_error("a bit past the last unit");
      }
    }
  }
  run.widest_word_bytes = memory.widest();
  run.sectors_loaded = memory.sectors_loaded();
  return run;
}

EmulatedRun emulate_unit_sample(const std::vector<UnitsOfMemory>& slices, ElementType type, bool widths,
                                std::vector<uint32_t>& words) {
  CheckedMemory memory;
  for (const UnitsOfMemory& slice : slices) memory.allow(slice.address, slice.bytes);
  memory.seal();
  words.clear();
  const auto words_per_slice = static_cast<size_t>(words_of_sample(type, widths));
  EmulatedRun run;
  for_each_sample_table(slices.data(), slices.size(), [&](const auto& table, size_t first) -> const char* {
    if (first * words_per_slice != words.size()) throw std::logic_error("a launch does not go on where the last ended");
    run.launches += 1;
    run.chunks += warp_count(table);
    // Behind the words one that nobody may touch.
    const size_t begin = words.size();
    words.resize(begin + static_cast<size_t>(table.count) * words_per_slice + 1);
    uint32_t* const of_table = words.data() + begin;
    // More warps than the table has, as in blocks that are launched whole.
    for (int64_t warp = 0; warp < warp_count(table) + kWarpsPerBlock; ++warp) {
      const SampledUnit unit = sampled_unit_of_warp(table, warp);
      if (words_per_slice == kWordsPerSample) {
        look_at_unit(unit, scan_masks(element_bytes(type)), PlayedWarp{}, memory, of_table);
      } else if (type == ElementType::kFloat32) {
        look_at_widths_of_unit<WidthsOfFloat32>(unit, PlayedWarp{}, memory, of_table);
      } else {
        look_at_widths_of_unit<WidthsOfFloat64>(unit, PlayedWarp{}, memory, of_table);
      }
    }
    if (words.back() != 0) throw std::logic_error("a bit past the words");
    words.pop_back();
    return nullptr;
  });
  run.widest_word_bytes = memory.widest();
  run.sectors_loaded = memory.sectors_loaded();
  return run;
}

EmulatedRun emulate_pack(char* to, const std::vector<SliceToPack>& slices, ElementType type) {
  CheckedMemory memory;
  const int64_t element_size = element_bytes(type);
  int64_t total = 0;
  for (const SliceToPack& slice : slices) {
    memory.allow(slice.address, slice.numel * element_size);
    total += packed_bytes(slice.numel, slice.width, element_size);
  }
  memory.allow(to, total);
  memory.seal();
  EmulatedRun run;
  with_number(type, [&](auto number) {
    using Number = decltype(number);
    const char* end_of_previous = to;
    for_each_pack_table(slices.data(), slices.size(), element_size, to, [&](const auto& table) -> const char* {
      if (table.to != end_of_previous) throw std::logic_error("a launch does not go on where the last one ended");
      end_of_previous = table.to + table.begin[table.count];
      run.launches += 1;
      run.chunks += chunk_count(table);
      const auto scaling = scaling_of<Number>(table);
      for (int64_t warp = 0; warp < launched_warps(chunk_count(table)); ++warp) {
        visit_stretches(table, warp, [&](int slice, int64_t offset, int64_t position, int bytes) {
          for (int lane = 0; lane < kWarpLanes; ++lane) {
            pack_stretch(table, slice, offset, position, bytes, lane, memory, scaling);
          }
        });
      }
      return nullptr;
    });
  });
  if (memory.bytes_written() != static_cast<size_t>(total)) throw std::logic_error("some bytes were not written");
  run.widest_word_bytes = memory.widest();
  return run;
}

EmulatedRun emulate_sum_terms(const char* packed, int64_t packed_bytes, const std::vector<SliceToSum>& slices,
                              ElementType type, double factor, bool adds_zero) {
  CheckedMemory memory;
  int64_t total = 0;
  for (const SliceToSum& slice : slices) {
    memory.allow(slice.address, slice.bytes);
    total += slice.bytes;
  }
  memory.allow(packed, packed_bytes);
  memory.seal();
  EmulatedRun run;
  with_number(type, [&](auto number) {
    using Number = decltype(number);
    const Addition<Number> addition{static_cast<typename Number::Wide>(factor),
                                    Number::round(adds_zero ? 0.0f : -0.0f)};
    const auto launch = [&](const auto& table) -> const char* {
      run.launches += 1;
      run.chunks += chunk_count(table);
      for (int64_t warp = 0; warp < launched_warps(chunk_count(table)); ++warp) {
        visit_stretches(table, warp, [&](int slice, int64_t offset, int64_t, int bytes) {
          for (int lane = 0; lane < kWarpLanes; ++lane) {
            sum_stretch<Number>(table, slice, offset, bytes, lane, memory, addition);
          }
        });
      }
      return nullptr;
    };
    if (const char* error = for_each_sum_table(slices.data(), slices.size(), packed, launch); error != nullptr) {
      throw std::logic_error(error);
    }
  });
  if (memory.bytes_written() != static_cast<size_t>(total)) throw std::logic_error("some bytes were not written");
  run.widest_word_bytes = memory.widest();
  return run;
}

}  // namespace ddp_hooks::cuda
