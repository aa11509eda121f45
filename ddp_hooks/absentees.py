"""Who did not come: which ranks a collective function waits for in vain, asked before it waits and after it failed.

Before: a rank that never comes says nothing, and a collective without it lasts until the group's timeout, or mixes with
whatever that rank sends next. So where some ranks may not know of a place, they meet in the store of their process
group first (:class:`Visit`): each leaves word that it is there, and one of them, the last to come or the first to lose
patience, writes down how it ended. That is read by all, so they agree, those that come later included. Nobody has to
lose patience where the ranks pass something together on their way, as the construction of a DDP module, which waits for
all of them. Each leaves word before it that it will come. What lies between makes sure that the word has been left, so
whoever has not left it by then will not come, and those that have will.

After: a rank that waits for another knows only that nothing arrived: gloo reports a timeout or a closed connection, a
store that a key is missing. The reason is nearly always that a rank did not call the function, called another one, or
came after the timeout. So a rank whose wait has failed (:func:`naming_absent_ranks`) leaves a note in the store of the
default process group: where it waited, and for how long. It gives the others a moment to leave theirs, since they fail
at about the same time, and reads them. While all goes well nothing is written, read or sent. The store may be gone by
then, with the process that held it. So nothing here is waited for without a bound, and what cannot be learned is left
out of the error.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .errors import RanksAbsentError
from .groups import check_in_use, store_of
from .wording import describe_ranks, short_list

# --- before anybody waits

# The place where ranks meet that make a module under `enable`.
ENABLE = "enable"
# How long `register` waits for ranks that took another way to their module, and may have gone on with it.
REGISTERING_SECONDS = 10.0

# How often the store is asked: soon at first, since the others are nearly there, then seldom.
_FIRST_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.2
# For ranks that are on their way for sure: they may have a large model to receive first.
SURE_SECONDS = 900.0
# For ranks that have left word elsewhere in the program, as it seems.
UNSURE_SECONDS = 5.0


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
        self._taken_back = False
        if self._ranks == 1:
            return
        self._places = _places(group, place)
        # Counted in the store, because another group may have had this one's name before.
        number = self._places.add(f"visits/{self._rank}", 1)
        self._places.add("visits", 1)
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
        self._places.add("visits", -1)

    def meet(self, patience_seconds: float, *, passed_together: bool = False) -> tuple[int, ...]:
        """Come to the place, and wait for the others.

        Args:
            patience_seconds: how long to wait for them.
            passed_together: since this visit began, this rank has waited for every rank, somewhere where those that
                come here had begun theirs. Then it is known who comes, and nobody else is waited for.

        Returns:
            The ranks (of the group) that did not come in time; the same on every rank that comes, also on one that
            comes too late. Empty if all have come.
        """
        if self._ranks == 1:
            return ()
        store = self._store
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

    Those that have may train already, on a module that was refused there. Otherwise this costs two requests to the
    store.

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
    if places.add("visits", 0) == ranks * visits:
        return
    absent = Visit(group, "register").meet(REGISTERING_SECONDS)
    if absent:
        raise RanksAbsentError(
            f"{function}: expected every rank to call it, waited {REGISTERING_SECONDS:g} s for {describe_ranks(absent)}"
            " in vain. Some ranks have made modules under ddp_hooks.enable() and others have not: call either of the "
            "two on every rank"
        )


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


# --- after a wait has failed

# How long the others may take to notice the same failure.
GRACE_SECONDS = 2.0
# A store that has not answered by then is taken for dead.
_STORE_SECONDS = 3.0
# The process that holds the store may end with its error; the others read the last note meanwhile.
_LINGER_SECONDS = 0.3
_POLL_SECONDS = 0.05
# What gloo, torch's stores and NCCL say of a rank that does not come, and of one that goes.
_WAITED_IN_VAIN = re.compile(
    r"time[d]?[ -]?out|connection (closed|reset|refused)|broken pipe|pair closure|socket|closed by peer", re.IGNORECASE
)

# Whether this process left a note that is out of date as soon as a function is called again.
_note_left = False


@dataclass(frozen=True, slots=True)
class _Note:
    """Where a rank waited in vain: the function, the ranks of its group, and for how long."""

    function: str
    ranks: tuple[int, ...]
    seconds: float

    @classmethod
    def read(cls, text: bytes) -> _Note:
        fields = json.loads(text)
        return cls(str(fields["function"]), tuple(fields["ranks"]), float(fields["seconds"]))


@contextmanager
def naming_absent_ranks(group: dist.ProcessGroup, function: str) -> Iterator[None]:
    """Put it around the first collective of a function that every rank has to call.

    Args:
        group: the process group whose ranks have to call the function. What is inside may use another one, as long as
            it has the same ranks.
        function: what the user called.

    Raises:
        RanksAbsentError: what is inside failed with a timeout or a lost connection, which is the error's cause. Other
            errors pass unchanged.
    """
    if _note_left:
        _take_note_back()
    started = time.monotonic()
    try:
        yield
    except RanksAbsentError:
        raise
    except RuntimeError as error:
        if not waited_in_vain(error):
            raise
        message = _explain(group, function, time.monotonic() - started, error)
        if message is None:
            raise
        raise RanksAbsentError(message) from error


def waited_in_vain(error: RuntimeError) -> bool:
    """Say whether an error is one of a rank that does not come, or of a connection that is lost."""
    return isinstance(error, dist.DistError) or _WAITED_IN_VAIN.search(str(error)) is not None


def _explain(group: dist.ProcessGroup, function: str, seconds: float, error: RuntimeError) -> str | None:
    """Ask the store who waited where; None if this rank is not in the group any more, so that nothing can be said."""
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
        own = dist.get_rank()
    except (RuntimeError, ValueError, KeyError):
        return None
    notes = _exchange_notes(own, _Note(function, ranks, seconds))
    return describe(function, seconds, ranks, own, notes, str(error))


def describe(
    function: str,
    seconds: float,
    ranks: Sequence[int],
    own: int,
    notes: dict[int, _Note] | None,
    error: str,
) -> str:
    """Say in words what the notes of the ranks tell.

    Args:
        function: what this rank waited in.
        seconds: for how long.
        ranks: the ranks of the group, as ranks of the world.
        own: this rank.
        notes: of each rank that left one, its note; ``None`` if the store did not answer.
        error: what the process group said.
    """
    everyone = f"every rank of the group ({short_list(ranks)}) has to call it, in the same order"
    cause = f"The process group said: {' '.join(error.split())[:300]}"
    waited = f"{function}: waited {seconds:.1f} s"
    if notes is None:
        return (
            f"{waited} in vain. Which ranks did not call it is not known, because the store of the process group does "
            f"not answer any more; {everyone}. Look for a rank that ended first. {cause}"
        )
    others = [rank for rank in ranks if rank != own]
    elsewhere = {
        rank: notes[rank]
        for rank in others
        if rank in notes and (notes[rank].function != function or notes[rank].ranks != tuple(ranks))
    }
    silent = [rank for rank in others if rank not in notes]
    if elsewhere or silent:
        absent = sorted([*elsewhere, *silent])
        details = [_describe_elsewhere(rank, note, function) for rank, note in elsewhere.items()]
        if silent:
            details.append(f"{describe_ranks(silent)} left no word: busy with something else, or ended")
        return (
            f"{waited} for {describe_ranks(absent)}, which did not call it ({'; '.join(details)}); {everyone}. {cause}"
        )
    waits = {own: seconds} | {rank: notes[rank].seconds for rank in others}
    first, last = max(waits, key=lambda rank: waits[rank]), min(waits, key=lambda rank: waits[rank])
    if waits[first] - waits[last] > 0.5 * waits[first]:
        return (
            f"{waited}. Every rank called it, but rank {last} came at least {waits[first] - waits[last]:.1f} s after "
            f"rank {first}, which had given up: let the ranks call it at about the same time, or give the process "
            f"group a longer timeout. {cause}"
        )
    return f"{waited}. Every rank of the group called it, so the connection between them failed. {cause}"


def _describe_elsewhere(rank: int, note: _Note, function: str) -> str:
    if note.function == function:
        return f"rank {rank} waits in it for another group, of the ranks {short_list(note.ranks)}"
    return f"rank {rank} waits in {note.function}"


def _exchange_notes(own: int, note: _Note) -> dict[int, _Note] | None:
    """Leave this rank's note, and read those that the others of its group leave within the grace."""
    global _note_left
    notes: dict[int, _Note] = {}
    answered = threading.Event()

    def exchange() -> None:
        store = _store()
        if store is None:
            return
        store.set(str(own), json.dumps(asdict(note)))
        answered.set()
        missing = [rank for rank in note.ranks if rank != own]
        deadline = time.monotonic() + GRACE_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in [rank for rank in missing if store.check([str(rank)])]:
                notes[rank] = _Note.read(store.get(str(rank)))
                missing.remove(rank)
            time.sleep(_POLL_SECONDS)
        time.sleep(_LINGER_SECONDS)

    _note_left = True
    _run_bounded(exchange, GRACE_SECONDS + _LINGER_SECONDS + _STORE_SECONDS)
    return dict(notes) if answered.is_set() else None


def _take_note_back() -> None:
    global _note_left

    def take_back() -> None:
        store = _store()
        if store is not None:
            store.delete_key(str(dist.get_rank()))

    _run_bounded(take_back, _STORE_SECONDS)
    _note_left = False


def _run_bounded(function: Callable[[], None], seconds: float) -> None:
    """Run what may block in a dead store; what it has found by then counts, and its errors do not."""

    def run() -> None:
        # A store that is gone raises, each kind another error.
        with suppress(Exception):
            function()

    thread = threading.Thread(target=run, name="ddp_hooks absentees", daemon=True)
    thread.start()
    thread.join(seconds)


def _store() -> Any:
    """Return the default group's store, in which ranks that wait on different groups find each other's notes."""
    store = distributed_c10d._get_default_store()
    return None if store is None else dist.PrefixStore("ddp_hooks/absentees", store)  # type: ignore[attr-defined]
