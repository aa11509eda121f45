"""Names the tensors of a synchronisation, and refuses tensors that it cannot handle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..serving.modules import uncompiled
from ..wording import short

_INTEGERS = frozenset(
    {torch.bool, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor with its name, which is the same on every rank.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"`` or ``"tensor"``.
        name: its name in the module, or its position in a list.
        tensor: the tensor, detached; writing to it writes to the original.
    """

    kind: str
    name: str
    tensor: torch.Tensor

    @property
    def label(self) -> str:
        """Its name in messages, which is unique among the tensors of a call."""
        return f"{self.kind} {self.name!r}"


def describe_layout(tensors: Iterable[NamedTensor]) -> dict[str, str]:
    """Describe the properties of each tensor that must be equal on all ranks before elements are exchanged."""
    tensors = list(tensors)
    # Ranks may number devices differently, but must agree on which tensors share a device.
    devices = {device: i for i, device in enumerate(dict.fromkeys(named.tensor.device for named in tensors))}
    layout = {}
    for named in tensors:
        tensor = named.tensor
        place = tensor.device.type if len(devices) == 1 else f"{tensor.device.type} (device {devices[tensor.device]})"
        layout[named.label] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {place}"
    return layout


def on_their_device(tensors: Iterable[NamedTensor]) -> AbstractContextManager[object]:
    """Make the device of some tensors the current one, on which a group without the CPU exchanges records."""
    for named in tensors:
        if named.tensor.device.type != "cpu":
            return torch.accelerator.device_index(named.tensor.device.index)
    return nullcontext()


# A module, a DDP module, a tensor, or any iterable of tensors.
TensorSource = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DDP and ``torch.compile`` wrappers, so that names do not depend on them."""
    inner = uncompiled(module)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def ignored_by_ddp(module: torch.nn.Module) -> frozenset[str]:
    """Return the names that the user told DDP to ignore, which may differ between ranks."""
    inner = uncompiled(module)
    return frozenset(inner.parameters_to_ignore) if isinstance(inner, DistributedDataParallel) else frozenset()


def named_parameters(module: torch.nn.Module) -> list[NamedTensor]:
    """Return the module's parameters, each once, without those that DDP ignores."""
    return _named("parameter", module, unwrap(module).named_parameters())


def named_buffers(module: torch.nn.Module) -> list[NamedTensor]:
    """Return the module's buffers, each once, without those that DDP ignores. Non-persistent ones are included."""
    return _named("buffer", module, unwrap(module).named_buffers())


def _named(kind: str, module: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[NamedTensor]:
    ignored = ignored_by_ddp(module)
    return [NamedTensor(kind, name, tensor.detach()) for name, tensor in tensors if name not in ignored]


def named_tensors(source: TensorSource, *, buffers: bool = True) -> list[NamedTensor]:
    """Return the tensors of a module (optionally with its buffers), or of an iterable, by position.

    A module may have no tensors. An iterable without tensors is refused, because it is nearly always a generator that
    was read before.

    Raises:
        TypeError: ``source`` is neither a module nor made of tensors.
        ValueError: ``source`` is an empty iterable.
    """
    if isinstance(source, torch.nn.Module):
        return named_parameters(source) + (named_buffers(source) if buffers else [])
    return [NamedTensor("tensor", str(i), tensor.detach()) for i, tensor in enumerate(read_tensors(source))]


def read_tensors(source: TensorSource) -> list[torch.Tensor]:
    """Return the tensors of a source that is not a module, in order.

    Raises:
        TypeError, ValueError: as for :func:`named_tensors`.
    """
    if isinstance(source, torch.Tensor):
        return [source]
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes, Mapping)):
        of_a_dictionary = "; for a dictionary, pass its .values()" if isinstance(source, Mapping) else ""
        raise TypeError(
            f"expected a module, a DDP module or tensors, received {type(source).__name__} ({short(source)}); "
            f"pass the model itself or model.parameters(){of_a_dictionary}"
        )
    tensors: list[torch.Tensor] = []
    for position, tensor in enumerate(source):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"expected every element to be a tensor, received {type(tensor).__name__} at position {position} "
                f"({short(tensor)}); pass the model itself or model.parameters(); for a dictionary, its .values()"
            )
        tensors.append(tensor)
    check_not_empty(tensors, source)
    return tensors


def check_not_empty(tensors: Sequence[torch.Tensor], source: object) -> None:
    """Raise if an iterable has no tensor.

    Raises:
        ValueError: there is none; the message describes ``source``.
    """
    if tensors:
        return
    used_up = ", which may have been consumed already" if isinstance(source, Iterator) else ""
    raise ValueError(
        f"expected at least one tensor, received an empty {type(source).__name__}{used_up}; "
        "pass the model itself, or a fresh model.parameters()"
    )


def _unsuitable(tensor: torch.Tensor) -> str | None:
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if wraps_others:
        return f"is a {type(tensor).__name__}, which holds other tensors: pass those, for example .to_local()"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}: make it dense with .to_dense()"
    if tensor.is_quantized:
        return "is quantized: pass its .int_repr()"
    if tensor.is_meta:
        return "is on the meta device and holds no elements: materialise it first"
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":
        return f"is a {type(tensor).__name__}, which holds no elements: pass a tensor that has some"
    needed_bytes = _needed_bytes(tensor)
    if storage.nbytes() < needed_bytes:
        # Kernels take an address and a shape, and would read past the storage.
        return f"needs {needed_bytes} bytes, but its storage has {storage.nbytes()}: restore its elements first"
    return None


def is_convertible(dtype: torch.dtype) -> bool:
    """Say whether torch can convert numbers of the dtype, which it cannot if they are smaller than a byte."""
    if dtype.is_floating_point:
        return dtype != torch.float4_e2m1fn_x2
    return dtype.is_complex or dtype in _INTEGERS


def _needed_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes of its storage that a strided tensor spans."""
    elements = tensor.numel()
    if elements == 0:
        return 0
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + elements) * tensor.element_size()


def _unwritable(tensor: torch.Tensor) -> str | None:
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return f"is expanded (strides {list(tensor.stride())}): make it .contiguous()"
    # Their memory does not hold the values that they show, and torch's multi-tensor copies refuse to write to them.
    if tensor.is_conj():
        return "is a lazy conjugate: make it .resolve_conj()"
    if tensor.is_neg():
        return "is lazily negated: make it .resolve_neg()"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference_mode() and can be written only there: replace it with a .clone()"
    return None


def check_readable(tensors: Iterable[NamedTensor]) -> None:
    """Raise for tensors whose elements cannot be read as one block.

    Raises:
        ValueError: a tensor is a wrapper of other tensors, sparse, quantized, on the meta device, or its storage is too
            small for it.
    """
    for named in tensors:
        reason = _unsuitable(named.tensor)
        if reason is not None:
            raise ValueError(f"expected strided tensors with elements, but {named.label} {reason}")


def check_writable(tensors: Iterable[NamedTensor]) -> None:
    """Raise for tensors that cannot be read, or whose elements do not have distinct memory with their values.

    Raises:
        ValueError: as for :func:`check_readable`, or a tensor is expanded, lazily conjugated or lazily negated.
    """
    tensors = list(tensors)
    check_readable(tensors)
    for named in tensors:
        reason = _unwritable(named.tensor)
        if reason is not None:
            raise ValueError(f"expected tensors that can be written to, but {named.label} {reason}")
