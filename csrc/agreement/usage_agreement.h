// Which parameters this rank has gradients for, as `skip_unused` sees it, and which any rank has.
//
// A synchronised backward pass exchanges one mask of parameters, unless there is a single rank, or `skip_unused` is off
// and no parameter is unmanaged. The exchange starts when the pass is known to reach the Reducer. The first bucket
// takes it up, and a later one may wait for its result. Buckets may exchange masks of units as well. Masks of
// parameters have a bit for each of the Reducer's parameters, for each unmanaged one, and three more. *Joined*: this
// rank has. *Left over*: here a gradient is left of something that this pass does not use, which it would contribute
// although nobody sees it in the graph. *Unreached*: something counts as used here that this pass may not reach, so
// that ranks with the same mask may have other graphs. Beside the mask travel *objections*: a bit for each parameter
// that may have units, set by a rank that would rather send it whole.
//
// Always holds: at most one exchange is under way that no step has taken up.
// Thread-safety: none; the engine locks, and the Reducer's mutex is held. Every rank must agree on: the settings, the
// number of parameters, the layout of the buckets.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "agreement/mask_exchange.h"
#include "layout/usage_mask.h"
#include "reducer/reducer_view.h"
#include "reducer/unused_parameters.h"

namespace ddp_hooks {

struct AgreementSettings {
  // Whether what the autograd graph left out counts as unused.
  bool skip_unused = true;
  // Whether it is asked who uses what, and not only whether somebody does.
  bool asks_who = false;
  // Identifies policy, world and model; ranks with different ones must not exchange masks.
  uint64_t configuration = 0;
};

// Since the last reset; all but the seconds are the same on every rank.
struct ExchangeStatistics {
  int64_t exchanges = 0;
  int64_t mask_bytes = 0;
  double wait_seconds = 0;  // the backward pass stood still for the agreed mask
};

// What a step has asked of the other ranks and not been told yet.
struct AskedUsage {
  UsageMask here;
  std::unique_ptr<PendingExchange> exchange;  // null where nobody is asked
  bool shadow = false;
};

struct AgreedUsage {
  UsageMask here;
  UsageMask anywhere;
  bool same_everywhere = true;     // every rank's pass reaches the same parameters
  bool nobody_joined = false;      // as far as it was agreed; without an exchange nobody knows
  UsageMask objections;            // of any rank; empty without an exchange
  Contributors contributors;       // as far as somebody asked who
  bool nothing_left_over = false;  // no rank contributes what its mask does not say
  // A parameter that this rank has used and nobody announced, not even this one; left out of `here`.
  std::optional<size_t> unannounced;
};

class UsageAgreement {
 public:
  // What this rank objects to, or a mask of that size without any objection.
  using Objections = std::function<UsageMask(bool none)>;

  // Of `parameters`, the Reducer's and then the unmanaged ones.
  UsageAgreement(const ReducerView& reducer, const UnusedParameters& unused, size_t parameters,
                 std::shared_ptr<const ControlGroups> groups, const AgreementSettings& settings, Objections objections,
                 ExchangeStatistics& statistics);

  int world_size() const { return exchange_.world_size(); }
  size_t joined_bit() const { return joined_bit_; }
  UsageMask nothing() const { return UsageMask(joined_bit_ + 3); }

  // Whether an exchange is needed and none is under way. One may be: another output of the same pass started it, or a
  // pass that failed before its first bucket did, and then the other ranks count on that exchange.
  bool awaits_start() const { return exchanges() && !early_; }
  void start(uint64_t layout);
  // What kept an exchange from being started; thrown when its result is asked for.
  void fail(std::exception_ptr error) { early_error_ = std::move(error); }
  bool is_under_way() const { return early_ != nullptr; }
  // How many exchanges this rank has started, since it was made.
  int64_t started() const { return started_; }
  // Starts those of so many that other ranks have started and this one has not, without any usage; waits for what is
  // under way, and drops the results.
  void finish(uint64_t layout, int64_t started);

  // Hands over the exchange, and starts it if that has not been done. `shadow`: this rank has joined and has nothing to
  // contribute.
  AskedUsage ask(bool shadow, uint64_t layout);
  // Instead of waiting for the exchange: it is under way again.
  void take_back(AskedUsage asked) { early_ = std::move(asked.exchange); }
  // Waits for the exchange.
  AgreedUsage agree(AskedUsage asked);

  // The pieces of it, for exchanges of what a bucket's values say.
  std::unique_ptr<PendingExchange> start_exchange_of_units(UsageMask units, size_t capacity_words, uint64_t layout,
                                                           uint64_t phase);
  UsageMask wait(PendingExchange& exchange);

 private:
  size_t leftover_bit() const { return joined_bit_ + 1; }
  size_t unreached_bit() const { return joined_bit_ + 2; }
  bool has_leftover(const UsageMask& usage) const;
  bool has_unreached(const UsageMask& usage) const;
  bool exchanges() const;
  UsageMask everything() const;
  UsageMask local_usage() const;
  std::unique_ptr<PendingExchange> start_usage_exchange(const UsageMask& usage, bool shadow, uint64_t layout);
  std::unique_ptr<PendingExchange> counted(std::unique_ptr<PendingExchange> exchange);

  const ReducerView& reducer_;
  const UnusedParameters& unused_;
  const AgreementSettings& settings_;
  const Objections objections_;
  ExchangeStatistics& statistics_;
  const size_t reduced_count_;
  const size_t joined_bit_;
  MaskExchange exchange_;

  int64_t started_ = 0;
  std::unique_ptr<PendingExchange> early_;
  std::exception_ptr early_error_;
};

}  // namespace ddp_hooks
