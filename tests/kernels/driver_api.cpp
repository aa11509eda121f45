// Compiled by test_cuda_rehearsal.py with CUDA's own header: our declarations of the driver's functions say the same.
#include "kernels/cuda/driver_api.h"

#include <cuda.h>

#include <cstddef>
#include <type_traits>

namespace {

// Handles are pointers and enumerations numbers; what a pointer points to does not matter to a call.
template <typename T>
struct AsPassed {
  using type =
      std::conditional_t<std::is_pointer_v<T>, void*, std::conditional_t<std::is_enum_v<T>, int, std::remove_cv_t<T>>>;
};
template <typename T>
using Passed = std::conditional_t<std::is_same_v<typename AsPassed<T>::type, unsigned long long>, unsigned long,
                                  typename AsPassed<T>::type>;

template <typename Signature>
struct Call;
template <typename Result, typename... Parameters>
struct Call<Result(Parameters...)> {
  using type = Passed<Result>(Passed<Parameters>...);
};

}  // namespace

namespace ddp_hooks::cuda {

// cuda.h renames some functions to newer ones of another name, and the name is what is looked for.
#define DDP_HOOKS_TEXT(name) #name
#define DDP_HOOKS_EXPANDED(name) DDP_HOOKS_TEXT(name)
#define DDP_HOOKS_FUNCTION(name, parameters)                                                             \
  static_assert(std::is_same_v<Call<decltype(name)>::type, Call<DriverStatus parameters>::type>, #name); \
  static_assert(sizeof(DDP_HOOKS_EXPANDED(name)) == sizeof(#name), #name);
DDP_HOOKS_DRIVER_FUNCTIONS(DDP_HOOKS_FUNCTION)

static_assert(kDriverSuccess == CUDA_SUCCESS);
static_assert(kDriverNotFound == CUDA_ERROR_NOT_FOUND);
static_assert(kDriverCaptureImplicit == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
static_assert(kNotCapturing == CU_STREAM_CAPTURE_STATUS_NONE);

}  // namespace ddp_hooks::cuda
