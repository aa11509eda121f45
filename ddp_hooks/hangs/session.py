"""Lets the ranks of one run ask each other where they are, if one of them waits for too long.

A waiting rank *calls*: it raises a counter in the store. Every rank that sees this writes its status under the
counter's new value. The lowest of the waiting ranks reads them, prints which ranks are missing, and leaves the report
for the others, whose errors say the same. If a rank does not answer, its host and its process are still known, because
each rank writes them when it begins.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .activity import Activity
from .board import Board
from .forks import apart_from_forks
from .report import Report, describe_left_out, find_missing, has_ended, headline, this_host
from .stack import Position
from .status import Status, Wait
from .witness import Witness

# How long the others may take to answer a call, and then the printing rank to print.
ANSWER_SECONDS = 1.5
_PRINT_SECONDS = 3.0
# How long ranks that fail for the same reason may take to notice it.
GRACE_SECONDS = 2.0
# The process that holds the store may end with its error; the others read its last word meanwhile.
_LINGER_SECONDS = 0.3
_POLL_SECONDS = 0.1
# The number of lower ranks that are asked at once whether one of them prints.
_ASKED_AT_ONCE = 8
# How often calls are looked for by a rank that may be missing somewhere. On thousands of ranks less often, because one
# process serves all of them.
_LEAST_POLL_SECONDS, _MOST_POLL_SECONDS = 0.25, 2.0
_REQUESTS_A_SECOND = 500
# Ranks that fail at one place so close together fail for the same reason.
_SAME_FAILURE_SECONDS = 10.0
# Ranks that come to one place come there nearly at the same time.
_NEARLY_SECONDS = 1.0
# How long the process that holds the store stays after an error, so that the others learn of it.
_GOODBYE_SECONDS = 3.0
# The precision of the time at which a wait began.
_SAME_WAIT_SECONDS = 2.0
_LONGEST_KEY = 400


class Session:
    """One default process group, from the moment this process is watched in it until it is destroyed."""

    def __init__(self, group: dist.ProcessGroup, witness: Witness, activity: Activity) -> None:
        self.ended = False
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.witness = witness
        self._calls = activity.calls
        # Weakly, and asked for by nobody but the thread that trains: whoever drops a group's last reference waits.
        self._group = weakref.ref(group, self._group_is_gone)
        store = distributed_c10d._get_default_store()
        self._board = Board(store, "hangs")
        self._held_by_rank_0 = _rank_0_holds(store)
        self._answered = 0
        self._has_left = False  # what it has said of its end holds
        self._processes = {self.rank: (this_host(), os.getpid())}
        self._told: tuple[Wait, float, Report] | None = None  # what was printed, and when
        if self._held_by_rank_0:
            self._board.ask_before(self._holder_has_ended)

    def introduce(self) -> None:
        """Write this process's host and id, and read those of the process that holds the store, if it has written them.

        If a rank does this before a collective, the other ranks can read it after that collective.
        """
        self._board.leave(f"process/{self.rank}", list(self._processes[self.rank]))
        self.learn_holder()

    def _group_is_gone(self, reference: object) -> None:
        self.ended = True

    def serves(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether this is the session of the default group; called by the thread that trains."""
        return not self.ended and group is not None and self._group() is group

    def poll_seconds(self, shortest: float) -> float:
        """Return the seconds between two looks for a call: at least ``shortest``."""
        return min(max(min(_LEAST_POLL_SECONDS, shortest), self.ranks / _REQUESTS_A_SECOND), _MOST_POLL_SECONDS)

    def learn_holder(self) -> bool:
        """Learn which process holds the store, while it answers; return whether that is known, if it is a rank's."""
        if self._held_by_rank_0 and 0 not in self._processes:
            self._read_processes([0])
        return not self._held_by_rank_0 or 0 in self._processes

    def close(self, seconds: float = 0.0) -> None:
        """Release the store; may be called again."""
        self.ended = True
        self._board.close(seconds)

    def _holder_has_ended(self) -> bool:
        host, pid = self._processes.get(0, ("", 0))
        return host == this_host() and has_ended(pid)

    # --- who answers

    def answer(self) -> int:
        """Write this rank's status if a rank has called since the last time; return the number of that call, or 0."""
        calls = self._board.count("calls")
        if calls is None or calls <= self._answered:
            return 0
        self._answered = calls
        self._leave(calls)
        return calls

    def _leave(self, call: int) -> None:
        # What it has said of its end, in another thread, holds.
        self._board.leave(
            f"status/{self.rank}", self.witness.make_status(call).to_dict(), unless=lambda: self._has_left
        )

    def say_goodbye(self, status: Status, *, lingers: bool = True) -> None:
        """Write what has ended this rank's program, for ranks that wait and for later calls.

        Args:
            status: what to leave.
            lingers: if this process holds the store: stay until those that wait have read it.
        """
        self._has_left = True
        self._board.leave(f"status/{self.rank}", {**status.to_dict(), "call": sys.maxsize})
        call = self._board.count("calls", 1)
        if lingers and self._held_by_rank_0 and self.rank == 0 and call is not None:
            statuses = self._gather(call, range(1, self.ranks), _GOODBYE_SECONDS)
            if any(status.wait is not None for status in statuses.values()):
                # Whoever has answered still has to read what was asked for, and may not run at once.
                self._wait_for_report(call)
            time.sleep(_LINGER_SECONDS)

    # --- who asks

    def call(self) -> int:
        """Ask every rank where it is; return the number of the call, or 0 if the store does not answer."""
        calls = self._board.count("calls", 1)
        if calls is None:
            return 0
        self._answered = calls
        self._leave(calls)
        return calls

    def tell(
        self,
        call: int,
        wait: Wait,
        still_waits: Callable[[], bool],
        position: Position | None,
        *,
        patience_seconds: float,
        prints: bool = True,
    ) -> bool:
        """Find the missing ranks, and print a report unless a lower rank does; return whether any rank is missing.

        Args:
            call: the number of the call that is answered; 0 if the store does not answer.
            wait: where this rank waits.
            still_waits: asked when the others have answered.
            position: where this rank's thread is.
            patience_seconds: how long a rank waits before it is time to tell.
            prints: that it has not been printed just now.
        """
        if call == 0:
            if not still_waits():
                return False
            if prints:
                self._print(wait, [self.rank], self._report_without_store(wait), position)
            return True
        if self._leaves_it_to_another(call, wait):
            word = self._wait_for_report(call)
            if word is not None:
                if word["place"] == wait.place:
                    self._told = wait, time.monotonic(), Report(tuple(word["missing"]), {}, tuple(word["lines"]))
                if self.rank in word["missing"] and prints:
                    self._print_what_is_left_out(call, wait)
                return bool(word["missing"])
        statuses = self._gather(call, [rank for rank in wait.ranks if rank != self.rank], ANSWER_SECONDS)
        report = self._report(wait, statuses)
        # Others may have called who wait elsewhere for somebody else, or because they end with an error.
        waits = [wait, *(each.wait for each in statuses.values() if each.wait is not None and each.error is None)]
        is_late = any(self.rank in each.ranks and each.seconds > patience_seconds - _NEARLY_SECONDS for each in waits)
        if not is_late:
            ended = [rank for rank in report.missing if rank in statuses and statuses[rank].error is not None]
            report = self._report(replace(wait, ranks=(self.rank, *ended)), statuses)
        if not still_waits():
            report = Report((), {}, ())
        word = {"call": call, "place": wait.place, "missing": list(report.missing), "lines": list(report.lines)}
        self._board.leave("report", word)
        if report.missing:
            self._told = wait, time.monotonic(), report
        if report.missing and prints:
            there = [rank for rank in wait.ranks if rank not in report.missing]
            others = [status.wait.seconds for status in statuses.values() if status.comes_to(wait) and status.wait]
            self._print(replace(wait, seconds=max([wait.seconds, *others])), there, report, position)
        return bool(report.missing)

    def _print_what_is_left_out(self, call: int, wait: Wait) -> None:
        lines = describe_left_out(self._read(call, wait.ranks), self.rank, self._calls)
        print_to_stderr("".join(f"ddp_hooks: {line}\n" for line in lines))

    def _leaves_it_to_another(self, call: int, wait: Wait) -> bool:
        """Return whether a lower rank that also waits for this one prints the report."""
        lower = [rank for rank in wait.ranks if rank < self.rank]
        for first in range(0, len(lower), _ASKED_AT_ONCE):
            asked = lower[first : first + _ASKED_AT_ONCE]

            def prints(status: Status) -> bool:
                waits = status.wait is not None and status.error is None
                return waits and status.wait is not None and self.rank in status.wait.ranks

            deadline = time.monotonic() + (ANSWER_SECONDS if first == 0 else _POLL_SECONDS)
            while True:
                answers = self._read(call, asked)
                if any(map(prints, answers.values())):
                    return True
                if len(answers) == len(asked) or time.monotonic() > deadline:
                    break
                self._pause()
        return False

    def _wait_for_report(self, call: int) -> dict[str, Any] | None:
        deadline = time.monotonic() + _PRINT_SECONDS
        while time.monotonic() < deadline:
            word: dict[str, Any] | None = (self._board.read(["report"]) or {}).get("report")
            if word is not None and word["call"] >= call:
                return word
            self._pause()
        return None

    def _pause(self) -> None:
        # Whoever asks at the same time waits for this rank's answer.
        self.answer()
        time.sleep(_POLL_SECONDS)

    def _gather(self, call: int, ranks: Sequence[int], seconds: float) -> dict[int, Status]:
        statuses: dict[int, Status] = {}
        deadline = time.monotonic() + seconds
        while True:
            statuses |= self._read(call, [rank for rank in ranks if rank not in statuses])
            if len(statuses) == len(ranks) or time.monotonic() > deadline:
                return statuses
            self._pause()

    def _read(self, call: int, ranks: Sequence[int]) -> dict[int, Status]:
        words = self._board.read([f"status/{rank}" for rank in ranks]) or {}
        statuses = {}
        for word in words.values():
            with suppress(KeyError, TypeError, ValueError):  # of another version of this package
                status = Status.read(word)
                if status.call >= call:
                    statuses[status.rank] = status
        return statuses

    def _report(self, wait: Wait, statuses: dict[int, Status], *, is_over: bool = False) -> Report:
        self._read_processes([rank for rank in wait.ranks if rank not in statuses and rank not in self._processes])
        return find_missing(wait, self.rank, statuses, self._processes, is_over=is_over)

    def _read_processes(self, ranks: Sequence[int]) -> None:
        for key, (host, pid) in (self._board.read([f"process/{rank}" for rank in ranks]) or {}).items():
            self._processes[int(key.partition("/")[2])] = host, pid

    def _report_without_store(self, wait: Wait) -> Report:
        text = "the process group's store does not answer, so no rank can be asked"
        if not self._held_by_rank_0:
            others = tuple(rank for rank in wait.ranks if rank != self.rank)
            return Report(others, {}, (f"{text}; it is held by torchrun's agent on the first node",))
        silent = find_missing(Wait(wait.place, (0,), 0.0, step=wait.step), -1, {}, self._processes)
        return Report((0,), {}, (*silent.lines, f"{text}; it is held by rank 0's process"))

    def _print(self, wait: Wait, there: Sequence[int], report: Report, position: Position | None) -> None:
        at = position.frames[0] if position is not None and position.frames else ""
        text = headline(wait, there, report.missing, at) + "".join(f"\n  {line}" for line in report.lines) + "\n"
        print_to_stderr(text)

    # --- who has failed

    def explain(self, wait: Wait) -> Report | None:
        """Find the ranks that were missing where this rank's wait has failed; None if the store does not answer.

        Ranks that wait for the same ranks get the same lines.
        """
        # Asked anew, because it may be long ago that it was printed.
        call = self.call()
        if call == 0:
            return self._report_from_memory(wait)
        others = [rank for rank in wait.ranks if rank != self.rank]
        statuses = self._gather(call, others, GRACE_SECONDS)
        report = self._share(wait, self._report(wait, statuses, is_over=True))
        report = replace(report, lines=(*report.lines, *describe_left_out(statuses, self.rank, self._calls)))
        linger = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < linger:
            self._pause()
        return report

    def _report_from_memory(self, wait: Wait) -> Report | None:
        if self._told is not None:
            told, at, report = self._told
            began_apart = abs(told.seconds + time.monotonic() - at - wait.seconds)
            if (told.place, told.step) == (wait.place, wait.step) and began_apart < _SAME_WAIT_SECONDS:
                return report
        return self._report_without_store(wait) if self._held_by_rank_0 and self.rank != 0 else None

    def _share(self, wait: Wait, report: Report) -> Report:
        """Take over the lines of the first rank that has said the same ranks are missing there."""
        if not report.missing:
            return report
        key = f"lines/{wait.place}/{wait.step}/{wait.ranks}/{report.missing}"[:_LONGEST_KEY]
        if (told := self._read_lines(key)) is None:
            self._board.leave(key, {"lines": list(report.lines), "time": time.time()})
            # Of those that leave theirs at the same time the last one holds.
            time.sleep(_POLL_SECONDS)
            told = self._read_lines(key)
        return report if told is None else Report(report.missing, report.waited, told)

    def _read_lines(self, key: str) -> tuple[str, ...] | None:
        word = (self._board.read([key]) or {}).get(key)
        if word is None or abs(time.time() - word["time"]) > _SAME_FAILURE_SECONDS:
            return None
        return tuple(word["lines"])


def _rank_0_holds(store: Any) -> bool:
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    is_tcp = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    return is_tcp and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def print_to_stderr(text: str) -> None:
    """Write to standard error, even if it is closed or replaced."""
    # Closed, a pipe that nobody reads, or something of the program's own, which may raise anything.
    with suppress(Exception), apart_from_forks():
        stream = sys.stderr
        if stream is not None:
            stream.write(text)
            stream.flush()
