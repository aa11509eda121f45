#include "transport/direct_sender.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace ddp_hooks {
namespace {

// What one rank sends of a message, part after part, each where the one before ends.
class Packer {
 public:
  explicit Packer(const at::Tensor& to) : to_(to) {}

  void add(const DirectPart& part, const DirectPlace& place) {
    if (part.width != Width::kFull) {
      parts_.push_back({place.slice, part.width});
    } else {
      parts_.push_back({place.slice, part.width, place.divisor, place.divides});
    }
  }

  // After the last one. In one call, because on a device each takes a launch.
  void finish() {
    RECORD_FUNCTION("ddp_hooks::pack", std::vector<c10::IValue>());
    pack(to_, parts_);
  }

 private:
  const at::Tensor to_;
  std::vector<PackedSlice> parts_;
};

// Where the parts of a group are to be summed, of contributions that lie in `positions` by rank, which are moved past
// them. `here`: this rank, whose narrow contributions lie where the sum is to be; -1 where all have been copied.
void add_sums(const DirectGroup& group, const std::vector<DirectPlace>& places, int here, int world_size,
              std::vector<int64_t>& positions, std::vector<SliceSum>& sums) {
  for (size_t i = 0; i < group.parts.size(); ++i) {
    const DirectPart& part = group.parts[i];
    const DirectPlace& place = places[i];
    const bool is_narrow = part.width != Width::kFull;
    const int64_t bytes = packed_bytes(part.length, part.width, place.slice.flat.element_size());
    SliceSum& sum = sums.emplace_back();
    sum.to = place.slice;
    sum.divisor = is_narrow ? place.divisor : 1;
    sum.adds_zero = std::popcount(part.contributors) < world_size;
    for (int rank = 0; rank < world_size; ++rank) {
      if (!contains(part.contributors, rank)) continue;
      int64_t& position = positions[static_cast<size_t>(rank)];
      sum.contributions.push_back({position, part.width, is_narrow && rank == here});
      position += bytes;
    }
  }
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

template <typename Group>
c10::intrusive_ptr<c10d::Work> start_all_gather(Group& group, at::Tensor& received, at::Tensor& sent) {
  if constexpr (requires { group.all_gather_single(received, sent); }) {
    return group.all_gather_single(received, sent);
  } else {
    return group._allgather_base(received, sent);
  }
}

std::vector<SliceOfTensor> slices_of(const std::vector<DirectPlace>& places) {
  std::vector<SliceOfTensor> slices;
  slices.reserve(places.size());
  for (const DirectPlace& place : places) slices.push_back(place.slice);
  return slices;
}

void keep(const at::Tensor& memory, const DirectPlaces& places) {
  if (memory.is_cpu()) return;
  keep_for_stream(memory);
  for (const std::vector<DirectPlace>& of_group : places) keep_for_stream(slices_of(of_group));
}

at::TensorOptions options_of(const DirectPlaces& places) {
  return places.front().front().slice.flat.options();
}

}  // namespace

bool DirectSender::is_possible(c10d::ProcessGroup& group, c10::Device device) {
  // A group of several backends, one for each device, has no name of its own; and one written in Python no backend.
  std::string name = backend_name(group, device.type());
  if (name.empty()) name = group.getBackendName();
  return group.getSize() > 1 && group.getSize() <= kMostRanksInSet &&
         (name == "gloo" || is_on_streams(name, device.type()));
}

c10::intrusive_ptr<c10d::Work> DirectSender::all_to_all(at::Tensor received, at::Tensor sent, Splits splits) {
  RECORD_FUNCTION("ddp_hooks::all_to_all", std::vector<c10::IValue>());
  statistics_.messages += 1;
  statistics_.sent_bytes += static_cast<int64_t>(sent.nbytes());
  return start_all_to_all(group_, received, sent, splits.received, splits.sent);
}

c10::intrusive_ptr<c10d::Work> DirectSender::all_gather(const FromAll& room) {
  RECORD_FUNCTION("ddp_hooks::all_gather", std::vector<c10::IValue>());
  const int64_t bytes = room.memory.numel() / world_size();
  statistics_.messages += 1;
  statistics_.sent_bytes += bytes * (world_size() - 1);
  // Where its result lies already: NCCL then copies nothing.
  at::Tensor received = room.memory, sent = received.narrow(0, room.begins[static_cast<size_t>(rank())], bytes);
  return start_all_gather(group_, received, sent);
}

DirectSender::Splits DirectSender::no_splits() const {
  const std::vector<int64_t> nothing(static_cast<size_t>(world_size()), 0);
  return {nothing, nothing};
}

void DirectSender::send(Launch launch, const DirectMessage& message, DirectPlaces places) {
  const int64_t element_bytes = places.front().front().slice.flat.element_size();
  const MessageBytes bytes = bytes_of(message, element_bytes);
  statistics_.payload_bytes += bytes.payload;
  statistics_.narrow_bytes += bytes.narrow;
  (message.is_summed ? statistics_.owner_bytes : statistics_.broadcast_bytes) += bytes.payload;
  message.is_summed ? collect(std::move(launch), message, std::move(places))
                    : broadcast(std::move(launch), message, std::move(places));
}

DirectSender::FromAll DirectSender::take_room(const Launch& launch, const DirectMessage& message,
                                              const at::TensorOptions& options) {
  const std::vector<int64_t>& bytes = message.for_all_bytes;
  const auto own = static_cast<size_t>(rank());
  const int64_t most = *std::max_element(bytes.begin(), bytes.end());
  FromAll room;
  int64_t end = 0;
  for (size_t from = 0; from < bytes.size(); ++from) {
    room.begins.push_back(end);
    if (message.is_gathered) {
      end += most;
    } else if (from != own) {
      end += bytes[from];
    }
  }
  if (!message.is_gathered) {
    // Behind what is received, a copy for each of the others.
    room.begins[own] = end;
    end += bytes[own] * (world_size() - 1);
  }
  room.memory = staging_.take(*launch.step, end, options.dtype(at::kByte));
  return room;
}

c10::intrusive_ptr<c10d::Work> DirectSender::send_to_all(const DirectMessage& message, const FromAll& room) {
  if (message.is_gathered) return all_gather(room);
  Splits splits{message.for_all_bytes, message.for_all_bytes};
  const auto own = static_cast<size_t>(rank());
  const int64_t here = message.for_all_bytes[own], others = world_size() - 1;
  std::fill(splits.sent.begin(), splits.sent.end(), here);
  splits.received[own] = splits.sent[own] = 0;
  const int64_t received = room.begins[own];
  const at::Tensor sent = room.memory.narrow(0, received, here * others);
  for (int64_t copy = 1; copy < others; ++copy) {
    sent.narrow(0, copy * here, here).copy_(sent.narrow(0, 0, here));
  }
  return all_to_all(room.memory.narrow(0, 0, received), sent, std::move(splits));
}

void DirectSender::broadcast(Launch launch, const DirectMessage& message, DirectPlaces places) {
  const at::TensorOptions options = options_of(places);
  FromAll received = take_room(launch, message, options);
  const auto own = static_cast<size_t>(rank());
  Packer packer(received.memory.narrow(0, received.begins[own], message.for_all_bytes[own]));
  for (size_t i = 0; i < message.groups.size(); ++i) {
    const std::vector<DirectPart>& parts = message.groups[i].parts;
    for (size_t part = 0; part < parts.size(); ++part) {
      if (contains(parts[part].contributors, rank())) packer.add(parts[part], places[i][part]);
    }
  }
  packer.finish();

  const auto work = send_to_all(message, received);
  const c10::Device device = received.memory.device();
  when_back(work, device, std::move(launch),
            [groups = message.groups, places = std::move(places), received = std::move(received), rank = rank(),
             ranks = world_size()](c10::ivalue::Future&) {
              RECORD_FUNCTION("ddp_hooks::sum", std::vector<c10::IValue>());
              std::vector<SliceSum> sums;
              std::vector<int64_t> positions = received.begins;
              for (size_t i = 0; i < groups.size(); ++i) {
                add_sums(groups[i], places[i], rank, ranks, positions, sums);
              }
              sum_contributions(received.memory, sums);
              keep(received.memory, places);
            });
}

// The first phase of what owners sum.
void DirectSender::collect(Launch launch, const DirectMessage& message, DirectPlaces places) {
  const at::TensorOptions options = options_of(places);
  const int64_t element_bytes = static_cast<int64_t>(options.dtype().itemsize());
  Splits splits = no_splits();
  int64_t own = 0, sent = 0, received = 0;
  std::vector<int64_t> begins(static_cast<size_t>(world_size()), 0);
  for (const DirectGroup& group : message.groups) {
    if (group.owner != rank()) {
      const int64_t bytes = contribution_bytes(group, rank(), element_bytes);
      splits.sent[static_cast<size_t>(group.owner)] = bytes;
      sent += bytes;
      continue;
    }
    own = contribution_bytes(group, rank(), element_bytes);
    for (int from = 0; from < world_size(); ++from) {
      if (from == rank()) continue;
      const int64_t bytes = contribution_bytes(group, from, element_bytes);
      splits.received[static_cast<size_t>(from)] = bytes;
      begins[static_cast<size_t>(from)] = received;
      received += bytes;
    }
  }
  begins[static_cast<size_t>(rank())] = received;
  StepInFlight& step = *launch.step;
  const at::TensorOptions bytes = options.dtype(at::kByte);
  Waiting waiting{std::move(launch),
                  message,
                  std::move(places),
                  staging_.take(step, sent, bytes),
                  {staging_.take(step, received + own, bytes), std::move(begins)},
                  nullptr};
  int64_t filled = 0;
  for (size_t i = 0; i < message.groups.size(); ++i) {
    const DirectGroup& group = message.groups[i];
    const bool is_own = group.owner == rank();
    const int64_t size = contribution_bytes(group, rank(), element_bytes);
    Packer packer(is_own ? waiting.received.memory.narrow(0, received, size) : waiting.sent.narrow(0, filled, size));
    for (size_t part = 0; part < group.parts.size(); ++part) {
      if (contains(group.parts[part].contributors, rank())) packer.add(group.parts[part], waiting.places[i][part]);
    }
    packer.finish();
    if (!is_own) filled += size;
  }
  waiting.work = all_to_all(waiting.received.memory.narrow(0, 0, received), waiting.sent, std::move(splits));
  *step.messages_not_back += 1;
  waiting_.push_back(std::move(waiting));
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
  broadcast_sums(waiting);
}

// The second phase: to all others what this rank owns.
void DirectSender::broadcast_sums(const Waiting& waiting) {
  const DirectMessage& message = waiting.message;
  const at::TensorOptions options = options_of(waiting.places);
  const FromAll received = take_room(waiting.launch, message, options);
  // The group's sums, which lie where its owner's part begins.
  const auto sums_of = [received, options](const DirectGroup& group) {
    const auto element_bytes = static_cast<int64_t>(options.dtype().itemsize());
    const int64_t begin = received.begins[static_cast<size_t>(group.owner)];
    return received.memory.narrow(0, begin, group.numel * element_bytes)
        .view(c10::typeMetaToScalarType(options.dtype()));
  };
  for (size_t i = 0; i < message.groups.size(); ++i) {
    const DirectGroup& group = message.groups[i];
    if (group.owner != rank()) continue;
    const at::Tensor own = sums_of(group);
    std::vector<DirectPlace> into;
    int64_t filled = 0;
    for (size_t part = 0; part < group.parts.size(); ++part) {
      into.push_back({{own, filled, group.parts[part].length}, waiting.places[i][part].divisor});
      filled += group.parts[part].length;
    }
    std::vector<SliceSum> sums;
    std::vector<int64_t> positions = waiting.received.begins;
    add_sums(group, into, -1, world_size(), positions, sums);
    sum_contributions(waiting.received.memory, sums);
  }

  const auto work = send_to_all(message, received);
  const c10::Device device = received.memory.device();
  when_back(work, device, waiting.launch,
            [groups = message.groups, places = waiting.places, received, sums_of](c10::ivalue::Future&) {
              RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
              for (size_t i = 0; i < groups.size(); ++i) scatter(sums_of(groups[i]), slices_of(places[i]));
              keep(received.memory, places);
            });
}

}  // namespace ddp_hooks
