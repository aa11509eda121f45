// See kernels.cpp.
#pragma once

#include "kernels/device_kernels.h"

namespace pretend {

const ddp_hooks::DeviceKernels& kernels();

}  // namespace pretend
