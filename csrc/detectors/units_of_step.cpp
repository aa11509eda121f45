#include "detectors/units_of_step.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "agreement/mask_codec.h"

namespace ddp_hooks {
namespace {

constexpr size_t kBitsPerWord = 64;

size_t words_of(const Units& units) {
  return UsageMask::word_count(static_cast<size_t>(units.count()));
}

// Each divided parameter begins with a word, so that masks are put together by copying words.
size_t bits_of(const Units& units) {
  return words_of(units) * kBitsPerWord;
}

// The sum of zeros of either sign depends on who adds it up; +0.0 is the same on every rank. A masked gradient may have
// a -0.0 in every row, so neighbours are written at once, with the few between them, which are zeros, too.
void make_zeros_positive(const GradientInUnits& in_units, const std::vector<uint32_t>& negative_zeros,
                         const UsageMask& used) {
  constexpr int64_t kMostBetween = 16;
  const SliceOfTensor& gradient = in_units.gradient;
  const Units& units = in_units.units;
  const auto is_used = [&](int64_t unit) { return used.test(units.first_bit + static_cast<size_t>(unit)); };
  int64_t begin = 0, end = 0;  // units to be written
  const auto write = [&] {
    if (begin == end) return;
    const int64_t first = units.begin(begin);
    gradient.flat.narrow(0, gradient.offset + first, units.end(end - 1) - first).zero_();
  };
  for (const int64_t unit : negative_zeros) {
    if (is_used(unit)) continue;
    bool joins = begin < end && unit - end <= kMostBetween;
    for (int64_t between = end; joins && between < unit; ++between) joins = !is_used(between);
    if (!joins) {
      write();
      begin = unit;
    }
    end = unit + 1;
  }
  write();
}

}  // namespace

const UnitScanResult& UnitsOfStep::Bucket::result(size_t gradient) {
  static const UnitScanResult kNothing;
  return results[gradient] ? scan.wait()[*results[gradient]] : kNothing;
}

std::vector<size_t> UnitsOfStep::Bucket::parameters() const {
  std::vector<size_t> parameters;
  for (const GradientInUnits& gradient : gradients) parameters.push_back(gradient.parameter);
  return parameters;
}

bool UnitsOfStep::concerns(uint32_t bucket) const {
  const std::vector<ParameterSlice>& slices = step_.layout.buckets[bucket].slices;
  return chosen_.whole || std::any_of(slices.begin(), slices.end(), [&](const ParameterSlice& slice) {
           return chosen_.divided.test(slice.parameter);
         });
}

bool UnitsOfStep::is_chosen(const ParameterSlice& slice, const UsageMask& agreed) const {
  return chosen_.divided.test(slice.parameter) || (chosen_.whole && slice.length > 0 && agreed.test(slice.parameter));
}

// Starts exchanges as soon as scans have answered. The first buckets are settled at once, later ones a bucket later,
// and all of them at the end if ranks use different parameters (bucket_pipeline.h).
void UnitsOfStep::advance(uint32_t ready, UsageMask& local, UsageMask& agreed, const Settled& settled) {
  pipeline_.advance(
      ready, ready + 1 == step_.layout.buckets.size(),
      [&](Bucket& scanned) {
        if (scanned.gradients.empty()) return;
        start_exchange(scanned, detector_.capacity_words(scanned.index, scanned.parameters(), scanned.bits), local);
      },
      [&](Bucket& first) { return try_settle(first, local, agreed, settled); });
}

void UnitsOfStep::scan(uint32_t index, uint32_t ready, const at::Tensor& flat, const UsageMask& local,
                       const UsageMask& agreed) {
  RECORD_FUNCTION("ddp_hooks::scan_units", std::vector<c10::IValue>());
  const BucketLayout& layout = step_.layout.buckets[index];
  Bucket bucket;
  bucket.index = index;
  std::vector<UnitsToScan> scans;
  for (const ParameterSlice& slice : layout.slices) {
    if (layout.sparse || !is_chosen(slice, agreed)) continue;
    const size_t parameter = slice.parameter;
    GradientInUnits gradient{parameter, slice.offset, {flat, slice.offset, slice.length}, {slice.length, slice.length}};
    gradient.is_divided = chosen_.divided.test(parameter);
    if (gradient.is_divided) gradient.units = detector_.units_of(slice, layout);
    // In a view that the Reducer has filled there may be a gradient that .grad has lost since.
    const bool detached = step_.views.is_detached(parameter);
    const bool has_gradient =
        !step_.shadow && (step_.views.has_gradient(parameter) || (!detached && local.test(parameter)));
    // A divided gradient is .grad itself, to be written to; or, if others share its memory or this rank has none, the
    // filled view, which the Reducer copies into .grad.
    at::Tensor elsewhere;
    if (detached && gradient.is_divided && !step_.shadow) {
      elsewhere = step_.views.find_own_or_fill(parameter);
    } else if (detached && has_gradient) {
      elsewhere = step_.views.find_or_fill(parameter);
    }
    if (elsewhere.defined()) gradient.gradient = {elsewhere, 0, slice.length};
    bucket.results.push_back(has_gradient ? std::make_optional(scans.size()) : std::nullopt);
    if (has_gradient) scans.push_back(to_scan(gradient));
    bucket.gradients.push_back(std::move(gradient));
  }
  bucket.scan = start_unit_scan(std::move(scans));
  place_bits(bucket);
  pipeline_.add(index, ready, std::move(bucket));
}

void UnitsOfStep::place_bits(Bucket& bucket) const {
  for (GradientInUnits& gradient : bucket.gradients) {
    if (!gradient.is_divided) gradient.units.first_bit = bucket.bits++;
  }
  bucket.bits = UsageMask::word_count(bucket.bits) * kBitsPerWord;
  for (GradientInUnits& gradient : bucket.gradients) {
    if (!gradient.is_divided) continue;
    gradient.units.first_bit = bucket.bits;
    bucket.bits += bits_of(gradient.units);
  }
}

UnitsToScan UnitsOfStep::to_scan(const GradientInUnits& gradient) const {
  UnitsToScan scan{gradient.gradient, gradient.units.length, std::nullopt};
  if (gradient.is_divided && step_.views.is_as_autograd_left_it(gradient.parameter)) {
    std::vector<uint64_t> candidates =
        looked_up_.units_of(step_.views.parameter(gradient.parameter), gradient.gradient.flat, gradient.units.length);
    if (!candidates.empty()) scan.candidates = std::move(candidates);
  }
  return scan;
}

UsageMask UnitsOfStep::found_here(Bucket& bucket) const {
  std::vector<uint64_t> words(UsageMask::word_count(bucket.bits), 0);
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const Units& units = bucket.gradients[i].units;
    const UnitScanResult& result = bucket.result(i);
    if (!bucket.gradients[i].is_divided) {
      const uint64_t found = result.nonzero.empty() ? 0 : result.nonzero.front() & 1;
      words[units.first_bit / kBitsPerWord] |= found << (units.first_bit % kBitsPerWord);
      continue;
    }
    std::copy(result.nonzero.begin(), result.nonzero.end(),
              words.begin() + static_cast<std::ptrdiff_t>(units.first_bit / kBitsPerWord));
  }
  return {bucket.bits, std::move(words)};
}

void UnitsOfStep::start_exchange(Bucket& bucket, size_t capacity_words, UsageMask& local) {
  UsageMask here = found_here(bucket);
  bucket.used_here.clear();
  for (const GradientInUnits& gradient : bucket.gradients) {
    bucket.used_here.push_back(count_in(gradient.units, here));
    if (!gradient.is_divided && bucket.used_here.back() == 0) local.clear(gradient.parameter);
  }
  bucket.capacity_words = capacity_words;
  bucket.exchange = step_.agreement.start_exchange_of_units(std::move(here), capacity_words, step_.layout_hash,
                                                            units_phase(bucket.index));
}

// False if the masks did not fit; then an exchange with room for any is under way.
bool UnitsOfStep::try_settle(Bucket& bucket, UsageMask& local, UsageMask& agreed, const Settled& settled) {
  if (!bucket.exchange) {
    settled({bucket.index, bucket.gradients, UsageMask(), Contributors()});
    return true;
  }
  const UsageMask anywhere = step_.agreement.wait(*bucket.exchange);
  const size_t needed = bucket.exchange->needed_words();
  if (needed > bucket.capacity_words) {
    start_exchange(bucket, most_words(bucket.bits), local);
    return false;
  }
  detector_.note_needed_words(bucket.index, bucket.parameters(), bucket.bits, needed);
  const Contributors& who = bucket.exchange->contributors();
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const GradientInUnits& gradient = bucket.gradients[i];
    make_zeros_positive(gradient, bucket.result(i).negative_zeros, anywhere);
    if (gradient.is_divided) {
      count(bucket, i, anywhere, who);
    } else {
      settle_whole(gradient, anywhere.test(gradient.units.first_bit), agreed);
    }
  }
  const std::vector<double> sent = settled({bucket.index, bucket.gradients, anywhere, who});
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const GradientInUnits& gradient = bucket.gradients[i];
    if (!gradient.is_divided) continue;
    detector_.observe(gradient.parameter, step_number_, gradient.units.slice_length, sent[i]);
  }
  return true;
}

void UnitsOfStep::settle_whole(const GradientInUnits& gradient, bool is_used, UsageMask& agreed) {
  const int64_t bytes = gradient.gradient.length * gradient.gradient.flat.element_size();
  whole_bytes_ += bytes;
  if (is_used) return;
  zero_bytes_ += bytes;
  agreed.clear(gradient.parameter);
  BucketViews& views = step_.views;
  if (views.is_detached(gradient.parameter) && !views.has_gradient(gradient.parameter)) views.fill(gradient.parameter);
}

void UnitsOfStep::count(const Bucket& bucket, size_t index, const UsageMask& anywhere, const Contributors& who) {
  const GradientInUnits& gradient = bucket.gradients[index];
  UnitCounts& counts = counts_.emplace_back();
  counts.parameter = gradient.parameter;
  counts.units = gradient.units.count();
  counts.here = bucket.used_here[index];
  counts.anywhere = count_in(gradient.units, anywhere);
  if (who.by_rank().size() == static_cast<size_t>(step_.agreement.world_size())) {
    for (const UsageMask& mask : who.by_rank()) counts.by_rank.push_back(count_in(gradient.units, mask));
  }
}

}  // namespace ddp_hooks
