// How the host launches kernels: with as many warps as there is work for, in blocks of kWarpsPerBlock.
#pragma once

#include <type_traits>

#include "kernels/cuda/driver.h"
#include "kernels/cuda/kernels.h"

namespace ddp_hooks::cuda {

// The arguments have to be of the kernel's own types. Returns null, or CUDA's words for what went wrong.
template <typename... Parameters>
const char* launch_warps(const Kernel<void(Parameters...)>& kernel, int64_t warps, Stream stream,
                         const std::type_identity_t<Parameters>&... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return launch_blocks(kernel.id, (warps + kWarpsPerBlock - 1) / kWarpsPerBlock, pointers, stream);
}

}  // namespace ddp_hooks::cuda
