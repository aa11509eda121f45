#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/rooms.h"
#include "layout/bucket_layout.h"
#include "layout/units.h"
#include "layout/usage_mask.h"

namespace py = pybind11;

namespace ddp_hooks {
namespace {

size_t checked(const UsageMask& mask, size_t index) {
  if (index >= mask.size()) {
    throw py::index_error("usage mask of " + std::to_string(mask.size()) + " parameters: received index " +
                          std::to_string(index));
  }
  return index;
}

}  // namespace

void bind_layout(py::module_& m) {
  py::class_<UsageMask>(m, "UsageMask")
      .def(py::init<size_t, bool>(), py::arg("size"), py::arg("used") = false)
      .def(py::init<size_t, std::vector<uint64_t>>(), py::arg("size"), py::arg("words"))
      .def("__len__", &UsageMask::size)
      .def("test", [](const UsageMask& mask, size_t index) { return mask.test(checked(mask, index)); })
      .def("set", [](UsageMask& mask, size_t index) { mask.set(checked(mask, index)); })
      .def("clear", [](UsageMask& mask, size_t index) { mask.clear(checked(mask, index)); })
      .def("merge", &UsageMask::merge)
      .def("count", &UsageMask::count)
      .def("words", [](const UsageMask& mask) { return mask.words(); })
      .def("__eq__", [](const UsageMask& a, const UsageMask& b) { return a == b; })
      .def("indices", [](const UsageMask& mask) {
        std::vector<size_t> used;
        for (size_t i = 0; i < mask.size(); ++i) {
          if (mask.test(i)) used.push_back(i);
        }
        return used;
      });

  py::class_<ParameterSlice>(m, "ParameterSlice")
      .def(py::init([](uint32_t parameter, int64_t offset, int64_t length, int64_t row_length) {
             return ParameterSlice{parameter, offset, length, row_length};
           }),
           py::arg("parameter"), py::arg("offset"), py::arg("length"), py::arg("row_length") = 0)
      .def_readonly("parameter", &ParameterSlice::parameter)
      .def_readonly("offset", &ParameterSlice::offset)
      .def_readonly("length", &ParameterSlice::length)
      .def_readonly("row_length", &ParameterSlice::row_length);

  py::class_<UnitSettings>(m, "UnitSettings")
      .def(py::init([](int64_t min_unit_bytes, int64_t max_unit_bytes, int64_t min_divided_bytes) {
             return UnitSettings{min_unit_bytes, max_unit_bytes, min_divided_bytes};
           }),
           py::kw_only(), py::arg("min_unit_bytes"), py::arg("max_unit_bytes"),
           py::arg("min_divided_bytes") = UnitSettings().min_divided_bytes)
      .def_readonly("min_divided_bytes", &UnitSettings::min_divided_bytes);
  py::class_<Units>(m, "Units")
      .def(py::init([](int64_t length, int64_t slice_length, size_t first_bit) {
             return Units{length, slice_length, first_bit};
           }),
           py::arg("length"), py::arg("slice_length"), py::arg("first_bit") = 0)
      .def_readonly("length", &Units::length)
      .def_readonly("slice_length", &Units::slice_length)
      .def("__len__", &Units::count)
      .def("begin", &Units::begin)
      .def("end", &Units::end);
  m.def("units_of", &units_of);

  py::class_<BucketLayout>(m, "BucketLayout")
      .def(py::init([](std::vector<ParameterSlice> slices, int64_t element_bytes, uint64_t kind) {
             BucketLayout bucket;
             for (const ParameterSlice& slice : slices) bucket.numel += slice.length;
             bucket.slices = std::move(slices);
             bucket.element_bytes = element_bytes;
             bucket.kind = kind;
             return bucket;
           }),
           py::arg("slices"), py::arg("element_bytes"), py::arg("kind") = 0)
      .def_readonly("slices", &BucketLayout::slices)
      .def_readonly("numel", &BucketLayout::numel)
      .def_readonly("element_bytes", &BucketLayout::element_bytes)
      .def_readonly("sparse", &BucketLayout::sparse);

  py::class_<LayoutOfBuckets>(m, "LayoutOfBuckets")
      .def(py::init([](std::vector<BucketLayout> buckets, size_t parameter_count) {
        return LayoutOfBuckets{std::move(buckets), parameter_count};
      }))
      .def_readonly("buckets", &LayoutOfBuckets::buckets)
      .def_readonly("parameter_count", &LayoutOfBuckets::parameter_count)
      .def("hash", &LayoutOfBuckets::hash)
      .def("buckets_within", &LayoutOfBuckets::buckets_within);
}

}  // namespace ddp_hooks
