#include "transport/stepwise_message.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include "kernels/coding.h"
#include "transport/coded_message.h"
#include "transport/collectives.h"

namespace ddp_hooks {
namespace {

constexpr const char* kSizes = "ddp_hooks::exchange_sizes";  // for profilers

at::Tensor bytes(int64_t count) {
  return at::empty({count}, at::kByte);
}

int64_t sum_of(const std::vector<int64_t>& numbers) {
  int64_t sum = 0;
  for (const int64_t number : numbers) sum += number;
  return sum;
}

// So many bytes of what was `uncoded` before, by what all of it takes.
int64_t share_of(int64_t bytes, int64_t coded, int64_t uncoded) {
  if (coded == uncoded) return bytes;
  return static_cast<int64_t>(static_cast<double>(bytes) * static_cast<double>(coded) / static_cast<double>(uncoded));
}

// Of neighbours one slice.
void append(std::vector<BorrowedSlice>& slices, const BorrowedSlice& next) {
  if (!slices.empty() && slices.back().continues_in(next)) {
    slices.back().length += next.length;
  } else {
    slices.push_back(next);
  }
}

}  // namespace

MessageStatistics LateStatistics::read() const {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void LateStatistics::reset() {
  std::lock_guard lock(mutex_);
  statistics_ = {};
}

void LateStatistics::add(const MessageStatistics& more) {
  std::lock_guard lock(mutex_);
  statistics_ += more;
}

void LateStatistics::add_payload(const DirectMessage& message, int64_t element_bytes, const Travelled& travelled) {
  const MessageBytes bytes = bytes_of(message, element_bytes);
  MessageStatistics more;
  more.payload_bytes = share_of(bytes.contributions, travelled.contributions, travelled.uncoded_contributions) +
                       share_of(bytes.sums, travelled.sums, travelled.uncoded_sums);
  if (message.transport == Transport::kByOwner) more.owner_bytes = more.payload_bytes;
  if (message.transport == Transport::kBroadcast) more.broadcast_bytes = more.payload_bytes;
  if (message.is_coded) {
    more.coded_bytes = more.payload_bytes;
    more.uncoded_bytes = bytes.contributions + bytes.sums;
  }
  add(more);
}

Travelled& Travelled::operator+=(const Travelled& other) {
  for (const auto field :
       {&Travelled::contributions, &Travelled::uncoded_contributions, &Travelled::sums, &Travelled::uncoded_sums}) {
    this->*field += other.*field;
  }
  return *this;
}

void in_turn(OrderedGroup& group, int64_t turn, const std::shared_ptr<StepInFlight>& step, const Groups& groups,
             OrderedGroup::Start start, std::function<void(const Groups&)> on_success,
             std::function<void(const Groups&, const std::exception_ptr&)> on_end) {
  group.start(turn, std::move(start),
              [&group, step, held = std::weak_ptr(groups), on_success = std::move(on_success),
               on_end = std::move(on_end)](const OrderedGroup::WorkPointer& work, std::exception_ptr error) {
                const Groups groups = held.lock();
                if (!error && !groups) {
                  error = std::make_exception_ptr(std::runtime_error("ddp_hooks: the state was closed during a step"));
                }
                if (error) return on_end(groups, error);
                when_back(
                    work, c10::kCPU, step, [on_success, groups](c10::ivalue::Future&) { on_success(groups); },
                    [on_end, groups, work, &group](const std::exception_ptr& failure) {
                      // Of what has come back as it should, the content may be wrong, and the group goes on.
                      const bool is_groups = failure && work->getFuture()->hasError();
                      on_end(groups, is_groups ? group.fail(failure) : failure);
                    });
              });
}

StepwiseMessage::StepwiseMessage(std::shared_ptr<StepInFlight> step, DirectMessage message, Places places, int rank,
                                 std::vector<int> members, Ended ended)
    : step_(std::move(step)),
      message_(std::move(message)),
      places_(std::move(places)),
      rank_(rank),
      members_(std::move(members)),
      world_size_(static_cast<int>(members_.size())),
      number_(message_.is_coded ? step_->coded_messages++ : 0),
      type_(element_type_of(one_of(places_))),
      element_bytes_(element_bytes_of(places_)),
      contributed_(count_contributed()),
      ended_(std::move(ended)) {}

void StepwiseMessage::take_turns(const ControlGroups& groups, bool exchanges_sizes) {
  if (exchanges_sizes && message_.is_coded) turn_of_sizes_ = groups.sizes().take_turn();
  turn_of_contributions_ = groups.contributions().take_turn();
  if (!message_.is_summed()) return;
  if (message_.is_coded) turn_of_sizes_of_sums_ = groups.sums().take_turn();
  turn_of_sums_ = groups.sums().take_turn();
}

void StepwiseMessage::send(const Groups& groups) {
  if (message_.transport != Transport::kAllReduce) encode_contributions(nullptr);
  if (!message_.is_coded) return send_contributions(groups);
  start_in_turn(groups->sizes(), turn_of_sizes_, groups, &StepwiseMessage::start_sizes,
                &StepwiseMessage::take_all_sizes, false);
}

// --- contributions

void StepwiseMessage::encode_contributions(Staging* staging) {
  const auto take = [&](int64_t count) { return staging ? staging->take(*step_, count, at::kByte) : bytes(count); };
  int64_t most = 0;
  for (size_t i = 0; i < size_count(); ++i) most += most_bytes(contributed(rank_, i));
  // All other ranks take a copy of their own of what is broadcast.
  const int64_t copies = message_.is_summed() ? 1 : world_size_ - 1;
  coded_ = take(most * copies);
  int64_t filled = 0;
  for (size_t i = 0; i < size_count(); ++i) {
    std::vector<BorrowedSlice> slices;
    for (const DirectGroup& group : message_.groups) {
      const bool is_for_it = group.owner == static_cast<int>(i) && group.owner != rank_;
      if (!message_.is_summed() || is_for_it) add_slices(group, slices);
    }
    own_sizes_.push_back(write_message(slices, message_.is_coded, coded_.narrow(0, filled, coded_.numel() - filled)));
    filled += own_sizes_.back();
    if (message_.is_coded) tally().contribution_bytes += contributed(rank_, i) * element_bytes_;
  }
  if (message_.is_coded) tally().coded_contribution_bytes += filled;
  for (const DirectGroup& group : message_.groups) {
    if (!message_.is_summed() || group.owner != rank_) continue;
    std::vector<PackedSlice> own;
    for (const DirectPart& part : group.parts) own.push_back({places_[part.place].slice(part)});
    own_ = take(group.numel * element_bytes_);
    pack(own_, own);
    own_ = own_.view(one_of(places_).scalar_type());
  }
}

StepwiseMessage::WorkPointer StepwiseMessage::start_sizes(c10d::Backend& group) {
  const auto count = static_cast<int64_t>(size_count());
  all_sizes_ = at::empty({world_size_ * count}, at::kLong);
  return all_gather(group, all_sizes_, at::tensor(own_sizes_, at::kLong), kSizes);
}

void StepwiseMessage::take_all_sizes(const Groups& groups) {
  const int64_t* next = all_sizes_.const_data_ptr<int64_t>();
  for (int from = 0; from < world_size_; ++from, next += size_count()) take_sizes(from, next);
  send_contributions(groups);
}

void StepwiseMessage::take_sizes(int from, const int64_t* sizes) {
  for (size_t i = 0; i < size_count(); ++i) check_size(sizes[i], contributed(from, i), from, "a contribution");
  sizes_.emplace_back(sizes, sizes + size_count());
}

void StepwiseMessage::send_contributions(const Groups& groups) {
  if (!message_.is_coded) {
    // What is not coded takes what the plan says.
    for (const std::vector<int64_t>& counts : contributed_) {
      std::vector<int64_t>& sizes = sizes_.emplace_back();
      for (const int64_t count : counts) sizes.push_back(count * element_bytes_);
    }
  }
  for (size_t from = 0; from < sizes_.size(); ++from) {
    travelled_.contributions += sum_of(sizes_[from]);
    travelled_.uncoded_contributions += sum_of(contributed_[from]) * element_bytes_;
  }
  start_in_turn(groups->contributions(), turn_of_contributions_, groups, &StepwiseMessage::start_contributions,
                &StepwiseMessage::take_contributions, !message_.is_summed());
}

StepwiseMessage::WorkPointer StepwiseMessage::start_contributions(c10d::Backend& group) {
  if (message_.transport == Transport::kAllReduce) {
    const Place& place = places_.front();
    sent_bytes_ += 2 * (world_size_ - 1) * message_.numel * element_bytes_ / world_size_;
    std::vector<at::Tensor> tensors{place.flat.narrow(0, place.offset, message_.numel)};
    return group.allreduce(tensors);
  }
  if (!message_.is_summed()) {
    std::vector<int64_t> by_rank;
    for (const std::vector<int64_t>& sizes : sizes_) by_rank.push_back(sizes.front());
    return start_to_all(group, coded_, std::move(by_rank));
  }
  std::vector<int64_t> from_others;
  for (const std::vector<int64_t>& sizes : sizes_) from_others.push_back(sizes[static_cast<size_t>(rank_)]);
  receive(from_others);
  const int64_t sent = sum_of(own_sizes_);
  sent_bytes_ += sent;
  return all_to_all(group, received_, coded_.narrow(0, 0, sent), std::move(from_others), own_sizes_);
}

void StepwiseMessage::take_contributions(const Groups& groups) {
  if (message_.transport == Transport::kAllReduce) return;
  if (!message_.is_summed()) return add_up();
  sum();
  if (!message_.is_coded) return send_sums(groups);
  start_in_turn(groups->sums(), turn_of_sizes_of_sums_, groups, &StepwiseMessage::start_sizes_of_sums,
                &StepwiseMessage::take_sizes_of_sums, false);
}

// Every rank adds up what was broadcast, where it is to lie.
void StepwiseMessage::add_up() {
  if (step_->has_failed) return;
  add_contributions([&](const DirectPart& part) { return places_[part.place].slice(part); });
}

// The owner adds up what was contributed to it, in memory of its own, and codes the sum.
void StepwiseMessage::sum() {
  if (!own_.defined()) return;
  int64_t filled = 0;
  add_contributions([&](const DirectPart& part) {
    filled += part.length;
    return BorrowedSlice{&own_, filled - part.length, part.length};
  });
  coded_ = bytes(most_bytes(own_.numel()) * (world_size_ - 1));
  own_sum_bytes_ = write_message({{&own_, 0, own_.numel()}}, message_.is_coded, coded_);
  if (!message_.is_coded) return;
  tally().sum_bytes += own_.numel() * element_bytes_;
  tally().coded_sum_bytes += own_sum_bytes_;
}

template <typename To>
void StepwiseMessage::add_contributions(const To& to) {
  // Those of the others, decoded.
  std::vector<int64_t> begins = received_begins_, counts;
  for (int from = 0; from < world_size_; ++from) {
    counts.push_back(from == rank_ ? 0 : contributed(from, message_.is_summed() ? static_cast<size_t>(rank_) : 0));
  }
  at::Tensor decoded = received_;
  if (message_.is_coded) {
    const at::Tensor numbers = at::empty({sum_of(counts)}, one_of(places_).options());
    int64_t end = 0;
    for (int from = 0; from < world_size_; ++from) {
      const auto index = static_cast<size_t>(from);
      read_from(from, {&numbers, end, counts[index]}, "a contribution");
      begins[index] = end * element_bytes_;
      end += counts[index];
    }
    decoded = numbers.view(at::kByte);
  }
  RECORD_FUNCTION("ddp_hooks::sum", std::vector<c10::IValue>());
  std::vector<SliceSum> sums;
  sums.reserve(count_parts(message_.groups));
  for (const DirectGroup& group : message_.groups) {
    if (message_.is_summed() && group.owner != rank_) continue;
    add_sums(group, places_, to, {rank_}, world_size_, begins, sums);
  }
  sum_contributions(decoded, sums);
}

// --- sums

StepwiseMessage::WorkPointer StepwiseMessage::start_sizes_of_sums(c10d::Backend& group) {
  sizes_of_sums_ = at::empty({world_size_}, at::kLong);
  return all_gather(group, sizes_of_sums_, at::full({1}, own_sum_bytes_, at::kLong), kSizes);
}

void StepwiseMessage::take_sizes_of_sums(const Groups& groups) {
  const int64_t* sizes = sizes_of_sums_.const_data_ptr<int64_t>();
  received_sums_.assign(sizes, sizes + world_size_);
  for (int from = 0; from < world_size_; ++from) check_size(sizes[from], owned(from), from, "a sum");
  send_sums(groups);
}

void StepwiseMessage::send_sums(const Groups& groups) {
  for (int from = 0; from < world_size_; ++from) {
    const int64_t uncoded = owned(from) * element_bytes_;
    travelled_.uncoded_sums += uncoded;
    if (!message_.is_coded) received_sums_.push_back(uncoded);
  }
  travelled_.sums = sum_of(received_sums_);
  start_in_turn(groups->sums(), turn_of_sums_, groups, &StepwiseMessage::start_sums, &StepwiseMessage::take_sums, true);
}

StepwiseMessage::WorkPointer StepwiseMessage::start_sums(c10d::Backend& group) {
  return start_to_all(group, coded_.defined() ? coded_ : bytes(0), std::move(received_sums_));
}

void StepwiseMessage::take_sums(const Groups&) {
  if (step_->has_failed) return;
  for (const DirectGroup& group : message_.groups) {
    std::vector<BorrowedSlice> to;
    for (const DirectPart& part : group.parts) append(to, places_[part.place].slice(part));
    if (group.owner == rank_) {
      scatter(own_, to);
    } else if (to.size() == 1) {
      read_from(group.owner, to[0], "a sum");
    } else {
      const at::Tensor sums = at::empty({group.numel}, one_of(places_).options());
      read_from(group.owner, {&sums, 0, group.numel}, "a sum");
      scatter(sums, to);
    }
  }
}

// --- every step

void StepwiseMessage::start_in_turn(OrderedGroup& group, int64_t turn, const Groups& groups, Start start, Take take,
                                    bool is_last) {
  const auto self = shared_from_this();
  in_turn(
      group, turn, step_, groups, [self, start](c10d::Backend& backend) { return (self.get()->*start)(backend); },
      [self, take](const Groups& open) { (self.get()->*take)(open); },
      [self, is_last](const Groups& open, const std::exception_ptr& error) {
        if (error) return self->give_up(open, error);
        if (is_last) self->ended_(*self, nullptr);
      });
}

// Turns that it has taken will not be used, and other ranks wait for them.
void StepwiseMessage::give_up(const Groups& groups, const std::exception_ptr& error) {
  ended_(*this, groups && message_.is_summed() ? groups->sums().fail(error) : error);
}

// How many elements each rank contributes to what each owner adds up, apart from its own; or to what is broadcast.
std::vector<std::vector<int64_t>> StepwiseMessage::count_contributed() const {
  const auto ranks = static_cast<size_t>(world_size_);
  std::vector<std::vector<int64_t>> counts(ranks, std::vector<int64_t>(size_count(), 0));
  for (const DirectGroup& group : message_.groups) {
    const auto owner = static_cast<size_t>(group.owner);
    for (const DirectPart& part : group.parts) {
      for (RankSet left = part.contributors; left != 0; left &= left - 1) {
        const auto from = static_cast<size_t>(std::countr_zero(left));
        if (!message_.is_summed() || from != owner) counts[from][message_.is_summed() ? owner : 0] += part.length;
      }
    }
  }
  return counts;
}

int64_t StepwiseMessage::owned(int owner) const {
  int64_t numel = 0;
  for (const DirectGroup& group : message_.groups) numel += group.owner == owner ? group.numel : 0;
  return numel;
}

int64_t StepwiseMessage::most_bytes(int64_t count) const {
  if (count == 0 || !message_.is_coded) return count * element_bytes_;
  return most_coded_bytes(count, type_);
}

void StepwiseMessage::add_slices(const DirectGroup& group, std::vector<BorrowedSlice>& slices) const {
  for (const DirectPart& part : group.parts) {
    if (contains(part.contributors, rank_)) append(slices, places_[part.place].slice(part));
  }
}

// To be added to what an error says.
std::string StepwiseMessage::describe(int from, const char* what) const {
  const int rank = members_[static_cast<size_t>(from)];
  return std::string(what) + " from rank " + std::to_string(rank) + ", coded message " + std::to_string(number_) +
         " of the step";
}

void StepwiseMessage::check_size(int64_t size, int64_t count, int from, const char* what) const {
  const int64_t most = most_bytes(count);
  TORCH_CHECK(size >= 0 && size <= most && (size == 0) == (count == 0), "ddp_hooks: ", describe(from, what),
              ": expected ", count, " values in at most ", most, " bytes, received a size of ", size, " bytes");
}

void StepwiseMessage::read_from(int from, const BorrowedSlice& to, const char* what) const {
  const auto index = static_cast<size_t>(from);
  read_message(received_, received_begins_[index], received_sizes_[index], to, message_.is_coded,
               [&] { return describe(from, what); });
}

// Makes room for so much from each rank.
void StepwiseMessage::receive(const std::vector<int64_t>& sizes) {
  received_ = bytes(sum_of(sizes));
  received_sizes_ = sizes;
  received_begins_.clear();
  int64_t end = 0;
  for (const int64_t size : sizes) {
    received_begins_.push_back(end);
    end += size;
  }
}

// What this rank has for all others, which lies at the beginning of `coded`.
StepwiseMessage::WorkPointer StepwiseMessage::start_to_all(c10d::Backend& group, const at::Tensor& coded,
                                                           std::vector<int64_t> sizes) {
  const auto own = static_cast<size_t>(rank_);
  const int64_t most = *std::max_element(sizes.begin(), sizes.end());
  if (is_gathered(sizes)) {
    sent_bytes_ += most * (world_size_ - 1);
    receive(std::vector<int64_t>(sizes.size(), most));
    received_sizes_ = sizes;
    const at::Tensor sent = received_.narrow(0, received_begins_[own], most);
    sent.narrow(0, 0, sizes[own]).copy_(coded.narrow(0, 0, sizes[own]));
    return all_gather(group, received_, sent);
  }
  sent_bytes_ += sizes[own] * (world_size_ - 1);
  std::vector<int64_t> from_others = sizes;
  from_others[own] = 0;
  receive(from_others);
  return all_to_all_alike(group, received_, coded, std::move(sizes), rank_);
}

}  // namespace ddp_hooks
