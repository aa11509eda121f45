"""Checks whether all ranks hold the same model, bit for bit, and if not, where and by how much they differ.

Every rank hashes its tensors (csrc/kernels/tensor_hash.h), and sends one record of 64 bytes. If the digests over all
tensors are equal, nothing else is sent. Otherwise, eight bytes per tensor are exchanged to find those that differ, and
those are compared element by element with the version that most ranks hold.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import _C
from ..errors import ReplicasDifferError
from ..serving.agreement import RECORD_BYTES, describe_differences, exchange_records, refuse
from ..serving.groups import gather_tensor, resolve_group
from ..wording import check_flag, short
from .messages import BroadcastMessage, cut, run, split
from .tensors import (
    NamedTensor,
    TensorSource,
    check_readable,
    describe_layout,
    ignored_by_ddp,
    is_convertible,
    named_tensors,
    on_their_device,
    read_tensors,
    unwrap,
)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on all ranks.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"`` or ``"tensor"``.
        name: its name.
        versions: the ranks that hold each version. The most frequent version comes first, and among equally frequent
            ones that of the lowest rank.
        max_abs_differences: for each rank, the largest absolute difference of an element from the first version. It is
            NaN if a NaN or two infinities meet, or if torch cannot convert the dtype, and 0.0 if only the bits differ,
            as for -0.0.
    """

    kind: str
    name: str
    versions: tuple[tuple[int, ...], ...]
    max_abs_differences: tuple[float, ...]

    @property
    def majority(self) -> tuple[int, ...] | None:
        """The ranks with the most frequent version, or ``None`` if no version is more frequent than all others."""
        return None if len(self.versions[0]) == len(self.versions[1]) else self.versions[0]

    def __str__(self) -> str:
        """Describe the difference in one line."""
        versions = " | ".join(", ".join(map(str, ranks)) for ranks in self.versions)
        note = "" if self.majority else ", no majority"
        reference = set(self.versions[0])
        amounts = ", ".join(
            f"{difference:.3g} on rank {rank}"
            for rank, difference in enumerate(self.max_abs_differences)
            if rank not in reference
        )
        return f"{self.kind} {self.name!r}: ranks {versions}{note}; they differ by at most {amounts}"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The result of :func:`verify_replicas`, which is the same on all ranks except for ``hash_seconds``.

    Attributes:
        in_step: whether all ranks hold the same tensors with the same bits.
        differences: the tensors whose elements differ.
        layout_differences: one line for each tensor whose name, dtype, shape or presence differs.
        tensors: the number of tensors that this rank hashed.
        hashed_bytes: their size.
        hash_seconds: how long hashing took.
        exchanged_bytes: bytes that this rank gave to collectives to find differences. The elements of differing
            tensors, which are exchanged to measure the differences, are not included.
    """

    in_step: bool
    differences: tuple[TensorDifference, ...]
    layout_differences: tuple[str, ...]
    tensors: int
    hashed_bytes: int
    hash_seconds: float
    exchanged_bytes: int

    def __str__(self) -> str:
        """Describe each difference in one line."""
        if self.in_step:
            return f"all ranks hold the same {self.tensors} tensors"
        lines = [*self.layout_differences, *map(str, self.differences)]
        return f"the ranks differ in {len(lines)} tensors:\n  " + "\n  ".join(lines)


@torch.no_grad()
def verify_replicas(
    module: TensorSource,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    gradients: bool = True,
    process_group: dist.ProcessGroup | None = None,
    raise_on_difference: bool = False,
) -> ReplicaReport:
    """Check that all ranks hold the same parameters, buffers, gradients and optimizer state, bit for bit. Collective.

    It compares elements, not memory layouts: a channels-last tensor equals a contiguous one. The report also lists
    names, dtypes and shapes that differ, and gradients or state that some ranks lack; tensors that all ranks have are
    compared in any case.

    On one core, hashing is about as fast as copying the same bytes. Tensors on an accelerator come to the host
    together, in copies of up to 16 MiB.

    Args:
        module: a module, a DDP module, a tensor, or any iterable of tensors. A module may have no tensors, but an
            iterable must have one.
        optimizer: an optimizer whose state and numeric settings, such as the learning rate, are compared as well.
        gradients: whether to compare gradients. Leave them out if they may differ, as between backward passes under
            ``no_sync``.
        process_group: the ranks to compare; the default group if ``None``.
        raise_on_difference: raise on all ranks instead of returning a report that is not ``in_step``.

    Returns:
        A report.

    Raises:
        TypeError: an argument is of the wrong type, or ``module`` contains something other than tensors.
        ValueError: ``module`` is an empty iterable, or a tensor's elements cannot be hashed (sparse, quantized, on the
            meta device, uninitialized, without its memory).
        RanksDisagreeError: arguments differ between ranks, or another rank raised one of the errors above.
        RanksAbsentError: some rank did not call it within the group's timeout.
        ReplicasDifferError: the ranks differ, and ``raise_on_difference`` is set.

    Source:
        For the hash, see csrc/kernels/tensor_hash.h.
    """
    group = resolve_group(process_group)
    try:
        check_flag("gradients", gradients)
        check_flag("raise_on_difference", raise_on_difference)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"expected optimizer to be a torch.optim.Optimizer or None, received {short(optimizer)}; if it is a "
                "wrapper, pass the optimizer inside it"
            )
        tensors = _everything(module, optimizer, gradients)
        check_readable(tensors)
        started = time.perf_counter()
        digests = _C.hash_tensors([named.tensor for named in tensors])
        hash_seconds = time.perf_counter() - started
    except Exception as error:  # any error must reach the other ranks, which wait
        refuse(group, "verify_replicas", error)

    hashed_bytes = sum(named.tensor.nbytes for named in tensors)
    layout = describe_layout(tensors)
    arguments = {
        "optimizer": optimizer is not None,
        "gradients": gradients,
        "raise_on_difference": raise_on_difference,
    }
    exchanged_bytes = RECORD_BYTES
    differences: tuple[TensorDifference, ...] = ()
    layout_differences: tuple[str, ...] = ()
    with on_their_device(tensors):
        agreement = exchange_records(group, "verify_replicas", arguments, layout, words=_combine(digests))
        if agreement.layouts is not None:
            layout_differences = tuple(describe_differences(agreement.layouts))
            tensors, digests = _common(tensors, digests, agreement.layouts)
        if agreement.layouts is not None or any(words != agreement.words[0] for words in agreement.words):
            versions, version_bytes = _find_versions(digests, group)
            exchanged_bytes += version_bytes
            differences = _measure({i: tensors[i] for i in versions}, versions, group)
    report = ReplicaReport(
        in_step=not differences and not layout_differences,
        differences=differences,
        layout_differences=layout_differences,
        tensors=len(layout),
        hashed_bytes=hashed_bytes,
        hash_seconds=hash_seconds,
        exchanged_bytes=exchanged_bytes,
    )
    if raise_on_difference and not report.in_step:
        raise ReplicasDifferError(report)
    return report


def _everything(module: TensorSource, optimizer: torch.optim.Optimizer | None, gradients: bool) -> list[NamedTensor]:
    sources: list[tuple[str, torch.Tensor]]
    if isinstance(module, torch.nn.Module):
        sources = list(unwrap(module).named_parameters())
    else:
        # A generator can be read only once, and gradients are read after parameters.
        module = read_tensors(module)
        sources = [(str(i), tensor) for i, tensor in enumerate(module)]
    tensors = named_tensors(module)
    # Parameters that DDP was told to ignore may differ, and so may their gradients and optimizer state.
    ignored = ignored_by_ddp(module) if isinstance(module, torch.nn.Module) else frozenset()
    if gradients:
        tensors += [
            NamedTensor("gradient", name, tensor.grad.detach())
            for name, tensor in sources
            if name not in ignored and tensor.grad is not None
        ]
    if optimizer is not None:
        names = {tensor: name for name, tensor in sources}
        tensors += _optimizer_tensors(optimizer, names, ignored)
    return tensors


def _optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], ignored: frozenset[str]
) -> list[NamedTensor]:
    """Return the state of each parameter, and the numeric settings of each group as tensors."""
    tensors: list[NamedTensor] = []
    for position, group in enumerate(optimizer.param_groups):
        for key in sorted(key for key in group if key != "params"):
            tensors += _numbers(f"group {position}: {key}", group[key])
        for i, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"group {position}: parameter {i}")
            if name in ignored:
                continue
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                tensors += _numbers(f"{name}: {key}", state[key])
    return tensors


def _numbers(name: str, value: object) -> list[NamedTensor]:
    """Return a tensor for a tensor or number, and for each number of a tuple; nothing for other settings."""
    if isinstance(value, torch.Tensor):
        return [NamedTensor("optimizer state", name, value.detach())]
    if isinstance(value, (bool, int, float)):
        return [NamedTensor("optimizer state", name, torch.tensor(value, dtype=torch.float64, device="cpu"))]
    if isinstance(value, (tuple, list)):
        return [named for i, element in enumerate(value) for named in _numbers(f"{name}[{i}]", element)]
    return []


def _combine(digests: torch.Tensor) -> list[int]:
    """Hash the digests of all tensors to a digest of 128 bits, as two signed words."""
    words = b"".join(word.to_bytes(8, "little", signed=True) for word in digests.flatten().tolist())
    combined = hashlib.blake2b(words, digest_size=16).digest()
    return [int.from_bytes(combined[i : i + 8], "little", signed=True) for i in (0, 8)]


def _common(
    tensors: Sequence[NamedTensor], digests: torch.Tensor, layouts: Sequence[Mapping[str, str]]
) -> tuple[list[NamedTensor], torch.Tensor]:
    """Return the tensors that all ranks describe in the same way, in an order that is the same on all ranks."""
    positions = {named.label: i for i, named in enumerate(tensors)}
    kept = [
        positions[label]
        for label, description in layouts[0].items()
        if all(layout.get(label) == description for layout in layouts)
    ]
    return [tensors[i] for i in kept], digests[kept]


def _find_versions(
    digests: torch.Tensor, group: dist.ProcessGroup
) -> tuple[dict[int, tuple[tuple[int, ...], ...]], int]:
    """Find the tensors that differ, and the ranks that hold each version.

    Half of each digest is enough to tell the versions of a tensor apart. The other half is exchanged only if the first
    one shows no difference.

    Returns:
        The ranks that hold each version, by position of the tensor; and the bytes that this rank sent.
    """
    versions: dict[int, tuple[tuple[int, ...], ...]] = {}
    sent_bytes = 0
    for half in (0, 1) if digests.shape[0] else ():
        gathered = gather_tensor(group, digests[:, half].contiguous())
        sent_bytes += digests.shape[0] * 8
        for position in (gathered != gathered[0]).any(dim=0).nonzero().flatten().tolist():
            holders: dict[int, list[int]] = {}
            for rank, digest in enumerate(gathered[:, position].tolist()):
                holders.setdefault(digest, []).append(rank)
            versions[position] = tuple(sorted(map(tuple, holders.values()), key=lambda ranks: (-len(ranks), ranks[0])))
        if versions:
            break
    return versions, sent_bytes


class _ComparisonMessage(BroadcastMessage):
    """Sends the reference version of some tensors to all ranks, which measure their differences and keep their own."""

    def __init__(self, tensors: list[torch.Tensor], src: int, group: dist.ProcessGroup) -> None:
        super().__init__(tensors, src, group)
        self.max_abs_differences = [0.0] * len(tensors)

    def receive(self, staging: torch.Tensor) -> None:
        if self.sends:
            return
        for i, (own, reference) in enumerate(zip(self.tensors, cut(staging, self.tensors), strict=True)):
            self.max_abs_differences[i] = _max_abs_difference(own, reference)


def _max_abs_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if not is_convertible(a.dtype):
        return math.nan
    wide = torch.complex128 if a.is_complex() else torch.float64
    # In pieces, because a large tensor in float64 would take several times its memory.
    pieces = zip(a.reshape(-1).split(1 << 20), b.reshape(-1).split(1 << 20), strict=True)  # type: ignore[no-untyped-call]
    largest = [(x.to(wide) - y.to(wide)).abs().max() for x, y in pieces]
    return float(torch.stack(largest).max())


def _measure(
    tensors: dict[int, NamedTensor], versions: dict[int, tuple[tuple[int, ...], ...]], group: dist.ProcessGroup
) -> tuple[TensorDifference, ...]:
    """Compare each differing tensor with the version that most ranks hold, element by element."""
    if not versions:
        return ()
    messages: list[_ComparisonMessage] = []
    order: list[int] = []
    for src in sorted({ranks[0][0] for ranks in versions.values()}):
        of_src = {id(tensors[i].tensor): i for i in versions if versions[i][0][0] == src}
        for part in split([tensors[i].tensor for i in of_src.values()]):
            messages.append(_ComparisonMessage(part, src, group))
            order += [of_src[id(tensor)] for tensor in part]
    run(messages)
    amounts = [amount for message in messages for amount in message.max_abs_differences]
    own = torch.tensor(amounts, dtype=torch.float64, device="cpu")
    by_rank = gather_tensor(group, own)
    measured = {position: tuple(by_rank[:, i].tolist()) for i, position in enumerate(order)}
    return tuple(TensorDifference(tensors[i].kind, tensors[i].name, versions[i], measured[i]) for i in sorted(versions))
