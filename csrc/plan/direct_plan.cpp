#include "plan/direct_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

namespace ddp_hooks {
namespace {

int64_t most_of(const std::vector<int64_t>& bytes_by_rank) {
  return *std::max_element(bytes_by_rank.begin(), bytes_by_rank.end());
}

// Whether an all-gather brings to all what each rank has for them. Two ranks swap, unless that takes longer: NCCL's
// all-to-alls through sockets are slower than its rings.
bool is_gathered(const std::vector<int64_t>& for_all_bytes, const CollectiveCosts& costs) {
  if (for_all_bytes.size() == 2) return costs.all_to_all_seconds_per_byte > costs.all_reduce_seconds_per_byte;
  return pads_little(for_all_bytes);
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
        costs_(settings.costs),
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

  // How long the rank takes that takes longest. Without what an all-gather pads, which is half of an all-reduce.
  double seconds() const {
    double by_bytes = 0;
    const bool gathers_sums = is_gathered(summed_.for_all_bytes, costs_),
               gathers = is_gathered(broadcast_.for_all_bytes, costs_);
    for (size_t rank = 0; rank < count(); ++rank) {
      const int64_t sums = others() * summed_.for_all_bytes[rank], own = others() * broadcast_.for_all_bytes[rank];
      const int64_t gathered = (gathers_sums ? sums : 0) + (gathers ? own : 0);
      by_bytes =
          std::max(by_bytes, static_cast<double>(gathered) * costs_.all_reduce_seconds_per_byte +
                                 static_cast<double>(sent_bytes(rank) - gathered) * costs_.all_to_all_seconds_per_byte);
    }
    const double with_sums = messages_of(summed_), others = messages_of(broadcast_);
    const double gathered = (gathers_sums ? with_sums : 0) + (gathers ? others : 0);
    const double by_messages =
        gathered * costs_.all_reduce_seconds / 2 + (2 * with_sums + others - gathered) * costs_.all_to_all_seconds;
    int64_t summed = 0;
    for (const int64_t bytes : summed_.for_all_bytes) summed += bytes;
    return std::max(by_bytes, by_messages) + costs_.summing_seconds_per_byte * static_cast<double>(summed) +
           costs_.seconds_per_part * static_cast<double>(parts_);
  }

  std::vector<DirectMessage> messages() const {
    std::vector<DirectMessage> messages;
    collect(broadcast_, Transport::kBroadcast, messages);
    collect(summed_, Transport::kByOwner, messages);
    for (DirectMessage& message : messages) {
      complete(message, transports_.world_size, element_bytes_, costs_);
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

  double messages_of(const Dealt& dealt) const {
    int64_t most = 0;
    for (const std::vector<DirectPart>& parts : dealt.parts) {
      int64_t bytes = 0;
      for (const DirectPart& part : parts) bytes += part.length * element_bytes_;
      most = std::max(most, bytes);
    }
    return std::ceil(static_cast<double>(most) / static_cast<double>(segment_bytes_));
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
    parts_ += 1;
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
  const CollectiveCosts costs_;
  const CodedParts parts_of_bytes_;
  std::vector<int64_t> to_owners_;  // what each rank sends of what others own, bytes
  size_t turn_ = 0;
  int64_t parts_ = 0;
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

bool pads_little(const std::vector<int64_t>& bytes_by_rank) {
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

void complete(DirectMessage& message, int world_size, int64_t element_bytes, const CollectiveCosts& costs) {
  message.for_all_bytes.clear();
  for (int rank = 0; rank < world_size; ++rank) {
    message.for_all_bytes.push_back(for_all_bytes(message, rank, element_bytes));
  }
  message.is_gathered = is_gathered(message.for_all_bytes, costs);
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
                             const DirectSettings& settings, WhileReduced while_reduced) {
  const Transports& allowed = settings.transports;
  const Transports none{allowed.world_size, false, false};
  if (stretches.empty() || !allowed.direct) return none;
  struct Stretches {
    int64_t bytes = 0;
    int64_t count = 0;
  };
  const auto ring = [&](const Stretches& of, bool packed) {
    constexpr double kMessageBytes = 4 << 20;
    const CollectiveCosts& costs = settings.costs;
    const auto bytes = static_cast<double>(of.bytes);
    const double carried = 2.0 * (allowed.world_size - 1) / allowed.world_size * bytes;
    const double messages = std::ceil(bytes / kMessageBytes);
    return std::max(carried * costs.all_reduce_seconds_per_byte, messages * costs.all_reduce_seconds) +
           (packed ? costs.seconds_per_part * static_cast<double>(of.count) : 0);
  };
  struct Outcome {
    Stretches leaving;  // of the all-reduces
    bool sums = false;  // owners sum some of that
    double leaving_seconds = 0;
    double seconds = 0;  // with what stays
  };
  const auto outcome = [&](const Transports& transports) {
    Outcome of;
    std::vector<DirectPart> leaving;
    Stretches staying;
    for (const DirectPart& stretch : stretches) {
      const Transport transport = transport_for(stretch.contributors, transports);
      const bool leaves = transport != Transport::kAllReduce;
      of.sums = of.sums || transport == Transport::kByOwner;
      Stretches& these = leaves ? of.leaving : staying;
      these.bytes += stretch.length * element_bytes;
      these.count += 1;
      if (leaves) leaving.push_back(stretch);
    }
    const bool packs =
        while_reduced == WhileReduced::kPacked || (while_reduced == WhileReduced::kInPlaceTogether && !leaving.empty());
    of.leaving_seconds = share_out(leaving, element_bytes, transports, settings).seconds();
    of.seconds = of.leaving_seconds + ring(staying, packs);
    return of;
  };
  Transports chosen = none;
  double seconds = outcome(none).seconds;
  // What gains nothing stays where it can travel with no copy.
  constexpr double kMostOfARing = 0.95;
  const Transports broadcasts{allowed.world_size, true, false, allowed.coded};
  const Outcome with_broadcasts = outcome(broadcasts);
  const double stayed = kMostOfARing * ring(with_broadcasts.leaving, while_reduced == WhileReduced::kPacked);
  if (with_broadcasts.leaving.bytes > 0 && with_broadcasts.leaving.bytes >= settings.min_direct_bytes &&
      with_broadcasts.leaving_seconds <= stayed && with_broadcasts.seconds < seconds) {
    chosen = broadcasts;
    seconds = with_broadcasts.seconds;
  }
  if (!allowed.owners) return chosen;
  const Outcome with_sums = outcome(allowed);
  // Coding copies everything, and pays by the bytes it saves; what they have to be worth is decided elsewhere.
  const double least_saving = allowed.coded
                                  ? std::min(1 - kMostOfARing, settings.min_owner_saving)
                                  : settings.min_owner_saving * (while_reduced == WhileReduced::kInPlace ? 2 : 1);
  const bool pays = with_sums.seconds <= (1 - least_saving) * seconds;
  return with_sums.sums && pays && with_sums.leaving.bytes >= settings.min_direct_bytes ? allowed : chosen;
}

std::vector<DirectMessage> make_direct_messages(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                                                const Transports& transports, const DirectSettings& settings) {
  return share_out(stretches, element_bytes, transports, settings).messages();
}

}  // namespace ddp_hooks
