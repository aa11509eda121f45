"""What a rank says of itself when somebody waits: where it waits, or what it does instead."""

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
        place: what the ranks have to come to, as the user calls it: a function, or "backward of Net".
        ranks: those of the group, as ranks of the world.
        seconds: for how long.
        step: in which step, if it is in one; else 0.
        call: if it is in a function that every rank has to call: the how-manieth call of it; else 0.
        timed_out: if it has failed: with a timeout, and not because a connection was lost.
    """

    place: str
    ranks: tuple[int, ...]
    seconds: float
    step: int = 0
    call: int = 0
    timed_out: bool = True

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Wait:
        """Make one of what JSON made of it."""
        return cls(**{**fields, "ranks": tuple(fields["ranks"])})

    def is_met_by(self, other: Wait) -> bool:
        """Say whether a rank with that other wait is where this one waits."""
        if self.ranks != other.ranks:
            return False
        if self.place == other.place:
            return True
        # What only the stack tells is less than what the engine knows.
        kinds = {self.place.partition(" of ")[0], other.place.partition(" of ")[0]}
        return kinds == {BACKWARD} and BACKWARD in (self.place, other.place)


@dataclass(frozen=True, slots=True)
class Status:
    """One rank at one moment.

    Attributes:
        rank: of the world.
        call: the number of the call that it answers.
        host: its machine.
        pid: its process.
        steps: how many synchronised forward passes it has begun.
        phase: what it does, in words, as in "forward of vision.blocks.3".
        seconds: for how long it has stood there.
        wait: what it waits for now; None if nothing.
        failed: its last wait that failed, if it has called nothing else since; else None.
        frames: the innermost lines of the user's code, the innermost first.
        inside: the innermost line of all, if that is somebody else's.
        error: what has ended its program, or None.
        is_ending: its program ends with an error, that of a failed wait perhaps.
        remarks: what else is known of it, a line each.
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
        """Make one of what JSON made of :meth:`to_dict`."""
        waits = {name: None if fields[name] is None else Wait.read(fields[name]) for name in ("wait", "failed")}
        lists = {name: tuple(fields[name]) for name in ("frames", "remarks")}
        return cls(**{**fields, **lists, **waits})

    def comes_to(self, wait: Wait) -> bool:
        """Say whether this rank is where that wait is for it."""
        return self.wait is not None and self.error is None and wait.is_met_by(self.wait)

    def came_to(self, wait: Wait) -> bool:
        """Say whether this rank was there, and its wait failed like that one."""
        return self.failed is not None and wait.is_met_by(self.failed)
