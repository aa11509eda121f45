#include "memory.h"

#include <c10/util/Backtrace.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "counts.h"

namespace pretend {
namespace {

constexpr int kPoison = 0xff;  // NaN, and -1

thread_local StreamId current = 0;

struct Access {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool writes = false;
  StreamId stream = 0;
  uint64_t count = 0;  // of the piece of work
  std::string name;    // and its name

  bool is_within(const Passed& passed) const {
    const auto found = passed.find(stream);
    return found != passed.end() && found->second >= count;
  }
};

struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  StreamId stream = 0;  // it was made on
  std::set<StreamId> used_on;
  std::vector<Ticket> recorded;  // since it was given back: where the streams were that it was recorded on
  bool given_back = false;       // and not taken again
  std::vector<Access> accesses;  // those that later ones may have to be ordered with

  bool holds(const void* pointer) const {
    const auto* const at = static_cast<const char*>(pointer);
    return at >= data && at < static_cast<const char*>(data) + bytes;
  }
};

// Both kinds of memory. Blocks are never freed, so that a late read of them is one of poison and not of nothing.
struct Memory {
  std::mutex mutex;
  std::map<const void*, Block*> pinned;  // by its beginning
  std::map<const void*, Block*> on_device;
  std::map<std::pair<StreamId, size_t>, std::vector<Block*>> free;
  std::map<StreamId, std::vector<Block*>> given_back;  // and not yet ended
  bool ends_late = false;
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
  memory().free[{block->stream, block->bytes}].push_back(block);
}

std::string text_of(const Access& access) {
  return std::string(access.writes ? "written" : "read") + " by " + access.name + " on stream " +
         std::to_string(access.stream);
}

void fail(const Block& block, const std::string& what) {
  Queues::get().fail("memory of stream " + std::to_string(block.stream) + " is " + what + "; from " +
                     c10::get_backtrace());
}

// Whoever gets the block next may use it when this has run.
void end_accesses(Block& block, const Passed& passed) {
  for (const Access& access : block.accesses) {
    if (!access.is_within(passed)) {
      fail(block, "given back, and nothing orders that with where it is " + text_of(access));
    }
  }
  block.accesses.clear();
}

// Ends what was given back on the stream, before what is put there next.
void end_given_back(StreamId stream) {
  // What was recorded ends on a stream of its own, so that the block's own stream does not wait.
  constexpr StreamId kWaiting = -1;
  const std::vector<Block*> blocks = std::exchange(memory().given_back[stream], {});
  if (blocks.empty()) return;
  Queues& queues = Queues::get();
  const Ticket here = queues.ticket(stream);
  for (Block* const block : blocks) {
    const std::vector<Ticket> recorded = std::exchange(block->recorded, {});
    Passed passed = here.passed;
    add(passed, queues.known_to_host());
    for (const Ticket& use : recorded) {
      add(passed, use.passed);
      queues.wait(kWaiting, use);
    }
    end_accesses(*block, passed);
    if (recorded.empty()) {
      queues.put(stream, [block] {
        std::memset(block->data, kPoison, block->bytes);
        return true;
      });
      continue;
    }
    queues.wait(kWaiting, here);
    queues.put(kWaiting, [block] {
      std::memset(block->data, kPoison, block->bytes);
      const std::lock_guard lock(memory().mutex);
      put_back(block);
      return true;
    });
  }
}

void free_on_device(void* context) {
  auto* const block = static_cast<Block*>(context);
  const std::lock_guard lock(memory().mutex);
  block->given_back = true;
  for (const StreamId stream : std::exchange(block->used_on, {})) {
    if (stream != block->stream) block->recorded.push_back(Queues::get().ticket(stream));
  }
  const bool is_recorded = !block->recorded.empty();
  memory().given_back[block->stream].push_back(block);
  if (!memory().ends_late) end_given_back(block->stream);
  if (!is_recorded) put_back(block);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kPrivateUse1, 0);
    if (bytes == 0) return {nullptr, nullptr, &free_on_device_of_nothing, device};
    ++Counts::get().allocations;
    const std::lock_guard lock(memory().mutex);
    end_given_back(current);
    Block* block = take(memory().free, std::make_pair(current, rounded(bytes)));
    if (block == nullptr) {
      block = new_block(rounded(bytes));
      memory().on_device[block->data] = block;
    }
    block->stream = current;
    block->given_back = false;
    return {block->data, block, &free_on_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const auto size = static_cast<int64_t>(bytes);
    put_work(current, "a copy of memory", {{from, size, false}, {to, size, true}}, [=] {
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
  Passed passed = Queues::get().known_to_host();
  for (const StreamId stream : std::exchange(block->used_on, {})) {
    uses.push_back(Queues::get().ticket(stream));
    add(passed, uses.back().passed);
  }
  {
    const std::lock_guard lock(memory().mutex);
    end_accesses(*block, passed);
    block->given_back = true;
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
    block->given_back = false;
    return {block->data, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void free_nothing(void* /*context*/) {}
};

Block* find(const std::map<const void*, Block*>& blocks, const void* pointer) {
  const auto found = blocks.upper_bound(pointer);
  if (found == blocks.begin()) return nullptr;
  Block* const block = std::prev(found)->second;
  return block->holds(pointer) ? block : nullptr;
}

Block* find_pinned(const void* pointer) {
  return find(memory().pinned, pointer);
}

void note_uses(const Ticket& work, const std::string& name, const std::vector<Use>& uses) {
  for (const Use& use : uses) {
    if (use.bytes == 0) continue;
    Block* block = find(memory().on_device, use.begin);
    if (block == nullptr) block = find_pinned(use.begin);
    if (block == nullptr) continue;
    const auto* const begin = static_cast<const char*>(use.begin);
    const Access access{begin, begin + use.bytes, use.writes, work.stream, work.count, name};
    if (block->given_back) fail(*block, text_of(access) + " after it was given back");
    for (const Access& other : block->accesses) {
      const bool conflicts = other.begin < access.end && access.begin < other.end && (access.writes || other.writes);
      if (conflicts && !other.is_within(work.passed)) {
        fail(*block, text_of(access) + ", and nothing orders that with where it is " + text_of(other));
      }
    }
    // What comes later and is ordered with this one, is with these.
    std::erase_if(block->accesses, [&](const Access& other) {
      const bool stands_for = access.writes || (!other.writes && other.stream == access.stream);
      return access.begin <= other.begin && other.end <= access.end && stands_for && other.is_within(work.passed);
    });
    block->accesses.push_back(access);
  }
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
  const Block* const block = find_pinned(pointer);
  return block != nullptr && !block->given_back;
}

void record_on_stream(const c10::DataPtr& pointer, StreamId stream) {
  if (pointer.get_deleter() == &free_on_device) static_cast<Block*>(pointer.get_context())->used_on.insert(stream);
}

void note_use_of_pinned(const void* pointer, StreamId stream) {
  std::lock_guard lock(memory().mutex);
  if (Block* const block = find_pinned(pointer)) block->used_on.insert(stream);
}

Use use_of(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.const_data_ptr(), (last + 1) * static_cast<int64_t>(tensor.element_size()), writes};
}

void end_memory_late(bool late) {
  const std::lock_guard lock(memory().mutex);
  memory().ends_late = late;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  c10::DataPtr memory = device_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) device_allocator()->copy_data(memory.mutable_get(), impl->data(), kept);
  impl->set_data_ptr(std::move(memory));
  impl->set_nbytes(bytes);
}

Ticket put_work(StreamId stream, const std::string& name, const std::vector<Use>& uses, Work act, const Cost& cost) {
  const std::lock_guard lock(memory().mutex);
  end_given_back(stream);
  const Ticket work = Queues::get().put(stream, std::move(act), cost);
  note_uses(work, name, uses);
  return work;
}

StreamId current_stream() {
  return current;
}

StreamId exchange_stream(StreamId stream) {
  return std::exchange(current, stream);
}

}  // namespace pretend
