// Numbers as one rank sends them to another one: as they are, or coded (kernels/coding.h). On the CPU.
//
// Always holds: what is received is checked before it is decoded. Thread-safety: these are functions. Both ends must
// agree on: how many numbers of which type, whether they are coded, and how many bytes they take.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/slice_copy.h"

namespace ddp_hooks {

// The slices, of one type, one after the other at the beginning of `to` (uint8), which has room for the most bytes that
// they can take. Returns how many bytes they take.
int64_t write_message(const std::vector<BorrowedSlice>& slices, bool is_coded, const at::Tensor& to);

// What takes `bytes` from `begin` of what was `received` (uint8). Errors of a message that cannot be decoded say that
// it is `describe()`.
void read_message(const at::Tensor& received, int64_t begin, int64_t bytes, const BorrowedSlice& to, bool is_coded,
                  const std::function<std::string()>& describe);

}  // namespace ddp_hooks
