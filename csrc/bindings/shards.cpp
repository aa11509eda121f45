#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "kernels/coding.h"
#include "kernels/slice_copy.h"
#include "transport/coded_message.h"
#include "transport/shard_units.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

// The masks of all parts: a row each, which may lie apart.
class MaskRows {
 public:
  MaskRows(const at::Tensor& masks, const ShardUnits& units) : tensor_(masks) {
    TORCH_CHECK(masks.is_cpu() && masks.scalar_type() == at::kByte && masks.dim() == 2 &&
                    masks.size(1) >= units.mask_bytes() && masks.stride(1) == 1,
                "ddp_hooks: expected rows of at least ", units.mask_bytes(), " bytes for masks, received ",
                masks.scalar_type(), " of shape ", masks.sizes());
  }

  int64_t parts() const { return tensor_.size(0); }
  uint8_t* row(int64_t part) const { return tensor_.mutable_data_ptr<uint8_t>() + part * tensor_.stride(0); }

 private:
  at::Tensor tensor_;
};

// How far apart the parts lie: one after the other, or the same one for all.
int64_t distance_of_parts(const at::Tensor& flat, const ShardUnits& units, const MaskRows& rows) {
  check_range(flat, 0, flat.numel());
  if (flat.numel() == units.numel()) return 0;
  TORCH_CHECK(flat.numel() == units.numel() * rows.parts(), "ddp_hooks: expected ", rows.parts(), " parts of ",
              units.numel(), " elements or one for all, received ", flat.numel());
  return units.numel();
}

std::vector<int64_t> sent_elements_of(const ShardUnits& units, const at::Tensor& masks) {
  const MaskRows rows(masks, units);
  std::vector<int64_t> elements;
  for (int64_t part = 0; part < rows.parts(); ++part) elements.push_back(units.sent_elements(rows.row(part)));
  return elements;
}

// Where each rank's part begins in what was received.
std::vector<int64_t> offsets_of(const ShardUnits& units, const at::Tensor& masks) {
  std::vector<int64_t> offsets = sent_elements_of(units, masks);
  std::exclusive_scan(offsets.begin(), offsets.end(), offsets.begin(), int64_t{0});
  return offsets;
}

int64_t choose(const ShardUnits& units, const at::Tensor& masks, const at::Tensor& flat, int64_t own, bool zeros,
               const std::vector<bool>& known_zero) {
  const MaskRows rows(masks, units);
  const int64_t distance = distance_of_parts(flat, units, rows);
  std::vector<ShardUnits::Part> parts;
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part != own) parts.push_back({part * distance, rows.row(part)});
  }
  return units.choose(flat, parts, {zeros, {known_zero.begin(), known_zero.end()}});
}

// The messages for all ranks but `own`, one after the other; what does not get smaller stays as it is.
std::vector<int64_t> write_parts(const ShardUnits& units, const at::Tensor& to, const at::Tensor& flat,
                                 const at::Tensor& masks, int64_t own, bool is_coded) {
  const MaskRows rows(masks, units);
  const int64_t distance = distance_of_parts(flat, units, rows);
  std::vector<int64_t> sizes;
  std::vector<BorrowedSlice> slices;
  int64_t end = 0;
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part != own) units.append_slices(flat, part * distance, rows.row(part), slices);
    int64_t size = part == own ? 0 : units.sent_elements(rows.row(part)) * flat.element_size();
    if (is_coded) {
      const at::Tensor rest = to.narrow(0, end, to.numel() - end);
      const int64_t coded = write_message(slices, true, rest);
      size = coded < size ? coded : write_message(slices, false, rest);
      slices.clear();
    }
    sizes.push_back(size);
    end += size;
  }
  write_message(slices, false, to);
  return sizes;
}

void sum_parts(const ShardUnits& units, const at::Tensor& to, const at::Tensor& flat, const at::Tensor& received,
               const at::Tensor& masks, int64_t own, const std::vector<int64_t>& order) {
  const MaskRows rows(masks, units);
  const at::Tensor part = flat.narrow(0, own * distance_of_parts(flat, units, rows), units.numel());
  if (part.const_data_ptr() != to.const_data_ptr()) to.copy_(part);
  const std::vector<int64_t> offsets = offsets_of(units, masks);
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

void unpack_parts(const ShardUnits& units, const at::Tensor& flat, const at::Tensor& received, const at::Tensor& masks,
                  int64_t own) {
  const MaskRows rows(masks, units);
  const int64_t distance = distance_of_parts(flat, units, rows);
  const std::vector<int64_t> offsets = offsets_of(units, masks);
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part == own) continue;
    units.sum(flat.narrow(0, part * distance, units.numel()), received,
              {{rows.row(part), offsets[static_cast<size_t>(part)]}});
  }
}

void decode_messages(const at::Tensor& to, const at::Tensor& coded, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& counts) {
  TORCH_CHECK(sizes.size() == counts.size(), "ddp_hooks: expected ", counts.size(), " sizes, received ", sizes.size());
  int64_t begin = 0, end = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const bool is_coded = sizes[i] != counts[i] * to.element_size();
    read_message(coded, begin, sizes[i], {&to, end, counts[i]}, is_coded,
                 [i] { return c10::str("FSDP2's message from rank ", i, " of the process group"); });
    begin += sizes[i];
    end += counts[i];
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
      .def_property_readonly("mask_bytes", &ShardUnits::mask_bytes)
      .def("__len__", [](const ShardUnits& units) { return static_cast<size_t>(units.count()); })
      .def("choose", &choose, py::arg("masks"), py::arg("flat"), py::arg("own"), py::arg("zeros"),
           py::arg("known_zero"), unlocked)
      .def("sent_elements", &sent_elements_of, py::arg("masks"), unlocked)
      .def("write", &write_parts, py::arg("to"), py::arg("flat"), py::arg("masks"), py::arg("own"), py::arg("is_coded"),
           unlocked)
      .def("sum", &sum_parts, py::arg("to"), py::arg("flat"), py::arg("received"), py::arg("masks"), py::arg("own"),
           py::arg("order"), unlocked)
      .def("unpack", &unpack_parts, py::arg("flat"), py::arg("received"), py::arg("masks"), py::arg("own"), unlocked);
  m.def("most_coded_bytes",
        [](int64_t count, const at::Tensor& like) { return most_coded_bytes(count, element_type_of(like)); });
  m.def("decode_messages", &decode_messages, py::arg("to"), py::arg("coded"), py::arg("sizes"), py::arg("counts"),
        unlocked);
}

}  // namespace ddp_hooks
