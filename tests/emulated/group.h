// A process group of one real rank, whose other ranks are emulated: they hold what this one holds.
//
// A collective on a device's tensors takes as long, on a stream of its own, as a ring over the ranks takes on a link of
// a given rate: it holds that stream up, and moves nothing but what a rank would receive, which is its own. Its work is
// complete when it is put there, as with NCCL, whose name the group may bear. A collective on the CPU, as those that
// carry masks, ends a given time after it began, in a thread of the group.
//
// Thread-safety: collectives may be asked for in any thread; the link may be changed while none is under way.
#pragma once

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulated {

// What the collectives of all groups take.
struct Link {
  double latency_seconds = 0;   // of a collective on a device
  double bytes_per_second = 0;  // of a device
  double host_seconds = 0;      // of a collective on the CPU
};

Link& link();

// Holds up the current stream of a device for so many seconds.
using HoldUp = std::function<void(double seconds)>;

c10::intrusive_ptr<c10d::Backend> make_group(int rank, int size, std::string name, c10::DeviceType device,
                                             HoldUp hold_up);

}  // namespace emulated
