// Times usage_mask, mask_codec and reduction_plan of csrc/ by themselves, without Python: their operations take nanoseconds,
// and a call through a binding takes longer than most of them. micro.py compiles and runs this; every line printed is a
// JSON row with the seconds of one call in each round, beside those of a baseline measured in the same round.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "agreement/mask_codec.h"
#include "layout/hash.h"
#include "layout/usage_mask.h"
#include "plan/plan_cache.h"
#include "plan/reduction_plan.h"

using namespace ddp_hooks;

namespace {

constexpr double kBatchSeconds = 50e-6;  // long enough for the clock, short enough to fit between two interruptions

// The compiler must believe that somebody looks at what a pointer points to.
void keep(const void* pointer) {
  asm volatile("" : : "g"(pointer) : "memory");
}

double seconds_of(const std::function<void()>& call, long calls) {
  const auto start = std::chrono::steady_clock::now();
  for (long i = 0; i < calls; ++i) call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

long batch_size(const std::function<void()>& call) {
  long calls = 1;
  while (seconds_of(call, calls) < kBatchSeconds && calls < (1L << 24)) calls *= 2;
  return calls;
}

void print_samples(const char* name, const std::vector<double>& samples) {
  std::printf(", \"%s\": [", name);
  for (size_t i = 0; i < samples.size(); ++i) std::printf("%s%.6g", i == 0 ? "" : ", ", samples[i]);
  std::printf("]");
}

// `fields` are JSON members that say what was measured.
void compare(const std::string& fields, const std::function<void()>& call, const char* baseline_name,
             const std::function<void()>& baseline, bool correct, int rounds) {
  const long calls = batch_size(call), baseline_calls = batch_size(baseline);
  std::vector<double> samples, baseline_samples;
  for (int round = 0; round < rounds; ++round) {
    baseline_samples.push_back(seconds_of(baseline, baseline_calls) / baseline_calls);
    samples.push_back(seconds_of(call, calls) / calls);
  }
  std::printf("{%s, \"calls_per_round\": %ld, \"baseline\": \"%s\", \"correct\": %s", fields.c_str(), calls,
              baseline_name, correct ? "true" : "false");
  print_samples("samples", samples);
  print_samples("baseline_samples", baseline_samples);
  std::printf("}\n");
}

std::vector<bool> draw(size_t parameters, double used, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<bool> drawn(parameters);
  for (size_t i = 0; i < parameters; ++i) drawn[i] = generator() < used * 4294967296.0;
  return drawn;
}

UsageMask mask_of(const std::vector<bool>& used) {
  UsageMask mask(used.size());
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) mask.set(i);
  }
  return mask;
}

void time_masks(size_t parameters, int rounds) {
  const std::vector<bool> ours = draw(parameters, 0.5, 1), theirs = draw(parameters, 0.5, 2);
  const UsageMask mine = mask_of(ours), other = mask_of(theirs);
  bool merges = true, encodes = true;
  size_t used = 0;
  UsageMask merged = mine;
  merged.merge(other);
  for (size_t i = 0; i < parameters; ++i) {
    merges = merges && merged.test(i) == (ours[i] || theirs[i]);
    used += ours[i];
  }
  const std::vector<uint64_t>& words = mine.words();
  std::vector<uint64_t> copy(words.size()), message(6 + words.size());
  const auto copy_words = [&] {
    std::memcpy(copy.data(), words.data(), words.size() * sizeof(uint64_t));
    keep(copy.data());
  };
  // As MaskExchange::start does it: three header words with their complements, one a hash of the mask, then the words.
  const auto encode = [&] {
    const uint64_t header[] = {7, 8, mine.hash()};
    for (size_t i = 0; i < 3; ++i) {
      message[2 * i] = header[i];
      message[2 * i + 1] = ~header[i];
    }
    std::memcpy(message.data() + 6, words.data(), words.size() * sizeof(uint64_t));
    keep(message.data());
  };
  encode();
  const auto decode = [&] { return UsageMask(parameters, std::vector<uint64_t>(message.begin() + 6, message.end())); };
  encodes = decode() == mine;
  UsageMask target(parameters);
  const auto row = [&](const char* operation, const std::function<void()>& call, bool correct) {
    const std::string fields =
        "\"operation\": \"" + std::string(operation) + "\", \"parameters\": " + std::to_string(parameters);
    compare(fields, call, "memcpy of the words", copy_words, correct, rounds);
  };
  row(
      "set every second bit",
      [&] {
        for (size_t i = 0; i < parameters; i += 2) target.set(i);
        keep(target.words().data());
      },
      [&] {
        UsageMask fresh(parameters);
        for (size_t i = 0; i < parameters; i += 2) fresh.set(i);
        return fresh.count() == (parameters + 1) / 2;
      }());
  row("merge (OR)", [&] { keep((merged.merge(other), merged.words().data())); }, merges);
  row(
      "count",
      [&] {
        const size_t count = mine.count();
        keep(&count);
      },
      mine.count() == used);
  row("encode", encode, encodes);
  row(
      "decode",
      [&] {
        const UsageMask decoded = decode();
        keep(decoded.words().data());
      },
      encodes);
}

// Ranges of 1 to 1,000 units, a hundredth of all together.
UsageMask clusters(size_t units) {
  std::mt19937 generator(4);
  UsageMask mask(units);
  for (size_t set = 0; set < units / 100;) {
    const size_t begin = generator() % units, length = 1 + generator() % 1'000;
    mask.set_range(begin, std::min(units, begin + length));
    set += length;
  }
  return mask;
}

void time_codec(const std::string& pattern, const UsageMask& mask, int rounds) {
  static const char* const kForms[] = {"none", "bitmap", "runs"};
  const std::vector<uint64_t> sent = compress(mask);
  std::vector<uint64_t> copy(mask.words().size());
  UsageMask received(mask.size()), merged(mask.size());
  merge_compressed(sent, received);
  const bool correct = received == mask;
  const std::string fields = "\"units\": " + std::to_string(mask.size()) + ", \"pattern\": \"" + pattern +
                             "\", \"set\": " + std::to_string(mask.count()) + ", \"form\": \"" +
                             kForms[sent[0] & 0xff] + "\", \"bytes\": " + std::to_string(8 * sent.size()) +
                             ", \"bitmap_bytes\": " + std::to_string(8 * mask.words().size());
  compare(
      "\"operation\": \"encode\", " + fields,
      [&] {
        const std::vector<uint64_t> words = compress(mask);
        keep(words.data());
      },
      "memcpy of the bitmap",
      [&] {
        std::memcpy(copy.data(), mask.words().data(), copy.size() * sizeof(uint64_t));
        keep(copy.data());
      },
      correct, rounds);
  compare(
      "\"operation\": \"decode\", " + fields,
      [&] { keep((merge_compressed(sent, received), received.words().data())); }, "merge of the bitmap",
      [&] { keep((merged.merge(mask), merged.words().data())); }, correct, rounds);
}

// As in a transformer: as many vectors (4 KiB) as matrices (256 KiB), one after the other, in buckets of a size.
LayoutOfBuckets layout_of(size_t parameters, int64_t bucket_bytes) {
  LayoutOfBuckets layout;
  layout.parameter_count = parameters;
  for (size_t i = 0; i < parameters; ++i) {
    if (layout.buckets.empty() || layout.buckets.back().bytes() >= bucket_bytes) {
      layout.buckets.emplace_back();
      layout.buckets.back().element_bytes = 4;
    }
    BucketLayout& bucket = layout.buckets.back();
    const int64_t length = i % 2 == 0 ? 1 << 10 : 1 << 16;
    bucket.slices.push_back({static_cast<uint32_t>(i), bucket.numel, length});
    bucket.numel += length;
  }
  return layout;
}

int64_t used_elements(const LayoutOfBuckets& layout, const UsageMask& agreed) {
  int64_t elements = 0;
  for (const BucketLayout& bucket : layout.buckets) {
    for (const ParameterSlice& slice : bucket.slices) {
      if (agreed.test(slice.parameter)) elements += slice.length;
    }
  }
  return elements;
}

// Whether the plan sends as much as is used, and gaps within their bound.
bool covers(const ReductionPlan& plan, const LayoutOfBuckets& layout, const UsageMask& agreed) {
  int64_t sent = 0, gaps = 0;
  for (const BucketPlan& bucket : plan.buckets) {
    for (const Message& message : bucket.launches) {
      for (const Stretch& stretch : message.stretches) sent += stretch.length;
      for (const Stretch& gap : message.gaps) gaps += gap.length;
    }
  }
  const int64_t used = used_elements(layout, agreed);
  return sent - gaps == used && gaps * 128 <= used;
}

void time_plans(size_t parameters, int64_t bucket_mib, double used, int rounds) {
  const PlanSettings settings{.in_place_bytes = 1 << 20, .pack_bytes = 4 << 20};  // the presets'
  const LayoutOfBuckets layout = layout_of(parameters, bucket_mib << 20);
  const UsageMask agreed = mask_of(draw(parameters, used, 3));
  const UsageMask nothing(parameters);  // is agreed on by units
  const auto plan = std::make_shared<const ReductionPlan>(make_reduction_plan(layout, agreed, nothing, {}, settings));
  size_t messages = 0;
  for (const BucketPlan& bucket : plan->buckets) messages += bucket.launches.size();
  PlanCache cache(64);
  for (unsigned i = 0; i < 63; ++i) cache.insert({mask_of(draw(parameters, 0.5, 100 + i)), nothing, {}, {}}, plan);
  const PlanCache::Key key{agreed, nothing, {}, {}};
  cache.insert(key, plan);
  const auto walk = [&] {
    const int64_t elements = used_elements(layout, agreed);
    keep(&elements);
  };
  const auto row = [&](const char* operation, const std::function<void()>& call, bool correct) {
    const std::string fields =
        "\"operation\": \"" + std::string(operation) + "\", \"parameters\": " + std::to_string(parameters) +
        ", \"bucket_mib\": " + std::to_string(bucket_mib) +
        ", \"fraction_used\": " + std::to_string(used).substr(0, 4) +
        ", \"buckets\": " + std::to_string(layout.buckets.size()) + ", \"messages\": " + std::to_string(messages);
    compare(fields, call, "summing the used slices", walk, correct, rounds);
  };
  row(
      "make",
      [&] {
        const ReductionPlan made = make_reduction_plan(layout, agreed, nothing, {}, settings);
        keep(made.buckets.data());
      },
      covers(*plan, layout, agreed));
  row(
      "cache hit",
      [&] {
        const auto found = cache.find(key);
        keep(found.get());
      },
      cache.find(key) == plan && cache.find({nothing, nothing, {}, {}}) == nullptr);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string part = count > 1 ? arguments[1] : "";
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 0;
  if ((part != "mask" && part != "mask_codec" && part != "plan") || rounds < 1) {
    std::fprintf(stderr, "expected: mask|mask_codec|plan <rounds>\n");
    return 2;
  }
  if (part == "mask_codec") {
    for (size_t units = 1'000; units <= 10'000'000; units *= 10) {
      for (const char* const density : {"1e-4", "1e-3", "1e-2", "0.1", "0.4", "0.9"}) {
        time_codec(density, mask_of(draw(units, std::atof(density), 5)), rounds);
      }
      time_codec("clustered", clusters(units), rounds);
      time_codec("all", UsageMask(units, true), rounds);
    }
    // 64 MiB of bits: whether it stays linear.
    const size_t most = size_t{64} << 23;
    const int few = std::min(rounds, 3);
    for (const char* const density : {"1e-4", "1e-2"}) {
      time_codec(density, mask_of(draw(most, std::atof(density), 5)), few);
    }
    time_codec("clustered", clusters(most), few);
    return 0;
  }
  for (const size_t parameters : {100, 1'000, 10'000, 100'000}) {
    if (part == "mask") {
      time_masks(parameters, rounds);
      continue;
    }
    for (const int64_t bucket_mib : {1, 25}) {
      for (const double used : {0.1, 0.5, 1.0}) time_plans(parameters, bucket_mib, used, rounds);
    }
  }
  return 0;
}
