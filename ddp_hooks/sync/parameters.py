"""Synchronises parameters and buffers across ranks without a backward pass.

Each function is collective: every rank of the process group calls it with the same arguments, and with tensors of the
same names, dtypes and shapes. Ranks check this before anything is exchanged (serving/agreement.py), so if a rank
differs, every rank raises and nothing changes. Tensors then travel in a few large messages (messages.py).

If a connection breaks, each tensor has either its old or its new value, never a mixture. Call the function again, once
the process group works, to synchronise all of them. On a device's stream, as with NCCL, the host does not wait for
messages, so a tensor may then hold anything, and NCCL ends the process.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, overload

import torch
import torch.distributed as dist

from ..serving.agreement import agree, refuse
from ..serving.groups import resolve_group
from ..wording import check_flag, did_you_mean, short
from . import sharing
from .messages import BroadcastMessage, MaximumMessage, MeanMessage, Message, run, split
from .tensors import (
    NamedTensor,
    TensorSource,
    check_writable,
    describe_layout,
    is_convertible,
    named_tensors,
    on_their_device,
)
from .work import SyncReport, SyncWork, carry_out, report_on

BufferTreatment = Literal["average", "broadcast", "ignore"]
_BUFFER_TREATMENTS = ("average", "broadcast", "ignore")


@overload
def broadcast_parameters(
    module: TensorSource,
    src: int = ...,
    *,
    buffers: bool = ...,
    process_group: dist.ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
) -> SyncReport: ...
@overload
def broadcast_parameters(
    module: TensorSource,
    src: int = ...,
    *,
    buffers: bool = ...,
    process_group: dist.ProcessGroup | None = ...,
    async_op: Literal[True],
) -> SyncWork: ...


@torch.no_grad()
def broadcast_parameters(
    module: TensorSource,
    src: int = 0,
    *,
    buffers: bool = True,
    process_group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> SyncReport | SyncWork:
    """Broadcast the parameters and buffers of one rank to all ranks, bit for bit. Collective.

    Parameters and buffers that DDP was told to ignore are left alone.

    Args:
        module: a module, a DDP module, the result of ``torch.compile`` for one of these, a tensor, or any iterable of
            tensors such as ``model.parameters()``. Tensors may have any dtype, shape, strides and device. A module may
            have no tensors; an iterable must have one, because an empty one is probably a generator that was read
            before.
        src: the rank within ``process_group`` whose values are broadcast.
        buffers: whether to broadcast the module's buffers as well.
        process_group: the ranks that take part; the default group if ``None``.
        async_op: return at once, and write the tensors when the returned work is waited for. This needs memory for a
            second copy of all tensors.

    Returns:
        A report, or with ``async_op`` the work to wait for.

    Raises:
        TypeError: an argument is of the wrong type, or ``module`` contains something other than tensors.
        ValueError: ``src`` is not in the group, ``module`` is an empty iterable, or a tensor cannot be written (sparse,
            quantized, expanded, lazily conjugated or negated, uninitialized, without its memory).
        RanksDisagreeError: on every rank, before anything is sent, if arguments, names, dtypes or shapes differ between
            ranks, or if another rank raised one of the errors above. The message names the differences.
        RanksAbsentError: some rank did not call it within the group's timeout.
    """

    def find() -> list[NamedTensor]:
        check_flag("buffers", buffers)
        check_flag("async_op", async_op)
        return named_tensors(module, buffers=buffers)

    arguments = {"buffers": buffers, "async_op": async_op}
    return broadcast_named("broadcast_parameters", find, src, resolve_group(process_group), arguments, async_op)


def broadcast_named(
    function: str,
    find: Callable[[], list[NamedTensor]],
    src: int,
    group: dist.ProcessGroup,
    arguments: Mapping[str, object],
    async_op: bool = False,
) -> SyncReport | SyncWork:
    """Do what :func:`broadcast_parameters` does, under the name of the function that the user called.

    Args:
        function: the function that the user called.
        find: returns the tensors. Its exceptions are raised, and told to the other ranks.
        src: the rank within ``group`` whose values are broadcast.
        group: the ranks that take part.
        arguments: other arguments that must be equal on all ranks, by name.
        async_op: as for :func:`broadcast_parameters`.
    """
    try:
        tensors = find()
        src = _check_src(src, group)
        check_writable(tensors)
        private, shared = sharing.partition(tensors, group)
    except Exception as error:  # any error must reach the other ranks, which wait
        refuse(group, function, error)
    with on_their_device(tensors):
        agree(group, function, {"src": src, **arguments}, _layout(tensors, shared))

    messages = _broadcasts(private, src, group)
    for handle, there in shared.items():
        if handle.leader_group is not None:
            messages += _broadcasts(there, handle.host_of(src), handle.leader_group)
    return carry_out(tensors, messages, group if shared else None, async_op)


@overload
def average_parameters(
    module: TensorSource,
    *,
    weights: float | Sequence[float] | None = ...,
    buffers: BufferTreatment = ...,
    process_group: dist.ProcessGroup | None = ...,
    async_op: Literal[False] = ...,
) -> SyncReport: ...
@overload
def average_parameters(
    module: TensorSource,
    *,
    weights: float | Sequence[float] | None = ...,
    buffers: BufferTreatment = ...,
    process_group: dist.ProcessGroup | None = ...,
    async_op: Literal[True],
) -> SyncWork: ...


@torch.no_grad()
def average_parameters(
    module: TensorSource,
    *,
    weights: float | Sequence[float] | None = None,
    buffers: BufferTreatment = "average",
    process_group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> SyncReport | SyncWork:
    """Average parameters and buffers over all ranks, which end with the same bits. Collective.

    Half-precision and 8-bit floating-point tensors are summed in float32 and rounded once. Integers and bools take the
    maximum over the ranks instead of a mean, so that equal tables stay unchanged, and counters such as BatchNorm's
    ``num_batches_tracked`` never run backwards.

    Args:
        module: as for :func:`broadcast_parameters`.
        weights: the weight of each rank, for example its number of samples: either this rank's own weight, or a list of
            all weights, the same on all ranks. They must not be negative, nor all zero. Values of a rank with weight
            zero have no influence, even if they are NaN. ``None`` for equal weights.
        buffers: ``"average"`` the module's buffers like its parameters, ``"broadcast"`` those of rank 0, or
            ``"ignore"`` them.
        process_group: the ranks that take part; the default group if ``None``.
        async_op: as for :func:`broadcast_parameters`.

    Returns:
        A report, or with ``async_op`` the work to wait for.

    Raises:
        TypeError: an argument is of the wrong type, or ``module`` contains something other than tensors.
        ValueError: an argument is out of range, ``module`` is an empty iterable, or a tensor cannot be written or
            averaged (``uint64``, bits, elements smaller than a byte).
        RanksDisagreeError, RanksAbsentError: as for :func:`broadcast_parameters`.
    """

    def find() -> list[NamedTensor]:
        if not isinstance(buffers, str) or buffers not in _BUFFER_TREATMENTS:
            raise ValueError(
                f"expected buffers to be one of {', '.join(_BUFFER_TREATMENTS)}, received {short(buffers)}"
                f"{did_you_mean(buffers, _BUFFER_TREATMENTS)}"
            )
        check_flag("async_op", async_op)
        return named_tensors(module, buffers=buffers != "ignore")

    group = resolve_group(process_group)
    return average_named("average_parameters", find, group, weights, buffers, {"async_op": async_op}, async_op)


def average_named(
    function: str,
    find: Callable[[], list[NamedTensor]],
    group: dist.ProcessGroup,
    weights: float | Sequence[float] | None = None,
    buffers: BufferTreatment = "average",
    arguments: Mapping[str, object] = MappingProxyType({}),
    async_op: bool = False,
) -> SyncReport | SyncWork:
    """Do what :func:`average_parameters` does, under the name of the function that the user called.

    Args:
        function: the function that the user called.
        find: returns the tensors. Its exceptions are raised, and told to the other ranks.
        group: the ranks that take part.
        weights: as for :func:`average_parameters`.
        buffers: as for :func:`average_parameters`.
        arguments: other arguments that must be equal on all ranks, by name.
        async_op: as for :func:`average_parameters`.
    """
    try:
        tensors = find()
        weight = _own_weight(weights, group)
        check_writable(tensors)
        averaged = [named for named in tensors if named.kind != "buffer" or buffers == "average"]
        _check_averageable(averaged)
        private, shared = sharing.partition(averaged, group)
    except Exception as error:  # any error must reach the other ranks, which wait
        refuse(group, function, error)
    alike = {
        # Numbers may differ between ranks, lists may not.
        "weights": _describe_weights(weights),
        "buffers": buffers,
        **arguments,
    }
    bits = struct.unpack("<q", struct.pack("<d", weight))
    with on_their_device(tensors):
        words = agree(group, function, alike, _layout(tensors, shared), words=bits)
    rank_weights = [struct.unpack("<d", struct.pack("<q", word[0]))[0] for word in words]
    if not 0 < sum(rank_weights) < math.inf:
        # All ranks know of this error, and raise it together.
        raise ValueError(
            f"expected weights with a positive, finite sum, received {short(rank_weights)} by rank; give at least one "
            "rank a weight above 0"
        )

    messages = _means(private, rank_weights, group)
    for handle, there in shared.items():
        if handle.leader_group is not None:
            host_weights = [sum(rank_weights[rank] for rank in ranks) for ranks in handle.hosts]
            messages += _means(there, host_weights, handle.leader_group)
    if buffers == "broadcast":
        messages += _broadcasts([named for named in tensors if named.kind == "buffer"], 0, group)
    return carry_out(tensors, messages, group if shared else None, async_op)


def _layout(
    tensors: Sequence[NamedTensor], shared: dict[sharing.SharedParameters, list[NamedTensor]]
) -> dict[str, str]:
    layout = describe_layout(tensors)
    for there in shared.values():
        for named in there:
            layout[named.label] += " (shared)"
    return layout


def _broadcasts(tensors: Sequence[NamedTensor], src: int, group: dist.ProcessGroup) -> list[Message]:
    if dist.get_world_size(group) == 1:
        return []
    return [BroadcastMessage(part, src, group) for part in split([named.tensor for named in tensors])]


def _means(tensors: Sequence[NamedTensor], weights: Sequence[float], group: dist.ProcessGroup) -> list[Message]:
    """Build the messages that average tensors over a group, with a weight for each rank."""
    if dist.get_world_size(group) == 1:
        return []
    alike = all(weight == weights[0] for weight in weights)
    factor = None if alike else weights[dist.get_rank(group)] / sum(weights)
    messages: list[Message] = []
    for part in split([_as_real(named.tensor) for named in tensors], _wire_dtype):
        wire_dtype = _wire_dtype(part[0].dtype)
        if wire_dtype.is_floating_point:
            messages.append(MeanMessage(part, wire_dtype, factor, group))
        else:
            messages.append(MaximumMessage(part, group))
    return messages


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which real tensors of ``dtype`` are summed, or compared if they are integers."""
    if not dtype.is_floating_point:
        return torch.int64
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _check_averageable(tensors: Sequence[NamedTensor]) -> None:
    for named in tensors:
        dtype = named.tensor.dtype
        if not is_convertible(dtype) or dtype == torch.uint64:  # the dtype is too wide
            raise ValueError(
                f"expected dtypes that fit int64 or float64, but {named.label} is "
                f"{str(dtype).removeprefix('torch.')}; broadcast it instead"
            )


def _own_weight(weights: float | Sequence[float] | None, group: dist.ProcessGroup) -> float:
    if weights is None:
        return 1.0
    if isinstance(weights, Sequence) and not isinstance(weights, (str, bytes)):
        if len(weights) != dist.get_world_size(group):
            raise ValueError(
                f"expected this rank's weight, or one weight for each of the {dist.get_world_size(group)} ranks, "
                f"received {len(weights)}: {short(weights)}"
            )
        # Check all weights, so that every rank refuses a list that any rank would refuse.
        return [_check_weight(weight) for weight in weights][dist.get_rank(group)]
    return _check_weight(weights)


def _describe_weights(weights: float | Sequence[float] | None) -> object:
    if isinstance(weights, Sequence):
        return [float(weight) for weight in weights]
    return None if weights is None else "one number per rank"


def _check_weight(weight: object) -> float:
    try:
        if isinstance(weight, (bool, str, bytes)):
            raise TypeError
        number = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(
            f"expected weights to be a number, a list with one number per rank, or None, received {short(weight)}"
        ) from None
    if not 0 <= number < math.inf:
        raise ValueError(f"expected a finite weight that is not negative, received {number}")
    return number


def _check_src(src: object, group: dist.ProcessGroup) -> int:
    ranks = dist.get_world_size(group)
    try:
        if isinstance(src, (bool, torch.Tensor)):
            raise TypeError
        rank = operator.index(src)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"expected src to be a rank of the process group, an int from 0 to {ranks - 1}, received {short(src)}"
        ) from None
    if not 0 <= rank < ranks:
        raise ValueError(
            f"expected src to be a rank of the process group, 0 to {ranks - 1}, received {short(rank)}; "
            "ranks are counted within process_group"
        )
    return rank


def broadcast_tensors(tensors: Sequence[NamedTensor], src: int, group: dist.ProcessGroup) -> SyncReport:
    """Broadcast tensors on which the ranks have agreed already."""
    messages = _broadcasts(tensors, src, group)
    run(messages)
    return report_on(tensors, messages)
