#include "transport/direct_sender.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "transport/collectives.h"

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
      parts_.push_back({place.slice(part), place.divisor, place.divides});
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

// What this rank has for all others, which lies where its part of the memory begins.
template <typename Group>
c10::intrusive_ptr<c10d::Work> send_to_all(Group& group, const DirectMessage& message, at::Tensor memory,
                                           const std::vector<int64_t>& begins, int rank) {
  const auto own = static_cast<size_t>(rank);
  if (message.is_gathered) {
    // Where its result lies already: NCCL then copies nothing.
    const at::Tensor sent = memory.narrow(0, begins[own], memory.numel() / static_cast<int64_t>(begins.size()));
    return all_gather(group, std::move(memory), sent);
  }
  const at::Tensor sent = memory.narrow(0, begins[own], memory.numel() - begins[own]);
  return all_to_all_alike(group, memory.narrow(0, 0, begins[own]), sent, message.for_all_bytes, rank);
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
      add_sums(group, places, behind, {}, world_size, positions, sums);
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
    keep_for_stream(places);
  }
};

bool DirectSender::is_possible(c10d::ProcessGroup& group, c10::Device device, int count) {
  // A group of several backends, one for each device, has no name of its own; and one written in Python no backend.
  std::string name = backend_name(group, device.type());
  if (name.empty()) name = group.getBackendName();
  return count > 1 && count <= kMostRanksInSet && (name == "gloo" || is_on_streams(name, device.type()));
}

bool DirectSender::can_sum(c10d::ProcessGroup& group, c10::Device device, int count) {
  // Of two neither saves anything as an owner.
  return count > 2 && is_possible(group, device, count) &&
         (device.is_cpu() || is_on_streams(backend_name(group, device.type()), device.type()));
}

bool DirectSender::can_code(c10d::ProcessGroup& group, c10::Device device, int count) {
  return device.is_cpu() && is_possible(group, device, count);
}

bool DirectSender::needs_group_for_sums(c10d::ProcessGroup& group, c10::Device device, int count) {
  return device.is_cpu() && can_sum(group, device, count);
}

void DirectSender::count(int64_t sent_bytes) {
  statistics_.messages += 1;
  statistics_.sent_bytes += sent_bytes;
}

void DirectSender::send(OutgoingMessage outgoing) {
  const MessageBytes bytes = bytes_of(outgoing.message, element_bytes_of(outgoing.places));
  const int64_t payload = bytes.contributions + bytes.sums;
  statistics_.payload_bytes += payload;
  (outgoing.message.is_summed() ? statistics_.owner_bytes : statistics_.broadcast_bytes) += payload;
  outgoing.message.is_summed() ? collect(std::move(outgoing)) : broadcast(std::move(outgoing));
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

void DirectSender::broadcast(OutgoingMessage outgoing) {
  auto& [launch, message, places] = outgoing;
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
            [groups = std::move(message.groups), places = std::move(places), received = std::move(received),
             ranks = world_size()](c10::ivalue::Future&) {
              RECORD_FUNCTION("ddp_hooks::sum", std::vector<c10::IValue>());
              std::vector<SliceSum> sums;
              sums.reserve(count_parts(groups));
              std::vector<int64_t> positions = received.begins;
              const auto to = [&](const DirectPart& part) { return places[part.place].slice(part); };
              for (const DirectGroup& group : groups) add_sums(group, places, to, {}, ranks, positions, sums);
              sum_contributions(received.memory, sums);
              keep_for_stream(received.memory);
              keep_for_stream(places);
            });
}

void DirectSender::collect(OutgoingMessage outgoing) {
  auto& [launch, message, places] = outgoing;
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
          end_message(owned->launch, open ? open->sums().fail(failure) : failure);
        });
  };
  const c10::Device device = owned->device();
  if (is_on_streams_) {
    // The completion runs here and now, in the same order on every rank.
    check_is_complete(*contributions, group_, device);
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
        if (error) end_message(owned->launch, groups->sums().fail(error));
      });
}

}  // namespace ddp_hooks
