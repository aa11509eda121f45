// See process_group.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace pretend {

c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Backend>& gloo);
c10::intrusive_ptr<c10d::Backend> make_host_group(const c10::intrusive_ptr<c10d::Backend>& gloo);

// Whether collectives of the second kind of group are done when they have been asked for.
void finish_host_collectives_at_once(bool at_once);
// The so-many-th collective from now on that is asked of the first kind of group throws, and is not started.
void fail_collective(int number);

}  // namespace pretend
