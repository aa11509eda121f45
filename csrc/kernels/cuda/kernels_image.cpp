// The compiled kernels. DDP_HOOKS_KERNELS_IMAGE is where nvcc has put them, for builds that have it.
#include "kernels/cuda/driver.h"

#ifdef DDP_HOOKS_KERNELS_IMAGE
extern "C" {
extern const char ddp_hooks_kernels_image[] __attribute__((visibility("hidden")));
extern const char ddp_hooks_kernels_image_end[] __attribute__((visibility("hidden")));
}
asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".global ddp_hooks_kernels_image\n"
    ".hidden ddp_hooks_kernels_image\n"
    "ddp_hooks_kernels_image:\n"
    ".incbin \"" DDP_HOOKS_KERNELS_IMAGE
    "\"\n"
    ".global ddp_hooks_kernels_image_end\n"
    ".hidden ddp_hooks_kernels_image_end\n"
    "ddp_hooks_kernels_image_end:\n"
    ".byte 0\n"
    ".popsection\n");
#endif

namespace ddp_hooks::cuda {

std::string_view kernels_image() {
#ifdef DDP_HOOKS_KERNELS_IMAGE
  return {ddp_hooks_kernels_image, static_cast<size_t>(ddp_hooks_kernels_image_end - ddp_hooks_kernels_image)};
#else
  return {};
#endif
}

}  // namespace ddp_hooks::cuda
