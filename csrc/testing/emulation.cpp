#include "testing/emulation.h"

#include <stdexcept>

#include "testing/played_kernels.h"

namespace ddp_hooks::cuda {
namespace {

// Plays each launch that moves slices to a message or back: play(launch, table).
template <typename PlayLaunch>
EmulatedRun move(char* message, const std::vector<SliceOfMemory>& slices, const PlayLaunch& play) {
  CheckedMemory memory;
  int64_t total = 0;
  for (const SliceOfMemory& slice : slices) {
    memory.allow(slice.address, slice.bytes);
    total += slice.bytes;
  }
  memory.allow(message, total);
  memory.seal();
  EmulatedRun run;
  const char* end_of_previous = message;
  for_each_table(slices.data(), slices.size(), message, [&](const auto& table, size_t) -> const char* {
    if (table.message != end_of_previous) throw std::logic_error("a launch does not go on where the last one ended");
    end_of_previous = table.message + table.begin[table.count];
    run.launches += 1;
    run.chunks += chunk_count(table);
    play(Play{launched_warps(chunk_count(table)), memory}, table);
    return nullptr;
  });
  if (memory.bytes_written() != static_cast<size_t>(total)) throw std::logic_error("some bytes were not written");
  run.widest_word_bytes = memory.widest();
  return run;
}

}  // namespace

EmulatedRun emulate_gather_scaled(char* message, const std::vector<SliceOfMemory>& slices, ElementType type,
                                  double factor) {
  if (factor == 1) {
    return move(message, slices, [](const Play& launch, const auto& table) { launch.copy(table, true); });
  }
  return with_number(type, [&](auto number) {
    using Number = decltype(number);
    return move(message, slices, [&](const Play& launch, const auto& table) {
      launch.gather_scaled<Number>(table, static_cast<typename Number::Wide>(factor));
    });
  });
}

EmulatedRun emulate_scatter(char* message, const std::vector<SliceOfMemory>& slices) {
  return move(message, slices, [](const Play& launch, const auto& table) { launch.copy(table, false); });
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
    Play{launched_warps(warps), memory}.scan_slices(table, warps, masks, flags.data() + first);
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
  const Play launch{launched_warps(run.chunks), memory};
  if (count != kBitmapsOfWidths) {
    launch.scan_units(units, scan_masks(element_bytes(type)), bitmaps.data(), bitmaps.data() + words);
  } else if (type == ElementType::kFloat32) {
    launch.scan_widths<WidthsOfFloat32>(units, bitmaps.data(), words);
  } else {
    launch.scan_widths<WidthsOfFloat64>(units, bitmaps.data(), words);
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
    const Play launch{warp_count(table) + kWarpsPerBlock, memory};
    if (words_per_slice == kWordsPerSample) {
      launch.sample_units(table, scan_masks(element_bytes(type)), of_table);
    } else if (type == ElementType::kFloat32) {
      launch.sample_widths<WidthsOfFloat32>(table, of_table);
    } else {
      launch.sample_widths<WidthsOfFloat64>(table, of_table);
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
      const Play launch{launched_warps(chunk_count(table)), memory};
      launch.pack<Number>(table, scaling_of<typename Number::Wide>(table));
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
    const AdditionOf<Number> addition{static_cast<typename Number::Wide>(factor),
                                      Number::round(adds_zero ? 0.0f : -0.0f)};
    const auto launch = [&](const auto& table) -> const char* {
      run.launches += 1;
      run.chunks += chunk_count(table);
      Play{launched_warps(chunk_count(table)), memory}.sum<Number>(table, addition);
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
