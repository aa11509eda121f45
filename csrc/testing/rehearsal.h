// The host's side of the CUDA kernels, run on CPU memory through a stand-in for CUDA's driver
// (tests/kernels/stand_in_driver.cpp): tables are divided and launched by the code that launches them on a GPU.
#pragma once

#include <string>

#include "testing/emulation.h"

namespace ddp_hooks::cuda {

// What emulation.h declares, or the same through a driver.
struct Emulation {
  decltype(&emulate_gather_scaled) gather_scaled = emulate_gather_scaled;
  decltype(&emulate_scatter) scatter = emulate_scatter;
  decltype(&emulate_unit_scan) unit_scan = emulate_unit_scan;
  decltype(&emulate_unit_sample) unit_sample = emulate_unit_sample;
  decltype(&emulate_sum_terms) sum_terms = emulate_sum_terms;
  decltype(&emulate_encode) encode = emulate_encode;
  decltype(&emulate_decode) decode = emulate_decode;
};

// What plays kernels now.
const Emulation& emulation();

// From now on, kernels are launched through the driver at this path, which is looked for anew; with an empty path, they
// are emulated.
void rehearse(const std::string& path);

}  // namespace ddp_hooks::cuda
