"""Measures how long collectives take on a module's process group, when its ranks make a state.

These times decide which gradients are not all-reduced (docs/internals/protocol.md, "By which transport"). All ranks
therefore use the same times, those of the slowest rank.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _extension

_C = _extension.load()

# How many collectives are under way at once; a gloo group works on two at a time. There are as many small ones as a
# bucket has segments, so that each is charged the time for which it delays the others. Large all-reduces are as long as
# packed messages, and large all-to-alls have a segment for each other rank.
MESSAGES = 4
SMALL_MESSAGES = 16
SEGMENT_BYTES = 256 << 10
# Bytes that a rank sends in a round. The last takes 134 ms at 1 Gbit/s.
SMALL_BYTES = 16 << 10
LARGE_BYTES = (1 << 20, 4 << 20, 16 << 20)
# A round is long enough if it takes this long, several times the burst that a link carries after a pause, and if bytes
# make up this share of it. Many ranks on few cores wait for each other's turns, whatever they send.
ENOUGH_SECONDS = 0.03
LEAST_OF_BYTES = 0.5
# Rounds come in pairs, because the first one has the link after a pause. The median of the pairs counts. More pairs are
# measured while the budget lasts.
LEAST_PAIRS = 2
MOST_PAIRS = 5
BUDGET_SECONDS = 0.1
# If the times per byte of all-reduces and all-to-alls are this close, they count as equal: measurements are no more
# precise, and links treat both alike.
SAME_WITHIN = 1.5
# The size of a gradient that is summed as one part: more than fits in caches, like most gradients.
WHOLE_BYTES = 16 << 20
# The size of a gradient that is summed in parts as long as rows.
SUMMED_BYTES = 8 << 20
PART_LENGTH = 256
_TIMES = 3
_FIELDS = (
    "all_reduce_seconds",
    "all_reduce_seconds_per_byte",
    "all_to_all_seconds",
    "all_to_all_seconds_per_byte",
    "summing_seconds_per_byte",
    "seconds_per_part",
)


def measure_collective_costs(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Measure the times of all-reduces, all-to-alls and summing. Every rank calls it and gets the same times.

    At 1 Gbit/s it takes about 0.7 s. A slow link gets fewer bytes and rounds.

    Args:
        group: the module's process group, of several ranks.
        device: where the module's gradients lie.

    Returns:
        A ``_C.CollectiveCosts``.

    Raises:
        RuntimeError: from the collectives, if a rank has gone.
    """
    _pair(group, device, SMALL_BYTES)  # allocates memory and waits for the other ranks
    quarters = _pair(group, device, LARGE_BYTES[0] // 4)
    for sent in LARGE_BYTES:
        times = _pair(group, device, sent)
        if min(times) >= ENOUGH_SECONDS and min(map(_of_bytes, quarters, times)) >= LEAST_OF_BYTES:
            break
        quarters = times
    # These times are the same on every rank, so that all ranks stop together.
    pairs: list[list[Sequence[float]]] = []
    spent = 0.0
    while len(pairs) < LEAST_PAIRS or (len(pairs) < MOST_PAIRS and spent < BUDGET_SECONDS):
        pairs.append([_pair(group, device, size) for size in (SMALL_BYTES, sent)])
        spent += 2 * sum(map(sum, pairs[-1]))
    small, large = (
        [statistics.median(times) for times in zip(*rounds, strict=True)] for rounds in zip(*pairs, strict=True)
    )
    per_byte = [seconds / sent for seconds in large]
    if 1 / SAME_WITHIN < per_byte[0] / per_byte[1] < SAME_WITHIN:
        per_byte = [math.sqrt(per_byte[0] * per_byte[1])] * 2
    summing, for_a_part = _slowest(group, device, _working_seconds(device))
    return _C.CollectiveCosts(
        all_reduce_seconds=small[0] / SMALL_MESSAGES,
        all_reduce_seconds_per_byte=per_byte[0],
        all_to_all_seconds=small[1] / SMALL_MESSAGES,
        all_to_all_seconds_per_byte=per_byte[1],
        summing_seconds_per_byte=summing / WHOLE_BYTES,
        seconds_per_part=for_a_part,
    )


def costs_as_numbers(costs: Any) -> tuple[float, ...] | None:
    """Return the fields of a ``_C.CollectiveCosts`` as numbers, which ranks can compare; None for None."""
    return None if costs is None else tuple(getattr(costs, name) for name in _FIELDS)


def _of_bytes(quarter: float, large: float) -> float:
    """Return the share of a round's time that bytes take, given the time of a round with a quarter of the bytes."""
    return (1 - quarter / large) / 0.75


def _pair(group: dist.ProcessGroup, device: torch.device, sent_bytes: int) -> Sequence[float]:
    """Return the mean of two rounds, each of which begins with another kind of collective."""
    rounds = [_round(group, device, sent_bytes, first) for first in (0, 1)]
    return [statistics.fmean(times) for times in zip(*rounds, strict=True)]


def _round(group: dist.ProcessGroup, device: torch.device, sent_bytes: int, first: int) -> Sequence[float]:
    """Return the seconds that all-reduces and all-to-alls of a given size take on the slowest rank."""
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    is_small = sent_bytes <= SMALL_BYTES
    reduced_messages = SMALL_MESSAGES if is_small else MESSAGES
    messages = SMALL_MESSAGES if is_small else max(1, sent_bytes // (SEGMENT_BYTES * (ranks - 1)))
    numel = sent_bytes // 4
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    reduced = torch.zeros(reduced_messages, max(1, numel * ranks // (2 * (ranks - 1)) // reduced_messages), **options)
    to_each = max(1, numel // (ranks - 1) // messages)
    splits = [0 if other == here else to_each for other in range(ranks)]
    sent, received = (torch.zeros(messages, sum(splits), **options) for _ in range(2))

    def all_reduces() -> list[dist.Work]:
        return [dist.all_reduce(message, group=group, async_op=True) for message in reduced]

    def all_to_alls() -> list[dist.Work]:
        return [
            dist.all_to_all_single(received[i], sent[i], splits, splits, group=group, async_op=True)
            for i in range(messages)
        ]

    seconds = [0.0, 0.0]
    for i in (first, 1 - first):
        seconds[i] = _seconds((all_reduces, all_to_alls)[i], device)
    return _slowest(group, device, seconds)


def _working_seconds(device: torch.device) -> tuple[float, float]:
    """Return the wall-clock seconds of a sum on this rank, and those of a sum's part; both 0 on a device."""
    if device.type != "cpu":
        return 0.0, 0.0
    gradient = torch.ones(WHOLE_BYTES // 4, dtype=torch.float32, device=device)
    packed = torch.zeros(WHOLE_BYTES, dtype=torch.uint8, device=device)
    summed, contributions = gradient[: SUMMED_BYTES // 4], packed[:SUMMED_BYTES]
    whole, in_parts, by_clock = [], [], []
    for _ in range(_TIMES):
        started, start = time.perf_counter(), time.thread_time()
        _C.sum_parts_once(gradient, packed, gradient.numel())
        whole.append(time.thread_time() - start)
        by_clock.append(time.perf_counter() - started)
        start = time.thread_time()
        _C.sum_parts_once(summed, contributions, PART_LENGTH)
        in_parts.append(time.thread_time() - start)
    # If ranks take turns on cores, a mean is more meaningful than a median.
    clock, busy = statistics.fmean(by_clock), statistics.fmean(whole)
    # A thread's clock may be too coarse to measure it.
    sharing = max(1.0, clock / busy) if busy > 0 else 1.0
    return clock, sharing * min(in_parts) / (SUMMED_BYTES // 4 // PART_LENGTH)


def _slowest(group: dist.ProcessGroup, device: torch.device, times: Sequence[float]) -> Sequence[float]:
    """Return each time of the slowest rank."""
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return [float(seconds) for seconds in slowest.tolist()]


def _seconds(start_all: Callable[[], list[dist.Work]], device: torch.device) -> float:
    start = time.perf_counter()
    for work in start_all():
        work.wait()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start
