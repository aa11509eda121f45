// Preloaded, it makes the workers of gloo groups late, as a busy machine does: whoever waits for a collective is woken
// up, and the worker that has ended it goes on only LATE_WORKERS_MS milliseconds later.
#include <dlfcn.h>
#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

bool is_worker() {
  char name[16] = {};  // as Linux limits it
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strcmp(name, "pt_gloo_runloop") == 0;
}

}  // namespace

extern "C" int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  using Broadcast = int (*)(pthread_cond_t*);
  static const auto broadcast = reinterpret_cast<Broadcast>(dlsym(RTLD_NEXT, "pthread_cond_broadcast"));
  static const char* const milliseconds = std::getenv("LATE_WORKERS_MS");
  const int result = broadcast(condition);
  if (milliseconds != nullptr && is_worker()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(milliseconds)));
  }
  return result;
}
