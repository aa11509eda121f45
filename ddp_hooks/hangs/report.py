"""Describes which ranks are missing where others wait, and what each of them does instead."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..wording import describe_ranks, short_list
from .status import SOME_COLLECTIVE, Status, Wait

_MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one round of questions.

    Attributes:
        missing: the ranks that are not where others wait for them.
        waited: how long each rank has waited that has come and given up. Seconds.
        lines: what is known of the missing, those first that wait for nobody.
    """

    missing: tuple[int, ...]
    waited: Mapping[int, float]
    lines: tuple[str, ...]


def find_missing(
    wait: Wait,
    own: int,
    statuses: Mapping[int, Status],
    processes: Mapping[int, tuple[str, int]],
    *,
    is_over: bool = False,
) -> Report:
    """Find the ranks that are missing where a rank waits.

    Args:
        wait: where it waits.
        own: that rank.
        statuses: what each rank says of itself, those that answered.
        processes: of each rank, as far as it said so when it began, the host and the process id.
        is_over: the wait has failed, so that a rank whose own wait there has failed counts as one that came.
    """
    others = [rank for rank in wait.ranks if rank != own]

    def depends(rank: int) -> bool:
        status = statuses.get(rank)
        if status is None:
            return False
        gave_up = status.failed is not None and (is_over or status.error is not None)
        return gave_up or (status.wait is not None and status.error is None)

    def failed_somewhere(rank: int) -> bool:
        failed = statuses[rank].failed if is_over and rank in statuses else None
        return failed is not None and failed.place == SOME_COLLECTIVE

    here = {
        rank: status
        for rank, status in statuses.items()
        if rank in others and (status.comes_to(wait) or (is_over and status.came_to(wait)))
    }
    missing = [rank for rank in others if rank not in here]
    # In the end, all others wait for the ranks that wait for nobody. If it is unknown in which collective this rank
    # was, a rank that also waits may be in the same one, and so may a rank that has failed in an unknown one.
    roots = [rank for rank in missing if not depends(rank)]
    if roots:
        missing = roots if wait.place == SOME_COLLECTIVE else [rank for rank in missing if not failed_somewhere(rank)]
    waited = {
        rank: status.failed.seconds
        for rank, status in here.items()
        if status.failed is not None and status.came_to(wait)
    }
    lines = []
    for rank in sorted(missing, key=lambda rank: (depends(rank), rank))[:_MOST_RANKS]:
        status = statuses.get(rank)
        if status is None:
            lines.append(_describe_silent(rank, wait, processes.get(rank)))
        else:
            lines += _describe_elsewhere(status, wait, is_over)
    if len(missing) > _MOST_RANKS:
        lines.append(f"and {len(missing) - _MOST_RANKS} more")
    return Report(tuple(missing), waited, tuple(lines))


def describe_left_out(
    statuses: Mapping[int, Status], own: int, calls: Callable[[str, Sequence[int]], int]
) -> tuple[str, ...]:
    """Return a line for each function in which other ranks wait or have failed and which this rank has not called.

    Args:
        statuses: of the other ranks.
        own: this rank.
        calls: says how often this rank has called a function that so many ranks have to call.
    """
    lines = []
    for wait in [wait for status in statuses.values() for wait in (status.wait, status.failed) if wait is not None]:
        called = calls(wait.place, wait.ranks)
        if own in wait.ranks and called < wait.call:
            has_called = f"has called {wait.place} {called} times instead of {wait.call}"
            if called == 0:
                has_called = f"has not called {wait.place}"
            everyone = f"every rank of the group ({short_list(wait.ranks)}) must call it"
            lines.append(f"this process (rank {own}) {has_called}; {everyone}")
    return tuple(dict.fromkeys(lines))


def headline(wait: Wait, there: Sequence[int], missing: Sequence[int], position: str) -> str:
    """Return the first line of a report: which ranks wait where, and for which ranks."""
    place = f"{wait.place}, step {wait.step:,}" if wait.step else wait.place
    at = f" ({position})" if position else ""
    who = f"{describe_ranks(there)} {'has' if len(there) == 1 else 'have'} been waiting"
    return f"ddp_hooks: {who} in {place}{at} for {_seconds(wait.seconds)}. Missing: {describe_ranks(missing)}"


def _describe_elsewhere(status: Status, wait: Wait, is_over: bool) -> list[str]:
    who = f"rank {status.rank} (process {status.pid} on {status.host})"
    place = f" at {status.frames[0]}" if status.frames else ""
    other = status.failed if is_over and status.failed is not None else status.wait
    if status.error is not None:
        text = f"{who} ended {_describe_steps(status)} with {status.error}" + (place and f", raised{place}")
    elif other is None:
        stood = f", and has been{place} for {_seconds(status.seconds)}" if status.seconds >= 1 else f", now{place}"
        text = f"{who} is {_describe_phase(status)}{place and stood}"
    elif other is not status.wait:
        failed = "timed out" if other.timed_out else "lost a connection"
        text = f"{who} {failed} in {other.place}"
        if status.is_ending:
            text += f"{place}, {_describe_steps(status)}, and its program is ending"
        elif place:
            text += f", and is now{place}"
    elif other.place == wait.place:
        text = f"{who} calls it for another group (ranks {short_list(other.ranks)}){place}"
    else:
        text = (
            f"{who} has been waiting in {other.place}{place} for {_seconds(other.seconds)}, {_describe_steps(status)}"
        )
    lines = [text, *(f"  called from {frame}" for frame in status.frames[1:])]
    if status.inside is not None:
        lines.append(f"  innermost: {status.inside}")
    return [*lines, *(f"  {remark}" for remark in status.remarks)]


def _describe_steps(status: Status) -> str:
    if status.steps == 0:
        return "before its first step"
    return f"after {status.steps:,} step{'' if status.steps == 1 else 's'}"


def _describe_phase(status: Status) -> str:
    if status.phase:
        return f"in {status.phase}, " + (f"step {status.steps:,}" if status.steps else _describe_steps(status))
    return _describe_steps(status) if status.steps == 0 else f"between steps, {_describe_steps(status)}"


def _describe_silent(rank: int, wait: Wait, process: tuple[str, int] | None) -> str:
    last = f"; it took part in step {wait.step - 1:,}" if wait.step > 1 else ""
    if process is None:
        nothing = f"neither {wait.place} nor anything else" if wait.call else "nothing"
        return (
            f"rank {rank} does not answer, and has never reported: it has ended, or has called {nothing} of ddp_hooks"
        )
    host, pid = process
    return f"rank {rank} (process {pid} on {host}) does not answer: {_state_of(host, pid)}{last}"


def has_ended(pid: int) -> bool:
    """Return whether a process of this machine has visibly ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return os.path.isdir("/proc/self")
    except (OSError, IndexError):
        return False


def _state_of(host: str, pid: int) -> str:
    """Describe what can be seen of a process that does not answer."""
    if host != this_host() or not os.path.isdir("/proc/self"):
        return "it has ended, is stopped, is in a call that holds the GIL, or has destroyed its process group"
    with suppress(OSError, IndexError):
        # Behind the name, which may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "Tt":
            return "it is stopped (by SIGSTOP, or by a debugger)"
        if state in "ZX":
            return "it has ended"
        return "it is running, but in a call that holds the GIL, or it has destroyed its process group"
    return "it has ended"


def this_host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
