"""Finds the ranks that do not call a collective function, before it waits for them and after it has failed.

Before: a collective lasts until the group's timeout if some rank never calls it, or matches whatever that rank sends
next. So ranks meet in the store of their process group (:class:`Visit`) if some of them may not come. Each rank writes
that it is there, and one rank, the last to come or the first to lose patience, writes down the outcome. All ranks read
it, including late ones, so they agree. Nobody has to lose patience if the ranks first do something that waits for all
of them, such as constructing a DDP module: each rank announces its visit before that, so afterwards every rank knows
which ranks will come.

While waiting and afterwards: a rank that waits for another sees only that nothing arrives. gloo reports a timeout or a
closed connection, and a store a missing key. Nearly always, some rank did not call the function, called another one, or
came after the timeout. So :func:`naming_absent_ranks` records what this rank waits for around the first collective of
each function, and :mod:`ddp_hooks.hangs` names the missing ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..errors import RanksAbsentError, RefusedError
from ..hangs import watcher
from ..hangs.activity import activity
from ..hangs.report import Report
from ..wording import describe_ranks, short_list
from .groups import check_in_use, store_of

# --- before a collective

# The meeting place of ranks that make a module under `enable`.
ENABLE = "enable"
# The names of places in reports.
_WORDS = {ENABLE: "the construction of a DDP module under enable()"}
# How long `register` waits for ranks that may be training already on a module that `enable` did not serve.
REGISTERING_SECONDS = 10.0

# How often to ask the store: soon at first, because the others are usually close, then rarely.
_FIRST_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.2
# For ranks that are certain to come: they may have to receive a large model first.
SURE_SECONDS = 900.0
# For ranks that seem to be elsewhere in the program.
UNSURE_SECONDS = 5.0
# For all ranks, if this one is failing.
FAILED_SECONDS = 5.0


class Visit:
    """Announces that this rank will come to a place, so that other ranks can count on it.

    The n-th visits of all ranks to a place belong together.

    Args:
        group: the process group.
        place: the name of the place; part of keys in the store.

    Attributes:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup, place: str) -> None:
        self.group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._place = place
        self._taken_back = False
        if self._ranks == 1:
            return
        self._places = _places(group, place)
        # Counted in the store, because an earlier group may have had the same name.
        number = self._number = self._places.add(f"visits/{self._rank}", 1)
        self._places.add(f"ranks with {number} visits", 1)
        self._store = dist.PrefixStore(str(number), self._places)  # type: ignore[attr-defined]
        self._where = _collectives_so_far(group)
        self._store.set(f"coming/{self._rank}", "yes")
        self._store.add(f"coming at {self._where}", 1)

    def take_back(self) -> None:
        """Withdraw the announcement: this rank does not come, because the others cannot come either."""
        if self._ranks == 1 or self._taken_back:
            return
        self._taken_back = True
        self._store.set(f"coming/{self._rank}", "no")
        self._store.add(f"coming at {self._where}", -1)
        self._places.add(f"visits/{self._rank}", -1)
        self._places.add(f"ranks with {self._number} visits", -1)

    def meet(
        self, patience_seconds: float, *, passed_together: bool = False, problem: str | None = None
    ) -> tuple[int, ...]:
        """Come to the place, and wait for the others.

        Args:
            patience_seconds: how long to wait for them.
            passed_together: since the announcement, this rank has waited for every rank, after each had announced
                its own visit, if any. Then the announcements are complete, and no other rank is waited for.
            problem: the problem of this rank for :meth:`problems`, or None.

        Returns:
            The ranks of the group that did not come in time. It is the same on every rank that comes, even too late.
            Empty if all ranks came.
        """
        if self._ranks == 1:
            return ()
        watcher.begin()
        function = self._place.partition("/")[0]
        with activity.waiting(_WORDS.get(function, function), _ranks_of(self.group)):
            return self._meet(patience_seconds, passed_together, problem)

    def problems(self) -> list[str]:
        """Return the problems of all ranks by rank, once every rank has come."""
        if self._ranks == 1 or self._store.add("problems", 0) == 0:
            return []
        having = [rank for rank in range(self._ranks) if self._store.check([f"problem/{rank}"])]
        return [f"rank {rank}: {self._store.get(f'problem/{rank}').decode()}" for rank in having]

    def _meet(self, patience_seconds: float, passed_together: bool, problem: str | None) -> tuple[int, ...]:
        store = self._store
        if problem is not None:
            store.set(f"problem/{self._rank}", problem)
            store.add("problems", 1)
        store.set(f"here/{self._rank}", "")
        if store.add("here", 1) == self._ranks:
            _end(store, [])
        elif passed_together:
            patience_seconds = self._ask_who_comes()
        deadline, pause = time.monotonic() + patience_seconds, _FIRST_POLL_SECONDS
        while not store.check(["absent"]):
            if time.monotonic() >= deadline:
                _end(store, [other for other in range(self._ranks) if not store.check([f"here/{other}"])])
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        return tuple(int(other) for other in store.get("absent").decode().split())

    def _ask_who_comes(self) -> float:
        """Write down the outcome if some rank will certainly not come; otherwise return how long to wait."""
        store = self._store
        if store.add(f"coming at {self._where}", 0) == self._ranks:
            return SURE_SECONDS
        staying_away = [other for other in range(self._ranks) if not _is_coming(store, other)]
        if staying_away:
            _end(store, staying_away)
        return UNSURE_SECONDS


def meet_to_register(group: dist.ProcessGroup, function: str) -> None:
    """Make sure that every rank registers, even if only some ranks called :func:`ddp_hooks.enable`.

    A rank whose module ``enable`` did not serve may be training already. Usually this costs three requests to the
    store.

    Args:
        group: the module's process group, whose ranks waited for each other when the module was made.
        function: the function that every rank should call.

    Raises:
        ValueError: the group was destroyed.
        RanksAbsentError: on every rank that came, if other ranks did not.
    """
    check_in_use(group)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    places = _places(group, ENABLE)
    visits = int(places.add(f"visits/{dist.get_rank(group)}", 0))
    # Each rank is counted once for each number of visits. A plain sum of visits would not do: one rank may have made
    # one visit more, and another one less.
    reached, beyond = (int(places.add(f"ranks with {number} visits", 0)) for number in (visits, visits + 1))
    if beyond == 0 and reached == (ranks if visits > 0 else 0):
        return
    absent = Visit(group, "register").meet(REGISTERING_SECONDS)
    if absent:
        raise RanksAbsentError(
            f"{function}: expected every rank to call it, but {describe_ranks(absent)} did not within "
            f"{REGISTERING_SECONDS:g} s. Some ranks made their modules under ddp_hooks.enable() and others did not: "
            "use one of the two on every rank"
        )


def meet_to_close(group: dist.ProcessGroup, name: str, problem: str | None, timeout_seconds: float) -> None:
    """Make sure that every rank closes its state before any rank does.

    This uses no collective: after one has failed, the next on the same group may fail as well, and a rank that is
    elsewhere would match it with another collective.

    Args:
        group: the process group, which must be in use.
        name: the name of the state, the same on every rank.
        problem: why this rank cannot close, or None.
        timeout_seconds: how long to wait for the others. If this rank is failing, they may be waiting for it elsewhere;
            then it waits for :data:`FAILED_SECONDS` only, and raises nothing about absent ranks.

    Raises:
        RefusedError: on every rank, if some rank has a problem.
        RanksAbsentError: on every rank that came, if other ranks did not.
    """
    has_failed = sys.exc_info()[1] is not None
    activity.failed = None
    started = time.monotonic()
    report, said = None, ""
    try:
        visit = Visit(group, f"close/{name}")
        absent = visit.meet(min(timeout_seconds, FAILED_SECONDS) if has_failed else timeout_seconds, problem=problem)
        problems = [] if absent else visit.problems()
    except RuntimeError as error:
        # The process that holds the store has gone.
        absent, problems, said = tuple(range(dist.get_world_size(group))), [], str(error)
    if problems:
        raise RefusedError(f"close: refused on every rank. {'; '.join(problems)}")
    if absent and not has_failed:
        seconds, ranks = time.monotonic() - started, _ranks_of(group)
        if not said:
            report = watcher.explain("close", ranks, seconds, "timed out")
        others = [ranks[rank] for rank in absent]
        if report is not None and not report.missing and dist.get_rank() not in others:
            raise RanksAbsentError(
                f"close: timed out after {seconds:.1f} s of waiting for {describe_ranks(others)}, which called it for "
                "another state. Close several states in the same order on every rank"
            )
        raise RanksAbsentError(describe("close", seconds, ranks, dist.get_rank(), report, said))


def _places(group: dist.ProcessGroup, place: str) -> Any:
    return dist.PrefixStore(f"ddp_hooks/{place}", store_of(group))  # type: ignore[attr-defined]


def _collectives_so_far(group: dist.ProcessGroup) -> int:
    # Equal on all ranks at the same place of a program, and different later. Not every backend counts.
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def _is_coming(store: Any, rank: int) -> bool:
    word = f"coming/{rank}"
    return bool(store.check([word])) and store.get(word) == b"yes"


def _end(store: Any, absent: list[int]) -> None:
    # Two ranks may get here at the same time; only the outcome that is written first counts.
    if store.add("ended", 1) == 1:
        store.set("absent", " ".join(map(str, absent)))


# --- during and after a collective


@contextmanager
def naming_absent_ranks(group: dist.ProcessGroup, function: str) -> Iterator[None]:
    """Name missing ranks if the collective in this block waits for long, or fails.

    Put it around the first collective of a function that every rank must call. The ranks are named on standard error
    during a long wait, and in the exception if the collective fails.

    Args:
        group: the process group whose ranks must call the function. The block may use another group of the same ranks.
        function: the function that the user called.

    Raises:
        RanksAbsentError: the block failed with a timeout or a lost connection, which is the cause of this error. Other
            errors pass unchanged.
    """
    ranks = _ranks_of(group)
    activity.failed = None
    watcher.begin()
    started = time.monotonic()
    try:
        with activity.waiting(function, ranks):
            yield
    except RanksAbsentError:
        raise
    except RuntimeError as error:
        # A rank that has left the group knows nothing about it.
        if not ranks or not watcher.waited_in_vain(error):
            raise
        seconds = time.monotonic() - started
        report = watcher.explain(function, ranks, seconds, str(error))
        raise RanksAbsentError(describe(function, seconds, ranks, dist.get_rank(), report, str(error))) from error


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (RuntimeError, ValueError, KeyError):
        return ()


def describe(function: str, seconds: float, ranks: Sequence[int], own: int, report: Report | None, error: str) -> str:
    """Describe which ranks did not come.

    Args:
        function: the function in which this rank waited.
        seconds: how long it waited.
        ranks: the ranks of the group, numbered as in the default group.
        own: this rank.
        report: the known status of the other ranks; ``None`` if the store did not answer.
        error: the error of the process group; empty if there is none.
    """
    everyone = f"Every rank of the group ({short_list(ranks)}) must call it, in the same order."
    cause = f"The process group's error was: {' '.join(error.split())[:300]}" if error else ""
    how = "timed out" if not error or watcher.timed_out(error) else "lost a connection"
    failed = f"{function}: {how} after {seconds:.1f} s"
    if report is None:
        return (
            f"{failed}. The process group's store no longer answers, so the ranks that did not call it cannot be named."
            f" {everyone} Look for the rank that ended first. {cause}"
        )
    if report.missing:
        lines = "".join(f"\n  {line}" for line in report.lines)
        waiting = f"{failed} of waiting for {describe_ranks(report.missing)}, which did not call it"
        return f"{waiting}. {everyone}{lines}\n{cause}".rstrip()
    waits = {own: seconds, **report.waited}
    first, last = max(waits, key=lambda rank: waits[rank]), min(waits, key=lambda rank: waits[rank])
    if waits[first] - waits[last] > 0.5 * waits[first]:
        return (
            f"{failed}. Every rank called it, but rank {last} called it at least {waits[first] - waits[last]:.1f} s "
            f"after rank {first}, which had timed out by then. Call it at about the same time on every rank, or give "
            f"the process group a longer timeout. {cause}"
        ).rstrip()
    return f"{failed}. Every rank of the group called it, so a connection between them has failed. {cause}".rstrip()
