// Many slices and one message, as a kernel sees them: where each slice begins, and which piece of the work is whose.
//
// The slices of a launch lie one after the other in the message. The message is cut into *chunks* of equal size, and
// each warp takes one chunk: it looks up the slice in which its chunk begins and walks on from there. So the work is
// balanced by bytes, whether there is one slice or thousands, and no slice needs a block of its own.
//
// A table travels as a kernel parameter, by value. It then has no lifetime: nothing has to outlive the call, no copy to
// the device has to be ordered before the kernel, no event has to guard a buffer that is written again. The price is
// that a launch holds kLargeTable slices at most (kernel parameters end at 32,764 bytes); more of them take several
// launches, one after the other on the same stream. Most messages fit the small table, whose parameters are the 4 KB
// that any launch carries.
//
// Always holds: the chunks cover each byte of the message exactly once; `begin` does not decrease.
// All of it is plain arithmetic that compiles for host and device, so that the tests can run it without a GPU
// (emulation.h). Thread-safety: pure functions of a table that nobody writes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/slices_of_memory.h"

namespace ddp_hooks::cuda {

constexpr int kSmallTable = 248;
constexpr int kLargeTable = 2000;

// A warp moves 16 bytes a lane, so this is eight independent loads a lane: enough under way to fill the memory's
// pipeline. Smaller chunks for smaller slices, because a warp walks the slices of its chunk one after the other.
constexpr int64_t kLargestChunkBytes = 4096;
constexpr int64_t kSmallestChunkBytes = 256;

constexpr int kWarpLanes = 32;
constexpr int kWarpsPerBlock = 4;

template <int kCapacity>
struct SliceTable {
  // Bytes into the part of the message that belongs to this launch; begin[count] is where it ends.
  int64_t begin[kCapacity + 1];
  char* address[kCapacity];
  char* message;  // null where there is none
  int64_t chunk_bytes;
  int32_t count;
};

static_assert(sizeof(SliceTable<kSmallTable>) + 64 <= 4096);
static_assert(sizeof(SliceTable<kLargeTable>) + 64 <= 32764);

// About the size of a slice, within limits; a power of two, so that chunks of an aligned message are aligned.
inline int64_t choose_chunk_bytes(int64_t message_bytes, int64_t slices) {
  int64_t chunk_bytes = kSmallestChunkBytes;
  while (chunk_bytes < kLargestChunkBytes && chunk_bytes * slices < message_bytes) chunk_bytes *= 2;
  return chunk_bytes;
}

template <typename Table>
int64_t chunk_count(const Table& table) {
  return (table.begin[table.count] + table.chunk_bytes - 1) / table.chunk_bytes;
}

template <int kCapacity>
void fill_table(SliceTable<kCapacity>& table, const SliceOfMemory* slices, size_t count, char* message) {
  int64_t position = 0;
  for (size_t i = 0; i < count; ++i) {
    table.begin[i] = position;
    table.address[i] = slices[i].address;
    position += slices[i].bytes;
  }
  table.begin[count] = position;
  table.message = message;
  table.chunk_bytes = choose_chunk_bytes(position, static_cast<int64_t>(count));
  table.count = static_cast<int32_t>(count);
}

// Calls launch(table, index of its first slice) for one table after another, until one returns an error (not null);
// returns that. Tables without a byte are left out.
template <typename Launch>
const char* for_each_table(const SliceOfMemory* slices, size_t count, char* message, const Launch& launch) {
  const auto run = [&](auto& table, size_t first, size_t length) -> const char* {
    fill_table(table, slices + first, length, message);
    const int64_t bytes = table.begin[length];
    if (message != nullptr) message += bytes;
    return bytes == 0 ? nullptr : launch(table, first);
  };
  for (size_t first = 0; first < count;) {
    const size_t left = count - first;
    const size_t length = left < kLargeTable ? left : kLargeTable;
    const char* error = nullptr;
    // Left as they are: only the first `length` entries are read.
    if (length <= kSmallTable) {
      SliceTable<kSmallTable> table;
      error = run(table, first, length);
    } else {
      SliceTable<kLargeTable> table;
      error = run(table, first, length);
    }
    if (error != nullptr) return error;
    first += length;
  }
  return nullptr;
}

// The last slice that begins at or before `position`: the one that holds this byte, because empty ones come first.
template <typename Table>
DDP_HOOKS_HOST_DEVICE int find_slice(const Table& table, int64_t position) {
  int low = 0;
  int high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.begin[middle] <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Calls visit(slice, bytes into it, position in the message, bytes) for each stretch of a chunk. Of any table with
// `begin`, `count` and `chunk_bytes` as above.
template <typename Table, typename Visit>
DDP_HOOKS_HOST_DEVICE void visit_stretches(const Table& table, int64_t chunk, const Visit& visit) {
  int64_t position = chunk * table.chunk_bytes;
  const int64_t total = table.begin[table.count];
  const int64_t end = position + table.chunk_bytes < total ? position + table.chunk_bytes : total;
  if (position >= end) return;
  for (int slice = find_slice(table, position); position < end; ++slice) {
    const int64_t slice_end = table.begin[slice + 1] < end ? table.begin[slice + 1] : end;
    const int bytes = static_cast<int>(slice_end - position);
    if (bytes == 0) continue;
    visit(slice, position - table.begin[slice], position, bytes);
    position = slice_end;
  }
}

// Calls visit(slice, address in it, position in the message, bytes) for each stretch of a chunk.
template <int kCapacity, typename Visit>
DDP_HOOKS_HOST_DEVICE void visit_chunk(const SliceTable<kCapacity>& table, int64_t chunk, const Visit& visit) {
  visit_stretches(table, chunk, [&](int slice, int64_t offset, int64_t position, int bytes) {
    visit(slice, table.address[slice] + offset, position, bytes);
  });
}

}  // namespace ddp_hooks::cuda
