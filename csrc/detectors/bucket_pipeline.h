// In which order, and when, the buckets of a step are asked for what they hold.
//
// A bucket goes through three moments. It is *scanned* when it is ready, or if it was held, when the step opens. The
// exchange of what was found *starts* then, too, or where scans run on a device, when the next bucket is ready, because
// the host would wait for the answer. And it is *settled*: the exchange is waited for, and the bucket may be sent.
// While the masks of one bucket are under way the next is scanned, so a bucket is settled when one after its exchange
// is ready. The first ones are settled at once, because the link has nothing to do yet: what they wait for takes a
// round trip, and the next bucket much longer. Where ranks use different parameters, though, all are settled with the
// last one: one of the ranks may reach a bucket long before another, which stands in some other collective that waits
// for the first.
//
// Always holds: buckets start and are settled in order, all of them when the last one is ready.
// Thread-safety: none; the engine locks. Every rank must agree on: the buckets, the timing.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

namespace ddp_hooks {

struct PipelineTiming {
  bool settles_last = false;   // ranks use different parameters
  bool answers_later = false;  // scans run on a device, while the host goes on
  uint32_t at_once = 0;        // buckets before this one are settled when they are ready
};

// `Bucket`: what is known of one.
template <typename Bucket>
class BucketPipeline {
 public:
  explicit BucketPipeline(const PipelineTiming& timing) : timing_(timing) {}

  // The bucket `index` was scanned when `ready` was ready: itself, or the one that opened the step.
  void add(uint32_t index, uint32_t ready, Bucket bucket) { waiting_.push_back({std::move(bucket), index, ready}); }

  // The bucket `ready` is ready, and was added if there is something in it to ask for. Calls `start(bucket)` and
  // `settle(bucket)`; if that returns false, it has started another exchange, and is called again, later.
  template <typename Start, typename Settle>
  void advance(uint32_t ready, bool last, const Start& start, const Settle& settle) {
    for (Waiting& waiting : waiting_) {
      const bool answered = last || !timing_.answers_later || waiting.scanned_with < ready;
      if (waiting.has_started || !answered) continue;
      start(waiting.bucket);
      waiting.has_started = true;
      waiting.started_with = ready;
    }
    while (!waiting_.empty()) {
      Waiting& first = waiting_.front();
      const bool under_way = first.has_started && (first.started_with < ready || first.index < timing_.at_once);
      if (!last && (timing_.settles_last || !under_way)) return;
      if (settle(first.bucket)) {
        waiting_.pop_front();
      } else {
        first.started_with = ready;
      }
    }
  }

 private:
  struct Waiting {
    Bucket bucket;
    uint32_t index = 0;
    uint32_t scanned_with = 0;  // the bucket that was ready then
    bool has_started = false;
    uint32_t started_with = 0;  // the bucket that was ready then
  };
  const PipelineTiming timing_;
  std::deque<Waiting> waiting_;  // in order
};

}  // namespace ddp_hooks
