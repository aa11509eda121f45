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

// Each begins with a word, so that masks are put together by copying words.
size_t bits_of(const Units& units) {
  return words_of(units) * kBitsPerWord;
}

bool asks_widths(const Units& units) {
  return units.forms.front() != Width::kFull;
}

std::vector<size_t> parameters_of(const std::vector<DividedGradient>& gradients) {
  std::vector<size_t> parameters;
  for (const DividedGradient& gradient : gradients) parameters.push_back(gradient.parameter);
  return parameters;
}

// The sum of zeros of either sign depends on who adds it up; +0.0 is the same on every rank. A masked gradient may have
// a -0.0 in every row, so neighbours are written at once, with the few between them, which are zeros, too.
void make_zeros_positive(const DividedGradient& divided, const std::vector<uint32_t>& negative_zeros,
                         const UsageMask& used) {
  constexpr int64_t kMostBetween = 16;
  const SliceOfTensor& gradient = divided.gradient;
  const Units& units = divided.units;
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

bool UnitsOfStep::concerns(uint32_t bucket) const {
  const std::vector<ParameterSlice>& slices = step_.layout.buckets[bucket].slices;
  return std::any_of(slices.begin(), slices.end(),
                     [&](const ParameterSlice& slice) { return chosen_.parameters.test(slice.parameter); });
}

void UnitsOfStep::bucket_ready(uint32_t bucket, const at::Tensor& flat, const UsageMask& local,
                               const Settled& settled) {
  if (concerns(bucket)) pipeline_.add(bucket, scan(bucket, flat, local));
  pipeline_.advance(
      bucket, bucket + 1 == step_.layout.buckets.size(),
      [&](Bucket& scanned) {
        start_exchange(scanned,
                       detector_.capacity_words(scanned.index, parameters_of(scanned.gradients), scanned.bits));
      },
      [&](Bucket& first) { return try_settle(first, settled); });
}

UnitsOfStep::Bucket UnitsOfStep::scan(uint32_t index, const at::Tensor& flat, const UsageMask& local) {
  RECORD_FUNCTION("ddp_hooks::scan_units", std::vector<c10::IValue>());
  const BucketLayout& layout = step_.layout.buckets[index];
  Bucket bucket;
  bucket.index = index;
  for (const ParameterSlice& slice : layout.slices) {
    if (!chosen_.parameters.test(slice.parameter)) continue;
    DividedGradient divided{slice.parameter, {flat, slice.offset, slice.length}, detector_.units_of(slice, layout)};
    divided.units.first_bit = bucket.bits;
    // Where this rank has no gradient, the Reducer makes one of the view; in a view that it has filled there may be one
    // that .grad has lost since.
    const bool detached = step_.views.is_detached(slice.parameter);
    const bool has_gradient = step_.views.has_gradient(slice.parameter) || (!detached && local.test(slice.parameter));
    if (detached) {
      const at::Tensor gradient = step_.views.find_own_or_fill(slice.parameter);
      if (gradient.defined()) divided.gradient = {gradient, 0, slice.length};
    }
    if (chosen_.widths.test(slice.parameter)) divided.units.forms = layout.narrow_forms();
    bucket.scans.push_back(has_gradient ? start_scan(divided) : PendingUnitScan());
    bucket.bits += bits_of(divided.units);
    bucket.gradients.push_back(std::move(divided));
  }
  for (DividedGradient& divided : bucket.gradients) {
    for (size_t form = 0; form < divided.units.forms.size(); ++form) {
      if (divided.units.forms[form] == Width::kFull) continue;
      divided.units.first_inexact_bits[form] = bucket.bits;
      bucket.bits += bits_of(divided.units);
    }
  }
  return bucket;
}

PendingUnitScan UnitsOfStep::start_scan(const DividedGradient& divided) const {
  const int64_t length = divided.units.length;
  if (step_.views.is_as_autograd_left_it(divided.parameter)) {
    const std::vector<uint64_t> candidates =
        looked_up_.units_of(step_.views.parameter(divided.parameter), divided.gradient.flat, length);
    if (!candidates.empty()) {
      RECORD_FUNCTION("ddp_hooks::scan_looked_up", std::vector<c10::IValue>());
      return start_unit_scan(divided.gradient, length, candidates, asks_widths(divided.units));
    }
  }
  return start_unit_scan(divided.gradient, length, asks_widths(divided.units));
}

UsageMask UnitsOfStep::found_here(Bucket& bucket) {
  std::vector<uint64_t> words;
  words.reserve(UsageMask::word_count(bucket.bits));
  const auto add = [&](const std::vector<uint64_t>& found, const Units& units) {
    words.insert(words.end(), found.begin(), found.end());
    words.resize(words.size() + words_of(units) - found.size(), 0);
  };
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    add(bucket.scans[i].wait().nonzero, bucket.gradients[i].units);
  }
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const Units& units = bucket.gradients[i].units;
    for (size_t form = 0; form < units.forms.size(); ++form) {
      if (units.forms[form] != Width::kFull) add(bucket.scans[i].wait().inexact[form], units);
    }
  }
  return {bucket.bits, std::move(words)};
}

void UnitsOfStep::start_exchange(Bucket& bucket, size_t capacity_words) {
  UsageMask here = found_here(bucket);
  bucket.used_here.clear();
  for (const DividedGradient& gradient : bucket.gradients) bucket.used_here.push_back(count_in(gradient.units, here));
  bucket.capacity_words = capacity_words;
  bucket.exchange = step_.agreement.start_exchange_of_units(std::move(here), capacity_words, step_.layout_hash,
                                                            units_phase(bucket.index));
}

// False if the masks did not fit; then an exchange with room for any is under way.
bool UnitsOfStep::try_settle(Bucket& bucket, const Settled& settled) {
  const UsageMask anywhere = step_.agreement.wait(*bucket.exchange);
  const size_t needed = bucket.exchange->needed_words();
  if (needed > bucket.capacity_words) {
    start_exchange(bucket, most_words(bucket.bits));
    return false;
  }
  detector_.note_needed_words(bucket.index, parameters_of(bucket.gradients), bucket.bits, needed);
  const Contributors& who = bucket.exchange->contributors();
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const DividedGradient& divided = bucket.gradients[i];
    make_zeros_positive(divided, bucket.scans[i].wait().negative_zeros, anywhere);
    UnitCounts& counts = counts_.emplace_back();
    counts.parameter = divided.parameter;
    counts.units = divided.units.count();
    counts.here = bucket.used_here[i];
    counts.anywhere = count_in(divided.units, anywhere);
    counts.narrow = count_narrow(divided.units, anywhere);
    for (const UsageMask& mask : who.by_rank()) counts.by_rank.push_back(count_in(divided.units, mask));
  }
  const std::vector<SentElements> sent = settled({bucket.index, bucket.gradients, anywhere, who});
  for (size_t i = 0; i < bucket.gradients.size(); ++i) {
    const DividedGradient& divided = bucket.gradients[i];
    detector_.observe(divided.parameter, step_number_, divided.units.slice_length, sent[i]);
  }
  return true;
}

}  // namespace ddp_hooks
