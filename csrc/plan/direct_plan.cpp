#include "plan/direct_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace ddp_hooks {
namespace {

int64_t most_of(const std::vector<int64_t>& bytes_by_rank) {
  return *std::max_element(bytes_by_rank.begin(), bytes_by_rank.end());
}

int64_t for_all_bytes(const DirectMessage& message, int rank, int64_t element_bytes) {
  int64_t bytes = 0;
  for (const DirectGroup& group : message.groups) {
    if (!message.is_summed()) bytes += contribution_bytes(group, rank, element_bytes);
    if (message.is_summed() && group.owner == rank) bytes += group.numel * element_bytes;
  }
  return bytes;
}

// What each rank owns, in the order in which it was given it, and what each has to send.
class Ownership {
 public:
  Ownership(const Transports& transports, int64_t element_bytes, const DirectSettings& settings)
      : transports_(transports),
        element_bytes_(element_bytes),
        segment_bytes_(settings.segment_bytes),
        parts_of_bytes_(transports.coded.value_or(CodedParts{})),
        to_owners_(count()),
        broadcast_(count()),
        summed_(count()) {}

  void add(const DirectPart& stretch) {
    const bool is_summed = transport_for(stretch.contributors, transports_) == Transport::kByOwner;
    const int64_t segment = std::max<int64_t>(1, segment_bytes_ / element_bytes_);
    DirectPart rest = stretch;
    while (rest.length > 0) {
      DirectPart part = rest;
      part.length = std::min(rest.length, segment);
      rest.offset += part.length;
      rest.length -= part.length;
      assign(part, is_summed);
    }
  }

  // Of the rank that sends the most. Without what an all-gather pads.
  int64_t most_sent_bytes() const {
    int64_t most = 0;
    for (size_t rank = 0; rank < count(); ++rank) most = std::max(most, sent_bytes(rank));
    return most;
  }

  std::vector<DirectMessage> messages() const {
    std::vector<DirectMessage> messages;
    collect(broadcast_, Transport::kBroadcast, messages);
    collect(summed_, Transport::kByOwner, messages);
    for (DirectMessage& message : messages) {
      complete(message, transports_.world_size, element_bytes_);
      message.is_coded = transports_.coded.has_value();
    }
    return messages;
  }

 private:
  // What was dealt out to be broadcast, or to be summed; by rank.
  struct Dealt {
    explicit Dealt(size_t ranks) : parts(ranks), for_all_bytes(ranks) {}
    std::vector<std::vector<DirectPart>> parts;
    std::vector<int64_t> for_all_bytes;
  };

  size_t count() const { return static_cast<size_t>(transports_.world_size); }
  int64_t others() const { return transports_.world_size - 1; }
  int64_t sent_bytes(size_t rank) const {
    return to_owners_[rank] + others() * (broadcast_.for_all_bytes[rank] + summed_.for_all_bytes[rank]);
  }

  // In how many bytes so many elements are expected to travel.
  int64_t bytes_of(int64_t length, double part_of_bytes) const {
    return static_cast<int64_t>(static_cast<double>(length * element_bytes_) * part_of_bytes);
  }

  size_t least_loaded(RankSet ranks) const {
    auto best = static_cast<size_t>(std::countr_zero(ranks));
    for (size_t rank = best + 1; rank < count(); ++rank) {
      if (contains(ranks, static_cast<int>(rank)) && sent_bytes(rank) < sent_bytes(best)) best = rank;
    }
    return best;
  }

  void assign(const DirectPart& part, bool is_summed) {
    // Of what is broadcast all contributors send the same, so it is dealt out in turn.
    const size_t owner = is_summed || std::has_single_bit(part.contributors) ? least_loaded(part.contributors)
                                                                             : next_in_turn(part.contributors);
    const int64_t contribution = bytes_of(part.length, parts_of_bytes_.contribution);
    Dealt& dealt = is_summed ? summed_ : broadcast_;
    for (size_t rank = 0; rank < count(); ++rank) {
      if (!contains(part.contributors, static_cast<int>(rank)) || (is_summed && rank == owner)) continue;
      (is_summed ? to_owners_ : dealt.for_all_bytes)[rank] += contribution;
    }
    if (is_summed) dealt.for_all_bytes[owner] += bytes_of(part.length, parts_of_bytes_.sum);
    dealt.parts[owner].push_back(part);
  }

  size_t next_in_turn(RankSet ranks) {
    do {
      turn_ = (turn_ + 1) % count();
    } while (!contains(ranks, static_cast<int>(turn_)));
    return turn_;
  }

  // Message i holds the i-th segment of each rank.
  void collect(const Dealt& dealt, Transport transport, std::vector<DirectMessage>& messages) const {
    const size_t first = messages.size();
    for (size_t owner = 0; owner < count(); ++owner) {
      size_t number = first;
      int64_t filled = 0;
      for (const DirectPart& part : dealt.parts[owner]) {
        const int64_t bytes = part.length * element_bytes_;
        if (filled > 0 && filled + bytes > segment_bytes_) {
          ++number;
          filled = 0;
        }
        filled += bytes;
        if (number == messages.size()) messages.push_back({transport, {}, 0, {}, false, false});
        append(messages[number], part, static_cast<int>(owner));
      }
    }
  }

  static void append(DirectMessage& message, const DirectPart& part, int owner) {
    if (message.groups.empty() || message.groups.back().owner != owner) message.groups.push_back({owner, 0, {}});
    DirectGroup& group = message.groups.back();
    message.numel += part.length;
    group.numel += part.length;
    ddp_hooks::append(group.parts, part);
  }

  const Transports transports_;
  const int64_t element_bytes_;
  const int64_t segment_bytes_;
  const CodedParts parts_of_bytes_;
  std::vector<int64_t> to_owners_;  // what each rank sends of what others own, bytes
  size_t turn_ = 0;
  Dealt broadcast_;
  Dealt summed_;
};

Ownership share_out(const std::vector<DirectPart>& stretches, int64_t element_bytes, const Transports& transports,
                    const DirectSettings& settings) {
  Ownership ownership(transports, element_bytes, settings);
  for (const DirectPart& stretch : stretches) ownership.add(stretch);
  return ownership;
}

}  // namespace

bool is_gathered(const std::vector<int64_t>& bytes_by_rank) {
  if (bytes_by_rank.size() < 3) return false;
  constexpr double kMostPadding = 0.1;
  const auto total = static_cast<double>(std::accumulate(bytes_by_rank.begin(), bytes_by_rank.end(), int64_t{0}));
  const auto padded = static_cast<double>(most_of(bytes_by_rank)) * static_cast<double>(bytes_by_rank.size());
  return padded <= (1 + kMostPadding) * total;
}

int64_t contribution_bytes(const DirectGroup& group, int rank, int64_t element_bytes) {
  int64_t bytes = 0;
  for (const DirectPart& part : group.parts) {
    if (contains(part.contributors, rank)) bytes += part.length * element_bytes;
  }
  return bytes;
}

void complete(DirectMessage& message, int world_size, int64_t element_bytes) {
  message.for_all_bytes.clear();
  for (int rank = 0; rank < world_size; ++rank) {
    message.for_all_bytes.push_back(for_all_bytes(message, rank, element_bytes));
  }
  message.is_gathered = is_gathered(message.for_all_bytes);
}

MessageBytes bytes_of(const DirectMessage& message, int64_t element_bytes) {
  MessageBytes bytes;
  for (const DirectGroup& group : message.groups) {
    for (const DirectPart& part : group.parts) {
      const int64_t half = part.length * element_bytes / 2;
      switch (message.transport) {
        case Transport::kAllReduce:
          bytes.contributions += 2 * half;
          break;
        case Transport::kBroadcast:
          bytes.contributions += half * std::max(2, std::popcount(part.contributors));
          break;
        case Transport::kByOwner:
          bytes.contributions += half;
          bytes.sums += half;
      }
    }
  }
  return bytes;
}

Transports choose_transports(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                             const DirectSettings& settings, bool in_place) {
  const Transports& allowed = settings.transports;
  const Transports none{allowed.world_size, false, false};
  if (stretches.empty() || !allowed.direct) return none;
  const auto ring = [&](int64_t bytes) {
    return 2.0 * (allowed.world_size - 1) / allowed.world_size * static_cast<double>(bytes);
  };
  // What the rank with the most to send sends, of what leaves the all-reduces and in all.
  struct Outcome {
    int64_t leaving_bytes = 0;
    bool sums = false;  // owners sum some of what leaves
    double leaving_sent = 0;
    double sent = 0;
  };
  // On two ranks: uncoded, a broadcast if one contributes, and an all-reduce if both do; coded, always a broadcast.
  const auto outcome = [&](const Transports& transports) {
    Outcome of;
    std::vector<DirectPart> leaving;
    int64_t staying_bytes = 0;
    for (const DirectPart& stretch : stretches) {
      const Transport transport = transport_for(stretch.contributors, transports);
      const bool leaves = transport != Transport::kAllReduce;
      of.sums = of.sums || transport == Transport::kByOwner;
      (leaves ? of.leaving_bytes : staying_bytes) += stretch.length * element_bytes;
      if (leaves) leaving.push_back(stretch);
    }
    const int64_t most = share_out(leaving, element_bytes, transports, settings).most_sent_bytes();
    of.leaving_sent = static_cast<double>(most);
    of.sent = of.leaving_sent + ring(staying_bytes);
    return of;
  };
  Transports chosen = none;
  double sent = outcome(none).sent;
  // What gains nothing stays where it can travel with no copy.
  constexpr double kMostOfARing = 0.95;
  const Transports broadcasts{allowed.world_size, true, false, allowed.coded};
  const Outcome with_broadcasts = outcome(broadcasts);
  if (with_broadcasts.leaving_bytes > 0 && with_broadcasts.leaving_bytes >= settings.min_direct_bytes &&
      with_broadcasts.leaving_sent <= kMostOfARing * ring(with_broadcasts.leaving_bytes) &&
      with_broadcasts.sent < sent) {
    chosen = broadcasts;
    sent = with_broadcasts.sent;
  }
  if (!allowed.owners) return chosen;
  const Outcome with_sums = outcome(allowed);
  // Coding copies everything, and pays by the bytes it saves; what they have to be worth is decided elsewhere.
  const double least_saving = allowed.coded ? std::min(1 - kMostOfARing, settings.min_owner_saving)
                                            : settings.min_owner_saving * (in_place ? 2 : 1);
  const bool pays = with_sums.sent <= (1 - least_saving) * sent;
  return with_sums.sums && pays && with_sums.leaving_bytes >= settings.min_direct_bytes ? allowed : chosen;
}

std::vector<DirectMessage> make_direct_messages(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                                                const Transports& transports, const DirectSettings& settings) {
  return share_out(stretches, element_bytes, transports, settings).messages();
}

}  // namespace ddp_hooks
