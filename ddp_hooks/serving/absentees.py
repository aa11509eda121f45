"""Who did not come: which ranks a collective function is missing, asked before it waits and after it has failed.

Before: a rank that never comes says nothing, and a collective without it lasts until the group's timeout, or mixes with
whatever that rank sends next. So where some ranks may not know of a place, they meet in the store of their process
group first (:class:`Visit`): each leaves word that it is there, and one of them, the last to come or the first to lose
patience, writes down how it ended. That is read by all, so they agree, those that come later included. Nobody has to
lose patience where the ranks pass something together on their way, as the construction of a DDP module, which waits for
all of them. Each leaves word before it that it will come. What lies between makes sure that the word has been left, so
whoever has not left it by then will not come, and those that have will.

While it waits, and after: a rank that waits for another knows only that nothing arrived: gloo reports a timeout or a
closed connection, a store that a key is missing. The reason is nearly always that a rank did not call the function,
called another one, or came after the timeout. So around the first collective of each function
(:func:`naming_absent_ranks`) stands for what this rank waits, and :mod:`ddp_hooks.hangs` tells who is missing.
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

# --- before anybody waits

# The place where ranks meet that make a module under `enable`.
ENABLE = "enable"
# What to call a place where it is waited for.
_WORDS = {ENABLE: "the construction of a DDP module under enable()"}
# How long `register` waits for ranks that took another way to their module, and may have gone on with it.
REGISTERING_SECONDS = 10.0

# How often the store is asked: soon at first, since the others are nearly there, then seldom.
_FIRST_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.2
# For ranks that are on their way for sure: they may have a large model to receive first.
SURE_SECONDS = 900.0
# For ranks that have left word elsewhere in the program, as it seems.
UNSURE_SECONDS = 5.0
# For all ranks, if this one has failed.
FAILED_SECONDS = 5.0


class Visit:
    """A visit of this rank to a place, from the moment from which others may know of it.

    Ranks meet on their first visits to a place, on their second ones, and so on.

    Args:
        group: the process group.
        place: what the ranks come to; a part of names in the store.

    Attributes:
        group: the same.
    """

    def __init__(self, group: dist.ProcessGroup, place: str) -> None:
        self.group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._place = place
        self._taken_back = False
        if self._ranks == 1:
            return
        self._places = _places(group, place)
        # Counted in the store, because another group may have had this one's name before.
        number = self._number = self._places.add(f"visits/{self._rank}", 1)
        self._places.add(f"ranks with {number} visits", 1)
        self._store = dist.PrefixStore(str(number), self._places)  # type: ignore[attr-defined]
        self._where = _collectives_so_far(group)
        self._store.set(f"coming/{self._rank}", "yes")
        self._store.add(f"coming at {self._where}", 1)

    def take_back(self) -> None:
        """Undo it: this rank does not come, because the others cannot come either."""
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
            passed_together: since this visit began, this rank has waited for every rank, somewhere where those that
                come here had begun theirs. Then it is known who comes, and nobody else is waited for.
            problem: what :meth:`problems` is to say of this rank.

        Returns:
            The ranks (of the group) that did not come in time; the same on every rank that comes, also on one that
            comes too late. Empty if all have come.
        """
        if self._ranks == 1:
            return ()
        watcher.begin()
        function = self._place.partition("/")[0]
        with activity.waiting(_WORDS.get(function, function), _ranks_of(self.group)):
            return self._meet(patience_seconds, passed_together, problem)

    def problems(self) -> list[str]:
        """Return, once every rank has come, the problem of each that has one, with its rank."""
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
        """End it if somebody will not come for sure; otherwise return how long to wait."""
        store = self._store
        if store.add(f"coming at {self._where}", 0) == self._ranks:
            return SURE_SECONDS
        staying_away = [other for other in range(self._ranks) if not _is_coming(store, other)]
        if staying_away:
            _end(store, staying_away)
        return UNSURE_SECONDS


def meet_to_register(group: dist.ProcessGroup, function: str) -> None:
    """Make sure that every rank registers, where some have made modules under `enable` and others have not.

    Those that have may train already, on a module that was refused there. Otherwise this costs three requests to
    the store.

    Args:
        group: the module's process group, whose ranks have waited for each other when it was made.
        function: what every rank should have called.

    Raises:
        ValueError: the group was destroyed.
        RanksAbsentError: ranks did not come; on every rank that did.
    """
    check_in_use(group)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    places = _places(group, ENABLE)
    visits = int(places.add(f"visits/{dist.get_rank(group)}", 0))
    # Of so many visits at least, each rank is counted once. A sum of all ranks' would not do: it may be that of ranks
    # that have made one more, and one less.
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
    """Make sure that every rank closes its state, before any of them does.

    Not by a collective: where one has failed, the next one on the same group may fail, too, and a rank that does not
    come would take it for something else.

    Args:
        group: the process group, which is in use.
        name: of what is closed; the same on every rank.
        problem: what keeps this rank from it, or None.
        timeout_seconds: how long to wait for the others. If this rank is about to end with an error, the others may
            wait for it elsewhere; then they have :data:`FAILED_SECONDS`, and nothing is raised about those that do not
            come.

    Raises:
        RefusedError: some rank has a problem; on every rank.
        RanksAbsentError: ranks did not come; on every rank that did.
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
        # Whoever held the store has gone.
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
    # The same on every rank at the same place of a program, and another one later. Not every backend counts.
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def _is_coming(store: Any, rank: int) -> bool:
    word = f"coming/{rank}"
    return bool(store.check([word])) and store.get(word) == b"yes"


def _end(store: Any, absent: list[int]) -> None:
    # Two may find so at the same time; the others wait for what the first one writes.
    if store.add("ended", 1) == 1:
        store.set("absent", " ".join(map(str, absent)))


# --- while and after somebody waits


@contextmanager
def naming_absent_ranks(group: dist.ProcessGroup, function: str) -> Iterator[None]:
    """Put it around the first collective of a function that every rank has to call.

    While this rank waits in it for long, the ranks that are missing are named on standard error, and when it fails, in
    the error.

    Args:
        group: the process group whose ranks have to call the function. What is inside may use another one, as long as
            it has the same ranks.
        function: what the user called.

    Raises:
        RanksAbsentError: what is inside failed with a timeout or a lost connection, which is the error's cause. Other
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
        # A rank that is not in the group any more can say nothing of it.
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
    """Say in words who did not come.

    Args:
        function: what this rank waited in.
        seconds: for how long.
        ranks: the ranks of the group, as ranks of the world.
        own: this rank.
        report: what is known of the others; ``None`` if the store did not answer.
        error: what the process group said; empty if it was not asked.
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
