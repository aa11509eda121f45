#include "mask_exchange.h"

#include <ATen/ATen.h>

#include <cstring>
#include <iterator>
#include <sstream>
#include <utility>
#include <vector>

#include "hash.h"

namespace ddp_hooks {
namespace {

// Sequence, identity and mask hash, each with its complement.
constexpr size_t kHeaderWords = 6;

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

}  // namespace

std::unique_ptr<PendingExchange> MaskExchange::start(const UsageMask& local, const ExchangeContext& context) {
  auto pending = std::make_unique<PendingExchange>();
  pending->groups_ = &groups_;
  pending->mask_size_ = local.size();
  pending->sequence_ = started_++;
  pending->context_ = context;

  const std::vector<uint64_t>& words = local.words();
  pending->message_ = at::empty({static_cast<int64_t>(kHeaderWords + words.size())}, at::kLong);
  auto* message = reinterpret_cast<uint64_t*>(pending->message_.mutable_data_ptr<int64_t>());
  const uint64_t header[] = {pending->sequence_, hash_of(context), local.hash()};
  for (size_t i = 0; i < std::size(header); ++i) {
    message[2 * i] = header[i];
    message[2 * i + 1] = ~header[i];
  }
  if (!words.empty()) std::memcpy(message + kHeaderWords, words.data(), words.size() * sizeof(uint64_t));
  pending->gather(*groups_.axes.front());
  return pending;
}

void PendingExchange::gather(c10d::ProcessGroup& axis) {
  gathered_ = at::empty({axis.getSize(), message_.numel()}, at::kLong);
  std::vector<std::vector<at::Tensor>> outputs{gathered_.unbind(0)};
  std::vector<at::Tensor> inputs{message_};
  work_ = axis.allgather(outputs, inputs);
}

void PendingExchange::merge_gathered() {
  const int64_t words = message_.numel();
  const auto* received = reinterpret_cast<const uint64_t*>(gathered_.const_data_ptr<int64_t>());
  auto* merged = reinterpret_cast<uint64_t*>(message_.mutable_data_ptr<int64_t>());
  for (const auto* end = received + gathered_.numel(); received != end; received += words) {
    for (int64_t i = 0; i < words; ++i) merged[i] |= received[i];
  }
}

UsageMask PendingExchange::wait() {
  work_->wait();
  merge_gathered();
  for (size_t axis = 1; axis < groups_->axes.size(); ++axis) {
    gather(*groups_->axes[axis]);
    work_->wait();
    merge_gathered();
  }
  const auto* message = reinterpret_cast<const uint64_t*>(message_.const_data_ptr<int64_t>());
  TORCH_CHECK(same_everywhere(message) && same_everywhere(message + 2), describe_drift());
  identical_ = same_everywhere(message + 4);
  std::vector<uint64_t> words(message + kHeaderWords, message + message_.numel());
  return UsageMask(mask_size_, std::move(words));
}

// Every rank saw the same mismatch, so every rank comes here, and one more collective can name the difference.
std::string PendingExchange::describe_drift() const {
  const auto word = [](uint64_t value) { return static_cast<int64_t>(value); };
  std::vector<at::Tensor> mine{at::tensor(
      {word(sequence_), word(context_.configuration), word(context_.layout), word(context_.phase)}, at::kLong)};
  std::vector<std::vector<at::Tensor>> all(1);
  for (int rank = 0; rank < groups_->all->getSize(); ++rank) all[0].push_back(at::empty({4}, at::kLong));
  groups_->all->allgather(all, mine)->wait();

  std::ostringstream text;
  text << "ddp_hooks: the ranks drifted apart: expected every rank at the same mask exchange with the same "
          "configuration and bucket layout, received";
  for (size_t rank = 0; rank < all[0].size(); ++rank) {
    const int64_t* values = all[0][rank].const_data_ptr<int64_t>();
    text << (rank ? "; " : " ") << "rank " << rank << ": exchange " << values[0] << ", configuration " << std::hex
         << values[1] << ", layout " << values[2] << std::dec;
    if (values[3] != 0) text << ", values of bucket " << values[3] - 1;
  }
  text << ". Every rank must run the same number of synchronised backward passes with the same policy; restart from a "
          "checkpoint with the same settings on every rank.";
  return text.str();
}

}  // namespace ddp_hooks
