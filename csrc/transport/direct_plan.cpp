#include "transport/direct_plan.h"

#include <algorithm>
#include <bit>

namespace ddp_hooks {
namespace {

// What each rank owns, in the order in which it was given it, and what it has to send for that.
class Ownership {
 public:
  Ownership(int world_size, int64_t segment)
      : world_size_(world_size), segment_(segment), sent_(count()), alone_(count()), summed_(count()) {}

  void add(const DirectPart& stretch) {
    DirectPart rest = stretch;
    while (rest.length > 0) {
      DirectPart part = rest;
      part.length = std::min(rest.length, segment_);
      rest.offset += part.length;
      rest.length -= part.length;
      assign(part, least_loaded(part.contributors));
    }
  }

  // Elements, of the rank with the most.
  int64_t most_sent() const { return *std::max_element(sent_.begin(), sent_.end()); }

  std::vector<DirectMessage> messages() const {
    std::vector<DirectMessage> messages;
    collect(alone_, false, messages);
    collect(summed_, true, messages);
    return messages;
  }

 private:
  using PartsByRank = std::vector<std::vector<DirectPart>>;

  size_t count() const { return static_cast<size_t>(world_size_); }

  size_t least_loaded(RankSet ranks) const {
    auto best = static_cast<size_t>(std::countr_zero(ranks));
    for (size_t rank = best + 1; rank < count(); ++rank) {
      if (contains(ranks, static_cast<int>(rank)) && sent_[rank] < sent_[best]) best = rank;
    }
    return best;
  }

  void assign(const DirectPart& part, size_t owner) {
    sent_[owner] += part.length * (world_size_ - 1);
    for (size_t rank = 0; rank < count(); ++rank) {
      if (rank != owner && contains(part.contributors, static_cast<int>(rank))) sent_[rank] += part.length;
    }
    (std::has_single_bit(part.contributors) ? alone_ : summed_)[owner].push_back(part);
  }

  // Message i holds the i-th segment of each rank.
  void collect(const PartsByRank& parts, bool is_summed, std::vector<DirectMessage>& messages) const {
    const size_t first = messages.size();
    for (size_t owner = 0; owner < count(); ++owner) {
      size_t number = first;
      int64_t filled = 0;
      for (const DirectPart& part : parts[owner]) {
        if (filled > 0 && filled + part.length > segment_) {
          ++number;
          filled = 0;
        }
        filled += part.length;
        if (number == messages.size()) messages.push_back({is_summed, {}, 0});
        append(messages[number], part, static_cast<int>(owner));
      }
    }
  }

  static void append(DirectMessage& message, const DirectPart& part, int owner) {
    if (message.groups.empty() || message.groups.back().owner != owner) message.groups.push_back({owner, 0, {}});
    DirectGroup& group = message.groups.back();
    message.numel += part.length;
    group.numel += part.length;
    if (!group.parts.empty()) {
      DirectPart& last = group.parts.back();
      if (last.place == part.place && last.offset + last.length == part.offset &&
          last.contributors == part.contributors) {
        last.length += part.length;
        return;
      }
    }
    group.parts.push_back(part);
  }

  const int world_size_;
  const int64_t segment_;      // elements
  std::vector<int64_t> sent_;  // elements, by rank
  PartsByRank alone_;
  PartsByRank summed_;
};

Ownership share_out(const std::vector<DirectPart>& stretches, int64_t element_bytes, const DirectSettings& settings) {
  Ownership ownership(settings.transports.world_size, std::max<int64_t>(1, settings.segment_bytes / element_bytes));
  for (const DirectPart& stretch : stretches) ownership.add(stretch);
  return ownership;
}

}  // namespace

Transports choose_transports(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                             const DirectSettings& settings, bool hidden) {
  // What gains nothing stays where it can travel with no copy.
  constexpr double kMostOfARing = 0.95;
  const Transports& allowed = settings.transports;
  std::vector<DirectPart> alone;
  int64_t alone_elements = 0, elements = 0;
  for (const DirectPart& stretch : stretches) {
    elements += stretch.length;
    if (!std::has_single_bit(stretch.contributors)) continue;
    alone.push_back(stretch);
    alone_elements += stretch.length;
  }
  const auto ring = [&](int64_t numel) {
    return 2.0 * (allowed.world_size - 1) / allowed.world_size * static_cast<double>(numel);
  };
  const auto busiest = [&](const std::vector<DirectPart>& parts) {
    return static_cast<double>(share_out(parts, element_bytes, settings).most_sent());
  };
  Transports chosen{allowed.world_size, false, false};
  double sent = ring(elements);
  if (alone_elements > 0 && alone_elements * element_bytes >= settings.min_bytes) {
    const double directly = busiest(alone);
    chosen.alone = directly <= kMostOfARing * ring(alone_elements);
    if (chosen.alone) sent = directly + ring(elements - alone_elements);
  }
  if (allowed.sums && alone_elements < elements && elements * element_bytes >= settings.min_bytes &&
      busiest(stretches) <= (1 - settings.least_saving_of_sums * (hidden ? 2 : 1)) * sent) {
    chosen.alone = chosen.sums = true;
  }
  return chosen;
}

std::vector<DirectMessage> make_direct_messages(const std::vector<DirectPart>& stretches, int64_t element_bytes,
                                                const DirectSettings& settings) {
  return share_out(stretches, element_bytes, settings).messages();
}

}  // namespace ddp_hooks
