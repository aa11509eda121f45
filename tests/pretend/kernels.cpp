// The hook's kernels on the pretended device: their emulation, put on the stream as one launch each, and the copy of
// what a scan found to the host as another piece of work. As launches do, they take their tables with them.

#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "costs.h"
#include "counts.h"
#include "memory.h"
#include "queues.h"
#include "testing/emulation.h"

namespace pretend {
namespace {

std::atomic<bool> copies_are_left_out{false};

using namespace ddp_hooks;        // NOLINT: what is played
using namespace ddp_hooks::cuda;  // NOLINT

void put(StreamHandle stream, const char* name, const std::vector<Use>& uses, std::function<void()> act) {
  ++Counts::get().launches;
  const auto run = [act = std::move(act)] {
    act();
    return true;
  };
  put_work(reinterpret_cast<intptr_t>(stream), name, uses, run, Costs::get().of_kernel(uses));
}

std::vector<Use> uses_of(const SliceOfMemory* slices, size_t count, bool writes) {
  std::vector<Use> uses;
  for (size_t i = 0; i < count; ++i) uses.push_back({slices[i].address, slices[i].bytes, writes});
  return uses;
}

// Of slices and of the message that they lie in one after the other.
std::vector<Use> uses_with_message(const SliceOfMemory* slices, size_t count, const void* message, bool to_message) {
  std::vector<Use> uses = uses_of(slices, count, !to_message);
  int64_t bytes = 0;
  for (const Use& use : uses) bytes += use.bytes;
  uses.push_back({message, bytes, to_message});
  return uses;
}

// The words that a kernel sets are copied to the host by a piece of work of their own.
void put_with_answer(StreamHandle stream, const char* name, std::vector<Use> uses, uint32_t* on_device,
                     uint32_t* on_host, size_t count, std::function<void(std::vector<uint32_t>&)> act) {
  // Who reads them before their turn reads nothing that makes sense.
  std::memset(on_host, 0xff, count * sizeof(uint32_t));
  const auto bytes = static_cast<int64_t>(count * sizeof(uint32_t));
  uses.push_back({on_device, bytes, true});
  put(stream, name, uses, [on_device, count, act = std::move(act)] {
    std::vector<uint32_t> words;
    act(words);
    if (words.size() != count) throw std::logic_error("pretend: a kernel answers in another number of words");
    std::memcpy(on_device, words.data(), count * sizeof(uint32_t));
  });
  put(stream, "an answer's copy", {{on_device, bytes, false}, {on_host, bytes, true}},
      [on_device, on_host, count] { std::memcpy(on_host, on_device, count * sizeof(uint32_t)); });
}

const char* play_gather_scaled(void* message, const SliceOfMemory* slices, size_t count, ElementType type,
                               double factor, StreamHandle stream) {
  put(stream, "gather", uses_with_message(slices, count, message, true),
      [message, all = std::vector<SliceOfMemory>(slices, slices + count), type, factor] {
        if (copies_are_left_out) return;
        emulate_gather_scaled(static_cast<char*>(message), all, type, factor);
      });
  return nullptr;
}

const char* play_scatter(const void* message, const SliceOfMemory* slices, size_t count, StreamHandle stream) {
  auto* const from = static_cast<char*>(const_cast<void*>(message));  // which is not written
  put(stream, "scatter", uses_with_message(slices, count, message, false),
      [from, all = std::vector<SliceOfMemory>(slices, slices + count)] {
        if (!copies_are_left_out) emulate_scatter(from, all);
      });
  return nullptr;
}

const char* play_unit_scan(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_bitmaps,
                           uint32_t* host_bitmaps, StreamHandle stream) {
  size_t words = 0;
  std::vector<Use> uses;
  for (size_t i = 0; i < count; ++i) {
    words += static_cast<size_t>(kBitmaps * words_of_bitmap(slices[i].count()));
    uses.push_back({slices[i].address, slices[i].bytes, false});
  }
  put_with_answer(stream, "a scan of units", std::move(uses), device_bitmaps, host_bitmaps, words,
                  [all = std::vector<UnitsOfMemory>(slices, slices + count), type](std::vector<uint32_t>& bitmaps) {
                    emulate_unit_scan(all, type, bitmaps);
                  });
  return nullptr;
}

const char* play_unit_sample(const UnitsOfMemory* slices, size_t count, ElementType type, uint32_t* device_words,
                             uint32_t* host_words, StreamHandle stream) {
  const auto words = count * static_cast<size_t>(kWordsPerSample);
  std::vector<Use> uses;
  for (size_t i = 0; i < count; ++i) uses.push_back({slices[i].address, slices[i].bytes, false});
  put_with_answer(stream, "a sample", std::move(uses), device_words, host_words, words,
                  [all = std::vector<UnitsOfMemory>(slices, slices + count), type](std::vector<uint32_t>& found) {
                    emulate_unit_sample(all, type, found);
                  });
  return nullptr;
}

const char* play_sum_terms(const char* packed, const SliceToSum* slices, size_t count, ElementType type, double factor,
                           bool adds_zero, StreamHandle stream) {
  // With its terms, which the caller may let go of.
  struct Sum {
    SliceToSum slice;
    std::vector<Contribution> terms;
  };
  std::vector<Sum> sums;
  std::vector<Use> uses;
  int64_t packed_bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    const SliceToSum& slice = slices[i];
    sums.push_back({slice, {slice.terms, slice.terms + slice.count}});
    uses.push_back({slice.address, slice.bytes, true});
    for (const Contribution& term : sums.back().terms) {
      if (!term.own) packed_bytes = std::max(packed_bytes, term.offset + slice.bytes);
    }
  }
  uses.push_back({packed, packed_bytes, false});
  put(stream, "sum", uses, [packed, packed_bytes, sums = std::move(sums), type, factor, adds_zero] {
    std::vector<SliceToSum> all;
    for (const Sum& sum : sums) {
      all.push_back(sum.slice);
      all.back().terms = sum.terms.data();
    }
    emulate_sum_terms(packed, packed_bytes, all, type, factor, adds_zero);
  });
  return nullptr;
}

}  // namespace

const DeviceKernels& kernels() {
  static const DeviceKernels all{.backends = {"pretend"},
                                 .gather_scaled = play_gather_scaled,
                                 .scatter = play_scatter,
                                 .unit_scan = play_unit_scan,
                                 .unit_sample = play_unit_sample,
                                 .sum_terms = play_sum_terms,
                                 .is_capturing = [](StreamHandle /*stream*/) { return false; }};
  return all;
}

void leave_out_copies() {
  copies_are_left_out = true;
}

}  // namespace pretend
