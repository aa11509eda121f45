"""How a step divides into computing and sending, how fast the link is, and what fewer bytes would make of the step.

The model: buckets leave in order, each when it is complete on every rank and the one before is through, and a link of a
constant rate carries them one after the other::

    end(0) = ready(0) + bytes(0) / rate,    end(b) = max(end(b - 1), ready(b)) + bytes(b) / rate

``ready`` is measured, and the rate is the one with which the last bucket of plain DDP ends when the step was measured
to end. The estimate for a policy is the same sum with the bytes that it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .recorder import Step


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one step, seen from all ranks, in seconds since the step before ended.

    Attributes:
        ready: when each bucket was complete on every rank.
        computed: when the slowest rank had all its gradients.
        ended: when DDP had finalised, the mean of the ranks.
        dense_bytes: of each bucket.
    """

    ready: tuple[float, ...]
    computed: float
    ended: float
    dense_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """How a step divides, the median of the steps but the first, which warms up.

    Attributes:
        step_seconds: what a step takes.
        compute_seconds: until the slowest rank had all its gradients.
        exposed_seconds: from then to the end: sending that nothing hides.
        bytes_per_second: what the link carries, counted in bytes handed to collectives; None with one rank.
        search_seconds: what DDP does between the model's forward pass and the end of its own, on the slowest rank.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes_per_second: float | None
    search_seconds: float


def put_together(steps: Sequence[Step], dense: tuple[int, ...]) -> StepTimes:
    """Return the times of one step; ``steps`` are the ranks', ``dense`` the bytes of each bucket."""
    ready: list[float] = []
    for moments in zip(*(step.ready for step in steps), strict=True):
        # A bucket does not leave before those in front of it.
        ready.append(max(max(moments), ready[-1] if ready else 0.0))
    ended = sum(step.seconds for step in steps) / len(steps)
    return StepTimes(tuple(ready), max(step.gradients_seconds for step in steps), ended, dense)


def end_of_step(ready: Sequence[float], sizes: Sequence[float], seconds_per_byte: float) -> float:
    """Return when the last bucket is through: the module's formula.

    Args:
        ready: when each bucket is complete. Seconds.
        sizes: what leaves with each. There may be one more, of what leaves after backward. Bytes.
        seconds_per_byte: of the link.
    """
    end = 0.0
    last = ready[-1] if ready else 0.0
    for number, size in enumerate(sizes):
        end = max(end, ready[number] if number < len(ready) else last) + size * seconds_per_byte
    return max(end, last)


def fit_link(times: StepTimes) -> float:
    """Return the seconds per byte with which plain DDP's step ends when it ended; 0 if nothing was sent."""
    if sum(times.dense_bytes) == 0 or not times.ready:
        return 0.0
    low, high = 0.0, max(times.ended - times.ready[0], 0.0) / max(sum(times.dense_bytes), 1) * 2
    for _ in range(50):
        middle = (low + high) / 2
        if end_of_step(times.ready, times.dense_bytes, middle) < times.ended:
            low = middle
        else:
            high = middle
    return high


def divide(steps: Sequence[StepTimes], searches: Sequence[float], ranks: int) -> Division:
    """Summarise the steps.

    Args:
        steps: each step's times.
        searches: for each step, how long DDP took after the model's forward pass, on the slowest rank. Seconds.
        ranks: how many there are.
    """
    steady = steps[1:] or steps
    pace = median(fit_link(times) for times in steady)
    step_seconds = median(times.ended for times in steady)
    compute_seconds = min(median(times.computed for times in steady), step_seconds)
    return Division(
        step_seconds,
        compute_seconds,
        step_seconds - compute_seconds,
        None if ranks == 1 or pace == 0 else 1 / pace,
        median(searches[1:] or searches),
    )


def estimate(steps: Sequence[StepTimes], sizes: Sequence[Sequence[float]], division: Division) -> float:
    """Return what a step would take with other bytes: the median over the steps but the first. Seconds.

    Args:
        steps: each step's times.
        sizes: for each step, what leaves with each bucket, in bytes of an all-reduce.
        division: what was measured.
    """
    if division.bytes_per_second is None:
        return division.step_seconds
    pace = 1 / division.bytes_per_second
    pairs = list(zip(steps, sizes, strict=True))
    # Against the model's own answer for plain DDP, so that what it leaves out stays in.
    saved = median(
        end_of_step(times.ready, times.dense_bytes, pace) - end_of_step(times.ready, size, pace)
        for times, size in pairs[1:] or pairs
    )
    return min(max(division.step_seconds - saved, 0.0), division.step_seconds + abs(saved))
