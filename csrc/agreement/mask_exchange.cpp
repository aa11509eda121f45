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

// The messages of those whom the last gather reached, each as long as this rank's own was.
struct Gathered {
  const uint64_t* first;
  const uint64_t* end;
};

Gathered gathered_by(const MaskInTransit& transit) {
  const auto* first = reinterpret_cast<const uint64_t*>(transit.gathered.const_data_ptr<int64_t>());
  return {first, first + transit.gathered.numel()};
}

// Of masks in plain words: one message, the OR of all.
at::Tensor merge_plain_messages(const MaskInTransit& transit) {
  at::Tensor message = at::zeros({static_cast<int64_t>(transit.words)}, at::kLong);
  uint64_t* merged = words_of(message);
  const auto [first, end] = gathered_by(transit);
  for (const uint64_t* received = first; received != end; received += transit.words) {
    for (size_t i = 0; i < transit.words; ++i) merged[i] |= received[i];
  }
  return message;
}

// Of compressed masks: the merged header, with what the longest needs; the masks are merged into `transit.units`, and
// one after the other in `apart`, if that is there.
at::Tensor merge_compressed_messages(MaskInTransit& transit, std::vector<UsageMask>* apart) {
  at::Tensor message = at::zeros({static_cast<int64_t>(transit.words)}, at::kLong);
  uint64_t* merged = words_of(message);
  const size_t capacity = transit.words - kCompressedHeaderWords;
  const auto [first, end] = gathered_by(transit);
  for (const uint64_t* received = first; received != end; received += transit.words) {
    for (size_t i = 0; i < kHeaderWords; ++i) merged[i] |= received[i];
    merged[kHeaderWords] = std::max(merged[kHeaderWords], received[kHeaderWords]);
    if (received[kHeaderWords] > capacity) continue;
    const std::span<const uint64_t> compressed(received + kCompressedHeaderWords, capacity);
    if (apart != nullptr) {
      merge_compressed(compressed, apart->emplace_back(transit.units->size()));
      transit.units->merge(apart->back());
    } else {
      merge_compressed(compressed, *transit.units);
    }
  }
  return message;
}

// Whether messages go on as they came after so many axes. Who uses units is asked of hosts only.
bool go_on_apart(const MaskInTransit& transit, size_t axes, const ControlGroups& groups) {
  return transit.keeps_apart && !(axes == 1 && transit.units && groups.topology().shares_hosts());
}

// Between two axes: what this rank knows now is what it sends along the next one.
void hand_on(MaskInTransit& transit, const ControlGroups& groups) {
  if (go_on_apart(transit, transit.axis, groups)) {
    transit.message = transit.gathered.view(-1);
  } else if (transit.units) {
    transit.message = merge_compressed_messages(transit, nullptr);
    write_compressed(*transit.units, transit.message);
  } else {
    transit.message = merge_plain_messages(transit);
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
        if (++transit->axis == groups_->axis_count()) return true;
        hand_on(*transit, *groups_);
        gather(transit);
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

std::unique_ptr<PendingExchange> MaskExchange::prepare(const UsageMask& local, size_t words, bool asks_who,
                                                       const ExchangeContext& context) {
  auto pending = std::make_unique<PendingExchange>();
  pending->line_ = line_;
  pending->transit_ = std::make_shared<MaskInTransit>();
  pending->mask_size_ = local.size();
  pending->sequence_ = started_++;
  pending->context_ = context;

  MaskInTransit& transit = *pending->transit_;
  transit.words = words;
  transit.keeps_apart = asks_who;
  transit.message = at::zeros({static_cast<int64_t>(words)}, at::kLong);
  uint64_t* message = words_of(transit.message);
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
  auto pending = prepare(local, kHeaderWords + mask.size() + piggybacked.words().size(), asks_who, context);
  pending->piggybacked_size_ = piggybacked.size();
  uint64_t* message = words_of(pending->transit_->message);
  std::copy(piggybacked.words().begin(), piggybacked.words().end(),
            std::copy(mask.begin(), mask.end(), message + kHeaderWords));
  line_->start(pending->transit_);
  return pending;
}

std::unique_ptr<PendingExchange> MaskExchange::start_compressed(UsageMask local, size_t capacity_words, bool asks_who,
                                                                const ExchangeContext& context) {
  auto pending = prepare(local, kCompressedHeaderWords + capacity_words, asks_who, context);
  write_compressed(local, pending->transit_->message);
  pending->transit_->units = std::move(local);
  line_->start(pending->transit_);
  return pending;
}

int64_t PendingExchange::payload_bytes() const {
  const ControlGroups& groups = line_->groups();
  int64_t messages = 0, length = 1;  // of how many ranks' messages one consists along an axis
  for (size_t axis = 0; axis < groups.axis_count(); ++axis) {
    messages += length;
    length *= go_on_apart(*transit_, axis + 1, groups) ? groups.axis(axis).getSize() : 1;
  }
  return messages * static_cast<int64_t>(transit_->words * sizeof(uint64_t));
}

UsageMask PendingExchange::wait() {
  line_->wait(*transit_);
  std::vector<UsageMask> apart;
  const bool compressed = transit_->units.has_value();
  const at::Tensor merged = compressed ? merge_compressed_messages(*transit_, transit_->keeps_apart ? &apart : nullptr)
                                       : merge_plain_messages(*transit_);
  const uint64_t* message = words_of(merged);
  TORCH_CHECK(same_everywhere(message) && same_everywhere(message + 2), describe_drift());
  identical_ = same_everywhere(message + 4);
  if (compressed) {
    needed_words_ = message[kHeaderWords];
    contributors_ = Contributors(std::move(apart));
    return std::move(*transit_->units);
  }
  const size_t mask_words = UsageMask::word_count(mask_size_);
  const auto read = [](size_t bits, const uint64_t* words) {
    return UsageMask(bits, std::vector<uint64_t>(words, words + UsageMask::word_count(bits)));
  };
  piggybacked_ = read(piggybacked_size_, message + kHeaderWords + mask_words);
  if (transit_->keeps_apart) {
    const auto [first, end] = gathered_by(*transit_);
    for (const uint64_t* received = first; received != end; received += transit_->words) {
      apart.push_back(read(mask_size_, received + kHeaderWords));
    }
    contributors_ = Contributors(line_->groups().topology().in_order_of_ranks(std::move(apart)));
  }
  return read(mask_size_, message + kHeaderWords);
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
    if (phase != 0) text << ", units of bucket " << phase - units_phase(0);
  }
  text << ". Every rank must run the same number of synchronised backward passes with the same policy; restart from a "
          "checkpoint with the same settings on every rank.";
  return text.str();
}

}  // namespace ddp_hooks
