#include "plan/shares.h"

#include <algorithm>

namespace ddp_hooks {
namespace {

// The elements from `begin` to `end` of a group.
DirectGroup cut(const DirectGroup& group, int64_t begin, int64_t end) {
  DirectGroup piece{group.owner, end - begin, {}};
  int64_t position = 0;
  for (const DirectPart& part : group.parts) {
    const int64_t first = std::max(begin, position), last = std::min(end, position + part.length);
    if (first < last) {
      DirectPart& kept = piece.parts.emplace_back(part);
      kept.offset += first - position;
      kept.length = last - first;
    }
    position += part.length;
  }
  return piece;
}

}  // namespace

std::vector<Share> divide_among(int ranks_per_host, const DirectMessage& message, int64_t element_bytes) {
  std::vector<Share> shares(static_cast<size_t>(ranks_per_host));
  for (size_t i = 0; i < shares.size(); ++i) {
    Share& share = shares[i];
    DirectMessage& between = share.between_hosts;
    between.transport = message.transport;
    between.is_coded = message.is_coded;
    for (const DirectGroup& group : message.groups) {
      const auto edge = [&](size_t of) { return group.numel * static_cast<int64_t>(of) / ranks_per_host; };
      DirectGroup own = cut(group, edge(i), edge(i + 1));
      share.parts.insert(share.parts.end(), own.parts.begin(), own.parts.end());
      if (own.numel == 0) continue;
      for (DirectPart& part : own.parts) {
        part.place = 0;
        part.offset = between.numel;
        between.numel += part.length;
      }
      between.groups.push_back(std::move(own));
    }
    complete(between, static_cast<int>(message.for_all_bytes.size()), element_bytes);
  }
  return shares;
}

std::vector<DirectMessage> between_hosts(const Message& message, int host_count, int64_t most_bytes) {
  const RankSet all = host_count < kMostRanksInSet ? (RankSet{1} << host_count) - 1 : ~RankSet{0};
  DirectGroup whole{0, message.numel, {}};
  for (const Stretch& stretch : message.stretches) whole.parts.push_back({stretch, all});
  const int64_t most = std::max<int64_t>(1, most_bytes / message.element_bytes);
  std::vector<DirectMessage> messages;
  for (int64_t begin = 0; begin < message.numel; begin += most) {
    DirectGroup group = cut(whole, begin, std::min(message.numel, begin + most));
    DirectMessage& one = messages.emplace_back();
    one.transport = Transport::kAllReduce;
    one.numel = group.numel;
    one.for_all_bytes.resize(static_cast<size_t>(host_count));
    one.groups.push_back(std::move(group));
  }
  return messages;
}

}  // namespace ddp_hooks
