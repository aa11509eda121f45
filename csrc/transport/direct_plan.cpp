#include "transport/direct_plan.h"

#include <algorithm>
#include <bit>
#include <deque>
#include <utility>

namespace ddp_hooks {
namespace {

int lowest(RankSet set) {
  return std::countr_zero(set);
}

// What each rank is given to send in one or two phases, in the order in which it was assigned.
class LoadBalancer {
 public:
  LoadBalancer(const Transports& transports, int64_t segment)
      : world_size_(transports.world_size),
        owners_(transports.owners),
        segment_(segment),
        load_(count()),
        loads_(count()) {}

  void add(const DirectStretch& stretch) {
    DirectPart rest = stretch.part;
    while (rest.length > 0) {
      DirectPart part = rest;
      part.length = std::min(rest.length, segment_);
      rest.offset += part.length;
      rest.length -= part.length;
      assign({part, stretch.contributors}, least_loaded(stretch.contributors));
    }
  }

  // Others broadcast a part of what one rank alone has too much of.
  void balance() {
    if (world_size_ < 3 || !owners_) return;
    // Each turn moves a segment, and none comes back.
    for (;;) {
      const size_t most = static_cast<size_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
      const size_t least = static_cast<size_t>(std::min_element(load_.begin(), load_.end()) - load_.begin());
      std::deque<DirectStretch>& own = loads_[most].own;
      if (own.empty()) return;
      const DirectStretch stretch = own.back();
      const int64_t moved = stretch.part.length * (world_size_ - 2);
      if (load_[least] + moved >= load_[most]) return;
      own.pop_back();
      load_[most] -= moved;
      load_[least] += moved;
      loads_[least].owned.push_front(stretch);
    }
  }

  // Of the rank with the most.
  int64_t most_sent() const { return *std::max_element(load_.begin(), load_.end()); }

  std::vector<DirectMessage> messages() {
    std::vector<DirectMessage> messages;
    collect(Transport::kBroadcast, &Load::own, messages);
    collect(Transport::kByOwner, &Load::owned, messages);
    return messages;
  }

 private:
  struct Load {
    std::deque<DirectStretch> own;    // what it alone contributes, and broadcasts
    std::deque<DirectStretch> owned;  // what others contribute, too, or alone
  };

  size_t count() const { return static_cast<size_t>(world_size_); }

  size_t least_loaded(RankSet ranks) const {
    auto best = static_cast<size_t>(lowest(ranks));
    for (size_t rank = best + 1; rank < count(); ++rank) {
      if (contains(ranks, static_cast<int>(rank)) && load_[rank] < load_[best]) best = rank;
    }
    return best;
  }

  void assign(const DirectStretch& stretch, size_t owner) {
    const bool alone = std::has_single_bit(stretch.contributors);
    load_[owner] += stretch.part.length * (world_size_ - 1);
    for (size_t rank = 0; !alone && rank < count(); ++rank) {
      if (rank != owner && contains(stretch.contributors, static_cast<int>(rank))) load_[rank] += stretch.part.length;
    }
    (alone ? loads_[owner].own : loads_[owner].owned).push_back(stretch);
  }

  // Message i holds the i-th segment of each rank.
  void collect(Transport transport, std::deque<DirectStretch> Load::* queue, std::vector<DirectMessage>& messages) {
    const size_t first = messages.size();
    for (size_t owner = 0; owner < count(); ++owner) {
      size_t number = first;
      int64_t filled = 0;
      for (const DirectStretch& stretch : loads_[owner].*queue) {
        if (filled > 0 && filled + stretch.part.length > segment_) {
          ++number;
          filled = 0;
        }
        filled += stretch.part.length;
        if (number == messages.size()) messages.push_back({transport, {}, 0});
        append(messages[number], stretch, static_cast<int>(owner));
      }
    }
  }

  static void append(DirectMessage& message, const DirectStretch& stretch, int owner) {
    auto group = std::find_if(message.groups.begin(), message.groups.end(), [&](const DirectGroup& candidate) {
      return candidate.contributors == stretch.contributors && candidate.owner == owner;
    });
    if (group == message.groups.end()) {
      message.groups.push_back({stretch.contributors, owner, 0, {}});
      group = message.groups.end() - 1;
    }
    message.numel += stretch.part.length;
    group->numel += stretch.part.length;
    if (!group->parts.empty()) {
      DirectPart& last = group->parts.back();
      if (last.place == stretch.part.place && last.offset + last.length == stretch.part.offset) {
        last.length += stretch.part.length;
        return;
      }
    }
    group->parts.push_back(stretch.part);
  }

  const int world_size_;
  const bool owners_;
  const int64_t segment_;      // elements
  std::vector<int64_t> load_;  // elements that each rank sends
  std::vector<Load> loads_;
};

LoadBalancer balance_load(const std::vector<DirectStretch>& stretches, int64_t element_bytes,
                          const DirectSettings& settings) {
  LoadBalancer balancer(settings.transports, std::max<int64_t>(1, settings.segment_bytes / element_bytes));
  for (const DirectStretch& stretch : stretches) balancer.add(stretch);
  balancer.balance();
  return balancer;
}

}  // namespace

double busiest_rank(const std::vector<DirectStretch>& stretches, int64_t element_bytes,
                    const DirectSettings& settings) {
  const LoadBalancer balancer = balance_load(stretches, element_bytes, settings);
  int64_t elements = 0;
  for (const DirectStretch& stretch : stretches) elements += stretch.part.length;
  const double ring =
      2.0 * (settings.transports.world_size - 1) / settings.transports.world_size * static_cast<double>(elements);
  return static_cast<double>(balancer.most_sent()) / std::max(ring, 1.0);
}

std::vector<DirectMessage> make_direct_messages(const std::vector<DirectStretch>& stretches, int64_t element_bytes,
                                                const DirectSettings& settings) {
  return balance_load(stretches, element_bytes, settings).messages();
}

}  // namespace ddp_hooks
