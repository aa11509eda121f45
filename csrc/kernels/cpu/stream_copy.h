// Writes memory that nobody will read soon, past the caches.
//
// An ordinary store first reads the cache line that it will overwrite. For a model that has just arrived in a staging
// buffer that is a third of the memory traffic, beside a transfer that needs the memory itself.
//
// Thread-safety: pure functions. The ranges do not overlap; they need no alignment. Other threads see what was written
// when they synchronise with the caller as after any write.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp_hooks::cpu {

void stream_copy(void* to, const void* from, size_t bytes);

// to[i] = from[i] / divisor, rounded once.
void stream_quotients(float* to, const float* from, int64_t numel, float divisor);
void stream_quotients(double* to, const double* from, int64_t numel, double divisor);

}  // namespace ddp_hooks::cpu
