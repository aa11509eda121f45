// The operators of the pretended device: torch's for the CPU, put on the current stream.
//
// What an operator returns is found by asking the same of meta tensors, so that the host goes on at once. Operators
// that cannot be asked so, and those that return numbers, wait for the stream, as a few do on a GPU.
//
// Tensors of the device are read and written as CPU tensors at the same addresses, which hold nothing alive: what is
// given back too early is poison when its turn comes.

#include "operators.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "costs.h"
#include "counts.h"
#include "memory.h"
#include "queues.h"

namespace pretend {

at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_privateuseone()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  // An empty tensor may have no memory.
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  at::Tensor alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void put_on_current_stream(const std::string& name, const std::vector<Use>& uses, std::function<void()> act) {
  ++Counts::get().launches;
  const auto run = [act = std::move(act)] {
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
    act();
    return true;
  };
  put_work(current_stream(), name, uses, run, Costs::get().of_kernel(uses));
}

void synchronize_current_stream() {
  ++Counts::get().host_waits;
  Queues::get().synchronize(Queues::get().ticket(current_stream()));
}

namespace {

using torch::jit::Stack;

constexpr c10::DeviceType kDevice = c10::kPrivateUse1;

at::Tensor empty_like_on_device(const at::Tensor& meta) {
  return at::empty_strided(meta.sizes(), meta.strides(), at::TensorOptions().dtype(meta.dtype()).device(kDevice));
}

// Replaces each tensor, in lists too.
template <typename Replace>
c10::IValue replaced(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& one : value.toListRef()) {
      list.push_back(one.isNone() ? std::optional<at::Tensor>() : replace(one.toTensor()));
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) return replace.device();
  return value;
}

struct ToMeta {
  at::Tensor operator()(const at::Tensor& tensor) const {
    if (!tensor.defined() || !tensor.device().is_privateuseone()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(),
                             at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta));
  }
  static c10::Device device() { return at::kMeta; }
};

// What the host may change meanwhile is copied, as a launch copies its arguments.
struct ToCpu {
  at::Tensor operator()(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    return tensor.device().is_privateuseone() ? as_cpu(tensor) : tensor.clone();
  }
  static c10::Device device() { return at::kCPU; }
};

void add_uses(const c10::IValue& value, bool writes, std::vector<Use>& uses) {
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.device().is_privateuseone()) uses.push_back(use_of(tensor, writes));
  };
  if (value.isTensor()) add(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor);
  }
  if (value.isOptionalTensorList()) {
    for (const c10::IValue& one : value.toListRef()) {
      if (one.isTensor()) add(one.toTensor());
    }
  }
}

std::vector<Use> uses_of_arguments(const c10::OperatorHandle& op, const Stack& stack) {
  std::vector<Use> uses;
  const auto& all = op.schema().arguments();
  for (size_t i = 0; i < all.size(); ++i) {
    const auto* const info = all[i].alias_info();
    add_uses(stack[stack.size() - all.size() + i], info != nullptr && info->isWrite(), uses);
  }
  return uses;
}

Stack arguments(const c10::OperatorHandle& op, const Stack& stack, const auto& replace) {
  Stack some;
  const size_t count = op.schema().arguments().size();
  for (size_t i = stack.size() - count; i < stack.size(); ++i) some.push_back(replaced(stack[i], replace));
  return some;
}

bool returns_tensors(const c10::OperatorHandle& op) {
  for (const auto& one : op.schema().returns()) {
    if (one.type()->kind() != c10::TypeKind::TensorType && one.type()->str() != "Tensor[]") return false;
  }
  return true;
}

// The argument that a return is, or -1: `Tensor(a!)`.
int written_argument(const c10::OperatorHandle& op, size_t number) {
  const auto* const info = op.schema().returns()[number].alias_info();
  if (info == nullptr || !info->isWrite()) return -1;
  const auto& all = op.schema().arguments();
  for (size_t i = 0; i < all.size(); ++i) {
    const auto* const other = all[i].alias_info();
    if (other != nullptr && other->isWrite() && other->beforeSets() == info->beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

// What the CPU does not make, such as what it needs no statistics of, meta tensors may have a shape for.
void copy_result(const at::Tensor& from, const at::Tensor& to) {
  if (to.defined() && from.defined() && from.numel() > 0) to.copy_(from);
}

void copy_results(const std::vector<c10::IValue>& from, const std::vector<c10::IValue>& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    if (to[i].isTensor()) {
      copy_result(from[i].toTensor(), to[i].toTensor());
    } else if (to[i].isTensorList()) {
      const auto a = from[i].toTensorVector(), b = to[i].toTensorVector();
      for (size_t k = 0; k < b.size(); ++k) copy_result(a[k], b[k]);
    }
  }
}

// False where only data tells the shapes, or no meta kernel is there.
bool ask_meta(const c10::OperatorHandle& op, const Stack& stack, Stack& results) {
  try {
    const c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
    results = arguments(op, stack, ToMeta());
    op.callBoxed(&results);
    return true;
  } catch (const std::exception&) {  // of Python's own meta kernels, too
    return false;
  }
}

// Of a layer norm: 32 bits by its meta kernel and on other devices, but the weight's type on the CPU.
void give_statistics_type_of_weight(Stack& arguments_of_backward) {
  const auto weight = arguments_of_backward[5].toOptional<at::Tensor>();
  const bool has_weight = weight && weight->defined();
  const at::ScalarType type = (has_weight ? *weight : arguments_of_backward[1].toTensor()).scalar_type();
  for (const size_t i : {3, 4}) arguments_of_backward[i] = arguments_of_backward[i].toTensor().to(type);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const size_t first = stack->size() - count;
  Stack shapes;
  const bool is_asynchronous = returns_tensors(op) && ask_meta(op, *stack, shapes);
  auto inputs = std::make_shared<Stack>(arguments(op, *stack, ToCpu()));
  std::vector<Use> uses = uses_of_arguments(op, *stack);
  std::vector<c10::IValue> outputs;  // of the device
  if (!is_asynchronous) {
    synchronize_current_stream();
    {
      const c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
      op.callBoxed(inputs.get());
    }
    shapes = *inputs;
  }
  std::vector<c10::IValue> aliases;
  for (size_t i = 0; i < op.schema().returns().size(); ++i) {
    const int argument = written_argument(op, i);
    if (argument >= 0) {
      outputs.push_back((*stack)[first + static_cast<size_t>(argument)]);
      if (outputs.back().isTensor() && shapes[i].isTensor() &&
          outputs.back().toTensor().sizes() != shapes[i].toTensor().sizes()) {
        outputs.back().toTensor().resize_(shapes[i].toTensor().sizes());
        (*inputs)[static_cast<size_t>(argument)] = as_cpu(outputs.back().toTensor());
      }
      aliases.emplace_back();
      continue;
    }
    TORCH_CHECK(op.schema().returns()[i].alias_info() == nullptr, "pretend: ", op.schema(), " returns a view");
    struct ToDevice {
      at::Tensor operator()(const at::Tensor& shape) const {
        return shape.defined() ? empty_like_on_device(shape) : shape;
      }
      static c10::Device device() { return {kDevice, 0}; }
    };
    outputs.push_back(replaced(shapes[i], ToDevice()));
    add_uses(outputs.back(), true, uses);
    aliases.push_back(replaced(outputs.back(), ToCpu()));
  }
  const auto act = [op, inputs, aliases, is_asynchronous] {
    if (op.operator_name().name == "aten::native_layer_norm_backward") give_statistics_type_of_weight(*inputs);
    if (is_asynchronous) op.callBoxed(inputs.get());
    copy_results(*inputs, aliases);
  };
  put_on_current_stream(op.operator_name().name, uses, act);
  torch::jit::drop(*stack, count);
  for (c10::IValue& output : outputs) stack->push_back(std::move(output));
}

// --- memory and views

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/,
                 std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), keys,
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                         std::optional<bool> /*pin*/) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), keys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> /*format*/) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t bytes = static_cast<size_t>(self.storage_offset() + self.numel()) * self.element_size();
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size),
                                                    stride.empty() && !size.empty()
                                                        ? at::detail::defaultStrides(C10_AS_INTARRAYREF_SLOW(size))
                                                        : C10_AS_INTARRAYREF_SLOW(stride).vec(),
                                                    offset.expect_int());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {c10::SymInt(numel)}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_on_stream(self.storage().data_ptr(), stream.id());
}

// --- copies

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (source.device().is_privateuseone() && target.device().is_privateuseone()) {
    put_on_current_stream("a copy", {use_of(source, false), use_of(target, true)},
                          [from = as_cpu(source), to = as_cpu(target)] { to.copy_(from); });
    return target;
  }
  if (target.device().is_privateuseone()) {
    // Memory that may be paged is staged; pinned memory is read when the copy's turn comes.
    const bool reads_later = non_blocking && is_pinned(source.const_data_ptr());
    if (reads_later) note_use_of_pinned(source.const_data_ptr(), current_stream());
    at::Tensor from = source.detach();
    if (!reads_later) from = from.clone();
    put_on_current_stream("a copy", {use_of(from, false), use_of(target, true)},
                          [from, to = as_cpu(target)] { to.copy_(from); });
    return target;
  }
  if (non_blocking && is_pinned(target.const_data_ptr())) {
    // Who reads it before its turn reads no number.
    if (target.is_non_overlapping_and_dense()) {
      std::memset(target.mutable_data_ptr(), 0xff, static_cast<size_t>(target.numel()) * target.element_size());
    }
    note_use_of_pinned(target.const_data_ptr(), current_stream());
    put_on_current_stream("a copy", {use_of(source, false), use_of(target, true)},
                          [from = as_cpu(source), to = target.detach()] { to.copy_(from); });
    return target;
  }
  synchronize_current_stream();
  target.detach().copy_(as_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize_current_stream();
  return as_cpu(self).item();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A copy resolves lazy conjugates and negatives itself: torch's fallback would make a copy to do it, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  // Otherwise torch puts it together from others, which round differently than the CPU's own.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace pretend

// What autocast casts on other devices, it casts here.
namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define PRETEND_IN_16_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define PRETEND_IN_32_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(PRETEND_IN_16_BITS)
  AT_FORALL_FP32(PRETEND_IN_32_BITS)
}

}  // namespace at::autocast
