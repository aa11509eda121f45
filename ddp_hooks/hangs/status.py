"""The status of a rank: where it waits, or what it does instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .stack import BACKWARD

# The place of a wait when nothing but its error is known.
SOME_COLLECTIVE = "a collective"


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for other ranks.

    Attributes:
        place: where the ranks have to meet, in the user's words: a function, or "backward of Net".
        ranks: the ranks of the group, as ranks of the world.
        seconds: the length of the wait.
        step: the step in which it waits; 0 outside of steps.
        call: the number of the call, in a function that every rank has to call; else 0.
        timed_out: whether a failed wait has timed out, and not lost a connection.
    """

    place: str
    ranks: tuple[int, ...]
    seconds: float
    step: int = 0
    call: int = 0
    timed_out: bool = True

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Wait:
        """Create a wait from its JSON values."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})

    def is_met_by(self, other: Wait) -> bool:
        """Return whether a rank with that other wait is in the same place."""
        if self.ranks != other.ranks:
            return False
        if self.place == other.place:
            return True
        # What only the stack tells is less than what the engine knows.
        kinds = {self.place.partition(" of ")[0], other.place.partition(" of ")[0]}
        return kinds == {BACKWARD} and BACKWARD in (self.place, other.place)


@dataclass(frozen=True, slots=True)
class Status:
    """The status of one rank at one moment.

    Attributes:
        rank: the rank in the world.
        call: the number of the call that it answers.
        host: the name of its machine.
        pid: the id of its process.
        steps: the number of synchronised forward passes that it has begun.
        phase: what it does, in words, as in "forward of vision.blocks.3".
        seconds: how long it has been there.
        wait: its current wait, or None.
        failed: its last wait that failed, if it has called nothing else since; else None.
        frames: the innermost lines of the user's code, innermost first.
        inside: the innermost line, if it is not in the user's code.
        error: the error that has ended its program, or None.
        is_ending: whether its program is ending with an error, perhaps that of a failed wait.
        remarks: more lines about this rank.
    """

    rank: int
    call: int
    host: str
    pid: int
    steps: int
    phase: str
    seconds: float
    wait: Wait | None = None
    failed: Wait | None = None
    frames: tuple[str, ...] = ()
    inside: str | None = None
    error: str | None = None
    is_ending: bool = False
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Status:
        """Create a status from the values of :meth:`to_dict`."""
        waits = {name: None if fields[name] is None else Wait.read(fields[name]) for name in ("wait", "failed")}
        lists = {name: tuple(fields[name]) for name in ("frames", "remarks")}
        return cls(**{**fields, **lists, **waits})

    def comes_to(self, wait: Wait) -> bool:
        """Return whether this rank is in the place where that wait expects it."""
        return self.wait is not None and self.error is None and wait.is_met_by(self.wait)

    def came_to(self, wait: Wait) -> bool:
        """Return whether this rank was in that place, and its wait failed in the same way."""
        return self.failed is not None and wait.is_met_by(self.failed)
