"""Divides a step into computation and communication, finds the link's rate, and estimates steps with fewer bytes.

In the model, buckets leave in order, each as soon as it is complete on every rank and the previous one has been sent. A
link with a constant rate carries them one after the other::

    end(0) = ready(0) + bytes(0) / rate,    end(b) = max(end(b - 1), ready(b)) + bytes(b) / rate

``ready`` is measured. The rate is chosen so that the last bucket of plain DDP ends when the measured step ended. The
estimate for a policy is the same sum with the policy's bytes, without the time in which DDP copies gradients into its
buckets that the policy does not move.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

import torch

from .recorder import Step
from .traffic import Traffic

# Long enough that no cache near a core holds it. Bytes.
_LONGEST_COPY = 16 << 20
_COPIES = 5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of one step, seen from all ranks, in seconds since the step before ended.

    Attributes:
        ready: when each bucket was complete on every rank.
        computed: when the slowest rank had all its gradients.
        ended: when DDP had finalised, the mean of the ranks.
        dense_bytes: of each bucket.
        copied: how much a rank had copied into buckets when each bucket was complete, the mean of the ranks. Bytes.
    """

    ready: tuple[float, ...]
    computed: float
    ended: float
    dense_bytes: tuple[int, ...]
    copied: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """How a step divides, the median of the steps but the first, which warms up.

    Attributes:
        step_seconds: what a step takes.
        compute_seconds: until the slowest rank had all its gradients.
        exposed_seconds: from then to the end: sending that nothing hides.
        bytes_per_second: what the link carries, counted in bytes handed to collectives; None with one rank.
        search_seconds: what DDP does between the model's forward pass and the end of its own, on the slowest rank; 0 if
            it was not timed.
        copy_seconds_per_byte: what it takes a rank to copy gradients; 0 on a device, which does it beside the host.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes_per_second: float | None
    search_seconds: float
    copy_seconds_per_byte: float = 0.0


def put_together(steps: Sequence[Step], dense: tuple[int, ...]) -> StepTimes:
    """Return the times of one step; ``steps`` are the ranks', ``dense`` the bytes of each bucket."""
    ready: list[float] = []
    for moments in zip(*(step.ready for step in steps), strict=True):
        # A bucket does not leave before those in front of it.
        ready.append(max(max(moments), ready[-1] if ready else 0.0))
    ended = sum(step.seconds for step in steps) / len(steps)
    copied = tuple(fmean(amounts) for amounts in zip(*(step.copied for step in steps), strict=True))
    return StepTimes(tuple(ready), max(step.gradients_seconds for step in steps), ended, dense, copied)


def measure_copying(most_bytes: int) -> float:
    """Return how long a copy in memory takes, in seconds per byte.

    Args:
        most_bytes: no more than this is copied at once; nothing is if it is 0. Bytes.
    """
    size = min(most_bytes, _LONGEST_COPY)
    if size == 0:
        return 0.0
    source, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(_COPIES):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    return median(seconds) / size


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


def ready_without_copies(times: StepTimes, traffic: Sequence[Traffic], seconds_per_byte: float) -> list[float]:
    """Return when each bucket is complete if only what travels is copied, when it leaves at the latest.

    Args:
        times: of a step.
        traffic: what leaves with each bucket.
        seconds_per_byte: of a copy.
    """
    travelled = accumulate(one.payload_bytes for one in traffic)
    ready: list[float] = []
    for moment, copied, sent in zip(times.ready, times.copied, travelled, strict=False):
        earlier = moment - max(copied - sent, 0.0) * seconds_per_byte
        ready.append(max(earlier, ready[-1] if ready else 0.0))
    return ready


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


def divide(
    steps: Sequence[StepTimes], searches: Sequence[float], ranks: int, copy_seconds_per_byte: float = 0.0
) -> Division:
    """Summarise the steps.

    Args:
        steps: each step's times.
        searches: for each step, how long DDP took after the model's forward pass, on the slowest rank. Seconds.
        ranks: how many there are.
        copy_seconds_per_byte: what a copy in memory takes.
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
        copy_seconds_per_byte,
    )


def estimate(steps: Sequence[StepTimes], traffic: Sequence[Sequence[Traffic]], division: Division) -> float:
    """Return what a step would take with other bytes: the median over the steps but the first. Seconds.

    Args:
        steps: each step's times.
        traffic: for each step, what leaves with each bucket.
        division: what was measured.
    """
    if division.bytes_per_second is None:
        return division.step_seconds
    pace = 1 / division.bytes_per_second
    pairs = list(zip(steps, traffic, strict=True))
    # Against the model's own answer for plain DDP, so that what it leaves out stays in.
    saved = median(
        end_of_step(times.ready, times.dense_bytes, pace)
        - end_of_step(
            ready_without_copies(times, sent, division.copy_seconds_per_byte), [one.ring_bytes for one in sent], pace
        )
        for times, sent in pairs[1:] or pairs
    )
    return min(max(division.step_seconds - saved, 0.0), division.step_seconds + abs(saved))
