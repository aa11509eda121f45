// Does this slice hold a non-zero? The only dispatch point by device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cpu/nonzero_scan.h"

namespace ddp_hooks {

using cpu::ScanResult;

// `flat` is one-dimensional and contiguous; offset and length are in elements.
ScanResult nonzero_scan(const at::Tensor& flat, int64_t offset, int64_t length);

}  // namespace ddp_hooks
