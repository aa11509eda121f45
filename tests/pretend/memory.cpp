#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "counts.h"

namespace pretend {
namespace {

constexpr int kPoison = 0xff;  // NaN, and -1

thread_local StreamId current = 0;

struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  StreamId stream = 0;  // it was made on
  std::set<StreamId> used_on;
};

// Both kinds of memory. Blocks are never freed, so that a late read of them is one of poison and not of nothing.
struct Memory {
  std::mutex mutex;
  std::map<const void*, Block*> pinned;  // by its beginning
  std::map<std::pair<StreamId, size_t>, std::vector<Block*>> free;
  std::map<size_t, std::vector<Block*>> free_pinned;
};

Memory& memory() {
  static auto* const all = new Memory();
  return *all;
}

Block* new_block(size_t bytes) {
  auto* const block = new Block();
  block->bytes = bytes;
  block->data = std::aligned_alloc(64, bytes);
  if (block->data == nullptr) throw std::bad_alloc();
  std::memset(block->data, kPoison, bytes);
  return block;
}

size_t rounded(size_t bytes) {
  return (bytes + 511) / 512 * 512;
}

template <typename Free, typename Key>
Block* take(Free& free, const Key& key) {
  const auto found = free.find(key);
  if (found == free.end() || found->second.empty()) return nullptr;
  Block* const block = found->second.back();
  found->second.pop_back();
  return block;
}

void put_back(Block* block) {
  std::lock_guard lock(memory().mutex);
  memory().free[{block->stream, block->bytes}].push_back(block);
}

void free_on_device(void* context) {
  auto* const block = static_cast<Block*>(context);
  Queues& queues = Queues::get();
  std::vector<Ticket> uses;
  for (const StreamId stream : std::exchange(block->used_on, {})) {
    if (stream != block->stream) uses.push_back(queues.ticket(stream));
  }
  const bool waits = !uses.empty();
  // Poisoned on a stream of its own where it has to wait, so that the block's own stream does not.
  constexpr StreamId kWaiting = -1;
  const StreamId stream = waits ? kWaiting : block->stream;
  if (waits) uses.push_back(queues.ticket(block->stream));
  for (const Ticket& use : uses) queues.wait(stream, use);
  queues.put(stream, [block, waits] {
    std::memset(block->data, kPoison, block->bytes);
    if (waits) put_back(block);
    return true;
  });
  if (!waits) put_back(block);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kPrivateUse1, 0);
    if (bytes == 0) return {nullptr, nullptr, &free_on_device_of_nothing, device};
    ++Counts::get().allocations;
    Block* block = nullptr;
    {
      std::lock_guard lock(memory().mutex);
      block = take(memory().free, std::make_pair(current, rounded(bytes)));
    }
    if (block == nullptr) block = new_block(rounded(bytes));
    block->stream = current;
    return {block->data, block, &free_on_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Queues::get().put(current, [=] {
      std::memcpy(to, from, bytes);
      return true;
    });
  }

 private:
  static void free_on_device_of_nothing(void* /*context*/) {}
};

void free_pinned(void* context) {
  auto* const block = static_cast<Block*>(context);
  std::vector<Ticket> uses;
  for (const StreamId stream : std::exchange(block->used_on, {})) uses.push_back(Queues::get().ticket(stream));
  {
    std::lock_guard lock(memory().mutex);
    memory().pinned.erase(block->data);
  }
  constexpr StreamId kWaiting = -2;
  for (const Ticket& use : uses) Queues::get().wait(kWaiting, use);
  const auto give_back = [block] {
    std::memset(block->data, kPoison, block->bytes);
    std::lock_guard lock(memory().mutex);
    memory().free_pinned[block->bytes].push_back(block);
    return true;
  };
  if (uses.empty()) {
    give_back();
  } else {
    Queues::get().put(kWaiting, give_back);
  }
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, c10::Device(c10::kCPU)};
    Block* block = nullptr;
    {
      std::lock_guard lock(memory().mutex);
      block = take(memory().free_pinned, rounded(bytes));
    }
    if (block == nullptr) block = new_block(rounded(bytes));
    std::lock_guard lock(memory().mutex);
    memory().pinned[block->data] = block;
    return {block->data, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void free_nothing(void* /*context*/) {}
};

Block* find_pinned(const void* pointer) {
  auto found = memory().pinned.upper_bound(pointer);
  if (found == memory().pinned.begin()) return nullptr;
  Block* const block = std::prev(found)->second;
  return static_cast<const char*>(pointer) < static_cast<const char*>(block->data) + block->bytes ? block : nullptr;
}

}  // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* pointer) {
  std::lock_guard lock(memory().mutex);
  return find_pinned(pointer) != nullptr;
}

void record_on_stream(const c10::DataPtr& pointer, StreamId stream) {
  if (pointer.get_deleter() == &free_on_device) static_cast<Block*>(pointer.get_context())->used_on.insert(stream);
}

void note_use_of_pinned(const void* pointer, StreamId stream) {
  std::lock_guard lock(memory().mutex);
  if (Block* const block = find_pinned(pointer)) block->used_on.insert(stream);
}

StreamId current_stream() {
  return current;
}

StreamId exchange_stream(StreamId stream) {
  return std::exchange(current, stream);
}

}  // namespace pretend
