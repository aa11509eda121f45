// A message that travels in steps, of which each completion starts the next one; among ranks that each have a place in
// their order, and gradients on the CPU.
//
//   what                    over                   when
//   sizes of contributions  sizes                  contributions are coded; each message in its turn
//   contributions           contributions          sizes are back; each message in its turn
//   sizes of sums           sums                   an owner has added contributions up, and codes; each in its turn
//   sums                    sums                   sizes are back; each message in its turn
//
// Where the sizes of many coded contributions travel together, whoever sends the messages does that before
// (transport/coded_sender.h). What is not coded has sizes that the plan knows. What is broadcast ends with its
// contributions, which every rank adds up in the order of ranks; what is all-reduced is so in place of contributions.
//
// With one rank for each host, contributions travel unscaled, because a number that was divided may have more bits;
// whoever adds them up multiplies each by 1/divisor, which every rank knows alike. Ranks that share a host scale and
// sum their contributions before this message starts.
//
// Always holds: what is received is checked before it is decoded, and an error names the rank and the message. A step
// that has failed here leaves its buckets alone, but sends what others wait for. Thread-safety: the engine locks until
// the first step starts; completions run in the groups' threads, and hold what they need. Every rank must agree on: the
// messages, their order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "agreement/control_groups.h"
#include "kernels/element_type.h"
#include "transport/contributions.h"
#include "transport/launch.h"
#include "transport/staging.h"

namespace ddp_hooks {

// What a message has taken, in bytes: of all ranks that exchange it, before it was coded and as it travelled.
struct Travelled {
  int64_t contributions = 0;
  int64_t uncoded_contributions = 0;
  int64_t sums = 0;
  int64_t uncoded_sums = 0;

  Travelled& operator+=(const Travelled& other);
};

// What completions count.
class LateStatistics {
 public:
  MessageStatistics read() const;
  void reset();
  void add(const MessageStatistics& more);
  // A message that is back.
  void add_payload(const DirectMessage& message, int64_t element_bytes, const Travelled& travelled);

 private:
  mutable std::mutex mutex_;
  MessageStatistics statistics_;
};

// Held while a collective is under way. What waits for its turn in a group must not hold the group.
using Groups = std::shared_ptr<const ControlGroups>;

// Starts a collective in its turn; when it is back, runs `on_success`, unless it or what was before it has failed, and
// then `on_end`.
void in_turn(OrderedGroup& group, int64_t turn, const std::shared_ptr<StepInFlight>& step, const Groups& groups,
             OrderedGroup::Start start, std::function<void(const Groups&)> on_success,
             std::function<void(const Groups&, const std::exception_ptr&)> on_end);

class StepwiseMessage : public std::enable_shared_from_this<StepwiseMessage> {
 public:
  // Called once, in any thread, with what has failed, or null.
  using Ended = std::function<void(const StepwiseMessage&, const std::exception_ptr&)>;

  // `members`: the ranks that exchange it, of which this one has the position `rank`; messages count these by position.
  StepwiseMessage(std::shared_ptr<StepInFlight> step, DirectMessage message, Places places, int rank,
                  std::vector<int> members, Ended ended);

  const DirectMessage& message() const { return message_; }
  int64_t element_bytes() const { return element_bytes_; }

  // Where every rank does so in the same order. `exchanges_sizes`: those of contributions, as a step of its own.
  void take_turns(const ControlGroups& groups, bool exchanges_sizes);

  // Sends it, with every step of its own; after take_turns.
  void send(const Groups& groups);

  // The same with sizes of contributions that travel otherwise. How many each rank tells: of what it broadcasts, or of
  // what goes to each owner.
  size_t size_count() const { return message_.is_summed() ? static_cast<size_t>(world_size_) : 1; }
  // From the staging memory, if there is one, which only the engine's thread may use.
  void encode_contributions(Staging* staging);
  const std::vector<int64_t>& own_sizes() const { return own_sizes_; }
  // Those of `from`, which are size_count().
  void take_sizes(int from, const int64_t* sizes);
  void send_contributions(const Groups& groups);

  // After its end.
  const Travelled& travelled() const { return travelled_; }
  // By this rank.
  int64_t sent_bytes() const { return sent_bytes_; }

  // Instead of what would be sent.
  void give_up(const Groups& groups, const std::exception_ptr& error);

 private:
  using WorkPointer = OrderedGroup::WorkPointer;
  using Start = WorkPointer (StepwiseMessage::*)(c10d::Backend&);
  using Take = void (StepwiseMessage::*)(const Groups&);

  void start_in_turn(OrderedGroup& group, int64_t turn, const Groups& groups, Start start, Take take, bool is_last);

  WorkPointer start_sizes(c10d::Backend& group);
  void take_all_sizes(const Groups& groups);
  WorkPointer start_contributions(c10d::Backend& group);
  void take_contributions(const Groups& groups);
  WorkPointer start_sizes_of_sums(c10d::Backend& group);
  void take_sizes_of_sums(const Groups& groups);
  WorkPointer start_sums(c10d::Backend& group);
  void take_sums(const Groups& groups);

  void add_up();
  void sum();
  void send_sums(const Groups& groups);
  std::vector<std::vector<int64_t>> count_contributed() const;
  int64_t contributed(int from, size_t to) const { return contributed_[static_cast<size_t>(from)][to]; }
  int64_t owned(int owner) const;
  int64_t most_bytes(int64_t count) const;
  void add_slices(const DirectGroup& group, std::vector<BorrowedSlice>& slices) const;
  std::string describe(int from, const char* what) const;
  void check_size(int64_t size, int64_t count, int from, const char* what) const;
  void read_from(int from, const BorrowedSlice& to, const char* what) const;
  void receive(const std::vector<int64_t>& sizes);
  WorkPointer start_to_all(c10d::Backend& group, const at::Tensor& coded, std::vector<int64_t> sizes);
  template <typename To>
  void add_contributions(const To& to);
  StepInFlight::CodedBytes& tally() const { return *step_->coded; }

  const std::shared_ptr<StepInFlight> step_;
  const DirectMessage message_;
  const Places places_;
  const int rank_;
  const std::vector<int> members_;
  const int world_size_;  // of them
  const int64_t number_;  // of the step
  const ElementType type_;
  const int64_t element_bytes_;
  const std::vector<std::vector<int64_t>> contributed_;  // elements; by rank, size_count()
  const Ended ended_;

  at::Tensor coded_;                         // this rank's contributions, and then its sum
  std::vector<int64_t> own_sizes_;           // size_count()
  at::Tensor all_sizes_;                     // of every rank
  std::vector<std::vector<int64_t>> sizes_;  // by rank
  at::Tensor own_;                           // what this rank contributes to what it owns, and then the sum
  at::Tensor received_;                      // coded
  std::vector<int64_t> received_begins_;     // by rank, bytes
  std::vector<int64_t> received_sizes_;      // by rank
  int64_t own_sum_bytes_ = 0;
  at::Tensor sizes_of_sums_;
  std::vector<int64_t> received_sums_;
  Travelled travelled_;
  int64_t sent_bytes_ = 0;
  // On their groups.
  int64_t turn_of_sizes_ = 0;
  int64_t turn_of_contributions_ = 0;
  int64_t turn_of_sizes_of_sums_ = 0;
  int64_t turn_of_sums_ = 0;
};

}  // namespace ddp_hooks
