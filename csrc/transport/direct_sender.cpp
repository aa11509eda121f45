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

  // Room for parts of some groups, so that the list does not move with each.
  void reserve(size_t parts) { parts_.reserve(parts); }
  // What the rank contributes to a group. `places` have to stay.
  void add_contributions(const DirectGroup& group, const Places& places, int rank) {
    for (const DirectPart& part : group.parts) {
      if (!contains(part.contributors, rank)) continue;
      const Place& place = places[part.place];
      if (part.width != Width::kFull) {
        parts_.push_back({place.slice(part), part.width});
      } else {
        parts_.push_back({place.slice(part), part.width, place.divisor, place.divides});
      }
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

// All places of a message are of one type, on one device.
const at::Tensor& one_of(const Places& places) {
  return std::find_if(places.begin(), places.end(), [](const Place& place) { return place.flat.defined(); })->flat;
}

size_t count_parts(const std::vector<DirectGroup>& groups) {
  size_t count = 0;
  for (const DirectGroup& group : groups) count += group.parts.size();
  return count;
}

int64_t element_bytes_of(const Places& places) {
  return one_of(places).element_size();
}

// Of each part of a group the sum of contributions, which lie in `positions` by rank, and which are moved past them; it
// is to be `to(part)`. `here`: this rank, whose narrow contributions lie there; -1 where all have been copied.
template <typename To>
void add_sums(const DirectGroup& group, const Places& places, const To& to, int here, int world_size,
              std::vector<int64_t>& positions, std::vector<SliceSum>& sums) {
  const int64_t element_bytes = element_bytes_of(places);
  for (const DirectPart& part : group.parts) {
    const bool is_narrow = part.width != Width::kFull;
    const int64_t bytes = packed_bytes(part.length, part.width, element_bytes);
    SliceSum& sum = sums.emplace_back();
    sum.to = to(part);
    sum.divisor = is_narrow ? places[part.place].divisor : 1;
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

void keep(const Places& places) {
  for (const Place& place : places) keep_for_stream(place.flat);
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_to_all(Group& group, at::Tensor received, at::Tensor sent,
                                          std::vector<int64_t> received_bytes, std::vector<int64_t> sent_bytes) {
  RECORD_FUNCTION("ddp_hooks::all_to_all", std::vector<c10::IValue>());
  return start_all_to_all(group, received, sent, received_bytes, sent_bytes);
}

// What this rank has for all others, which lies where its part of the memory begins.
template <typename Group>
c10::intrusive_ptr<c10d::Work> send_to_all(Group& group, const DirectMessage& message, at::Tensor memory,
                                           const std::vector<int64_t>& begins, int rank) {
  const auto own = static_cast<size_t>(rank);
  if (message.is_gathered) {
    RECORD_FUNCTION("ddp_hooks::all_gather", std::vector<c10::IValue>());
    // Where its result lies already: NCCL then copies nothing.
    at::Tensor sent = memory.narrow(0, begins[own], memory.numel() / static_cast<int64_t>(begins.size()));
    return start_all_gather(group, memory, sent);
  }
  const int64_t here = message.for_all_bytes[own], others = static_cast<int64_t>(begins.size()) - 1;
  std::vector<int64_t> received = message.for_all_bytes;
  std::vector<int64_t> to_each(begins.size(), here);
  received[own] = to_each[own] = 0;
  const at::Tensor sent = memory.narrow(0, begins[own], here * others);
  for (int64_t copy = 1; copy < others; ++copy) sent.narrow(0, copy * here, here).copy_(sent.narrow(0, 0, here));
  return all_to_all(group, memory.narrow(0, 0, begins[own]), sent, std::move(received), std::move(to_each));
}

}  // namespace

// Sent to owners, and then summed by them.
struct DirectSender::OwnedMessage {
  Launch launch;
  DirectMessage message;
  Places places;
  at::Tensor sent;    // to owners, by owner
  FromAll received;   // contributions to what this rank owns
  FromAll with_sums;  // of all owners
  int rank = 0;
  int world_size = 0;

  c10::Device device() const { return received.memory.device(); }

  // The group's sums, which lie where its owner's part begins.
  at::Tensor sums_of(const DirectGroup& group) const {
    const int64_t begin = with_sums.begins[static_cast<size_t>(group.owner)];
    return with_sums.memory.narrow(0, begin, group.numel * element_bytes_of(places)).view(one_of(places).scalar_type());
  }

  // What this rank owns.
  void sum() {
    RECORD_FUNCTION("ddp_hooks::sum", std::vector<c10::IValue>());
    for (const DirectGroup& group : message.groups) {
      if (group.owner != rank) continue;
      const at::Tensor own = sums_of(group);
      int64_t filled = 0;
      const auto behind = [&](const DirectPart& part) {
        filled += part.length;
        return BorrowedSlice{&own, filled - part.length, part.length};
      };
      std::vector<SliceSum> sums;
      sums.reserve(group.parts.size());
      std::vector<int64_t> positions = received.begins;
      add_sums(group, places, behind, -1, world_size, positions, sums);
      sum_contributions(received.memory, sums);
    }
  }

  // What was received is an output of the collective, and on streams its future records that.
  void put_back() const {
    RECORD_FUNCTION("ddp_hooks::scatter", std::vector<c10::IValue>());
    for (const DirectGroup& group : message.groups) {
      std::vector<BorrowedSlice> to;
      to.reserve(group.parts.size());
      for (const DirectPart& part : group.parts) to.push_back(places[part.place].slice(part));
      scatter(sums_of(group), to);
    }
    keep(places);
  }
};

bool DirectSender::is_possible(c10d::ProcessGroup& group, c10::Device device) {
  // A group of several backends, one for each device, has no name of its own; and one written in Python no backend.
  std::string name = backend_name(group, device.type());
  if (name.empty()) name = group.getBackendName();
  return group.getSize() > 1 && group.getSize() <= kMostRanksInSet &&
         (name == "gloo" || is_on_streams(name, device.type()));
}

bool DirectSender::can_sum(c10d::ProcessGroup& group, c10::Device device) {
  // Of two ranks neither saves anything as an owner.
  return group.getSize() > 2 && is_possible(group, device) &&
         (device.is_cpu() || is_on_streams(backend_name(group, device.type()), device.type()));
}

bool DirectSender::needs_group_for_sums(c10d::ProcessGroup& group, c10::Device device) {
  return device.is_cpu() && can_sum(group, device);
}

void DirectSender::count(int64_t sent_bytes) {
  statistics_.messages += 1;
  statistics_.sent_bytes += sent_bytes;
}

void DirectSender::send(const Launch& launch, const DirectMessage& message, Places places) {
  const MessageBytes bytes = bytes_of(message, element_bytes_of(places));
  statistics_.payload_bytes += bytes.payload;
  statistics_.narrow_bytes += bytes.narrow;
  (message.is_summed ? statistics_.owner_bytes : statistics_.broadcast_bytes) += bytes.payload;
  message.is_summed ? collect(launch, message, std::move(places)) : broadcast(launch, message, std::move(places));
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
  count((message.is_gathered ? most : bytes[own]) * (world_size() - 1));
  return room;
}

void DirectSender::broadcast(const Launch& launch, const DirectMessage& message, Places places) {
  const at::TensorOptions options = one_of(places).options();
  FromAll received = take_room(launch, message, options);
  const auto own = static_cast<size_t>(rank());
  Packer packer(received.memory.narrow(0, received.begins[own], message.for_all_bytes[own]));
  packer.reserve(count_parts(message.groups));
  for (const DirectGroup& group : message.groups) packer.add_contributions(group, places, rank());
  packer.finish();

  const auto work = send_to_all(group_, message, received.memory, received.begins, rank());
  const c10::Device device = received.memory.device();
  when_back(work, device, launch,
            [groups = message.groups, places = std::move(places), received = std::move(received), rank = rank(),
             ranks = world_size()](c10::ivalue::Future&) {
              RECORD_FUNCTION("ddp_hooks::sum", std::vector<c10::IValue>());
              std::vector<SliceSum> sums;
              sums.reserve(count_parts(groups));
              std::vector<int64_t> positions = received.begins;
              const auto to = [&](const DirectPart& part) { return places[part.place].slice(part); };
              for (const DirectGroup& group : groups) add_sums(group, places, to, rank, ranks, positions, sums);
              sum_contributions(received.memory, sums);
              keep_for_stream(received.memory);
              keep(places);
            });
}

void DirectSender::collect(const Launch& launch, const DirectMessage& message, Places places) {
  const at::TensorOptions options = one_of(places).options();
  const int64_t element_bytes = static_cast<int64_t>(options.dtype().itemsize());
  const std::vector<int64_t> nothing(static_cast<size_t>(world_size()), 0);
  std::vector<int64_t> to_owners = nothing, from_others = nothing, begins = nothing;
  int64_t own = 0, sent = 0, received = 0;
  for (const DirectGroup& group : message.groups) {
    if (group.owner != rank()) {
      const int64_t bytes = contribution_bytes(group, rank(), element_bytes);
      to_owners[static_cast<size_t>(group.owner)] = bytes;
      sent += bytes;
      continue;
    }
    own = contribution_bytes(group, rank(), element_bytes);
    for (int from = 0; from < world_size(); ++from) {
      if (from == rank()) continue;
      const int64_t bytes = contribution_bytes(group, from, element_bytes);
      from_others[static_cast<size_t>(from)] = bytes;
      begins[static_cast<size_t>(from)] = received;
      received += bytes;
    }
  }
  begins[static_cast<size_t>(rank())] = received;
  const at::TensorOptions bytes = options.dtype(at::kByte);
  const auto owned = std::make_shared<OwnedMessage>();
  owned->launch = launch;
  owned->message = message;
  owned->places = std::move(places);
  owned->sent = staging_.take(*launch.step, sent, bytes);
  owned->received = {staging_.take(*launch.step, received + own, bytes), std::move(begins)};
  owned->with_sums = take_room(launch, message, options);
  owned->rank = rank();
  owned->world_size = world_size();
  int64_t filled = 0;
  for (const DirectGroup& group : message.groups) {
    const bool is_own = group.owner == rank();
    const int64_t size = contribution_bytes(group, rank(), element_bytes);
    Packer packer(is_own ? owned->received.memory.narrow(0, received, size) : owned->sent.narrow(0, filled, size));
    packer.reserve(group.parts.size());
    packer.add_contributions(group, owned->places, rank());
    packer.finish();
    if (!is_own) filled += size;
  }
  count(sent);
  at::Tensor to = owned->received.memory.narrow(0, 0, received);
  sum_when_back(all_to_all(group_, to, owned->sent, from_others, to_owners), owned);
}

void DirectSender::sum_when_back(const c10::intrusive_ptr<c10d::Work>& contributions,
                                 std::shared_ptr<OwnedMessage> owned) {
  const auto send_sums = [owned](auto& group) {
    const FromAll& room = owned->with_sums;
    return send_to_all(group, owned->message, room.memory, room.begins, owned->rank);
  };
  // Until its sums are back, a message counts as under way.
  *owned->launch.step->messages_not_back += 1;
  // Not held: the group for sums holds this until its turn comes.
  const std::weak_ptr<const ControlGroups> groups =
      is_on_streams_ ? std::weak_ptr<const ControlGroups>() : control_groups_;
  const auto sums_sent = [owned, groups](const c10::intrusive_ptr<c10d::Work>& work, const std::exception_ptr& error) {
    if (error) return end_message(owned->launch, error);
    when_back(
        work, owned->device(), owned->launch.step,
        [owned](c10::ivalue::Future&) {
          if (!owned->launch.step->has_failed) owned->put_back();
          *owned->launch.step->messages_not_back -= 1;
        },
        [owned, groups](const std::exception_ptr& failure) {
          const auto open = failure ? groups.lock() : nullptr;
          if (open) open->sums().fail(failure);
          end_message(owned->launch, failure);
        });
  };
  const c10::Device device = owned->device();
  if (is_on_streams_) {
    // The completion runs here and now, in the same order on every rank.
    TORCH_CHECK(contributions->getFuture()->completed(), "ddp_hooks: expected a backend whose collectives complete ",
                "on the host once they are enqueued on a stream, received ", backend_name(group_, device.type()),
                ", for which the host would have to wait; set Tuning.owners to False");
    std::exception_ptr failure;
    when_back(
        contributions, device, owned->launch.step,
        [&](c10::ivalue::Future&) {
          owned->sum();
          sums_sent(send_sums(group_), nullptr);
        },
        [&](const std::exception_ptr& error) {
          failure = error;
          // Otherwise the collective that sends them does that.
          if (error) keep_for_stream(owned->with_sums.memory);
        });
    // The other ranks are ahead of this one, which must not send them anything else.
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const int64_t turn = control_groups_->sums().take_turn();
  when_back(
      contributions, device, owned->launch.step,
      [owned, send_sums, sums_sent, turn, groups = control_groups_](c10::ivalue::Future&) {
        owned->sum();
        groups->sums().start(turn, send_sums, sums_sent);
      },
      [owned, groups = control_groups_](const std::exception_ptr& error) {
        if (!error) return;
        groups->sums().fail(error);
        end_message(owned->launch, error);
      });
}

}  // namespace ddp_hooks
