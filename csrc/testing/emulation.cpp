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

EmulatedRun emulate_unit_scan(const std::vector<UnitsOfMemory>& slices, ElementType type,
                              std::vector<uint32_t>& bitmaps) {
  CheckedMemory memory;
  for (const UnitsOfMemory& slice : slices) memory.allow(slice.address, slice.bytes);
  memory.seal();
  int64_t total = 0;
  for (const UnitsOfMemory& slice : slices) total += kBitmaps * words_of_bitmap(slice.count());
  // Behind the bitmaps a word that nobody may touch.
  bitmaps.assign(static_cast<size_t>(total + 1), 0);
  EmulatedRun run;
  for_each_units_table(slices.data(), slices.size(), [&](const auto& table) -> const char* {
    const int64_t portions = warp_count(table);
    run.launches += 1;
    run.chunks += portions;
    Play{launched_warps(portions), memory}.scan_units(table, scan_masks(element_bytes(type)), bitmaps.data());
    return nullptr;
  });
  if (bitmaps.back() != 0) throw std::logic_error("a bit past the bitmaps");
  bitmaps.pop_back();
  auto end = bitmaps.begin();
  for (const UnitsOfMemory& slice : slices) {
    const int64_t words = words_of_bitmap(slice.count()), unused = words * kUnitsPerWord - slice.count();
    for (int i = 0; i < kBitmaps; ++i) {
      end += words;
      for (int64_t bit = 0; bit < unused; ++bit) {
        if ((*(end - 1 - bit / kUnitsPerWord) >> (kUnitsPerWord - 1 - bit % kUnitsPerWord) & 1) != 0) {
          throw std::logic_error("a bit past the last unit");
        }
      }
    }
  }
  run.widest_word_bytes = memory.widest();
  run.sectors_loaded = memory.sectors_loaded();
  return run;
}

EmulatedRun emulate_unit_sample(const std::vector<UnitsOfMemory>& slices, ElementType type,
                                std::vector<uint32_t>& words) {
  CheckedMemory memory;
  for (const UnitsOfMemory& slice : slices) memory.allow(slice.address, slice.bytes);
  memory.seal();
  words.clear();
  constexpr size_t kWords = kWordsPerSample;
  EmulatedRun run;
  for_each_sample_table(slices.data(), slices.size(), [&](const auto& table, size_t first) -> const char* {
    if (first * kWords != words.size()) throw std::logic_error("a launch does not go on where the last ended");
    run.launches += 1;
    run.chunks += warp_count(table);
    // Behind the words one that nobody may touch.
    const size_t begin = words.size();
    words.resize(begin + static_cast<size_t>(table.count) * kWords + 1);
    uint32_t* const of_table = words.data() + begin;
    // More warps than the table has, as in blocks that are launched whole.
    const Play launch{warp_count(table) + kWarpsPerBlock, memory};
    launch.sample_units(table, scan_masks(element_bytes(type)), of_table);
    if (words.back() != 0) throw std::logic_error("a bit past the words");
    words.pop_back();
    return nullptr;
  });
  run.widest_word_bytes = memory.widest();
  run.sectors_loaded = memory.sectors_loaded();
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

EmulatedRun emulate_encode(const char* values, int64_t count, ElementType type, char* to, int64_t most_bytes,
                           int64_t& bytes) {
  CheckedMemory memory;
  memory.allow(values, count * element_bytes(type));
  memory.allow(to, most_bytes);
  memory.seal();
  const CodedMessage message{const_cast<char*>(values), to, 0, count, type};
  const Play launch{launched_warps(section_count(message)), memory};
  launch.code_sizes(message);
  uint32_t words[2];
  launch.code_sections(message, words);
  bytes = static_cast<int64_t>(words[0] | uint64_t{words[1]} << 32);
  if (memory.bytes_written() != static_cast<size_t>(bytes)) throw std::logic_error("some bytes were not written");
  return {2, 2 * section_count(message), memory.widest(), memory.sectors_loaded()};
}

EmulatedRun emulate_decode(const char* coded, int64_t bytes, int64_t count, ElementType type, char* to, bool adds,
                           uint32_t& wrong) {
  CheckedMemory memory;
  memory.allow(coded, bytes);
  memory.allow(to, count * element_bytes(type));
  memory.seal();
  const CodedMessage message{to, const_cast<char*>(coded), bytes, count, type};
  const Play launch{launched_warps(section_count(message)), memory};
  wrong = 0;
  launch.check_coded(message, &wrong);
  with_number(type, [&](auto number) { launch.decode<decltype(number)>(message, adds, &wrong); });
  const int64_t expected = wrong == 0 ? count * element_bytes(type) : 0;
  if (memory.bytes_written() != static_cast<size_t>(expected)) throw std::logic_error("not what should be written");
  return {2, 2 * section_count(message), memory.widest(), memory.sectors_loaded()};
}

}  // namespace ddp_hooks::cuda
