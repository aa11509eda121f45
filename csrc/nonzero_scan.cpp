#include "nonzero_scan.h"

#include <c10/util/Exception.h>

#include "slice_copy.h"

namespace ddp_hooks {

ScanResult nonzero_scan(const at::Tensor& flat, int64_t offset, int64_t length) {
  TORCH_CHECK(flat.is_cpu(), "ddp_hooks: the values detector expected gradients on the CPU, received ", flat.device(),
              "; choose the policy 'skip_unused'");
  check_range(flat, offset, length);
  const char* data = static_cast<const char*>(flat.data_ptr()) + offset * flat.element_size();
  return cpu::nonzero_scan(data, length, element_type_of(flat));
}

}  // namespace ddp_hooks
