"""Agrees across ranks on what is about to be exchanged, before anything of it is.

Every rank gathers one small record of fixed size from every other: a digest of the call and its arguments, a digest of
the tensors' names, dtypes and shapes, and a few words that the caller needs from everybody. When the digests agree, the
collectives that follow match on all ranks by construction. When they do not, or when one rank refuses its input, every
rank knows, the descriptions themselves are exchanged, and every rank raises: nobody waits for a collective that
somebody else never starts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from .absentees import naming_absent_ranks
from .wording import short

# A record: digest of the call (1 word), digest of the layout (2), whether this rank refuses (1), the caller's own (4).
_OWN_WORDS = 4
RECORD_BYTES = (4 + _OWN_WORDS) * 8
_DIFFERENCES_SHOWN = 10
_LONGEST_REASON = 1000
_LONGEST_ARGUMENT = 160


class RanksDisagreeError(RuntimeError):
    """The ranks asked for different things; nothing was exchanged and no tensor changed."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What every rank knows after :func:`exchange_records`.

    Attributes:
        words: the caller's own words, by rank.
        layouts: what each rank calls its tensors and how it describes them, by rank; ``None`` if all are alike.
    """

    words: tuple[tuple[int, ...], ...]
    layouts: tuple[dict[str, str], ...] | None


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group to use, ``None`` being the default group.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: ``process_group`` is something else.
        ValueError: this rank is not in ``process_group``, or it was destroyed.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "expected an initialized process group, found none; call torch.distributed.init_process_group first"
        )
    group: object = dist.group.WORLD if process_group is None else process_group
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("expected a process group that this rank is in; let only its members call")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"expected process_group to be a process group or None, received {short(group)}; of ranks make one with "
            "torch.distributed.new_group(ranks), of a DeviceMesh pass .get_group()"
        )
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        raise ValueError(
            "expected a process group that is in use, received one that was destroyed; make it anew, or pass None for "
            "the default group"
        ) from error
    if rank < 0:
        raise ValueError("expected a process group that this rank is in; let only its members call")
    return group


def control_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device for small messages: the host where the group can, else the current accelerator.

    As for torch's own object collectives, each rank has to have made a device of its own the current one
    (``torch.cuda.set_device``).
    """
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def gather_tensor(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    """Gather a small host tensor of the same dtype and shape from every rank.

    Args:
        group: the process group.
        own: this rank's tensor, of any dtype the backend knows, on the host.

    Returns:
        A host tensor with one more dimension in front: the rank.
    """
    device = control_device(group)
    flat = own.contiguous().reshape(-1).to(device)
    gathered = torch.empty(dist.get_world_size(group), flat.numel(), dtype=flat.dtype, device=device)
    dist.all_gather(list(gathered), flat, group=group)
    return gathered.cpu().view(-1, *own.shape)


def gather_objects(group: dist.ProcessGroup, own: object) -> list[object]:
    """Gather a picklable object from every rank."""
    gathered: list[object] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


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
    """Gather every rank's record; a collective that every public function calls before any other.

    Args:
        group: the process group.
        function: the public function that was called.
        arguments: the arguments that have to be alike on all ranks, by name.
        layout: what this rank is going to exchange, in this order: a label and a description of each tensor.
        words: up to four 64-bit integers of the caller's own.
        refusal: why this rank cannot take part; the others learn of it instead of waiting.

    Returns:
        The words of all ranks, and the layouts if they differ.

    Raises:
        RanksDisagreeError: functions or arguments differ, or another rank refuses.
        RanksAbsentError: a rank did not call a function of this package within the group's timeout.
        Exception: ``refusal``, on the rank that refuses.
    """
    call = [function, *(f"{name}={value!r}" for name, value in arguments.items())]
    own = [
        *_digest_words(call, 1),
        *_digest_words([f"{label}: {description}" for label, description in layout.items()], 2),
        int(refusal is not None),
        *words,
        *([0] * (_OWN_WORDS - len(words))),
    ]
    with naming_absent_ranks(group, function):
        records = gather_tensor(group, torch.tensor(own, dtype=torch.int64)).tolist()
    own_words = tuple(tuple(record[4:]) for record in records)
    if not any(record[3] for record in records) and all(record[:3] == records[0][:3] for record in records):
        return Agreement(own_words, None)

    # From here on every rank knows that something is wrong, so a larger exchange is safe.
    reason = None if refusal is None else f"{type(refusal).__name__}: {refusal}"[:_LONGEST_REASON]
    everything = gather_objects(group, (call, reason, dict(layout)))
    for rank, received in enumerate(everything):
        if not _is_description(received):
            raise RanksDisagreeError(
                f"{function}: expected a description of the call from every rank, received {short(received)} from rank "
                f"{rank}, which may run another version of ddp_hooks. Install the same one on every rank"
            )
    calls, reasons, layouts = zip(*everything, strict=True)
    if refusal is not None:
        raise refusal
    if any(reason is not None for reason in reasons):
        lines = [f"rank {rank} refused: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
        raise RanksDisagreeError(_message(function, lines))
    if any(other != calls[0] for other in calls):
        raise RanksDisagreeError(_message(function, [f"{ranks} called {call}" for call, ranks in _by_value(calls)]))
    return Agreement(own_words, layouts)


def _is_description(received: object) -> bool:
    if not isinstance(received, (tuple, list)) or len(received) != 3:
        return False
    call, reason, layout = received
    return (
        isinstance(call, (tuple, list))
        and len(call) > 0
        and all(isinstance(part, str) for part in call)
        and (reason is None or isinstance(reason, str))
        and isinstance(layout, dict)
        and all(isinstance(text, str) for item in layout.items() for text in item)
    )


def agree(
    group: dist.ProcessGroup,
    function: str,
    arguments: Mapping[str, object],
    layout: Mapping[str, str],
    *,
    words: Sequence[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Make sure that all ranks are about to do the same; takes the same arguments as :func:`exchange_records`.

    Returns:
        The words of all ranks.

    Raises:
        RanksDisagreeError: functions, arguments or tensors differ, or another rank refuses. On all ranks.
    """
    agreement = exchange_records(group, function, arguments, layout, words=words)
    if agreement.layouts is not None:
        raise RanksDisagreeError(_message(function, describe_differences(agreement.layouts)))
    return agreement.words


def refuse(group: dist.ProcessGroup, function: str, reason: Exception) -> NoReturn:
    """Tell the other ranks, which are waiting in :func:`agree`, that this rank cannot take part; then raise."""
    exchange_records(group, function, {}, {}, refusal=reason)
    raise AssertionError("unreachable: exchange_records raises the refusal")


def describe_differences(layouts: Sequence[Mapping[str, str]]) -> list[str]:
    """Say, one line for each tensor, how the ranks' names, dtypes and shapes differ."""
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
            return ["the digests of the ranks' tensors differ, and their descriptions do not: a message was damaged"]
        lines.append(
            f"the tensors stand in different orders: at position {first} "
            + ", ".join(f"{name} on {ranks}" for name, ranks in _by_value([order[first] for order in orders]))
        )
    return lines


def _by_value(values: Sequence[object]) -> list[tuple[object, str]]:
    """Group the ranks that hold equal values: ``[(value, "ranks 0, 2"), ...]``."""
    groups: list[tuple[object, list[int]]] = []
    for rank, value in enumerate(values):
        for known, ranks in groups:
            if known == value:
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    return [
        (_readable(value), f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}")
        for value, ranks in groups
    ]


def _readable(value: object) -> object:
    if not isinstance(value, list):
        return value
    # A weight for each of a thousand ranks says nothing in a sentence.
    shown = [text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}..." for text in value[1:]]
    return f"{value[0]}({', '.join(shown)})"


def _message(function: str, lines: Sequence[str]) -> str:
    shown = list(lines[:_DIFFERENCES_SHOWN])
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    return (
        f"{function}: expected the same call with the same tensors on all ranks, but\n  "
        + "\n  ".join(shown)
        + "\nNothing was exchanged and no tensor changed. Make the ranks alike and call again on all of them."
    )
