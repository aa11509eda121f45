"""Looks at this rank repeatedly, and knows where it stands, since when, and where it waits."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

from .activity import Activity
from .report import this_host
from .stack import BACKWARD, Position, Progress, Stand, has_run, read_position, read_stand
from .status import Status, Wait

# What wakes up so much later than it wanted to was stopped, and with it perhaps all ranks. Seconds.
_STOPPED_SECONDS = 1.0


class Witness:
    """Looks at the thread that trains."""

    def __init__(self, activity: Activity, rank: int, ranks: int) -> None:
        # Of the thread, at the last look.
        self._stand: Stand | None = None
        self._activity = activity
        self._rank = rank
        self._everyone = tuple(range(ranks))
        # Time in which this process ran; it stands still where that was stopped.
        self._awake = 0.0
        self._looked = time.monotonic()
        self._stands_since = 0.0
        self._progress = Progress(None)
        # Of each module: its steps with all ranks, when the last one was, and when the one before it was.
        self._steps: list[tuple[int | None, float, float]] = []
        # Where this rank waits for sure, and since when.
        self._known: tuple[tuple[str, tuple[int, ...], int], float] | None = None

    def look(self, expected_seconds: float) -> None:
        """Look at the thread. Called at fixed intervals; a longer gap means that this process was stopped."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        self._awake += passed if passed < expected_seconds + _STOPPED_SECONDS else expected_seconds
        # What has wrapped the module need not live as long as what trains it.
        stand, progress = read_stand(self._activity.thread) or read_stand(_main_thread()), self._activity.progress()
        before = self._stand
        if stand is None or before is None or stand.mark != before.mark or has_run(self._progress, progress):
            self._stands_since = self._awake
        self._stand, self._progress = stand, progress
        self._notice_steps()

    def find_wait(self) -> Wait | None:
        """Return where this rank waits, and for how long it has done so while this process ran."""
        known = self._activity.known_wait()
        if known is not None:
            return self._correct(known)
        self._known = None
        stand = self._stand
        if stand is None or stand.waits_in is None:
            return None
        modules = list(self._activity.modules)
        place, steps = stand.waits_in, 0
        if place in (BACKWARD, "forward"):
            steps = self._activity.steps()
            place = f"{place} of {modules[0].name}" if len(modules) == 1 else place
        ranks = modules[0].ranks if modules else self._everyone
        return Wait(place, ranks, self._awake - self._stands_since, step=steps)

    def is_brisk(self, seconds: float) -> bool:
        """Return whether every module has had two steps with all ranks within so many seconds, and nothing has failed.

        Then nobody waits for this rank. A forward pass alone proves nothing: it may be one of an evaluation.
        """
        steady = all(self._awake - earlier < seconds for _, _, earlier in self._steps)
        return bool(self._steps) and steady and self._activity.failed is None

    def make_status(self, call: int) -> Status:
        """Return what this rank does now; any thread may call this."""
        position, before = self.read_position(), self._stand
        stood = position is not None and before is not None and position.mark == before.mark
        frames, ended_at = () if position is None else position.frames, self._activity.ended_at
        return Status(
            rank=self._rank,
            call=call,
            host=this_host(),
            pid=os.getpid(),
            steps=self._activity.steps(),
            phase="" if position is None else position.phase,
            seconds=self._awake - self._stands_since if stood else 0.0,
            wait=self.find_wait(),
            failed=self._activity.failed,
            frames=frames if ended_at is None else ended_at,
            inside=None if position is None else position.inside,
            is_ending=ended_at is not None,
            remarks=tuple(line for remark in list(self._activity.remarks) for line in remark()),
        )

    def read_position(self) -> Position | None:
        """Read where the thread is now."""
        return read_position(self._activity.thread) or read_position(_main_thread())

    def _correct(self, known: Wait) -> Wait:
        key, since = (known.place, known.ranks, known.step), self._awake - known.seconds
        before = self._known  # which another thread may set
        if before is None or before[0] != key:
            # It began after the last look, whatever the clock says.
            since = max(since, self._awake - 2 * _STOPPED_SECONDS)
        elif since < before[1] + _STOPPED_SECONDS:
            # The same wait, to which a stop of the process does not count; otherwise another one at the same place.
            since = before[1]
        self._known = key, since
        return replace(known, seconds=max(0.0, self._awake - since))

    def _notice_steps(self) -> None:
        modules = list(self._activity.modules)
        counts = [module.agreed_steps() if len(module.ranks) == len(self._everyone) else None for module in modules]
        if len(counts) != len(self._steps):
            self._steps = [(count, self._awake, float("-inf")) for count in counts]
            return
        for i, (count, (steps, last, _)) in enumerate(zip(counts, self._steps, strict=True)):
            if count is not None and count != steps:
                self._steps[i] = count, self._awake, last if count - 1 == steps else self._awake


def _main_thread() -> int:
    return threading.main_thread().ident or 0
