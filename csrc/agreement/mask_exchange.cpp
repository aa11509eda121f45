#include "agreement/mask_exchange.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <mutex>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "agreement/bit_sliced_counters.h"
#include "agreement/mask_codec.h"
#include "layout/hash.h"

namespace ddp_hooks {
namespace {

// Sequence, identity and mask hash, each with its complement.
constexpr size_t kHeaderWords = 6;
// Of a compressed mask: how many words it needs, before the words themselves.
constexpr size_t kCompressedHeaderWords = kHeaderWords + 1;

bool same_everywhere(const uint64_t* word_and_complement) {
  return (word_and_complement[0] & word_and_complement[1]) == 0;
}

uint64_t hash_of(const ExchangeContext& context) {
  Hash hash;
  hash.add(context.configuration);
  hash.add(context.layout);
  hash.add(context.phase);
  return hash.value();
}

uint64_t* words_of(const at::Tensor& message) {
  return reinterpret_cast<uint64_t*>(message.mutable_data_ptr<int64_t>());
}

// Writes how much room the mask needs, and the mask, if there is so much.
void write_compressed(const UsageMask& mask, const at::Tensor& message) {
  const std::vector<uint64_t> compressed = compress(mask);
  uint64_t* words = words_of(message) + kHeaderWords;
  const auto capacity = static_cast<size_t>(message.numel()) - kCompressedHeaderWords;
  words[0] = std::max<uint64_t>(words[0], compressed.size());
  if (words[0] > capacity) return;
  std::fill_n(std::copy(compressed.begin(), compressed.end(), words + 1), capacity - compressed.size(), 0);
}

void merge_compressed_messages(MaskInTransit& transit, const uint64_t* received, const uint64_t* end) {
  const auto words = static_cast<size_t>(transit.message.numel());
  uint64_t* merged = words_of(transit.message);
  const size_t capacity = words - kCompressedHeaderWords;
  for (; received != end; received += words) {
    for (size_t i = 0; i < kHeaderWords; ++i) merged[i] |= received[i];
    merged[kHeaderWords] = std::max(merged[kHeaderWords], received[kHeaderWords]);
    if (received[kHeaderWords] > capacity) continue;
    const std::span<const uint64_t> compressed(received + kCompressedHeaderWords, capacity);
    if (transit.asks_who) {
      merge_compressed(compressed, transit.units_by_rank.emplace_back(transit.units->size()));
      transit.units->merge(transit.units_by_rank.back());
    } else {
      merge_compressed(compressed, *transit.units);
    }
  }
}

// `more`: along another axis. What goes on has to be compressed again.
void merge_gathered(MaskInTransit& transit, bool more) {
  const int64_t words = transit.message.numel();
  const auto* received = reinterpret_cast<const uint64_t*>(transit.gathered.const_data_ptr<int64_t>());
  const auto* end = received + transit.gathered.numel();
  if (transit.units) {
    merge_compressed_messages(transit, received, end);
    if (more) write_compressed(*transit.units, transit.message);
    return;
  }
  uint64_t* merged = words_of(transit.message);
  const bool has_counters = transit.counter_bits > 0;
  const size_t ored = has_counters ? transit.words_before_counters : static_cast<size_t>(words);
  // This rank's own message is among those that were gathered, and counters count.
  std::fill(merged + ored, merged + words, 0);
  for (; received != end; received += words) {
    for (size_t i = 0; i < ored; ++i) merged[i] |= received[i];
    if (has_counters) merge_counters(merged + ored, received + ored, transit.counter_bits, transit.ranks);
  }
}

}  // namespace

// The exchanges under way, in the order in which they were started.
class ExchangeLine : public std::enable_shared_from_this<ExchangeLine> {
 public:
  explicit ExchangeLine(std::shared_ptr<const ControlGroups> groups) : groups_(std::move(groups)) {}

  const ControlGroups& groups() const { return *groups_; }

  void start(const std::shared_ptr<MaskInTransit>& transit) {
    RECORD_FUNCTION("ddp_hooks::start_masks", std::vector<c10::IValue>());
    std::lock_guard lock(mutex_);
    if (is_one_gather()) return gather(transit);
    line_.push_back(transit);
    try {
      gather(transit);
    } catch (...) {
      // A group may refuse at once. What never left would keep those behind it from going on, for good.
      std::erase(line_, transit);
      throw;
    }
  }

  void wait(MaskInTransit& transit) {
    if (is_one_gather()) {
      transit.work->wait();
      merge_gathered(transit, false);
      return;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_through(transit); });
    if (transit.error) std::rethrow_exception(transit.error);
  }

 private:
  bool is_one_gather() const { return groups_->axis_count() == 1; }
  bool is_through(const MaskInTransit& transit) const {
    return transit.error != nullptr || transit.axis == groups_->axis_count();
  }

  void gather(const std::shared_ptr<MaskInTransit>& transit) {
    c10d::Backend& axis = groups_->axis(transit->axis);
    transit->gathered = at::empty({axis.getSize(), transit->message.numel()}, at::kLong);
    std::vector<std::vector<at::Tensor>> outputs{transit->gathered.unbind(0)};
    std::vector<at::Tensor> inputs{transit->message};
    transit->work = axis.allgather(outputs, inputs);
    if (is_one_gather()) return;
    transit->work->getFuture()->addCallback([line = shared_from_this(), transit](c10::ivalue::Future& future) {
      line->arrive(*transit, future.hasError() ? future.exception_ptr() : nullptr);
    });
  }

  void arrive(MaskInTransit& transit, const std::exception_ptr& error) {
    std::lock_guard lock(mutex_);
    transit.error = error;
    transit.arrived = true;
    // A gather may be back before its callback is set, which then runs in the middle of this.
    if (advancing_) return;
    advancing_ = true;
    while (advance()) {
    }
    advancing_ = false;
    while (!line_.empty() && is_through(*line_.front())) line_.pop_front();
    changed_.notify_all();
  }

  // Sends the first that may go on its way along the next axis; false if none may.
  bool advance() {
    const MaskInTransit* ahead = nullptr;
    for (const std::shared_ptr<MaskInTransit>& transit : line_) {
      const bool free = ahead == nullptr || is_through(*ahead) || ahead->axis > transit->axis;
      ahead = transit.get();
      if (!transit->arrived || is_through(*transit) || !free) continue;
      transit->arrived = false;
      try {
        merge_gathered(*transit, transit->axis + 1 < groups_->axis_count());
        if (++transit->axis < groups_->axis_count()) gather(transit);
      } catch (...) {
        transit->error = std::current_exception();
      }
      return true;
    }
    return false;
  }

  // Completions hold the line, and so the groups: a worker may drop the last reference.
  const std::shared_ptr<const ControlGroups> groups_;
  // Recursive, because a callback may run at once, in the thread that sets it.
  std::recursive_mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<MaskInTransit>> line_;
  bool advancing_ = false;
};

MaskExchange::MaskExchange(std::shared_ptr<const ControlGroups> groups)
    : line_(std::make_shared<ExchangeLine>(std::move(groups))) {}

int MaskExchange::world_size() const {
  return line_->groups().world_size();
}

std::unique_ptr<PendingExchange> MaskExchange::prepare(const UsageMask& local, const ExchangeContext& context,
                                                       size_t words) {
  auto pending = std::make_unique<PendingExchange>();
  pending->line_ = line_;
  pending->transit_ = std::make_shared<MaskInTransit>();
  pending->mask_size_ = local.size();
  pending->sequence_ = started_++;
  pending->context_ = context;

  at::Tensor& tensor = pending->transit_->message;
  tensor = at::zeros({static_cast<int64_t>(words)}, at::kLong);
  uint64_t* message = words_of(tensor);
  const uint64_t header[] = {pending->sequence_, hash_of(context), local.hash()};
  for (size_t i = 0; i < std::size(header); ++i) {
    message[2 * i] = header[i];
    message[2 * i + 1] = ~header[i];
  }
  return pending;
}

std::unique_ptr<PendingExchange> MaskExchange::start(const UsageMask& local, const UsageMask& piggybacked,
                                                     bool asks_who, const ExchangeContext& context) {
  const std::vector<uint64_t>& mask = local.words();
  const auto ranks = static_cast<size_t>(world_size());
  const bool has_counters = asks_who && line_->groups().axis_count() > 1;
  const size_t words = kHeaderWords + mask.size() + piggybacked.words().size();
  auto pending = prepare(local, context, words + (has_counters ? words_of_counters(local.size(), ranks) : 0));
  pending->piggybacked_size_ = piggybacked.size();
  MaskInTransit& transit = *pending->transit_;
  transit.asks_who = asks_who;
  uint64_t* message = words_of(transit.message);
  std::copy(piggybacked.words().begin(), piggybacked.words().end(),
            std::copy(mask.begin(), mask.end(), message + kHeaderWords));
  if (has_counters) {
    transit.words_before_counters = words;
    transit.counter_bits = local.size();
    transit.ranks = ranks;
    write_counters(local, static_cast<size_t>(line_->groups().all().getRank()), ranks, message + words);
  }
  line_->start(pending->transit_);
  return pending;
}

std::unique_ptr<PendingExchange> MaskExchange::start_compressed(UsageMask local, size_t capacity_words, bool asks_who,
                                                                const ExchangeContext& context) {
  auto pending = prepare(local, context, kCompressedHeaderWords + capacity_words);
  write_compressed(local, pending->transit_->message);
  pending->transit_->units = std::move(local);
  pending->transit_->asks_who = asks_who && line_->groups().axis_count() == 1;
  line_->start(pending->transit_);
  return pending;
}

int64_t PendingExchange::payload_bytes() const {
  return static_cast<int64_t>(transit_->message.nbytes() * line_->groups().axis_count());
}

UsageMask PendingExchange::wait() {
  line_->wait(*transit_);
  const at::Tensor& merged = transit_->message;
  const auto* message = reinterpret_cast<const uint64_t*>(merged.const_data_ptr<int64_t>());
  TORCH_CHECK(same_everywhere(message) && same_everywhere(message + 2), describe_drift());
  identical_ = same_everywhere(message + 4);
  if (transit_->units) {
    needed_words_ = message[kHeaderWords];
    if (transit_->asks_who) contributors_ = Contributors(std::move(transit_->units_by_rank));
    return std::move(*transit_->units);
  }
  const uint64_t* mask = message + kHeaderWords;
  const uint64_t* piggybacked = mask + UsageMask::word_count(mask_size_);
  piggybacked_ = UsageMask(piggybacked_size_,
                           std::vector<uint64_t>(piggybacked, piggybacked + UsageMask::word_count(piggybacked_size_)));
  if (transit_->asks_who) contributors_ = read_contributors(UsageMask::word_count(mask_size_));
  return UsageMask(mask_size_, std::vector<uint64_t>(mask, piggybacked));
}

Contributors PendingExchange::read_contributors(size_t mask_words) {
  if (transit_->counter_bits > 0) {
    return read_counters(words_of(transit_->message) + transit_->words_before_counters, mask_size_, transit_->ranks);
  }
  std::vector<UsageMask> by_rank;
  const auto* received = reinterpret_cast<const uint64_t*>(transit_->gathered.const_data_ptr<int64_t>());
  for (int rank = 0; rank < line_->groups().world_size(); ++rank, received += transit_->message.numel()) {
    const uint64_t* mask = received + kHeaderWords;
    by_rank.emplace_back(mask_size_, std::vector<uint64_t>(mask, mask + mask_words));
  }
  return Contributors(std::move(by_rank));
}

// Every rank saw the same mismatch, so every rank comes here, and one more collective can name the difference.
std::string PendingExchange::describe_drift() const {
  const auto word = [](uint64_t value) { return static_cast<int64_t>(value); };
  std::vector<at::Tensor> mine{at::tensor(
      {word(sequence_), word(context_.configuration), word(context_.layout), word(context_.phase)}, at::kLong)};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < line_->groups().world_size(); ++rank) all[0].push_back(at::empty({4}, at::kLong));
  line_->groups().all().allgather(all, mine)->wait();

  std::ostringstream text;
  text << "ddp_hooks: the ranks drifted apart: expected every rank at the same mask exchange with the same "
          "configuration and bucket layout, received";
  for (size_t rank = 0; rank < all[0].size(); ++rank) {
    const int64_t* values = all[0][rank].const_data_ptr<int64_t>();
    text << (rank ? "; " : " ") << "rank " << rank << ": exchange " << values[0] << ", configuration " << std::hex
         << values[1] << ", layout " << values[2] << std::dec;
    const auto phase = static_cast<uint64_t>(values[3]);
    if (phase >= kUnitsPhase) {
      text << ", units of bucket " << phase - kUnitsPhase;
    } else if (phase != 0) {
      text << ", values of bucket " << phase - values_phase(0);
    }
  }
  text << ". Every rank must run the same number of synchronised backward passes with the same policy; restart from a "
          "checkpoint with the same settings on every rank.";
  return text.str();
}

}  // namespace ddp_hooks
