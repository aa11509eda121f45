#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "transport/shard_units.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

// The codes of all parts: a row each, which may lie apart.
class CodeRows {
 public:
  CodeRows(const at::Tensor& codes, const ShardUnits& units) : tensor_(codes) {
    TORCH_CHECK(codes.is_cpu() && codes.scalar_type() == at::kByte && codes.dim() == 2 &&
                    codes.size(1) >= units.code_bytes() && codes.stride(1) == 1,
                "ddp_hooks: expected rows of at least ", units.code_bytes(), " bytes for codes, received ",
                codes.scalar_type(), " of shape ", codes.sizes());
  }

  int64_t parts() const { return tensor_.size(0); }
  uint8_t* row(int64_t part) const { return tensor_.mutable_data_ptr<uint8_t>() + part * tensor_.stride(0); }

 private:
  at::Tensor tensor_;
};

void check_parts(const at::Tensor& flat, const ShardUnits& units, const CodeRows& rows) {
  check_range(flat, 0, flat.numel());
  TORCH_CHECK(flat.numel() == units.numel() * rows.parts(), "ddp_hooks: expected ", rows.parts(), " parts of ",
              units.numel(), " elements, received ", flat.numel());
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& sizes, const CodeRows& rows) {
  TORCH_CHECK(static_cast<int64_t>(sizes.size()) == rows.parts(), "ddp_hooks: expected ", rows.parts(),
              " sizes, received ", sizes.size());
  std::vector<int64_t> offsets;
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    offsets.push_back(offset);
    offset += size;
  }
  return offsets;
}

std::tuple<std::vector<int64_t>, int64_t, int64_t, int64_t> choose(const ShardUnits& units, const at::Tensor& codes,
                                                                   const at::Tensor& flat, int64_t own, bool zeros,
                                                                   bool widths, const std::vector<bool>& known_zero) {
  const CodeRows rows(codes, units);
  check_parts(flat, units, rows);
  const ShardQuestion question{zeros, widths, {known_zero.begin(), known_zero.end()}};
  std::vector<int64_t> bytes(static_cast<size_t>(rows.parts()), 0);
  ShardFindings all;
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part == own) continue;
    const ShardFindings findings = units.choose(flat, part * units.numel(), question, rows.row(part));
    bytes[static_cast<size_t>(part)] = findings.bytes;
    all.narrow_bytes += findings.narrow_bytes;
    all.units_sent += findings.units_sent;
    all.units_narrow += findings.units_narrow;
  }
  return {std::move(bytes), all.narrow_bytes, all.units_sent, all.units_narrow};
}

std::vector<int64_t> packed_bytes_of(const ShardUnits& units, const at::Tensor& codes, int64_t own,
                                     const at::Tensor& like) {
  const CodeRows rows(codes, units);
  std::vector<int64_t> bytes;
  for (int64_t part = 0; part < rows.parts(); ++part) {
    bytes.push_back(part == own ? 0 : units.packed_bytes(rows.row(part), element_type_of(like)));
  }
  return bytes;
}

void pack_parts(const ShardUnits& units, const at::Tensor& to, const at::Tensor& flat, const at::Tensor& codes,
                int64_t own) {
  const CodeRows rows(codes, units);
  check_parts(flat, units, rows);
  std::vector<PackedSlice> slices;
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part != own) units.append_slices(flat, part * units.numel(), rows.row(part), slices);
  }
  pack(to, slices);
}

void sum_parts(const ShardUnits& units, const at::Tensor& to, const at::Tensor& flat, const at::Tensor& received,
               const at::Tensor& codes, int64_t own, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& order) {
  const CodeRows rows(codes, units);
  check_parts(flat, units, rows);
  const std::vector<int64_t> offsets = offsets_of(sizes, rows);
  to.copy_(flat.narrow(0, own * units.numel(), units.numel()));
  std::vector<ShardUnits::Received> parts;
  for (const int64_t rank : order) {
    TORCH_CHECK_INDEX(rank >= 0 && rank < rows.parts(), "ddp_hooks: expected one of ", rows.parts(),
                      " ranks, received ", rank);
    if (rank == own) {
      parts.emplace_back();
    } else {
      parts.push_back({rows.row(rank), offsets[static_cast<size_t>(rank)]});
    }
  }
  units.sum(to, received, parts);
}

void unpack_parts(const ShardUnits& units, const at::Tensor& flat, const at::Tensor& received, const at::Tensor& codes,
                  int64_t own, const std::vector<int64_t>& sizes) {
  const CodeRows rows(codes, units);
  check_parts(flat, units, rows);
  const std::vector<int64_t> offsets = offsets_of(sizes, rows);
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part == own) continue;
    units.sum(flat.narrow(0, part * units.numel(), units.numel()), received,
              {{rows.row(part), offsets[static_cast<size_t>(part)]}});
  }
}

}  // namespace

void bind_shards(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> unlocked;
  py::class_<ShardUnits>(m, "ShardUnits")
      .def(py::init([](const std::vector<std::pair<int64_t, int64_t>>& stretches) {
             std::vector<Units> converted;
             for (const auto& [length, unit_length] : stretches) converted.push_back({unit_length, length});
             return ShardUnits(std::move(converted));
           }),
           py::arg("stretches"))
      .def_property_readonly("numel", &ShardUnits::numel)
      .def_property_readonly("code_bytes", &ShardUnits::code_bytes)
      .def("__len__", [](const ShardUnits& units) { return static_cast<size_t>(units.count()); })
      .def("choose", &choose, py::arg("codes"), py::arg("flat"), py::arg("own"), py::arg("zeros"), py::arg("widths"),
           py::arg("known_zero"), unlocked)
      .def("packed_bytes", &packed_bytes_of, py::arg("codes"), py::arg("own"), py::arg("like"), unlocked)
      .def("pack", &pack_parts, py::arg("to"), py::arg("flat"), py::arg("codes"), py::arg("own"), unlocked)
      .def("sum", &sum_parts, py::arg("to"), py::arg("flat"), py::arg("received"), py::arg("codes"), py::arg("own"),
           py::arg("sizes"), py::arg("order"), unlocked)
      .def("unpack", &unpack_parts, py::arg("flat"), py::arg("received"), py::arg("codes"), py::arg("own"),
           py::arg("sizes"), unlocked);
}

}  // namespace ddp_hooks
