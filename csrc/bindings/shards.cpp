#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "kernels/coding.h"
#include "kernels/slice_copy.h"
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

void check_parts(const at::Tensor& flat, const ShardUnits& units, const MaskRows& rows) {
  check_range(flat, 0, flat.numel());
  TORCH_CHECK(flat.numel() == units.numel() * rows.parts(), "ddp_hooks: expected ", rows.parts(), " parts of ",
              units.numel(), " elements, received ", flat.numel());
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
  check_parts(flat, units, rows);
  const ShardQuestion question{zeros, {known_zero.begin(), known_zero.end()}};
  int64_t chosen = 0;
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part != own) chosen += units.choose(flat, part * units.numel(), question, rows.row(part));
  }
  return chosen;
}

void pack_parts(const ShardUnits& units, const at::Tensor& to, const at::Tensor& flat, const at::Tensor& masks,
                int64_t own) {
  const MaskRows rows(masks, units);
  check_parts(flat, units, rows);
  std::vector<BorrowedSlice> slices;
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part != own) units.append_slices(flat, part * units.numel(), rows.row(part), slices);
  }
  gather_scaled(to, slices, 1);
}

void sum_parts(const ShardUnits& units, const at::Tensor& to, const at::Tensor& flat, const at::Tensor& received,
               const at::Tensor& masks, int64_t own, const std::vector<int64_t>& order) {
  const MaskRows rows(masks, units);
  check_parts(flat, units, rows);
  const std::vector<int64_t> offsets = offsets_of(units, masks);
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

void unpack_parts(const ShardUnits& units, const at::Tensor& flat, const at::Tensor& received, const at::Tensor& masks,
                  int64_t own) {
  const MaskRows rows(masks, units);
  check_parts(flat, units, rows);
  const std::vector<int64_t> offsets = offsets_of(units, masks);
  for (int64_t part = 0; part < rows.parts(); ++part) {
    if (part == own) continue;
    units.sum(flat.narrow(0, part * units.numel(), units.numel()), received,
              {{rows.row(part), offsets[static_cast<size_t>(part)]}});
  }
}

int64_t raw_bytes(int64_t count, const at::Tensor& like) {
  return count * like.element_size();
}

// One message after the other; what does not get smaller stays as it is. Returns their sizes.
std::vector<int64_t> encode_messages(const at::Tensor& to, const at::Tensor& flat, const std::vector<int64_t>& counts) {
  const ElementType type = element_type_of(flat);
  int64_t room = 0, elements = 0;
  for (const int64_t count : counts) {
    room += most_coded_bytes(count, type);
    elements += count;
  }
  check_range(flat, 0, elements);
  check_range(to, 0, room);
  const auto* from = static_cast<const char*>(flat.const_data_ptr());
  auto* end = static_cast<char*>(to.data_ptr());
  std::vector<int64_t> sizes;
  for (const int64_t count : counts) {
    int64_t size = count == 0 ? 0 : encode(from, count, type, end);
    if (size >= raw_bytes(count, flat)) {
      size = raw_bytes(count, flat);
      std::memcpy(end, from, static_cast<size_t>(size));
    }
    sizes.push_back(size);
    from += raw_bytes(count, flat);
    end += size;
  }
  return sizes;
}

void decode_messages(const at::Tensor& to, const at::Tensor& coded, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& counts) {
  const ElementType type = element_type_of(to);
  TORCH_CHECK(sizes.size() == counts.size(), "ddp_hooks: expected ", counts.size(), " sizes, received ", sizes.size());
  check_range(coded, 0, std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  check_range(to, 0, std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  const auto* from = static_cast<const char*>(coded.const_data_ptr());
  auto* end = static_cast<char*>(to.data_ptr());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t raw = raw_bytes(counts[i], to);
    if (sizes[i] == raw) {
      std::memcpy(end, from, static_cast<size_t>(raw));
    } else {
      try {
        decode(from, sizes[i], counts[i], type, end, false);
      } catch (c10::Error& error) {
        error.add_context(c10::str("in FSDP2's message from rank ", i, " of the process group"));
        throw;
      }
    }
    from += sizes[i];
    end += raw;
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
      .def("pack", &pack_parts, py::arg("to"), py::arg("flat"), py::arg("masks"), py::arg("own"), unlocked)
      .def("sum", &sum_parts, py::arg("to"), py::arg("flat"), py::arg("received"), py::arg("masks"), py::arg("own"),
           py::arg("order"), unlocked)
      .def("unpack", &unpack_parts, py::arg("flat"), py::arg("received"), py::arg("masks"), py::arg("own"), unlocked);
  m.def("most_coded_bytes",
        [](int64_t count, const at::Tensor& like) { return most_coded_bytes(count, element_type_of(like)); });
  m.def("encode_messages", &encode_messages, py::arg("to"), py::arg("flat"), py::arg("counts"), unlocked);
  m.def("decode_messages", &decode_messages, py::arg("to"), py::arg("coded"), py::arg("sizes"), py::arg("counts"),
        unlocked);
}

}  // namespace ddp_hooks
