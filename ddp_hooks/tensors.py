"""Names the tensors that a synchronisation is about, and refuses those it cannot handle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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


# What the functions of this package take: a module, a DDP module, a tensor, or any iterable of tensors. (Within the
# package, of named tensors too.)
TensorSource = torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | Iterable[NamedTensor]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a DDP module, so that names are the same with and without the wrapper."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def ignored_by_ddp(module: torch.nn.Module) -> frozenset[str]:
    """Return the names that the user told DDP to leave alone: they are meant to differ between ranks."""
    return frozenset(module.parameters_to_ignore) if isinstance(module, DistributedDataParallel) else frozenset()


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

    Raises:
        TypeError: ``source`` is neither a module nor made of tensors.
    """
    if isinstance(source, torch.nn.Module):
        return named_parameters(source) + (named_buffers(source) if buffers else [])
    if isinstance(source, torch.Tensor):
        return [NamedTensor("tensor", "0", source.detach())]
    if not isinstance(source, Iterable):
        raise TypeError(
            f"expected a module, a DDP module or tensors, received {type(source).__name__}; "
            "pass the model itself or model.parameters()"
        )
    named = []
    for position, tensor in enumerate(source):
        if isinstance(tensor, NamedTensor):
            named.append(tensor)
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"expected every element to be a tensor, received {type(tensor).__name__} at position {position}; "
                "of a dictionary, pass its .values()"
            )
        named.append(NamedTensor("tensor", str(position), tensor.detach()))
    return named


def _unsuitable(tensor: torch.Tensor) -> str | None:
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if wraps_others:
        return f"is a {type(tensor).__name__}, which holds other tensors: pass those, for instance .to_local()"
    if tensor.layout != torch.strided:
        return f"has layout {tensor.layout}: make it dense with .to_dense()"
    if tensor.is_quantized:
        return "is quantized: pass its .int_repr()"
    if tensor.is_meta:
        return "is on the meta device and holds no elements: materialise it first"
    return None


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def check_readable(tensors: Iterable[NamedTensor]) -> None:
    """Refuse tensors whose elements cannot be read as one block.

    Raises:
        ValueError: a tensor is a wrapper of other tensors, sparse, quantized or on the meta device.
    """
    for named in tensors:
        reason = _unsuitable(named.tensor)
        if reason is not None:
            raise ValueError(f"expected strided tensors with elements, but {named.label} {reason}")


def check_writable(tensors: Iterable[NamedTensor]) -> None:
    """Refuse tensors that cannot be read, or in which several elements are one place in memory.

    Raises:
        ValueError: as :func:`check_readable`, or a tensor is expanded.
    """
    tensors = list(tensors)
    check_readable(tensors)
    for named in tensors:
        if _overlaps_itself(named.tensor):
            raise ValueError(
                f"expected tensors that can be written to, but {named.label} is expanded "
                f"(strides {list(named.tensor.stride())}): make it .contiguous()"
            )


def check(tensors: list[NamedTensor], checker: Callable[[Iterable[NamedTensor]], None]) -> list[NamedTensor]:
    """Return ``tensors`` if ``checker`` lets them pass."""
    checker(tensors)
    return tensors
