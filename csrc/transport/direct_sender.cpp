#include "transport/direct_sender.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace ddp_hooks {
namespace {

bool is_alone(RankSet set, int rank) {
  return set == RankSet{1} << rank;
}

std::vector<SliceOfTensor> slices_of(const std::vector<DirectPlace>& places) {
  std::vector<SliceOfTensor> slices;
  slices.reserve(places.size());
  for (const DirectPlace& place : places) slices.push_back(place.slice);
  return slices;
}

// `to` = what this rank contributes to one group; neighbours that are scaled in the same way in one call.
void gather_places(const at::Tensor& to, const std::vector<DirectPlace>& places) {
  int64_t position = 0;
  for (auto first = places.begin(); first != places.end();) {
    std::vector<SliceOfTensor> slices;
    const int64_t begin = position;
    auto end = first;
    for (; end != places.end() && end->divisor == first->divisor && end->divides == first->divides; ++end) {
      slices.push_back(end->slice);
      position += end->slice.length;
    }
    gather(to.narrow(0, begin, position - begin), slices, first->divisor, first->divides);
    first = end;
  }
}

// A buffer as it is filled or read, group by group.
class Cursor {
 public:
  explicit Cursor(at::Tensor buffer) : buffer_(std::move(buffer)) {}
  at::Tensor next(int64_t numel) {
    const at::Tensor stretch = buffer_.narrow(0, position_, numel);
    position_ += numel;
    return stretch;
  }

 private:
  at::Tensor buffer_;
  int64_t position_ = 0;
};

void scatter_group(const at::Tensor& from, const std::vector<DirectPlace>& places) {
  RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
  scatter(from, slices_of(places));
}

// The sum with the others' zeros, which makes a -0.0 a +0.0.
void add_zero(const at::Tensor& tensor) {
  tensor.add_(0);
}

// Who receives the sum of a group: all but its owner, and but a rank that alone contributed it and has it.
bool lacks(const DirectGroup& group, int rank) {
  return rank != group.owner && !is_alone(group.contributors, rank);
}

// Torch 2.13 calls it by another name than those before.
template <typename Group>
c10::intrusive_ptr<c10d::Work> start_all_to_all(Group& group, at::Tensor& received, at::Tensor& sent,
                                                std::vector<int64_t>& received_numels,
                                                std::vector<int64_t>& sent_numels) {
  if constexpr (requires { group.all_to_all_single(received, sent, received_numels, sent_numels); }) {
    return group.all_to_all_single(received, sent, received_numels, sent_numels);
  } else {
    return group.alltoall_base(received, sent, received_numels, sent_numels);
  }
}

at::TensorOptions options_of(const DirectPlaces& places) {
  return places.front().front().slice.flat.options();
}

}  // namespace

bool DirectSender::is_possible(c10d::ProcessGroup& group, c10::Device device) {
  // A group of several backends, one for each device, has no name of its own; and one written in Python no backend.
  std::string name = backend_name(group, device.type());
  if (name.empty()) name = group.getBackendName();
  return group.getSize() > 1 && group.getSize() <= kMostRanksInSet && (name == "gloo" || is_nccl(name));
}

c10::intrusive_ptr<c10d::Work> DirectSender::all_to_all(at::Tensor& received, at::Tensor& sent, Splits splits) {
  RECORD_FUNCTION("ddp_hooks::all_to_all", std::vector<c10::IValue>());
  statistics_.messages += 1;
  statistics_.sent_bytes += static_cast<int64_t>(sent.nbytes());
  return start_all_to_all(group_, received, sent, splits.received, splits.sent);
}

void DirectSender::send(Launch launch, const DirectMessage& message, DirectPlaces places) {
  const int64_t bytes = message.numel * places.front().front().slice.flat.element_size();
  statistics_.payload_bytes += bytes;
  if (message.transport == Transport::kBroadcast) {
    statistics_.broadcast_bytes += bytes;
    broadcast(std::move(launch), message, std::move(places));
  } else {
    statistics_.owner_bytes += bytes;
    collect(std::move(launch), message, std::move(places));
  }
}

void DirectSender::broadcast(Launch launch, const DirectMessage& message, DirectPlaces places) {
  Splits splits{std::vector<int64_t>(static_cast<size_t>(world_size()), 0), {}};
  splits.received = splits.sent;
  int64_t here = 0;
  for (const DirectGroup& group : message.groups) {
    if (group.owner == rank()) {
      here += group.numel;
    } else {
      splits.received[static_cast<size_t>(group.owner)] += group.numel;
    }
  }
  const auto others = static_cast<int64_t>(world_size()) - 1;
  at::Tensor sent = staging_.take(*launch.step, here * others, options_of(places));
  at::Tensor received = staging_.take(*launch.step, message.numel - here, options_of(places));
  const at::Tensor own = sent.narrow(0, 0, here);
  Cursor contribution(own);
  for (size_t i = 0; i < message.groups.size(); ++i) {
    const DirectGroup& group = message.groups[i];
    if (group.owner == rank()) gather_places(contribution.next(group.numel), places[i]);
  }
  add_zero(own);
  for (int64_t copy = 1; copy < others; ++copy) sent.narrow(0, copy * here, here).copy_(own);
  for (int to = 0; to < world_size(); ++to) splits.sent[static_cast<size_t>(to)] = to == rank() ? 0 : here;

  const auto work = all_to_all(received, sent, std::move(splits));
  const c10::Device device = sent.device();
  when_back(*work, device, std::move(launch),
            [groups = message.groups, places = std::move(places), own, received, rank = rank(),
             ranks = world_size()](c10::ivalue::Future&) {
              Cursor arrived(received), contributed(own);
              for (int from = 0; from < ranks; ++from) {
                for (size_t i = 0; i < groups.size(); ++i) {
                  if (groups[i].owner != from) continue;
                  scatter_group((from == rank ? contributed : arrived).next(groups[i].numel), places[i]);
                }
              }
              keep_for_stream(own);
              keep_for_stream(received);
            });
}

// The first phase of what owners sum.
void DirectSender::collect(Launch launch, const DirectMessage& message, DirectPlaces places) {
  Splits splits{std::vector<int64_t>(static_cast<size_t>(world_size()), 0), {}};
  splits.received = splits.sent;
  int64_t own = 0, sent = 0, received = 0;
  for (const DirectGroup& group : message.groups) {
    for (int from = 0; from < world_size(); ++from) {
      if (!contains(group.contributors, from)) continue;
      const bool owned = group.owner == rank();
      if (owned && from == rank()) {
        own += group.numel;
      } else if (owned) {
        splits.received[static_cast<size_t>(from)] += group.numel;
        received += group.numel;
      } else if (from == rank()) {
        splits.sent[static_cast<size_t>(group.owner)] += group.numel;
        sent += group.numel;
      }
    }
  }
  const at::TensorOptions options = options_of(places);
  StepInFlight& step = *launch.step;
  Waiting waiting{std::move(launch),
                  message.groups,
                  std::move(places),
                  staging_.take(step, sent, options),
                  staging_.take(step, own, options),
                  staging_.take(step, received, options),
                  nullptr};
  Cursor to_owners(waiting.sent), to_itself(waiting.own);
  for (int owner = 0; owner < world_size(); ++owner) {
    for (size_t i = 0; i < waiting.groups.size(); ++i) {
      const DirectGroup& group = waiting.groups[i];
      if (group.owner != owner || !contains(group.contributors, rank())) continue;
      gather_places((owner == rank() ? to_itself : to_owners).next(group.numel), waiting.places[i]);
    }
  }
  waiting.work = all_to_all(waiting.received, waiting.sent, std::move(splits));
  *step.messages_not_back += 1;
  waiting_.push_back(std::move(waiting));
}

// What this rank owns, group by group.
at::Tensor DirectSender::sum(StepInFlight& step, const Waiting& waiting) const {
  int64_t numel = 0;
  for (const DirectGroup& group : waiting.groups) numel += group.owner == rank() ? group.numel : 0;
  const at::Tensor sums = staging_.take(step, numel, options_of(waiting.places));
  std::vector<bool> begun(waiting.groups.size(), false);
  Cursor arrived(waiting.received), contributed(waiting.own);
  for (int from = 0; from < world_size(); ++from) {
    Cursor place(sums);
    for (size_t i = 0; i < waiting.groups.size(); ++i) {
      const DirectGroup& group = waiting.groups[i];
      if (group.owner != rank()) continue;
      const at::Tensor to = place.next(group.numel);
      if (!contains(group.contributors, from)) continue;
      const at::Tensor contribution = (from == rank() ? contributed : arrived).next(group.numel);
      begun[i] ? to.add_(contribution) : to.copy_(contribution);
      begun[i] = true;
    }
  }
  add_zero(sums);
  return sums;
}

c10::intrusive_ptr<c10d::Work> DirectSender::contributions(const std::shared_ptr<StepInFlight>& step) {
  // Of a pass that was broken off, nothing is summed.
  while (!waiting_.empty() && waiting_.front().launch.step != step) waiting_.pop_front();
  return waiting_.empty() ? nullptr : waiting_.front().work;
}

void DirectSender::send_sums(const std::shared_ptr<StepInFlight>& step) {
  // Whoever waited may have been dropped meanwhile.
  if (!contributions(step)) return;
  Waiting waiting = std::move(waiting_.front());
  waiting_.pop_front();
  *step->messages_not_back -= 1;
  send_sums_of(std::move(waiting));
}

void DirectSender::send_sums_of(Waiting waiting) {
  StepInFlight& step = *waiting.launch.step;
  const at::Tensor sums = sum(step, waiting);
  Splits splits{std::vector<int64_t>(static_cast<size_t>(world_size()), 0), {}};
  splits.received = splits.sent;
  int64_t sent_numel = 0, received_numel = 0;
  for (const DirectGroup& group : waiting.groups) {
    if (group.owner != rank()) {
      if (!lacks(group, rank())) continue;
      splits.received[static_cast<size_t>(group.owner)] += group.numel;
      received_numel += group.numel;
      continue;
    }
    for (int to = 0; to < world_size(); ++to) {
      if (!lacks(group, to)) continue;
      splits.sent[static_cast<size_t>(to)] += group.numel;
      sent_numel += group.numel;
    }
  }
  at::Tensor sent = staging_.take(step, sent_numel, sums.options());
  at::Tensor received = staging_.take(step, received_numel, sums.options());
  Cursor outgoing(sent);
  for (int to = 0; to < world_size(); ++to) {
    Cursor summed(sums);
    for (const DirectGroup& group : waiting.groups) {
      if (group.owner != rank()) continue;
      const at::Tensor result = summed.next(group.numel);
      if (lacks(group, to)) outgoing.next(group.numel).copy_(result);
    }
  }
  // What this rank alone contributed and another one owns does not come back.
  add_zero(waiting.sent);

  const auto work = all_to_all(received, sent, std::move(splits));
  const c10::Device device = sent.device();
  Launch launch = std::move(waiting.launch);
  when_back(*work, device, std::move(launch),
            [waiting = std::move(waiting), sums, received, rank = rank(), ranks = world_size()](c10::ivalue::Future&) {
              Cursor summed(sums), arrived(received), contributed(waiting.sent);
              for (int owner = 0; owner < ranks; ++owner) {
                for (size_t i = 0; i < waiting.groups.size(); ++i) {
                  const DirectGroup& group = waiting.groups[i];
                  if (group.owner != owner) continue;
                  at::Tensor result;
                  if (owner == rank) {
                    result = summed.next(group.numel);
                  } else {
                    if (contains(group.contributors, rank)) result = contributed.next(group.numel);
                    if (lacks(group, rank)) result = arrived.next(group.numel);
                  }
                  scatter_group(result, waiting.places[i]);
                }
              }
              keep_for_stream(sums);
              keep_for_stream(received);
              keep_for_stream(waiting.sent);
            });
}

}  // namespace ddp_hooks
