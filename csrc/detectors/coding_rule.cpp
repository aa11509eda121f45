#include "detectors/coding_rule.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ddp_hooks {
namespace {

constexpr size_t kScale = 64;  // a word for each
// As long as it pays, and no longer.
constexpr int64_t kStepsAfterPay = 1;
// Before anything was coded. What most gradients take, less than what is too much.
constexpr CodedParts kHoped{0.75, 0.75};
// Whoever always codes does so whatever that saves.
constexpr double kMostIfAlways = 0.875;

void set_scale(std::vector<uint64_t>& words, int64_t before, int64_t after) {
  uint64_t scale = 0;
  for (size_t i = 0; i < kScale; ++i) {
    if (after * static_cast<int64_t>(kScale) > before * static_cast<int64_t>(i)) scale |= uint64_t{1} << i;
  }
  words.push_back(before == 0 ? 0 : scale);
}

AdaptiveSettings with_least_saving(AdaptiveSettings adaptive, double saving) {
  adaptive.min_zero_fraction = saving;
  return adaptive;
}

// 0 where nobody told anything.
double read_scale(uint64_t scale) {
  size_t set = 0;
  for (; set < kScale && (scale >> set & 1) != 0; ++set) {
  }
  return static_cast<double>(set) / kScale;
}

}  // namespace

CodingRule::CodingRule(const CodingSettings& settings, const AdaptiveSettings& adaptive, int world_size)
    : settings_(settings),
      world_size_(world_size),
      rule_(with_least_saving(adaptive, settings.least_saving), kStepsAfterPay, false),
      expected_(kHoped) {}

UsageMask CodingRule::tell(UsageMask mask, const StepInFlight::CodedBytes* last) const {
  if (is_off()) return mask;
  std::vector<uint64_t> words = mask.words();
  const StepInFlight::CodedBytes nothing;
  const StepInFlight::CodedBytes& coded = last == nullptr ? nothing : *last;
  set_scale(words, coded.contribution_bytes, coded.coded_contribution_bytes);
  set_scale(words, coded.sum_bytes, coded.coded_sum_bytes);
  const size_t bits = words.size() * kScale;
  return {bits, std::move(words)};
}

std::optional<CodedParts> CodingRule::choose(int64_t step, const UsageMask& told) {
  if (is_off()) return std::nullopt;
  if (const std::vector<uint64_t>& words = told.words(); words.size() >= 2) {
    const double contribution = read_scale(words[words.size() - 2]), sum = read_scale(words.back());
    if (contribution > 0) expected_.contribution = contribution;
    if (sum > 0) expected_.sum = sum;
    if (contribution > 0) {
      const double taken = world_size_ == 2 || sum == 0 ? contribution : (contribution + sum) / 2;
      rule_.observe(step - 1, 1 - taken, 1);
    }
  }
  if (settings_.coded == When::kOn) {
    return CodedParts{std::min(expected_.contribution, kMostIfAlways), std::min(expected_.sum, kMostIfAlways)};
  }
  if (!rule_.is_due(step)) return std::nullopt;
  if (!rule_.is_on()) expected_ = kHoped;
  return expected_;
}

}  // namespace ddp_hooks
