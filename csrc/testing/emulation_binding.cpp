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
  // Of slices (offset, length, unit length): (launches, portions, bytes of the widest access, sectors of 32 bytes
  // loaded), and each one's answer.
  m.def(
      "emulate_unit_scan",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices) {
        const int64_t element_size = flat.element_size();
        const ElementType type = element_type_of(flat);
        std::vector<UnitsOfMemory> memory;
        for (const auto& [offset, length, unit_length] : slices) {
          check_range(flat, offset, length);
          TORCH_CHECK(length > 0 && unit_length > 0, "emulate_unit_scan: expected a unit at least, received ", length,
                      " elements in units of ", unit_length);
          memory.push_back({static_cast<char*>(flat.data_ptr()) + offset * element_size, length * element_size,
                            std::min(unit_length, length) * element_size});
        }
        std::vector<uint32_t> bitmaps;
        const auto run = cuda::emulation().unit_scan(memory, type, bitmaps);
        std::vector<std::pair<std::vector<uint64_t>, std::vector<uint32_t>>> answers;
        const uint32_t* words = bitmaps.data();
        for (const UnitsOfMemory& slice : memory) {
          const UnitScanResult result = cuda::read_bitmaps(words, slice.count());
          words += cuda::kBitmaps * cuda::words_of_bitmap(slice.count());
          answers.emplace_back(result.nonzero, result.negative_zeros);
        }
        return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded),
                               std::move(answers));
      },
      py::arg("flat"), py::arg("slices"));
  // (launches, warps, bytes of the widest access, sectors of 32 bytes loaded), and how many sampled units are zero.
  m.def(
      "emulate_unit_sample",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices) {
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
        const auto run = cuda::emulation().unit_sample(memory, type, words);
        std::vector<int64_t> zeros;
        for (size_t i = 0; i < memory.size(); ++i) {
          zeros.push_back(cuda::count_zeros(words.data() + i * cuda::kWordsPerSample, memory[i].count()));
        }
        return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded),
                               zeros);
      },
      py::arg("flat"), py::arg("slices"));
  // Of sums of one type, divisor and way to end.
  m.def("emulate_sum_contributions", [summary](const at::Tensor& packed, const std::vector<HeldSum>& held) {
    const std::vector<SliceSum> sums = borrow(held);
    std::vector<std::vector<Contribution>> terms(sums.size());
    std::vector<SliceToSum> memory;
    for (size_t i = 0; i < sums.size(); ++i) {
      const SliceOfTensor to{held[i].flat, sums[i].to.offset, sums[i].to.length};
      check_range(to.flat, to.offset, to.length);
      for (const auto& [offset, own] : sums[i].contributions) terms[i].push_back({offset, own});
      memory.push_back({address_of(to), to.length * to.flat.element_size(), terms[i].data(), terms[i].size()});
    }
    const SliceSum& first = sums.at(0);
    return summary(cuda::emulation().sum_terms(static_cast<const char*>(packed.data_ptr()), packed.numel(), memory,
                                               element_type_of(*first.to.flat), 1 / first.divisor, first.adds_zero));
  });
  // And how many bytes a message takes, or what is wrong with one.
  m.def("emulate_encode", [summary](const at::Tensor& flat, const at::Tensor& to) {
    int64_t bytes = 0;
    const auto run =
        cuda::emulation().encode(static_cast<const char*>(flat.data_ptr()), flat.numel(), element_type_of(flat),
                                 static_cast<char*>(to.data_ptr()), to.numel(), bytes);
    return std::make_pair(summary(run), bytes);
  });
  m.def(
      "emulate_decode",
      [summary](const at::Tensor& coded, const at::Tensor& to, bool adds) {
        uint32_t wrong = 0;
        const auto run = cuda::emulation().decode(static_cast<const char*>(coded.data_ptr()), coded.numel(), to.numel(),
                                                  element_type_of(to), static_cast<char*>(to.data_ptr()), adds, wrong);
        return std::make_pair(summary(run), wrong);
      },
      py::arg("coded"), py::arg("to"), py::arg("adds") = false);
  m.def("rehearse", &cuda::rehearse, py::arg("path"));
  m.def("why_unserved", &why_unserved);
  m.def("kernels_image", [] { return py::bytes(cuda::kernels_image()); });
  m.attr("SLICES_PER_LAUNCH") = cuda::kLargeTable;
  m.attr("SCANS_PER_LAUNCH") = cuda::kLargeUnits;
  m.attr("SAMPLES_PER_LAUNCH") = cuda::kLargeSamples;
  m.attr("SUMS_PER_LAUNCH") = std::make_pair(cuda::LargeSumTable::kSlices, cuda::LargeSumTable::kTerms);
}

}  // namespace ddp_hooks
