#include "agreement/usage_agreement.h"

#include <ATen/record_function.h>

#include <utility>

#include "agreement/stopwatch.h"

namespace ddp_hooks {

UsageAgreement::UsageAgreement(const ReducerView& reducer, const UnusedParameters& unused, size_t parameters,
                               std::shared_ptr<const ControlGroups> groups, const AgreementSettings& settings,
                               Objections objections, ExchangeStatistics& statistics)
    : reducer_(reducer),
      unused_(unused),
      settings_(settings),
      objections_(std::move(objections)),
      statistics_(statistics),
      reduced_count_(reducer.parameters().size()),
      joined_bit_(parameters),
      exchange_(std::move(groups)) {}

bool UsageAgreement::exchanges() const {
  const bool has_unmanaged_parameters = joined_bit_ > reduced_count_;
  return exchange_.world_size() > 1 && (settings_.skip_unused || has_unmanaged_parameters);
}

UsageMask UsageAgreement::everything() const {
  UsageMask usage = nothing();
  for (size_t i = 0; i < reduced_count_; ++i) usage.set(i);
  return usage;
}

UsageMask UsageAgreement::local_usage() const {
  UsageMask usage = everything();
  if (settings_.skip_unused) reducer_.clear_unused(usage);
  // Where the Reducer searches the graph, it knows better than what was frozen or declared.
  if (settings_.skip_unused && !reducer_.searches_graph()) {
    for (size_t i = 0; i < reduced_count_; ++i) {
      if (unused_.has_nothing_to_send(i)) usage.clear(i);
    }
  }
  for (size_t i = reduced_count_; i < joined_bit_; ++i) {
    if (!unused_.has_nothing_to_send(i)) usage.set(i);
  }
  return usage;
}

void UsageAgreement::start(uint64_t layout) {
  early_ = start_usage_exchange(local_usage(), false, layout);
}

void UsageAgreement::finish(uint64_t layout, int64_t started) {
  if (early_error_) std::rethrow_exception(std::exchange(early_error_, nullptr));
  while (early_ || started_ < started) {
    if (!early_) early_ = start_usage_exchange(nothing(), true, layout);
    std::unique_ptr<PendingExchange>(std::move(early_))->wait();
  }
}

AskedUsage UsageAgreement::ask(bool shadow, uint64_t layout) {
  AskedUsage asked{nothing(), std::move(early_), shadow};
  if (early_error_) std::rethrow_exception(std::exchange(early_error_, nullptr));
  if (shadow) {
    asked.here.set(joined_bit_);
  } else {
    asked.here = local_usage();
  }
  if (exchanges() && !asked.exchange) asked.exchange = start_usage_exchange(asked.here, shadow, layout);
  return asked;
}

AgreedUsage UsageAgreement::agree(AskedUsage asked) {
  const auto& [here, exchange, shadow] = asked;
  AgreedUsage usage;
  usage.here = here;
  if (!exchange) {
    // A joined rank takes part in what the others send, and they then send everything.
    usage.anywhere = shadow ? everything() : usage.here;
    usage.same_everywhere = !reducer_.searches_graph();
    usage.nobody_joined = exchange_.world_size() == 1;
    return usage;
  }
  usage.anywhere = wait(*exchange);
  const bool leftovers = usage.anywhere.test(leftover_bit());
  const bool unreached = usage.anywhere.test(unreached_bit());
  usage.anywhere.clear(leftover_bit());
  usage.anywhere.clear(unreached_bit());
  usage.objections = exchange->piggybacked();
  usage.same_everywhere = exchange->masks_were_identical() && !unreached;
  usage.nobody_joined = !usage.anywhere.test(joined_bit_);
  usage.contributors = exchange->contributors();
  usage.nothing_left_over = !leftovers;
  for (size_t i = 0; !shadow && i < joined_bit_; ++i) {
    if (!usage.here.test(i) || usage.anywhere.test(i)) continue;
    usage.here.clear(i);
    usage.unannounced = i;
  }
  return usage;
}

std::unique_ptr<PendingExchange> UsageAgreement::start_usage_exchange(const UsageMask& usage, bool shadow,
                                                                      uint64_t layout) {
  UsageMask sent = usage;
  if (settings_.asks_who && !shadow && has_leftover(usage)) sent.set(leftover_bit());
  if (!shadow && has_unreached(usage)) sent.set(unreached_bit());
  auto exchange =
      counted(exchange_.start(sent, objections_(shadow), settings_.asks_who, {settings_.configuration, layout, 0}));
  ++started_;
  return exchange;
}

// DDP sends a gradient that is there, whether or not this pass adds to it, if another rank uses the parameter.
bool UsageAgreement::has_leftover(const UsageMask& usage) const {
  for (size_t i = 0; i < reduced_count_; ++i) {
    if (!usage.test(i) && reducer_.has_gradient(i)) return true;
  }
  return false;
}

// A gradient of an earlier pass under no_sync() that has yet to travel, a declaration that was taken back because of
// some graph; or all that the graph leaves out, where it is not asked.
bool UsageAgreement::has_unreached(const UsageMask& usage) const {
  for (size_t i : reducer_.unreached()) {
    if (usage.test(i)) return true;
  }
  for (size_t i = 0; i < reduced_count_ && !reducer_.searches_graph(); ++i) {
    if (usage.test(i) && unused_.may_be_unreached(i)) return true;
  }
  return false;
}

std::unique_ptr<PendingExchange> UsageAgreement::start_exchange_of_units(UsageMask units, size_t capacity_words,
                                                                         uint64_t layout, uint64_t phase) {
  return counted(exchange_.start_compressed(std::move(units), capacity_words, settings_.asks_who,
                                            {settings_.configuration, layout, phase}));
}

std::unique_ptr<PendingExchange> UsageAgreement::counted(std::unique_ptr<PendingExchange> exchange) {
  statistics_.exchanges += 1;
  statistics_.mask_bytes += exchange->payload_bytes();
  return exchange;
}

UsageMask UsageAgreement::wait(PendingExchange& exchange) {
  RECORD_FUNCTION("ddp_hooks::wait_for_masks", std::vector<c10::IValue>());
  const Stopwatch stopwatch;
  UsageMask agreed = exchange.wait();
  statistics_.wait_seconds += stopwatch.seconds();
  return agreed;
}

}  // namespace ddp_hooks
