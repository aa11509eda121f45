#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/driver.h"
#include "kernels/devices.h"
#include "kernels/packing.h"
#include "kernels/slice_copy.h"
#include "kernels/unit_scan.h"
#include "testing/parts.h"
#include "testing/rehearsal.h"

namespace py = pybind11;

namespace ddp_hooks {

// The CUDA kernels' indexing on CPU tensors, or their launches (rehearsal.h). Each function returns (launches, chunks,
// bytes of the widest access), the scan its flags besides.
void bind_emulation(py::module_& m) {
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  const auto to_memory = [](const at::Tensor& flat, const Ranges& ranges) {
    std::vector<SliceOfMemory> slices;
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
          return summary(cuda::emulation().gather_scaled(static_cast<char*>(message.data_ptr()),
                                                         to_memory(flat, ranges), element_type_of(flat), factor));
        });
  m.def("emulate_scatter",
        [to_memory, summary](const at::Tensor& message, const at::Tensor& flat, const Ranges& ranges) {
          return summary(cuda::emulation().scatter(static_cast<char*>(message.data_ptr()), to_memory(flat, ranges)));
        });
  m.def("emulate_nonzero_scan", [to_memory, summary](const at::Tensor& flat, const Ranges& ranges) {
    std::vector<uint32_t> flags;
    const auto run = cuda::emulation().nonzero_scan(to_memory(flat, ranges), element_type_of(flat), flags);
    return std::make_pair(summary(run), flags);
  });
  // (launches, portions, bytes of the widest access, sectors of 32 bytes loaded), and the scan's answer.
  m.def(
      "emulate_unit_scan",
      [](const at::Tensor& flat, int64_t offset, int64_t length, int64_t unit_length, bool widths) {
        check_range(flat, offset, length);
        TORCH_CHECK(length > 0 && unit_length > 0, "emulate_unit_scan: expected a unit at least, received ", length,
                    " elements in units of ", unit_length);
        const int64_t element_size = flat.element_size();
        const ElementType type = element_type_of(flat);
        std::vector<uint32_t> bitmaps;
        const auto run = cuda::emulation().unit_scan(
            {static_cast<char*>(flat.data_ptr()) + offset * element_size, length * element_size},
            std::min(unit_length, length) * element_size, type, widths, bitmaps);
        const int64_t units = (length - 1) / unit_length + 1;
        const UnitScanResult result = widths ? cuda::read_bitmaps_of_widths(bitmaps.data(), units, type)
                                             : cuda::read_bitmaps(bitmaps.data(), units);
        return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded),
                               std::make_tuple(result.nonzero, result.negative_zeros), result.inexact);
      },
      py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("unit_length"), py::arg("widths") = false);
  // (launches, warps, bytes of the widest access, sectors of 32 bytes loaded), how many sampled units are zero, and how
  // many of the others each form holds.
  m.def(
      "emulate_unit_sample",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices, bool widths) {
        std::vector<UnitsOfMemory> memory;
        const int64_t element_size = flat.element_size();
        for (const auto& [offset, length, unit_length] : slices) {
          check_range(flat, offset, length);
          TORCH_CHECK(length > 0 && unit_length > 0, "emulate_unit_sample: expected a unit at least, received ", length,
                      " elements in units of ", unit_length);
          memory.push_back({static_cast<char*>(flat.data_ptr()) + offset * element_size, length * element_size,
                            std::min(unit_length, length) * element_size});
        }
        const ElementType type = element_type_of(flat);
        std::vector<uint32_t> words;
        const auto run = cuda::emulation().unit_sample(memory, type, widths, words);
        std::vector<int64_t> zeros;
        std::vector<std::array<int64_t, 2>> narrow;
        for (size_t i = 0; i < memory.size(); ++i) {
          const uint32_t* const of_slice = words.data() + i * static_cast<size_t>(cuda::words_of_sample(type, widths));
          const cuda::SampleCounts counts = cuda::count_sample(of_slice, cuda::count_units(memory[i]), type, widths);
          zeros.push_back(counts.zeros);
          narrow.push_back(counts.narrow);
        }
        return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded),
                               zeros, narrow);
      },
      py::arg("flat"), py::arg("slices"), py::arg("widths") = false);
  m.def(
      "emulate_pack",
      [summary](const at::Tensor& to, const at::Tensor& flat, const WidthOfSlices& slices,
                const std::vector<double>& divisors) {
        std::vector<SliceToPack> memory;
        for (const auto& [slice, width, divisor, divides] : slices_to_pack(flat, slices, divisors, false)) {
          check_range(flat, slice.offset, slice.length);
          memory.push_back({address_of({flat, slice.offset, slice.length}), slice.length, width, 1 / divisor});
        }
        return summary(cuda::emulation().pack(static_cast<char*>(to.data_ptr()), memory, element_type_of(flat)));
      },
      py::arg("to"), py::arg("flat"), py::arg("slices"), py::arg("divisors") = std::vector<double>());
  // Of sums of one type, divisor and way to end.
  m.def("emulate_sum_contributions", [summary](const at::Tensor& packed, const std::vector<HeldSum>& held) {
    const std::vector<SliceSum> sums = borrow(held);
    std::vector<std::vector<Contribution>> terms(sums.size());
    std::vector<SliceToSum> memory;
    for (size_t i = 0; i < sums.size(); ++i) {
      const SliceOfTensor to{held[i].flat, sums[i].to.offset, sums[i].to.length};
      check_range(to.flat, to.offset, to.length);
      for (const auto& [offset, width, own] : sums[i].contributions) terms[i].push_back({offset, width, own});
      memory.push_back({address_of(to), to.length * to.flat.element_size(), terms[i].data(), terms[i].size()});
    }
    const SliceSum& first = sums.at(0);
    return summary(cuda::emulation().sum_terms(static_cast<const char*>(packed.data_ptr()), packed.numel(), memory,
                                               element_type_of(*first.to.flat), 1 / first.divisor, first.adds_zero));
  });
  m.def("rehearse", &cuda::rehearse, py::arg("path"));
  m.def("why_unserved", &why_unserved);
  m.def("kernels_image", [] { return py::bytes(cuda::kernels_image()); });
  m.attr("SLICES_PER_LAUNCH") = cuda::kLargeTable;
  m.attr("SAMPLES_PER_LAUNCH") = cuda::kLargeSamples;
  m.attr("PACKED_PER_LAUNCH") = cuda::kLargePackTable;
  m.attr("SUMS_PER_LAUNCH") = std::make_pair(cuda::LargeSumTable::kSlices, cuda::LargeSumTable::kTerms);
}

}  // namespace ddp_hooks
