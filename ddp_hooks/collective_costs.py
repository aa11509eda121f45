"""What collectives take on a module's process group, measured when its ranks make a state.

By these times the ranks decide what leaves the all-reduces (docs/internals/protocol.md, "By which transport"), so they
have to hold the same: each time is that of the rank that took longest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _extension

_C = _extension.load()

# As many as the hook has under way: a gloo group works on two at a time.
MESSAGES = 4
# What a rank sends in a round. At 1 Gbit/s 2 MiB take 17 ms.
SMALL_BYTES = 16 << 10
LARGE_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20)
# A round is long enough if it takes so long, and twice as long as one of few bytes.
ENOUGH_SECONDS = 0.015
# Medians are taken of so many; of more while they have taken less than the budget.
LEAST_ROUNDS = 3
MOST_ROUNDS = 7
BUDGET_SECONDS = 0.05
# Of a gradient that is made narrow: more than caches hold, as gradients are.
NARROWED_BYTES = 16 << 20


def measure_collective_costs(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Measure what all-reduces and all-to-alls take, and narrow gradients; every rank calls it, and gets the same.

    At 1 Gbit/s it takes about 0.3 s. A slow link gets fewer bytes and rounds.

    Args:
        group: the module's process group, of several ranks.
        device: where the module's gradients lie.

    Returns:
        A ``_C.CollectiveCosts``.

    Raises:
        RuntimeError: from the collectives, if a rank has gone.
    """
    _round(group, device, SMALL_BYTES)  # makes memory, and meets the others
    small_rounds = [_round(group, device, SMALL_BYTES)]
    least_seconds = max(ENOUGH_SECONDS, *(2 * seconds for seconds in small_rounds[0]))
    for sent in LARGE_BYTES:
        large_rounds = [_round(group, device, sent)]
        if min(large_rounds[0]) >= least_seconds:
            break
    # Counted in times that are the same on every rank, so that all of them stop together.
    spent = 0.0
    while len(large_rounds) < LEAST_ROUNDS or (len(large_rounds) < MOST_ROUNDS and spent < BUDGET_SECONDS):
        small_rounds.append(_round(group, device, SMALL_BYTES))
        large_rounds.append(_round(group, device, sent))
        spent += sum(small_rounds[-1]) + sum(large_rounds[-1])
    small = [statistics.median(times) for times in zip(*small_rounds, strict=True)]
    large = [statistics.median(times) for times in zip(*large_rounds, strict=True)]
    # Of messages that overlap, bytes take at least half.
    per_byte = [max(large[i] - small[i], large[i] / 2) / sent for i in range(2)]
    return _C.CollectiveCosts(
        all_reduce_seconds=small[0] / MESSAGES,
        all_reduce_seconds_per_byte=per_byte[0],
        all_to_all_seconds=small[1] / MESSAGES,
        all_to_all_seconds_per_byte=per_byte[1],
        narrowing_seconds_per_byte=_slowest(group, device, [_narrowing_seconds(device)])[0] / NARROWED_BYTES,
    )


def _round(group: dist.ProcessGroup, device: torch.device, sent_bytes: int) -> Sequence[float]:
    """Return the seconds of all-reduces and of all-to-alls in which each rank sends so much; of the slowest rank."""
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    numel = sent_bytes // MESSAGES // 4
    options: dict[str, Any] = {"dtype": torch.float32, "device": device}
    reduced = torch.zeros(MESSAGES, max(1, numel * ranks // (2 * (ranks - 1))), **options)
    to_each = max(1, numel // (ranks - 1))
    splits = [0 if other == here else to_each for other in range(ranks)]
    sent, received = (torch.zeros(MESSAGES, sum(splits), **options) for _ in range(2))

    def all_reduces() -> list[dist.Work]:
        return [dist.all_reduce(message, group=group, async_op=True) for message in reduced]

    def all_to_alls() -> list[dist.Work]:
        return [
            dist.all_to_all_single(received[i], sent[i], splits, splits, group=group, async_op=True)
            for i in range(MESSAGES)
        ]

    return _slowest(group, device, [_seconds(collectives, device) for collectives in (all_reduces, all_to_alls)])


def _narrowing_seconds(device: torch.device) -> float:
    """Return the seconds that it takes this rank's processor at least; 0 where nothing is narrow."""
    if device.type != "cpu":
        return 0.0
    gradient = torch.ones(NARROWED_BYTES // 4, dtype=torch.float32, device=device)
    packed = torch.zeros(NARROWED_BYTES // 2, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(LEAST_ROUNDS):
        start = time.thread_time()  # whatever else runs meanwhile
        _C.narrow_once(gradient, packed)
        seconds.append(time.thread_time() - start)
    return min(seconds)


def _slowest(group: dist.ProcessGroup, device: torch.device, times: Sequence[float]) -> Sequence[float]:
    """Return of each time that of the rank that took longest."""
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
