#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/devices.h"
#include "kernels/slice_copy.h"
#include "kernels/unit_scan.h"
#include "testing/emulation.h"
#include "testing/parts.h"

namespace py = pybind11;

namespace ddp_hooks {

// The CUDA kernels' indexing on CPU tensors. Each function returns (launches, chunks, bytes of the widest access), the
// scan its flags besides.
void bind_emulation(py::module_& m) {
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  const auto to_memory = [](const at::Tensor& flat, const Ranges& ranges) {
    std::vector<cuda::SliceOfMemory> slices;
    for (const auto& [offset, length] : ranges) {
      check_range(flat, offset, length);
      slices.push_back(
          {static_cast<char*>(flat.data_ptr()) + offset * flat.element_size(), length * flat.element_size()});
    }
    return slices;
  };
  const auto summary = [](const cuda::EmulatedRun& run) {
    return std::make_tuple(run.launches, run.chunks, run.widest_word_bytes);
  };
  m.def("emulate_gather_scaled",
        [to_memory, summary](const at::Tensor& message, const at::Tensor& flat, const Ranges& ranges, double factor) {
          return summary(cuda::emulate_gather_scaled(static_cast<char*>(message.data_ptr()), to_memory(flat, ranges),
                                                     element_type_of(flat), factor));
        });
  m.def("emulate_scatter",
        [to_memory, summary](const at::Tensor& message, const at::Tensor& flat, const Ranges& ranges) {
          return summary(cuda::emulate_scatter(static_cast<char*>(message.data_ptr()), to_memory(flat, ranges)));
        });
  m.def("emulate_nonzero_scan", [to_memory, summary](const at::Tensor& flat, const Ranges& ranges) {
    std::vector<uint32_t> flags;
    const auto run = cuda::emulate_nonzero_scan(to_memory(flat, ranges), element_type_of(flat), flags);
    return std::make_pair(summary(run), flags);
  });
  // (launches, portions, bytes of the widest access, sectors of 32 bytes loaded), and the scan's answer.
  m.def("emulate_unit_scan", [](const at::Tensor& flat, int64_t offset, int64_t length, int64_t unit_length) {
    check_range(flat, offset, length);
    TORCH_CHECK(length > 0 && unit_length > 0, "emulate_unit_scan: expected a unit at least, received ", length,
                " elements in units of ", unit_length);
    const int64_t element_size = flat.element_size();
    UnitScanResult result;
    const auto run =
        cuda::emulate_unit_scan({static_cast<char*>(flat.data_ptr()) + offset * element_size, length * element_size},
                                std::min(unit_length, length) * element_size, element_type_of(flat), result);
    return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded),
                           std::make_tuple(result.nonzero, result.negative_zeros));
  });
  // (launches, warps, bytes of the widest access, sectors of 32 bytes loaded), and how many sampled units are zero.
  m.def("emulate_unit_sample", [](const at::Tensor& flat,
                                  const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices) {
    std::vector<cuda::UnitsOfMemory> memory;
    const int64_t element_size = flat.element_size();
    for (const auto& [offset, length, unit_length] : slices) {
      check_range(flat, offset, length);
      TORCH_CHECK(length > 0 && unit_length > 0, "emulate_unit_sample: expected a unit at least, received ", length,
                  " elements in units of ", unit_length);
      memory.push_back({static_cast<char*>(flat.data_ptr()) + offset * element_size, length * element_size,
                        std::min(unit_length, length) * element_size});
    }
    std::vector<int64_t> zeros;
    const auto run = cuda::emulate_unit_sample(memory, element_type_of(flat), zeros);
    return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded), zeros);
  });
  m.attr("SLICES_PER_LAUNCH") = cuda::kLargeTable;
  m.attr("SAMPLES_PER_LAUNCH") = cuda::kLargeSamples;
}

}  // namespace ddp_hooks
