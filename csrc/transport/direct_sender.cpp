#include "transport/direct_sender.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace ddp_hooks {
namespace {

std::vector<SliceOfTensor> slices_of(const std::vector<DirectPlace>& places) {
  std::vector<SliceOfTensor> slices;
  slices.reserve(places.size());
  for (const DirectPlace& place : places) slices.push_back(place.slice);
  return slices;
}

// `to` = the places, one after the other; neighbours that are scaled in the same way in one call.
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

// Calls `act(offset, length, place)` for each of the group's parts to which the rank contributes: where it lies in what
// is owned, and its number.
template <typename Act>
void for_each_contribution(const DirectGroup& group, int rank, const Act& act) {
  int64_t offset = 0;
  for (size_t i = 0; i < group.parts.size(); ++i) {
    const DirectPart& part = group.parts[i];
    if (contains(part.contributors, rank)) act(offset, part.length, i);
    offset += part.length;
  }
}

int64_t count_contribution(const DirectGroup& group, int rank) {
  int64_t numel = 0;
  for_each_contribution(group, rank, [&](int64_t, int64_t length, size_t) { numel += length; });
  return numel;
}

void scatter_group(const at::Tensor& from, const std::vector<DirectPlace>& places) {
  RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
  scatter(from, slices_of(places));
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

DirectSender::Splits DirectSender::no_splits() const {
  const std::vector<int64_t> nothing(static_cast<size_t>(world_size()), 0);
  return {nothing, nothing};
}

void DirectSender::send(Launch launch, const DirectMessage& message, DirectPlaces places) {
  const int64_t bytes = message.numel * places.front().front().slice.flat.element_size();
  statistics_.payload_bytes += bytes;
  if (message.is_summed) {
    statistics_.owner_bytes += bytes;
    collect(std::move(launch), message, std::move(places));
    return;
  }
  statistics_.broadcast_bytes += bytes;
  std::vector<DirectPlace> own;
  for (size_t i = 0; i < message.groups.size(); ++i) {
    if (message.groups[i].owner == rank()) own = places[i];
  }
  spread(std::move(launch), message.groups, std::move(places), [&own](const at::Tensor& to) {
    gather_places(to, own);
    at::Tensor(to).add_(0);
  });
}

void DirectSender::spread(Launch launch, std::vector<DirectGroup> groups, DirectPlaces places,
                          const std::function<void(const at::Tensor&)>& fill) {
  Splits splits = no_splits();
  int64_t here = 0, elsewhere = 0;
  for (const DirectGroup& group : groups) {
    if (group.owner == rank()) {
      here = group.numel;
    } else {
      splits.received[static_cast<size_t>(group.owner)] = group.numel;
      elsewhere += group.numel;
    }
  }
  const int64_t others = world_size() - 1;
  at::Tensor sent = staging_.take(*launch.step, here * others, options_of(places));
  at::Tensor received = staging_.take(*launch.step, elsewhere, options_of(places));
  const at::Tensor own = sent.narrow(0, 0, here);
  fill(own);
  for (int64_t copy = 1; copy < others; ++copy) sent.narrow(0, copy * here, here).copy_(own);
  for (int to = 0; to < world_size(); ++to) splits.sent[static_cast<size_t>(to)] = to == rank() ? 0 : here;

  const auto work = all_to_all(received, sent, std::move(splits));
  const c10::Device device = sent.device();
  when_back(
      *work, device, std::move(launch),
      [groups = std::move(groups), places = std::move(places), own, received, rank = rank()](c10::ivalue::Future&) {
        int64_t arrived = 0;
        for (size_t i = 0; i < groups.size(); ++i) {
          const DirectGroup& group = groups[i];
          if (group.owner == rank) {
            scatter_group(own, places[i]);
          } else {
            scatter_group(received.narrow(0, arrived, group.numel), places[i]);
            arrived += group.numel;
          }
        }
        keep_for_stream(own);
        keep_for_stream(received);
      });
}

// The first phase of what owners sum.
void DirectSender::collect(Launch launch, const DirectMessage& message, DirectPlaces places) {
  Splits splits = no_splits();
  int64_t own = 0, sent = 0, received = 0;
  for (const DirectGroup& group : message.groups) {
    if (group.owner != rank()) {
      const int64_t numel = count_contribution(group, rank());
      splits.sent[static_cast<size_t>(group.owner)] = numel;
      sent += numel;
      continue;
    }
    own = count_contribution(group, rank());
    for (int from = 0; from < world_size(); ++from) {
      if (from == rank()) continue;
      const int64_t numel = count_contribution(group, from);
      splits.received[static_cast<size_t>(from)] = numel;
      received += numel;
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
  int64_t filled = 0;
  for (size_t i = 0; i < waiting.groups.size(); ++i) {
    const DirectGroup& group = waiting.groups[i];
    std::vector<DirectPlace> from;
    for_each_contribution(group, rank(),
                          [&](int64_t, int64_t, size_t part) { from.push_back(waiting.places[i][part]); });
    if (group.owner == rank()) {
      gather_places(waiting.own, from);
    } else {
      const int64_t numel = splits.sent[static_cast<size_t>(group.owner)];
      gather_places(waiting.sent.narrow(0, filled, numel), from);
      filled += numel;
    }
  }
  waiting.work = all_to_all(waiting.received, waiting.sent, std::move(splits));
  *step.messages_not_back += 1;
  waiting_.push_back(std::move(waiting));
}

// What this rank owns.
void DirectSender::sum(const Waiting& waiting, at::Tensor sums) const {
  sums.zero_();
  const auto group = std::find_if(waiting.groups.begin(), waiting.groups.end(),
                                  [&](const DirectGroup& candidate) { return candidate.owner == rank(); });
  if (group == waiting.groups.end()) return;
  int64_t arrived = 0;
  for (int from = 0; from < world_size(); ++from) {
    std::vector<Range> ranges;
    int64_t numel = 0;
    for_each_contribution(*group, from, [&](int64_t offset, int64_t length, size_t) {
      numel += length;
      if (!ranges.empty() && ranges.back().offset + ranges.back().length == offset) {
        ranges.back().length += length;
      } else {
        ranges.push_back({offset, length});
      }
    });
    if (from == rank()) {
      scatter_add(waiting.own, sums, ranges);
    } else {
      scatter_add(waiting.received.narrow(0, arrived, numel), sums, ranges);
      arrived += numel;
    }
  }
}

c10::intrusive_ptr<c10d::Work> DirectSender::contributions(const std::shared_ptr<StepInFlight>& step) {
  // Of a pass that was broken off, nothing is summed.
  while (!waiting_.empty() && waiting_.front().launch.step != step) waiting_.pop_front();
  return waiting_.empty() ? nullptr : waiting_.front().work;
}

void DirectSender::send_sums(const std::shared_ptr<StepInFlight>& step) {
  // Whoever waited may have been dropped meanwhile.
  if (!contributions(step)) return;
  const Waiting waiting = std::move(waiting_.front());
  waiting_.pop_front();
  *step->messages_not_back -= 1;
  spread(waiting.launch, waiting.groups, waiting.places, [&](const at::Tensor& sums) { sum(waiting, sums); });
}

}  // namespace ddp_hooks
