// Collectives in which every rank may send another amount, on process groups and on their backends alike.
//
// Thread-safety: that of the groups. Every rank must agree on: the order of the calls on a group, and all sizes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace ddp_hooks {

// Torch 2.13 calls both by other names than those before.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_to_all(Group& group, at::Tensor received, at::Tensor sent,
                                          std::vector<int64_t> received_numels, std::vector<int64_t> sent_numels) {
  RECORD_FUNCTION("ddp_hooks::all_to_all", std::vector<c10::IValue>());
  if constexpr (requires { group.all_to_all_single(received, sent, received_numels, sent_numels); }) {
    return group.all_to_all_single(received, sent, received_numels, sent_numels);
  } else {
    return group.alltoall_base(received, sent, received_numels, sent_numels);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather(Group& group, at::Tensor received, at::Tensor sent,
                                          const char* name = "ddp_hooks::all_gather") {
  RECORD_FUNCTION(name, std::vector<c10::IValue>());
  if constexpr (requires { group.all_gather_single(received, sent); }) {
    return group.all_gather_single(received, sent);
  } else {
    return group._allgather_base(received, sent);
  }
}

// What this rank has for all others, which lies once at the beginning of `sent`; that has room for a copy for each.
template <typename Group>
c10::intrusive_ptr<c10d::Work> all_to_all_alike(Group& group, at::Tensor received, const at::Tensor& sent,
                                                std::vector<int64_t> bytes_by_rank, int rank) {
  const auto own = static_cast<size_t>(rank);
  const int64_t here = bytes_by_rank[own], others = static_cast<int64_t>(bytes_by_rank.size()) - 1;
  std::vector<int64_t> to_each(bytes_by_rank.size(), here);
  bytes_by_rank[own] = to_each[own] = 0;
  for (int64_t copy = 1; copy < others; ++copy) sent.narrow(0, copy * here, here).copy_(sent.narrow(0, 0, here));
  return all_to_all(group, std::move(received), sent.narrow(0, 0, here * others), std::move(bytes_by_rank),
                    std::move(to_each));
}

}  // namespace ddp_hooks
