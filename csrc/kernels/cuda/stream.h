// What has to be known about a stream besides what is put on it.
#pragma once

#include "kernels/cuda/slice_copy.h"

namespace ddp_hooks::cuda {

// Whether what is put on the stream now is recorded into a graph instead of run. False where CUDA cannot say.
bool is_capturing(Stream stream);

}  // namespace ddp_hooks::cuda
