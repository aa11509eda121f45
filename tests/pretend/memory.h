// The pretended device's memory, and pinned memory of the host.
//
// Memory that is given back is poisoned when its stream comes to that point, as the next tensor on that stream would
// overwrite it: work on another stream that still reads it reads what nobody wrote, unless the memory was recorded on
// that stream. The next allocation of that size on the stream takes it at once. Nothing is ever unmapped.
//
// Pinned memory that is given back is poisoned at once, unless a copy of torch's own noted what it is used by.
#pragma once

#include <c10/core/Allocator.h>

#include "queues.h"

namespace pretend {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

bool is_pinned(const void* pointer);
void record_on_stream(const c10::DataPtr& pointer, StreamId stream);
void note_use_of_pinned(const void* pointer, StreamId stream);

// The calling thread's.
StreamId current_stream();
StreamId exchange_stream(StreamId stream);

}  // namespace pretend
