// The pretended device's memory, and pinned memory of the host.
//
// Memory that is given back is poisoned when its stream comes to that point, as the next tensor on that stream would
// overwrite it: work on another stream that still reads it reads what nobody wrote, unless the memory was recorded on
// that stream. The next allocation of that size on the stream takes it at once. Nothing is ever unmapped.
//
// FSDP2 relies on more: its private streams first wait for the others whenever they go on. So that point can be where
// the stream is next given work, or hands out memory, before which CUDA's allocator gives the memory to nobody.
//
// Pinned memory that is given back is poisoned at once, unless a copy of torch's own noted what it is used by.
//
// Besides, what each piece of work reads and writes is noted. It is found wrong where nothing orders it with what
// others read and write there, or with the end of that memory, and where it is put on a stream after that end. That
// needs no unlucky moment.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <string>
#include <vector>

#include "queues.h"

namespace pretend {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

bool is_pinned(const void* pointer);
void record_on_stream(const c10::DataPtr& pointer, StreamId stream);
void note_use_of_pinned(const void* pointer, StreamId stream);
// From now on, whether memory ends as FSDP2 relies on.
void end_memory_late(bool late);
// What fits is kept.
void resize_storage(const c10::Storage& storage, size_t bytes);

// What a piece of work does with some memory.
struct Use {
  const void* begin = nullptr;
  int64_t bytes = 0;
  bool writes = false;
};
Use use_of(const at::Tensor& tensor, bool writes);
// Puts a piece of work on a stream, as Queues::put does, by the name that an error calls it.
Ticket put_work(StreamId stream, const std::string& name, const std::vector<Use>& uses, Work act,
                const Cost& cost = {});

// The calling thread's.
StreamId current_stream();
StreamId exchange_stream(StreamId stream);

}  // namespace pretend
