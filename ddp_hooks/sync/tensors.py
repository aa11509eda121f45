"""Names the tensors that a synchronisation is about, and refuses those it cannot handle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """A tensor with what it is called on every rank.

    Attributes:
        kind: what it is: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"`` or ``"tensor"``.
        name: its name in the module, or its position in a list.
        tensor: the tensor itself, detached; writing to it writes to the original.
    """

    kind: str
    name: str
    tensor: torch.Tensor

    @property
    def label(self) -> str:
        """What messages call it; unique among the tensors of one call."""
        return f"{self.kind} {self.name!r}"


def describe_layout(tensors: Iterable[NamedTensor]) -> dict[str, str]:
    """Say of each tensor, by label, what has to be alike on every rank before elements are compared or exchanged."""
    tensors = list(tensors)
    # Devices may be numbered differently on every rank; which tensors stand together on one may not.
    devices = {device: i for i, device in enumerate(dict.fromkeys(named.tensor.device for named in tensors))}
    layout = {}
    for named in tensors:
        tensor = named.tensor
        place = tensor.device.type if len(devices) == 1 else f"{tensor.device.type} (device {devices[tensor.device]})"
        layout[named.label] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {place}"
    return layout


# What the functions of this package take: a module, a DDP module, a tensor, or any iterable of tensors.
TensorSource = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a DDP module or a compiled one, so that names are the same without the wrappers."""
    inner = uncompiled(module)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def ignored_by_ddp(module: torch.nn.Module) -> frozenset[str]:
    """Return the names that the user told DDP to leave alone: they are meant to differ between ranks."""
    inner = uncompiled(module)
    return frozenset(inner.parameters_to_ignore) if isinstance(inner, DistributedDataParallel) else frozenset()


def named_parameters(module: torch.nn.Module) -> list[NamedTensor]:
    """Return the module's parameters, each once, without those DDP ignores."""
    ignored = ignored_by_ddp(module)
    return [
        NamedTensor("parameter", name, parameter.detach())
        for name, parameter in unwrap(module).named_parameters()
        if name not in ignored
    ]


def named_buffers(module: torch.nn.Module) -> list[NamedTensor]:
    """Return the module's buffers, persistent or not, each once, without those DDP ignores."""
    ignored = ignored_by_ddp(module)
    return [
        NamedTensor("buffer", name, buffer.detach())
        for name, buffer in unwrap(module).named_buffers()
        if name not in ignored
    ]


def named_tensors(source: TensorSource, *, buffers: bool = True) -> list[NamedTensor]:
    """Return the tensors of a module (with its buffers, if asked), or of an iterable of tensors by position.

    A module without tensors is as it should be, for a model may have parts without any. An iterable without tensors is
    nearly always a generator that something else has read before, so it is refused.

    Raises:
        TypeError: ``source`` is neither a module nor made of tensors.
        ValueError: ``source`` is an iterable without an element.
    """
    if isinstance(source, torch.nn.Module):
        return named_parameters(source) + (named_buffers(source) if buffers else [])
    return [NamedTensor("tensor", str(i), tensor.detach()) for i, tensor in enumerate(read_tensors(source))]


def read_tensors(source: TensorSource) -> list[torch.Tensor]:
    """Return the tensors of what is not a module, in order.

    Raises:
        TypeError, ValueError: as :func:`named_tensors`.
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
    """Refuse an iterable that has no tensor.

    Args:
        tensors: what was found in it.
        source: what the user passed.

    Raises:
        ValueError: there is none; says what ``source`` is.
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
        # Kernels take an address and a shape, and would read what is not there.
        return f"needs {needed_bytes} bytes, but its storage has {storage.nbytes()}: restore its elements first"
    return None


def is_convertible(dtype: torch.dtype) -> bool:
    """Say whether torch can convert the dtype's numbers: it cannot where they have fewer bits than a byte."""
    if dtype.is_floating_point:
        return dtype != torch.float4_e2m1fn_x2
    return dtype.is_complex or dtype in _INTEGERS


def _needed_bytes(tensor: torch.Tensor) -> int:
    """Return how far into its storage a strided tensor reaches."""
    elements = tensor.numel()
    if elements == 0:
        return 0
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + elements) * tensor.element_size()


def _unwritable(tensor: torch.Tensor) -> str | None:
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return f"is expanded (strides {list(tensor.stride())}): make it .contiguous()"
    # Their memory holds something else than they say, and torch's copies of many tensors at once refuse to write it.
    if tensor.is_conj():
        return "is a lazy conjugate: make it .resolve_conj()"
    if tensor.is_neg():
        return "is lazily negated: make it .resolve_neg()"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference_mode() and can be written only there: replace it with a .clone()"
    return None


def check_readable(tensors: Iterable[NamedTensor]) -> None:
    """Refuse tensors whose elements cannot be read as one block.

    Raises:
        ValueError: a tensor is a wrapper of other tensors, sparse, quantized, on the meta device, or its storage is too
            small for it.
    """
    for named in tensors:
        reason = _unsuitable(named.tensor)
        if reason is not None:
            raise ValueError(f"expected strided tensors with elements, but {named.label} {reason}")


def check_writable(tensors: Iterable[NamedTensor]) -> None:
    """Refuse tensors that cannot be read, or whose elements have no place of their own in memory, as they are.

    Raises:
        ValueError: as :func:`check_readable`, or a tensor is expanded, lazily conjugated or lazily negated.
    """
    tensors = list(tensors)
    check_readable(tensors)
    for named in tensors:
        reason = _unwritable(named.tensor)
        if reason is not None:
            raise ValueError(f"expected tensors that can be written to, but {named.label} {reason}")
