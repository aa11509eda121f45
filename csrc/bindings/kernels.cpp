#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "kernels/cpu/instructions.h"
#include "kernels/cuda/emulation.h"
#include "kernels/devices.h"
#include "kernels/nonzero_scan.h"
#include "kernels/packing.h"
#include "kernels/slice_copy.h"
#include "kernels/staging_copy.h"
#include "kernels/tensor_hash.h"
#include "kernels/unit_sample.h"
#include "kernels/unit_scan.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

void bind_slices(py::module_& m) {
  const auto to_slices = [](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    std::vector<SliceOfTensor> slices;
    for (const auto& [offset, length] : ranges) slices.push_back({flat, offset, length});
    return slices;
  };
  m.def("gather_scaled", [to_slices](const at::Tensor& message, const at::Tensor& flat,
                                     const std::vector<std::pair<int64_t, int64_t>>& ranges,
                                     double factor) { gather_scaled(message, to_slices(flat, ranges), factor); });
  m.def("scatter", [to_slices](const at::Tensor& message, const at::Tensor& flat,
                               const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    scatter(message, to_slices(flat, ranges));
  });

  m.def("scatter_add",
        [](const at::Tensor& message, const at::Tensor& to, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
          std::vector<Range> stretches;
          for (const auto& [offset, length] : ranges) stretches.push_back({offset, length});
          scatter_add(message, to, stretches);
        });

  // For each slice: (any non-zero, any -0.0 if all are zero).
  py::class_<PendingScan>(m, "PendingScan")
      .def(
          "wait",
          [](PendingScan& scan) {
            std::vector<std::pair<bool, bool>> results;
            for (const ScanResult& result : scan.wait()) {
              results.emplace_back(result.any_nonzero, result.any_negative_zero);
            }
            return results;
          },
          py::call_guard<py::gil_scoped_release>());
  m.def("start_scan", [to_slices](const at::Tensor& flat, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
    return start_scan(to_slices(flat, ranges));
  });
  m.def("nonzero_scan", [](const at::Tensor& flat) {
    const ScanResult result = start_scan({{flat, 0, flat.numel()}}).wait().front();
    return std::make_pair(result.any_nonzero, result.any_negative_zero);
  });

  // The words of the bitmap of non-zero units, and the units that are zero and hold a -0.0; inexact() returns the words
  // of the bitmaps of what narrow forms do not hold.
  py::class_<PendingUnitScan>(m, "PendingUnitScan")
      .def(
          "wait",
          [](PendingUnitScan& scan) {
            const UnitScanResult& result = scan.wait();
            return std::make_tuple(result.nonzero, result.negative_zeros);
          },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "inexact", [](PendingUnitScan& scan) { return scan.wait().inexact; },
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "start_unit_scan",
      [](const at::Tensor& flat, int64_t offset, int64_t length, int64_t unit_length,
         const std::optional<std::vector<uint64_t>>& candidates, bool widths) {
        const SliceOfTensor slice{flat, offset, length};
        return candidates ? start_unit_scan(slice, unit_length, *candidates, widths)
                          : start_unit_scan(slice, unit_length, widths);
      },
      py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("unit_length"), py::arg("candidates") = py::none(),
      py::arg("widths") = false, py::call_guard<py::gil_scoped_release>());

  // Of each slice (offset, length, unit length): which part of a sample of its units is zero, and which part of the
  // rest is narrow.
  m.def(
      "sample_units",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices, bool widths) {
        std::vector<UnitsOfSlice> units;
        for (const auto& [offset, length, unit_length] : slices) units.push_back({{flat, offset, length}, unit_length});
        PendingUnitSample sample = start_unit_sample(units, widths);
        std::vector<std::pair<double, double>> fractions;
        for (const SampledUnits& each : sample.wait()) {
          fractions.emplace_back(each.zero_fraction, each.narrow_fraction);
        }
        return fractions;
      },
      py::arg("flat"), py::arg("slices"), py::arg("widths") = false, py::call_guard<py::gil_scoped_release>());

  m.def("has_cuda", &has_cuda);
  m.def("is_capturing", [](const at::Tensor& tensor) { return is_capturing(tensor.device()); });
}

void bind_packing(py::module_& m) {
  py::enum_<Width>(m, "Width")
      .value("FULL", Width::kFull)
      .value("BFLOAT16", Width::kBFloat16)
      .value("FLOAT16", Width::kFloat16)
      .value("FLOAT32", Width::kFloat32);
  m.def("narrow_widths", [](const at::Tensor& flat) { return narrow_widths(element_type_of(flat)); });
  m.def("packed_bytes", &packed_bytes, py::arg("numel"), py::arg("width"), py::arg("element_bytes"));

  m.def(
      "pack",
      [](const at::Tensor& to, const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, Width>>& slices) {
        std::vector<PackedSlice> packed;
        for (const auto& [offset, length, width] : slices) packed.push_back({{flat, offset, length}, width});
        pack(to, packed);
      },
      py::call_guard<py::gil_scoped_release>());

  py::class_<Contribution>(m, "Contribution")
      .def(py::init([](int64_t offset, Width width, bool own) { return Contribution{offset, width, own}; }),
           py::arg("offset") = 0, py::arg("width") = Width::kFull, py::arg("own") = false);
  py::class_<SliceSum>(m, "SliceSum")
      .def(py::init([](const at::Tensor& flat, int64_t offset, int64_t length, std::vector<Contribution> contributions,
                       double divisor, bool divides, bool adds_zero) {
             return SliceSum{{flat, offset, length}, std::move(contributions), divisor, divides, adds_zero};
           }),
           py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("contributions"), py::arg("divisor") = 1,
           py::arg("divides") = false, py::arg("adds_zero") = false);
  m.def(
      "sum_contributions",
      [](const std::optional<at::Tensor>& packed, const std::vector<SliceSum>& sums) {
        sum_contributions(packed.value_or(at::Tensor()), sums);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("leave_out_avx2", &cpu::leave_out_avx2);
}

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
  m.def(
      "emulate_unit_scan",
      [](const at::Tensor& flat, int64_t offset, int64_t length, int64_t unit_length, bool widths) {
        check_range(flat, offset, length);
        TORCH_CHECK(length > 0 && unit_length > 0, "emulate_unit_scan: expected a unit at least, received ", length,
                    " elements in units of ", unit_length);
        const int64_t element_size = flat.element_size();
        UnitScanResult result;
        const auto run = cuda::emulate_unit_scan(
            {static_cast<char*>(flat.data_ptr()) + offset * element_size, length * element_size},
            std::min(unit_length, length) * element_size, element_type_of(flat), widths, result);
        return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded),
                               std::make_tuple(result.nonzero, result.negative_zeros), result.inexact);
      },
      py::arg("flat"), py::arg("offset"), py::arg("length"), py::arg("unit_length"), py::arg("widths") = false);
  // (launches, warps, bytes of the widest access, sectors of 32 bytes loaded), how many sampled units are zero, and how
  // many of the others each form holds.
  m.def(
      "emulate_unit_sample",
      [](const at::Tensor& flat, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& slices, bool widths) {
        std::vector<cuda::UnitsOfMemory> memory;
        const int64_t element_size = flat.element_size();
        for (const auto& [offset, length, unit_length] : slices) {
          check_range(flat, offset, length);
          TORCH_CHECK(length > 0 && unit_length > 0, "emulate_unit_sample: expected a unit at least, received ", length,
                      " elements in units of ", unit_length);
          memory.push_back({static_cast<char*>(flat.data_ptr()) + offset * element_size, length * element_size,
                            std::min(unit_length, length) * element_size});
        }
        std::vector<cuda::SampleCounts> counts;
        const auto run = cuda::emulate_unit_sample(memory, element_type_of(flat), widths, counts);
        std::vector<int64_t> zeros;
        std::vector<std::array<int64_t, 2>> narrow;
        for (const cuda::SampleCounts& each : counts) {
          zeros.push_back(each.zeros);
          narrow.push_back(each.narrow);
        }
        return std::make_tuple(std::make_tuple(run.launches, run.chunks, run.widest_word_bytes, run.sectors_loaded),
                               zeros, narrow);
      },
      py::arg("flat"), py::arg("slices"), py::arg("widths") = false);
  m.def("emulate_pack", [summary](const at::Tensor& to, const at::Tensor& flat,
                                  const std::vector<std::tuple<int64_t, int64_t, Width>>& slices) {
    std::vector<cuda::SliceToPack> memory;
    for (const auto& [offset, length, width] : slices) {
      check_range(flat, offset, length);
      memory.push_back(
          {static_cast<char*>(flat.data_ptr()) + offset * flat.element_size(), length, flat.element_size(), width});
    }
    return summary(cuda::emulate_pack(static_cast<char*>(to.data_ptr()), memory));
  });
  // Of sums of one type, divisor and way to end.
  m.def("emulate_sum_contributions", [summary](const at::Tensor& packed, const std::vector<SliceSum>& sums) {
    std::vector<std::vector<cuda::TermToAdd>> terms(sums.size());
    std::vector<cuda::SliceToSum> memory;
    for (size_t i = 0; i < sums.size(); ++i) {
      const SliceOfTensor& to = sums[i].to;
      check_range(to.flat, to.offset, to.length);
      for (const auto& [offset, width, own] : sums[i].contributions) terms[i].push_back({offset, width, own});
      memory.push_back({address_of(to), to.length * to.flat.element_size(), terms[i].data(), terms[i].size()});
    }
    const SliceSum& first = sums.at(0);
    return summary(cuda::emulate_sum_terms(static_cast<const char*>(packed.data_ptr()), packed.numel(), memory,
                                           element_type_of(first.to.flat), 1 / first.divisor, first.adds_zero));
  });
  m.attr("SLICES_PER_LAUNCH") = cuda::kLargeTable;
  m.attr("SAMPLES_PER_LAUNCH") = cuda::kLargeSamples;
  m.attr("PACKED_PER_LAUNCH") = cuda::kLargePackTable;
  m.attr("SUMS_PER_LAUNCH") = std::make_pair(cuda::LargeSumTable::kSlices, cuda::LargeSumTable::kTerms);
}

// Hashes what a tensor says, not how it lies in memory: its elements in row-major order, so that a channels-last tensor
// and a contiguous one with the same elements have the same digest.
Digest digest_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "hash_tensors: expected strided tensors, received one with layout ",
              tensor.layout());
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
  return hash_bytes(plain.const_data_ptr(), plain.nbytes());
}

void bind_tensor_hash(py::module_& m) {
  py::enum_<HashKernel>(m, "HashKernel")
      .value("FASTEST", HashKernel::kFastest)
      .value("PORTABLE", HashKernel::kPortable)
      .value("SSE2", HashKernel::kSse2)
      .value("AVX2", HashKernel::kAvx2);

  m.def("hash_kernel_is_supported", &is_supported);
  m.def(
      "hash_bytes",
      [](const py::bytes& data, HashKernel kernel) {
        TORCH_CHECK(is_supported(kernel), "hash_bytes: expected a kernel that this processor can run, received ",
                    static_cast<int>(kernel));
        const std::string_view view = data;
        const Digest digest = hash_bytes(view.data(), view.size(), kernel);
        return std::make_pair(digest.low, digest.high);
      },
      py::arg("data"), py::arg("kernel") = HashKernel::kFastest);
  // One row of two int64 a tensor: the low and the high half of its digest.
  m.def(
      "hash_tensors",
      [](const std::vector<at::Tensor>& tensors) {
        at::Tensor digests = at::empty({static_cast<int64_t>(tensors.size()), 2}, at::kLong);
        auto* words = digests.mutable_data_ptr<int64_t>();
        for (const at::Tensor& tensor : tensors) {
          const Digest digest = digest_of(tensor);
          *words++ = static_cast<int64_t>(digest.low);
          *words++ = static_cast<int64_t>(digest.high);
        }
        return digests;
      },
      py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

void bind_staging_copy(py::module_& m) {
  m.def("gather_tensors", &gather_tensors, py::arg("staging"), py::arg("tensors"),
        py::call_guard<py::gil_scoped_release>());
  m.def("scatter_tensors", &scatter_tensors, py::arg("staging"), py::arg("tensors"), py::arg("divisor") = 1,
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_kernels(py::module_& m) {
  bind_slices(m);
  bind_packing(m);
  bind_emulation(m);
  bind_tensor_hash(m);
  bind_staging_copy(m);
}

}  // namespace ddp_hooks
