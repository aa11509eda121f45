"""The part of micro.py about transports: what collectives take to bring everybody what only some ranks have.

Nothing is computed beside, and nothing gathered or scattered: this is as fast as the collectives under the hook can be.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tools import harness, testbed

NUMEL = 4 << 20  # float32 that each rank contributes: 16.8 MB
SEGMENT_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
BASELINE = "all-reduce"


def transports_rank(rounds: int, numel: int = NUMEL) -> None:
    """Time every transport for what one rank alone and what two ranks contribute; rank 0 reports rows."""
    import torch.distributed as dist

    for contributors in (1, 2) if dist.get_world_size() > 2 else (1,):
        methods = _alone(numel) if contributors == 1 else _in_pairs(numel)
        _take_turns(contributors, methods, rounds, numel)


def _segments(numel: int, segment_bytes: int) -> Iterator[slice]:
    for start in range(0, numel, segment_bytes // 4):
        yield slice(start, min(start + segment_bytes // 4, numel))


def _alone(numel: int) -> dict[str, Callable[[], Any]]:
    """Each rank has a row of its own, of the same length; a method returns all rows."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = torch.empty(ranks, numel)
    to_others = [0 if other == rank else 1 for other in range(ranks)]

    def begin() -> Any:
        rows.zero_()
        rows[rank] = rank + 1
        return rows

    def all_reduce() -> Any:
        dist.all_reduce(begin())
        return rows

    def all_gather() -> Any:
        dist.all_gather_into_tensor(rows.view(-1), begin()[rank].clone())
        return rows

    def broadcasts(segment_bytes: int) -> Any:
        begin()
        works = [
            dist.broadcast(rows[source, part], source, async_op=True)
            for part in _segments(numel, segment_bytes)
            for source in range(ranks)
        ]
        for work in works:
            work.wait()
        return rows

    def spread(segment_bytes: int) -> Any:
        begin()
        under_way = []
        for part in _segments(numel, segment_bytes):
            size = part.stop - part.start
            received = torch.empty((ranks - 1) * size)
            splits = [size * to for to in to_others]
            sent = rows[rank, part].repeat(ranks - 1)
            work = dist.all_to_all_single(received, sent, splits, splits, async_op=True)
            under_way.append((work, part, received))
        others = [other for other in range(ranks) if other != rank]
        for work, part, received in under_way:
            work.wait()
            rows[others, part] = received.view(ranks - 1, -1)
        return rows

    methods: dict[str, Callable[[], Any]] = {BASELINE: all_reduce, "all_gather": all_gather}
    for size in SEGMENT_BYTES:
        methods[f"broadcasts of {size >> 10} KiB"] = lambda size=size: broadcasts(size)  # type: ignore[misc]
        methods[f"spread by {size >> 10} KiB"] = lambda size=size: spread(size)  # type: ignore[misc]
    return methods


def _in_pairs(numel: int) -> dict[str, Callable[[], Any]]:
    """Row i is contributed by ranks i and i + 1, and each owns a half of it; a method returns all sums."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    rows = torch.empty(ranks, numel)
    half = numel // 2

    def begin() -> Any:
        rows.zero_()
        rows[rank] = rank + 1
        rows[before] = 1
        return rows

    def all_reduce() -> Any:
        dist.all_reduce(begin())
        return rows

    def by_owner(segment_bytes: int) -> Any:
        begin()
        collected = []
        for part in _segments(half, segment_bytes):
            size = part.stop - part.start
            upper = slice(part.start + half, part.stop + half)
            sent, received = [0] * ranks, [0] * ranks
            # Each to the other owner of its two rows.
            sent[after] += size
            sent[before] += size
            received[before] += size
            received[after] += size
            parts = sorted([(after, rows[rank, upper]), (before, rows[before, part])], key=lambda pair: pair[0])
            arrived = torch.empty(2 * size)
            outgoing = torch.cat([values for _, values in parts])
            work = dist.all_to_all_single(arrived, outgoing, received, sent, async_op=True)
            collected.append((work, part, upper, arrived))
        broadcast = []
        for work, part, upper, arrived in collected:
            work.wait()
            size = part.stop - part.start
            first, second = arrived.view(2, size)
            from_before, from_after = (first, second) if before < after else (second, first)
            rows[before, upper] += from_before
            rows[rank, part] += from_after
            sums = torch.cat([rows[rank, part], rows[before, upper]])
            splits = [0 if other == rank else 2 * size for other in range(ranks)]
            received_sums = torch.empty(2 * size * (ranks - 1))
            outgoing = sums.repeat(ranks - 1)
            again = dist.all_to_all_single(received_sums, outgoing, splits, splits, async_op=True)
            broadcast.append((again, part, upper, received_sums))
        others = [other for other in range(ranks) if other != rank]
        for work, part, upper, sums in broadcast:
            work.wait()
            for other, (own, of_neighbour) in zip(others, sums.view(ranks - 1, 2, -1), strict=True):
                rows[other, part] = own
                rows[(other - 1) % ranks, upper] = of_neighbour
        return rows

    methods: dict[str, Callable[[], Any]] = {BASELINE: all_reduce}
    for size in SEGMENT_BYTES:
        methods[f"by owner, by {size >> 10} KiB"] = lambda size=size: by_owner(size)  # type: ignore[misc]
    return methods


def _take_turns(contributors: int, methods: dict[str, Callable[[], Any]], rounds: int, numel: int) -> None:
    import torch.distributed as dist

    ranks = dist.get_world_size()
    expected = [i + 1 if contributors == 1 else i + 2 for i in range(ranks)]
    names = list(methods)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    correct = dict.fromkeys(names, True)
    for turn in range(-1, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            rows = methods[name]()
            elapsed = time.perf_counter() - start
            correct[name] &= all(bool((row == value).all()) for row, value in zip(rows, expected, strict=True))
            if turn >= 0:
                seconds[name].append(elapsed)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (seconds, correct))
    if dist.get_rank() != 0:
        return
    slowest = {
        name: [max(times) for times in zip(*(theirs[0][name] for theirs in gathered), strict=True)] for name in names
    }
    transfers = {BASELINE: 2 * (ranks - 1) / ranks * ranks}
    for name in names:
        ratios = [a / b for a, b in zip(slowest[name], slowest[BASELINE], strict=True)]
        few = ranks - 1 if contributors == 1 else ranks
        sent = 4 * numel * transfers.get(name, few)
        testbed.report(
            {
                "part": "transports",
                "link": os.environ["DDP_HOOKS_TESTBED_RATE"],
                "world_size": ranks,
                "contributors": contributors,
                "method": name,
                "bytes": 4 * numel * ranks,
                "sent_bytes": int(sent),
                "seconds": harness.quartiles(slowest[name]),
                "baseline": BASELINE,
                "ratio_to_baseline": harness.quartiles(ratios),
                "correct": all(theirs[1][name] for theirs in gathered),
                "rounds": rounds,
            }
        )


def describe_transports(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: what the fastest way takes, for each link, world and number of contributors."""
    parts = []
    key = lambda row: (row["link"], row["world_size"], row["contributors"])  # noqa: E731
    for (link, ranks, contributors), group in itertools.groupby(sorted(rows, key=key), key=key):
        best = min((row for row in group if row["method"] != BASELINE), key=lambda row: row["seconds"]["median"])
        parts.append(f"{contributors} of {ranks} at {link} {best['method']} {best['ratio_to_baseline']['median']:.2f}")
    wrong = sum(not row["correct"] for row in rows)
    return (
        f"The fastest way to bring everybody what few ranks have, over the all-reduce: {'; '.join(parts)}. "
        f"{'All results are right.' if not wrong else f'{wrong} results are wrong.'}"
    )
