// What the sanitizers have to find. `make test-asan` and `make test-tsan` begin with these, so that a run that cannot
// find anything fails instead of passing. Compiled into sanitized builds only, with the flags of the extension.

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

extern "C" {

// AddressSanitizer: reads one element behind a heap block.
__attribute__((visibility("default"))) int64_t overflow_heap(int64_t numel) {
  const std::vector<int64_t> block(static_cast<size_t>(numel), 1);
  return block.data()[numel];
}

// UndefinedBehaviorSanitizer: shifts by more than there are bits. (Sums that do not fit are defined: Python's flags for
// extensions have -fwrapv.)
__attribute__((visibility("default"))) uint32_t shift_too_far(uint32_t bits) {
  return uint32_t{1} << bits;
}

// ThreadSanitizer: two threads count without a lock.
__attribute__((visibility("default"))) int64_t count_without_lock(int64_t rounds) {
  std::vector<int64_t> count(1);
  const auto add = [&] {
    for (int64_t i = 0; i < rounds; ++i) ++count[0];
  };
  std::thread one(add), other(add);
  one.join();
  other.join();
  return count[0];
}

// ThreadSanitizer: one thread writes a member, another one frees the object. That the one comes first is all that is
// sure: the flag that says so publishes nothing. tests/campaigns/sanitized.py leaves out what looks like this for an
// object that torch counts, and must not leave out this.
__attribute__((visibility("default"))) int64_t free_without_counting(int64_t value) {
  struct Object {
    int64_t member = 0;
  };
  auto object = std::make_unique<Object>();
  std::atomic<bool> written = false;
  std::thread writer([&written, member = &object->member, value] {
    *member = value;
    written.store(true, std::memory_order_relaxed);
  });
  while (!written.load(std::memory_order_relaxed)) std::this_thread::yield();
  object.reset();
  writer.join();
  return value;
}

}  // extern "C"
