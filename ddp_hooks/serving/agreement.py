"""Makes sure that all ranks are about to do the same, before any rank does it.

Each rank brings a *proposal*: the function it calls, everything that must be equal on all ranks, its problem if it
cannot take part, and whatever else the others need to know. A proposal travels in two forms:

1. Every collective function begins by exchanging *records* of fixed size. A record holds digests, whether this rank
   refuses, and a few words of the caller. If the digests are equal, the collectives that follow match on all ranks by
   construction. For functions on tensors that is usually enough.
2. The proposals follow *in words* if the records differ, to say how, or if a function needs more from every rank than a
   record can hold, as the functions of the hook do.

If something differs, or if one rank refuses, every rank learns of it and raises. So no rank waits for a collective that
another rank never starts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import RanksDisagreeError, RefusedError
from ..wording import short
from .absentees import naming_absent_ranks
from .groups import gather_objects, gather_tensor

T = TypeVar("T")

# A record: digests of the call (1 word) and of the layout (2), whether this rank refuses (1), the caller's words (4).
_OWN_WORDS = 4
RECORD_BYTES = (4 + _OWN_WORDS) * 8
_DIFFERENCES_SHOWN = 10
_LONGEST_REASON = 1000
_LONGEST_ARGUMENT = 160


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank is about to do, in words.

    Attributes:
        call: the function, and each of its arguments that must be equal on all ranks.
        description: everything else that must be equal on all ranks, by name.
        problem: why this rank cannot take part, or None.
        own: other information for the function on all ranks.
    """

    call: tuple[str, ...]
    description: Mapping[str, str]
    problem: str | None = None
    own: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, which other versions of this package can also read."""
        description = dict(self.description)
        return {"call": list(self.call), "description": description, "problem": self.problem, "own": self.own}

    @classmethod
    def read(cls, function: str, rank: int, received: object) -> Proposal:
        """Read the proposal that a rank sent.

        Raises:
            RanksDisagreeError: the rank sent something else.
        """
        if isinstance(received, dict) and set(received) == {"call", "description", "problem", "own"}:
            call, described, problem = received["call"], received["description"], received["problem"]
            if (
                isinstance(call, list)
                and len(call) > 0
                and all(isinstance(part, str) for part in call)
                and isinstance(described, dict)
                and all(isinstance(text, str) for item in described.items() for text in item)
                and (problem is None or isinstance(problem, str))
            ):
                return cls(tuple(call), described, problem, received["own"])
        raise RanksDisagreeError(
            f"{function}: expected a description of the call from every rank, received {short(received)} from rank "
            f"{rank}, which may run a different version of ddp_hooks. Install the same version on every rank"
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of :func:`exchange_records` on every rank.

    Attributes:
        words: the caller's words, by rank.
        layouts: the names and descriptions of each rank's tensors, by rank; ``None`` if all are equal.
    """

    words: tuple[tuple[int, ...], ...]
    layouts: tuple[Mapping[str, str], ...] | None


# --- records


def _digest_words(lines: Sequence[str], count: int) -> tuple[int, ...]:
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8 * count).digest()
    return struct.unpack(f"<{count}q", digest)


def exchange_records(
    group: dist.ProcessGroup,
    function: str,
    arguments: Mapping[str, object],
    layout: Mapping[str, str],
    *,
    words: Sequence[int] = (),
    refusal: Exception | None = None,
) -> Agreement:
    """Gather every rank's record. Every collective public function calls this before any other collective.

    Args:
        group: the process group.
        function: the public function that was called.
        arguments: the arguments that must be equal on all ranks, by name.
        layout: a label and a description of each tensor that this rank is going to exchange, in order.
        words: up to four 64-bit integers of the caller.
        refusal: why this rank cannot take part, or None. The other ranks learn of it instead of waiting.

    Returns:
        The words of all ranks, and the layouts if they differ.

    Raises:
        RanksDisagreeError: functions or arguments differ, or another rank refuses.
        RanksAbsentError: a rank did not call a function of this package within the group's timeout.
        Exception: ``refusal``, on the rank that refuses.
    """
    call = (function, *(f"{name}={value!r}" for name, value in arguments.items()))
    own = [
        *_digest_words(call, 1),
        *_digest_words([f"{label}: {description}" for label, description in layout.items()], 2),
        int(refusal is not None),
        *words,
        *([0] * (_OWN_WORDS - len(words))),
    ]
    with naming_absent_ranks(group, function):
        records = gather_tensor(group, torch.tensor(own, dtype=torch.int64, device="cpu")).tolist()
    own_words = tuple(tuple(record[4:]) for record in records)
    if not any(record[3] for record in records) and all(record[:3] == records[0][:3] for record in records):
        return Agreement(own_words, None)

    # Every rank knows now that something is wrong, so a larger exchange is safe.
    problem = None if refusal is None else f"{type(refusal).__name__}: {refusal}"[:_LONGEST_REASON]
    proposals = _gather_proposals(group, function, Proposal(call, layout, problem))
    if refusal is not None:
        raise refusal
    refused = [
        f"rank {rank} refused: {each.problem}" for rank, each in enumerate(proposals) if each.problem is not None
    ]
    if refused:
        raise RanksDisagreeError(_message(function, refused))
    calls = [each.call for each in proposals]
    if any(other != calls[0] for other in calls):
        lines = [f"{ranks} called {_readable(call)}" for call, ranks in _by_value(calls)]
        raise RanksDisagreeError(_message(function, lines))
    return Agreement(own_words, tuple(each.description for each in proposals))


def agree(
    group: dist.ProcessGroup,
    function: str,
    arguments: Mapping[str, object],
    layout: Mapping[str, str],
    *,
    words: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Make sure that all ranks are about to do the same. Takes the arguments of :func:`exchange_records`.

    Returns:
        The words of all ranks.

    Raises:
        RanksDisagreeError: on all ranks, if functions, arguments or tensors differ, or another rank refuses.
    """
    agreement = exchange_records(group, function, arguments, layout, words=words)
    if agreement.layouts is not None:
        raise RanksDisagreeError(_message(function, describe_differences(agreement.layouts)))
    return agreement.words


def refuse(group: dist.ProcessGroup, function: str, reason: Exception) -> NoReturn:
    """Tell the other ranks, which wait in :func:`agree`, that this rank cannot take part; then raise."""
    exchange_records(group, function, {}, {}, refusal=reason)
    raise AssertionError("unreachable: exchange_records raises the refusal")


# --- in words


def exchange_proposals(
    group: dist.ProcessGroup,
    function: str,
    description: Mapping[str, str],
    problem: str | None = None,
    own: object = None,
) -> list[Proposal]:
    """Gather every rank's proposal, after a record with the function's name. Call :func:`settle` with the result.

    Args:
        group: the process group.
        function: the public function that was called.
        description: everything that must be equal on all ranks, by name.
        problem: why this rank cannot take part, or None.
        own: other information for all ranks; must be picklable.

    Returns:
        The proposals, by rank.

    Raises:
        RanksDisagreeError: a rank calls another function of this package, or runs another version of it.
        RanksAbsentError: a rank calls no function of this package.
    """
    agree(group, function, {}, {})
    return _gather_proposals(group, function, Proposal((function,), description, problem, own))


class Distributed(Protocol):
    """A DDP module, or anything else with a process group and a device."""

    @property
    def process_group(self) -> Any:
        """The process group."""

    @property
    def device(self) -> torch.device:
        """The device of its gradients."""

    @property
    def device_type(self) -> str:
        """The type of that device."""


def propose(
    ddp: Distributed,
    function: str,
    description: Mapping[str, str],
    problem: str | None = None,
    own: object = None,
) -> list[Proposal]:
    """Exchange proposals with every rank of a module; see :func:`exchange_proposals`."""
    # Objects travel through the current device, which may be one that two ranks share, and not the module's.
    with torch.accelerator.device_index(ddp.device.index) if ddp.device_type != "cpu" else nullcontext():
        return exchange_proposals(ddp.process_group, function, description, problem, own)


def settle(function: str, proposals: Sequence[Proposal], error: Exception | None = None) -> list[Any]:
    """Raise on every rank if any rank has a problem, or if descriptions differ.

    Args:
        function: the function that every rank calls.
        proposals: the proposals of all ranks.
        error: the exception to raise on this rank if it has the problem, or None.

    Returns:
        The ``own`` of each rank's proposal, by rank.

    Raises:
        RefusedError: lists every rank's problem, or every difference.
        Exception: ``error``, on the rank that has it.
    """
    problems = [each.problem for each in proposals]
    if any(problem is not None for problem in problems):
        if error is not None:
            raise error.with_traceback(None)  # the reader does not care where it was noticed
        refused = [f"{ranks}: {problem}" for problem, ranks in _by_value(problems) if problem is not None]
        raise RefusedError(f"{function}: refused on every rank. {'; '.join(refused)}")
    differences = []
    for key in dict.fromkeys(key for each in proposals for key in each.description):
        expected, *others = [each.description.get(key, "nothing") for each in proposals]
        differences += [
            f"{key}: expected {expected} as on rank 0, received {received} on rank {rank}"
            for rank, received in enumerate(others, 1)
            if received != expected
        ]
    if differences:
        raise RefusedError(
            f"{function}: the ranks disagree: {'; '.join(differences)}. Pass the same module and policy on every rank; "
            "if there are several modules, pass them in the same order"
        )
    return [each.own for each in proposals]


def _gather_proposals(group: dist.ProcessGroup, function: str, own: Proposal) -> list[Proposal]:
    received = gather_objects(group, own.to_dict())
    return [Proposal.read(function, rank, each) for rank, each in enumerate(received)]


def describe_differences(layouts: Sequence[Mapping[str, str]]) -> list[str]:
    """Describe how names, dtypes and shapes differ between ranks, in one line for each tensor."""
    labels = dict.fromkeys(label for layout in layouts for label in layout)
    lines = []
    for label in labels:
        descriptions = [layout.get(label, "missing") for layout in layouts]
        if any(other != descriptions[0] for other in descriptions):
            lines.append(f"{label} is " + ", ".join(f"{value} on {ranks}" for value, ranks in _by_value(descriptions)))
    if not lines:
        orders = [tuple(layout) for layout in layouts]
        first = next((i for i, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1), None)
        if first is None:
            return ["the digests of the ranks' tensors differ, but their descriptions do not: a message was corrupted"]
        lines.append(
            f"the tensors are in different orders: position {first} is "
            + ", ".join(f"{name} on {ranks}" for name, ranks in _by_value([order[first] for order in orders]))
        )
    return lines


def _by_value(values: Sequence[T]) -> list[tuple[T, str]]:
    """Group the ranks that hold equal values: ``[(value, "ranks 0, 2"), ...]``."""
    groups: list[tuple[T, list[int]]] = []
    for rank, value in enumerate(values):
        for known, ranks in groups:
            if known == value:
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    return [
        (value, f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}") for value, ranks in groups
    ]


def _readable(call: Sequence[str]) -> str:
    # A sentence cannot hold a weight for each of a thousand ranks.
    shown = [text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}..." for text in call[1:]]
    return f"{call[0]}({', '.join(shown)})"


def _message(function: str, lines: Sequence[str]) -> str:
    shown = list(lines[:_DIFFERENCES_SHOWN])
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    return (
        f"{function}: expected the same call with the same tensors on all ranks, but\n  "
        + "\n  ".join(shown)
        + "\nNothing was exchanged and no tensor changed. Make the same call with the same tensors on all ranks."
    )
