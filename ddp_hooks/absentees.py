"""Says which ranks did not come when a collective function waits for them in vain.

A rank that waits for another knows only that nothing arrived: gloo reports a timeout or a closed connection, a store
that a key is missing. The reason is nearly always that a rank did not call the function, called another one, or came
after the timeout. So a rank whose wait has failed leaves a note in the store of the default process group: where it
waited, and for how long. It gives the others a moment to leave theirs, since they fail at about the same time, and
reads them. All of it happens after the failure; while all goes well nothing is written, read or sent.

The store may be gone by then, with the process that held it. So nothing here is waited for without a bound, and what
cannot be learned is left out of the error.
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
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from .errors import RanksAbsentError

# How long the others may take to notice the same failure.
GRACE_SECONDS = 2.0
# A store that has not answered by then is taken for dead.
_STORE_SECONDS = 3.0
# The process that holds the store may end with its error; the others read the last note meanwhile.
_LINGER_SECONDS = 0.3
_POLL_SECONDS = 0.05
_RANKS_SHOWN = 16
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
    everyone = f"every rank of the group ({_list(ranks)}) has to call it, in the same order"
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
            details.append(f"{_ranks(silent)} left no word: busy with something else, or ended")
        return f"{waited} for {_ranks(absent)}, which did not call it ({'; '.join(details)}); {everyone}. {cause}"
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
        return f"rank {rank} waits in it for another group, of the ranks {_list(note.ranks)}"
    return f"rank {rank} waits in {note.function}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {_list(ranks)}"


def _list(ranks: Sequence[int]) -> str:
    if len(ranks) <= _RANKS_SHOWN:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _RANKS_SHOWN - 1]))}, ..., {ranks[-1]}"


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
    return None if store is None else PrefixStore("ddp_hooks/absentees", store)
