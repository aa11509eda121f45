#include "transport/coded_sender.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "transport/collectives.h"

namespace ddp_hooks {
namespace {

// Messages whose sizes travel together: a small message each would wait behind what is under way.
constexpr size_t kMostInBatch = 8;

// Before its buckets complete, since the next step may begin then.
void end(const Launch& launch, const StepwiseMessage& message, LateStatistics& counted,
         const std::exception_ptr& error) {
  if (!error) {
    MessageStatistics more;
    more.messages = message.message().is_summed() ? 2 : 1;
    more.sent_bytes = message.sent_bytes();
    counted.add(more);
    counted.add_payload(message.message(), message.element_bytes(), message.travelled());
    *launch.step->messages_not_back -= 1;
  }
  end_message(launch, error);
}

}  // namespace

void CodedSender::send(std::vector<OutgoingMessage> messages) {
  for (size_t first = 0; first < messages.size(); first += kMostInBatch) {
    const auto begin = messages.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = begin + static_cast<std::ptrdiff_t>(std::min(kMostInBatch, messages.size() - first));
    send_batch({std::make_move_iterator(begin), std::make_move_iterator(end)});
  }
}

void CodedSender::send_batch(std::vector<OutgoingMessage> messages) {
  std::vector<std::shared_ptr<StepwiseMessage>> batch;
  std::vector<int64_t> sizes;
  const std::shared_ptr<StepInFlight> step = messages.front().launch.step;
  std::vector<int> everybody(static_cast<size_t>(world_size_));
  std::iota(everybody.begin(), everybody.end(), 0);
  for (OutgoingMessage& one : messages) {
    batch.push_back(
        std::make_shared<StepwiseMessage>(step, std::move(one.message), std::move(one.places), rank_, everybody,
                                          [launch = std::move(one.launch), counted = counted_](
                                              const StepwiseMessage& message, const std::exception_ptr& error) {
                                            end(launch, message, *counted, error);
                                          }));
    batch.back()->encode_contributions(&staging_);
    sizes.insert(sizes.end(), batch.back()->own_sizes().begin(), batch.back()->own_sizes().end());
  }
  const auto count = static_cast<int64_t>(sizes.size());
  const at::Tensor all = at::empty({world_size_ * count}, at::kLong);
  const Groups groups = control_groups_;
  const auto work = all_gather(groups->all(), all, at::tensor(sizes, at::kLong), "ddp_hooks::exchange_sizes");
  MessageStatistics more;
  more.size_bytes = count * static_cast<int64_t>(sizeof(int64_t));
  counted_->add(more);
  // From here on nothing fails before all turns are used, or given up.
  for (const auto& message : batch) {
    message->take_turns(*groups, false);
    // Until it is back as a whole, it counts as under way.
    *step->messages_not_back += 1;
  }
  when_back(
      work, c10::kCPU, step,
      [batch, groups, all, world_size = world_size_](c10::ivalue::Future&) {
        const int64_t* next = all.const_data_ptr<int64_t>();
        for (int from = 0; from < world_size; ++from) {
          for (const auto& message : batch) {
            message->take_sizes(from, next);
            next += message->size_count();
          }
        }
        for (const auto& message : batch) message->send_contributions(groups);
      },
      [batch, groups](const std::exception_ptr& error) {
        if (!error) return;
        const std::exception_ptr told = groups->fail(error);
        for (const auto& message : batch) message->give_up(groups, told);
      });
}

}  // namespace ddp_hooks
