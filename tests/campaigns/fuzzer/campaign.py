"""Runs programs in rank processes that are kept from one to the next, and judges what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gpu
import numpy
from spawn import RankFailure, run_ranks
from tuned import with_settings

import ddp_hooks

from .execute import Register, run_program, warm_up
from .program import Program, policy_of
from .units import unit_length

# Seconds. A program takes a fraction of one on the CPU, and on a device up to 30, if nothing else runs. A rank whose
# partner raised is let go by its group.
PROGRAM_TIMEOUT = 240.0
COLLECTIVE_TIMEOUT = 15.0
# What starts and imports does not count as a hang, however busy the machine.
START_TIMEOUT = 300.0
# The numbers of ranks, and backends, for which there are processes that have imported everything.
_warm: set[tuple[int, str]] = set()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a program.

    Attributes:
        kind: "same", "differs", "fails" (an exception with the hook), "hangs", or "oracle fails".
        report: what differs first, or the tracebacks and stacks of all ranks.
    """

    kind: str
    report: str = ""


def judge(program: Program, register: Register | None = None) -> Verdict:
    """Run a program and say whether the hook did as plain DDP."""
    where: dict[str, Any] = {"backend": "gloo"}
    if program.options.device == "pretend":
        where = {"backend": "cpu:gloo,pretend:pretend", "environment": _with_pretended_device}
    if program.options.device == "cuda":
        on_gpu = "nccl" if program.options.group == "stream" else "gloo"
        where = {"backend": f"cpu:gloo,cuda:{on_gpu}", "environment": gpu.environment, "before_import": True}
    processes = (program.ranks, where["backend"])
    if processes not in _warm:
        run_ranks(program.ranks, warm_up, timeout=START_TIMEOUT, **where)
        _warm.add(processes)
    arguments: list[Any] = [program.to_json(), *([register] if register is not None else [])]
    try:
        results = run_ranks(
            program.ranks,
            run_program,
            *arguments,
            timeout=PROGRAM_TIMEOUT,
            collective_timeout=COLLECTIVE_TIMEOUT,
            **where,
        )
    except RankFailure as failure:
        # The processes are gone with it.
        _warm.discard(processes)
        report = str(failure)
        if "OracleFailed" in report:
            return Verdict("oracle fails", report)
        # A rank that only waited for another that raised hangs, too.
        return Verdict("fails" if " failed:" in report else "hangs", report)
    found = list(_differences(program, results))
    return Verdict("differs", "\n".join(found[:12])) if found else Verdict("same")


def _with_pretended_device(rank: int) -> dict[str, str]:
    return {"DDP_HOOKS_IMPORT_FIRST": "pretend"}


def _differences(program: Program, results: list[dict[str, Any]]) -> Iterable[str]:
    yield from (found for result in results for found in result["differences"][:3])
    yield from _between_ranks(results)
    sparse = any(layer.get("sparse") for layer in program.layers)
    if not sparse:
        yield from _bytes(program, results)


def _between_ranks(results: list[dict[str, Any]]) -> Iterable[str]:
    """Find what is the same on every rank with plain DDP, and not with the hook."""
    first = results[0]
    for moment, plain in first["plain"].items():
        if any(moment not in result["plain"] for result in results):
            continue
        for what, bits in plain.items():
            alike = all(result["plain"][moment].get(what) == bits for result in results)
            ours = [result["ours"][moment].get(what) for result in results]
            if alike and len(set(ours)) > 1:
                yield f"after {moment}: {what} is not the same on every rank, as it is with plain DDP"


def _bytes(program: Program, results: list[dict[str, Any]]) -> Iterable[str]:
    if program.options.join is None:
        for name in results[0]["counters"]:
            values = [result["counters"][name] for result in results]
            if len(set(values)) > 1:
                yield f"at the end: {name} is {values}, by rank"
    if program.options.join is not None or program.ranks == 1:
        return
    sizes = results[0]["sizes"]
    flags = 16 * len(sizes)
    # Without a search, a .grad from an earlier step may pass for one that was accumulated under no_sync.
    searches = program.options.find_unused_parameters and not any(
        operation.get("search") is False for operation in program.operations
    )
    certain = searches or all(operation.get("sync", True) for operation in program.operations)
    failed = [index for index, operation in enumerate(program.operations) if operation["do"] == "fail"]
    for moment, (payload, dense) in results[0]["sent"].items():
        # What a pass that failed announced travels with the pass after it.
        if any(index < int(moment.split(".")[0]) for index in failed):
            return
        policy = policy_of(results[0]["policies"][moment])
        # What is unmanaged may travel whether or not it was used, with a flag for each.
        unmanaged = set().union(*(result["unmanaged"][moment] for result in results))
        used = set().union(*(result["used"][moment] for result in results)) - unmanaged
        used_bytes = sum(sizes[name] for name in used)
        # Only skip_unused knows for certain what was not used; zeros may be sent or not.
        known = policy.skip_unused and certain
        nonzero = {name: _nonzero_anywhere(results, moment, name) for name in used}
        if known and policy.skip_zero_rows == "on":
            used_bytes = sum(_unit_bytes(results[0], name, nonzero[name], policy) for name in used)
        allowed = (used_bytes if known else dense) * (1 + with_settings(policy).tuning.gap_fraction) + sum(
            sizes[name] for name in unmanaged
        )
        # What is coded may take a quarter of its bits, half of that if one of two ranks contributes zeros, or a few
        # more than all; messages of one number take many more.
        least = 1.0
        if getattr(policy, "coded", "off") != "off":
            least = 0.1
            allowed *= 1.1 if policy.tuning.segment_bytes > 500 else 4
        needed = least * sum(int(nonzero[name].sum()) * _element_bytes(results[0], name) for name in used)
        if payload < needed:
            yield f"after {moment}: {payload} bytes were sent, of {needed} that are not zero on every rank"
        if payload > allowed + flags:
            yield (
                f"after {moment}: {payload} bytes were sent, of {dense} that plain DDP sends, and of {used_bytes} that "
                "any rank used"
            )


def _nonzero_anywhere(results: list[dict[str, Any]], moment: str, name: str) -> numpy.ndarray:
    """Return which (real) elements of a gradient some rank had something in."""
    elements, _ = results[0]["shapes"][name]
    anywhere = numpy.zeros(elements, dtype=bool)
    for result in results:
        packed = result["nonzero"][moment].get(name)
        if packed is not None:
            anywhere |= numpy.unpackbits(numpy.frombuffer(packed, numpy.uint8), count=elements).astype(bool)
    return anywhere


def _element_bytes(result: dict[str, Any], name: str) -> int:
    return result["sizes"][name] // max(1, result["shapes"][name][0])


def _unit_bytes(result: dict[str, Any], name: str, nonzero: numpy.ndarray, policy: ddp_hooks.Policy) -> int:
    """Return the bytes of the units that hold something; of everything, where that is a little more."""
    elements, rows = result["shapes"][name]
    size = result["sizes"][name]
    length = unit_length(elements, rows, _element_bytes(result, name), policy)
    if length == 0:
        return size
    starts = range(0, elements, length)
    used = sum(min(length, elements - start) for start in starts if nonzero[start : start + length].any())
    return size if used * 16 >= elements * 15 else used * _element_bytes(result, name)


@dataclass
class Tally:
    """How many programs came to what."""

    programs: int = 0
    differ: int = 0
    hang: int = 0
    fail: int = 0

    def count(self, verdict: Verdict) -> None:
        self.programs += 1
        self.differ += verdict.kind == "differs"
        self.hang += verdict.kind == "hangs"
        self.fail += verdict.kind in ("fails", "oracle fails")

    @property
    def bad(self) -> int:
        return self.differ + self.hang + self.fail

    def __str__(self) -> str:
        return f"{self.programs} programs, {self.differ} differ, {self.hang} hang, {self.fail} raise"


def run_many(
    programs: Iterable[Program],
    *,
    until: float | None = None,
    on_failure: Callable[[Program, Verdict], None],
    on_progress: Callable[[Tally], None] = lambda tally: None,
    until_failure: bool = False,
) -> Tally:
    """Judge one program after another, until there are no more or the time (as of time.monotonic) has come.

    Or until the first one that does not do as plain DDP.
    """
    tally = Tally()
    for program in programs:
        if until is not None and time.monotonic() >= until:
            break
        verdict = judge(program)
        tally.count(verdict)
        if verdict.kind != "same":
            on_failure(program, verdict)
            if until_failure:
                break
        on_progress(tally)
    return tally
