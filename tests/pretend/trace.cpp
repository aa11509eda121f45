#include "trace.h"

#include <ATen/record_function.h>

#include <atomic>
#include <mutex>
#include <string_view>
#include <utility>

namespace pretend {
namespace {

std::atomic<bool> noting{false};
std::mutex mutex;
std::vector<Moment> moments;
uint64_t last_number = 0;  // of this trace or an earlier one
at::CallbackHandle ranges = at::INVALID_CALLBACK_HANDLE;

std::unique_ptr<at::ObserverContext> range_begins(const at::RecordFunction& range) {
  const std::string_view name = range.name();
  const bool is_exchange = name == "ddp_hooks::wait_for_ranks";
  if (is_exchange || name == "ddp_hooks::start_masks") Trace::get().note({.what = "masks start"});
  if (is_exchange || name == "ddp_hooks::wait_for_masks") Trace::get().note({.what = "masks wait"});
  return nullptr;
}

}  // namespace

Trace& Trace::get() {
  static Trace trace;
  return trace;
}

void Trace::begin() {
  std::lock_guard lock(mutex);
  moments.clear();
  if (noting.exchange(true)) return;
  ranges = at::addGlobalCallback(
      at::RecordFunctionCallback(&range_begins).scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

std::vector<Moment> Trace::end() {
  std::lock_guard lock(mutex);
  if (noting.exchange(false)) at::removeCallback(ranges);
  return std::exchange(moments, {});
}

uint64_t Trace::note(Moment moment) {
  if (!noting) return 0;
  std::lock_guard lock(mutex);
  moment.number = ++last_number;
  moments.push_back(std::move(moment));
  return last_number;
}

}  // namespace pretend
