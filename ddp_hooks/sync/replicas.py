"""Asks whether all ranks hold the same model, bit for bit, and if not, where and by how much.

Every rank hashes its tensors (csrc/kernels/tensor_hash.h) and one record of 64 bytes a rank is exchanged: when the
digests over everything agree, that is the whole of it. Only when they do not, eight bytes a tensor are exchanged to
find which tensors differ, and only those that do are then compared element by element with the version that most ranks
hold.
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
    read_tensors,
    unwrap,
)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on all ranks.

    Attributes:
        kind: ``"parameter"``, ``"buffer"``, ``"gradient"``, ``"optimizer state"`` or ``"tensor"``.
        name: its name.
        versions: the ranks that hold each version; the version that most ranks hold first, of equally frequent ones
            that of the lowest rank.
        max_abs_differences: by rank, the largest absolute difference of an element from the first version; NaN where a
            NaN or two infinities meet, or torch converts no such dtype; 0.0 for other bits of equal value such as -0.0.
    """

    kind: str
    name: str
    versions: tuple[tuple[int, ...], ...]
    max_abs_differences: tuple[float, ...]

    @property
    def majority(self) -> tuple[int, ...] | None:
        """The ranks that hold the most frequent version, or ``None`` if there is no single most frequent one."""
        return None if len(self.versions[0]) == len(self.versions[1]) else self.versions[0]

    def __str__(self) -> str:
        """Say it in one line."""
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
    """What :func:`verify_replicas` found; alike on all ranks but for ``hash_seconds``.

    Attributes:
        in_step: whether all ranks hold the same tensors with the same bits.
        differences: the tensors whose elements differ.
        layout_differences: one line for each tensor whose name, dtype, shape or presence differs.
        tensors: how many tensors this rank hashed.
        hashed_bytes: how many bytes they hold.
        hash_seconds: how long that took.
        exchanged_bytes: what this rank handed to collectives to find what differs; the elements of tensors that do
            differ, exchanged to say by how much, are not in it.
    """

    in_step: bool
    differences: tuple[TensorDifference, ...]
    layout_differences: tuple[str, ...]
    tensors: int
    hashed_bytes: int
    hash_seconds: float
    exchanged_bytes: int

    def __str__(self) -> str:
        """Say it in one line a difference."""
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
    """Check that all ranks hold the same parameters, buffers, gradients and optimizer state, bit for bit; collective.

    Compares what tensors say, not how they lie in memory: a channels-last tensor equals a contiguous one with the same
    elements. Differing names, dtypes and shapes, and gradients or state that some ranks lack, are part of the answer;
    the tensors that all ranks have are compared all the same.

    On one core, hashing runs at about the speed of a copy of the same bytes. Tensors on an accelerator are copied to
    the host for it.

    Args:
        module: a module, a DDP module, a tensor, or any iterable of tensors; a module may have no tensors, but an
            iterable has to have one.
        optimizer: compare its state and its numeric settings (learning rate, ...) too.
        gradients: whether to compare gradients; leave them out where they are meant to differ, between the backwards
            of ``no_sync``.
        process_group: the ranks to compare; the default group if ``None``.
        raise_on_difference: raise instead of returning a report that is not ``in_step``; on all ranks.

    Returns:
        What was found.

    Raises:
        TypeError: an argument is of the wrong type, or ``module`` holds something else than tensors.
        ValueError: ``module`` is an empty iterable, or a tensor has no elements that can be hashed (sparse, quantized,
            on the meta device, uninitialized, without its memory).
        RanksDisagreeError: arguments differ between ranks, or another rank raised one of the above.
        RanksAbsentError: a rank did not call it within the group's timeout.
        ReplicasDifferError: the ranks differ, if ``raise_on_difference``.

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
    except Exception as error:  # whatever it is, the others must not wait
        refuse(group, "verify_replicas", error)

    hashed_bytes = sum(named.tensor.nbytes for named in tensors)
    layout = describe_layout(tensors)
    arguments = {
        "optimizer": optimizer is not None,
        "gradients": gradients,
        "raise_on_difference": raise_on_difference,
    }
    agreement = exchange_records(group, "verify_replicas", arguments, layout, words=_combine(digests))
    exchanged_bytes = RECORD_BYTES
    differences: tuple[TensorDifference, ...] = ()
    layout_differences: tuple[str, ...] = ()
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
        # A generator can be read once only, and gradients are read after parameters.
        module = read_tensors(module)
        sources = [(str(i), tensor) for i, tensor in enumerate(module)]
    tensors = named_tensors(module)
    # What DDP was told to ignore is meant to differ, and so are its gradients and its optimizer's state.
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
    """Return the state of each parameter, and the numbers in the settings of each group as tensors."""
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
    """Return a tensor for a tensor, a number, or each number of a tuple; nothing for settings of another kind."""
    if isinstance(value, torch.Tensor):
        return [NamedTensor("optimizer state", name, value.detach())]
    if isinstance(value, (bool, int, float)):
        return [NamedTensor("optimizer state", name, torch.tensor(value, dtype=torch.float64, device="cpu"))]
    if isinstance(value, (tuple, list)):
        return [named for i, element in enumerate(value) for named in _numbers(f"{name}[{i}]", element)]
    return []


def _combine(digests: torch.Tensor) -> list[int]:
    """Hash the digests of all tensors to one of 128 bits, as two signed words."""
    words = b"".join(word.to_bytes(8, "little", signed=True) for word in digests.flatten().tolist())
    combined = hashlib.blake2b(words, digest_size=16).digest()
    return [int.from_bytes(combined[i : i + 8], "little", signed=True) for i in (0, 8)]


def _common(
    tensors: Sequence[NamedTensor], digests: torch.Tensor, layouts: Sequence[Mapping[str, str]]
) -> tuple[list[NamedTensor], torch.Tensor]:
    """Keep the tensors that every rank describes alike, in an order that is the same on every rank."""
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
    """Find which tensors differ, and which ranks hold which version of each.

    Half of each digest is enough to tell versions of one tensor apart; the other half is asked for only if the first
    finds nothing.

    Returns:
        By position of the tensor, the ranks that hold each version; and the bytes that this rank sent.
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
    """Brings the reference version of some tensors to all ranks, which measure their distance and keep their own."""

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
    # Piece by piece: in float64 a large tensor would take several times its own memory.
    pieces = zip(a.reshape(-1).split(1 << 20), b.reshape(-1).split(1 << 20), strict=True)  # type: ignore[no-untyped-call]
    largest = [(x.to(wide) - y.to(wide)).abs().max() for x, y in pieces]
    return float(torch.stack(largest).max())


def _measure(
    tensors: dict[int, NamedTensor], versions: dict[int, tuple[tuple[int, ...], ...]], group: dist.ProcessGroup
) -> tuple[TensorDifference, ...]:
    """Compare each differing tensor, element by element, with the version that most ranks hold."""
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
