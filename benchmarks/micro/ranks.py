"""The parts of micro.py that need ranks: the mask exchange, and what a bucket costs under each way to register."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from micro.grids import grids
from tools import harness, testbed

PARAMETERS = (100, 1_000, 10_000, 100_000)
BASELINE = "all_reduce_bor"
HEADER_WORDS = 6  # docs/internals/protocol.md
LAYERS = 200


def fastest_tenth(seconds: Sequence[float]) -> float:
    """The time that one round in ten keeps within: the scheduler, with more ranks than cores, is out of it for once."""
    return sorted(seconds)[len(seconds) // 10]


def _grid_groups(grid: Sequence[int], rank: int, ranks: int) -> list[Any]:
    """This rank's group in each dimension; ranks are numbered along the first dimension first."""
    import torch.distributed as dist

    groups = []
    stride = 1
    for extent in grid:
        mine = None
        # Every rank makes every group, in the same order, as new_group wants it.
        for start in range(ranks):
            if start // stride % extent == 0:
                members = [start + i * stride for i in range(extent)]
                group = dist.new_group(members, backend="gloo")
                if rank in members:
                    mine = group
        groups.append(mine)
        stride *= extent
    return groups


def _fold(gathered: Any, count: int, words: int) -> Any:
    """OR `count` masks that lie one after the other, half of them onto the other half at a time."""
    masks = gathered[: count * words].view(count, words)
    while count > 1:
        half = count // 2
        masks[:half] |= masks[count - half : count]
        count -= half
    return masks[0]


def exchange_rank(rounds: int) -> None:
    """Time every way to OR masks over all ranks against the others, on one process group; rank 0 reports rows."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    control = dist.new_group(backend="gloo")
    shapes = grids(ranks)
    groups = {shape: _grid_groups(shape, rank, ranks) for shape in shapes}

    def bor(mask: Any, space: Any) -> Any:
        dist.all_reduce(mask, op=dist.ReduceOp.BOR, group=control)
        return mask

    def gather(mask: Any, space: Any) -> Any:
        dist.all_gather_into_tensor(space, mask, group=control)
        return _fold(space, ranks, mask.numel())

    def grid(shape: tuple[int, ...]) -> Callable[[Any, Any], Any]:
        def run(mask: Any, space: Any) -> Any:
            for extent, group in zip(shape, groups[shape], strict=True):
                dist.all_gather_into_tensor(space[: extent * mask.numel()], mask, group=group)
                mask = _fold(space, extent, mask.numel()).clone()
            return mask

        return run

    methods: dict[str, Callable[[Any, Any], Any]] = {BASELINE: bor, "all_gather": gather}
    methods |= {"grid " + "x".join(map(str, shape)): grid(shape) for shape in shapes}
    hops = {BASELINE: 2 * (ranks - 1), "all_gather": ranks - 1}
    hops |= {"grid " + "x".join(map(str, shape)): sum(shape) - len(shape) for shape in shapes}
    names = list(methods)
    for parameters in PARAMETERS:
        words = HEADER_WORDS + math.ceil((parameters + 1) / 64)
        masks = [
            torch.randint(0, 1 << 62, (words,), generator=torch.Generator().manual_seed(1000 * parameters + other))
            for other in range(ranks)
        ]
        expected = _fold(torch.cat(masks), ranks, words)
        space = torch.empty(ranks * words, dtype=torch.int64)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        wrong = dict.fromkeys(names, 0)
        for turn in range(-5, rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                mask = masks[rank].clone()
                dist.barrier()
                start = time.perf_counter()
                agreed = methods[name](mask, space)
                elapsed = time.perf_counter() - start
                wrong[name] += not torch.equal(agreed, expected)
                if turn >= 0:
                    seconds[name].append(elapsed)
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, (seconds, wrong))
        if rank != 0:
            continue
        by_round = {n: list(zip(*(theirs[0][n] for theirs in gathered), strict=True)) for n in names}
        slowest = {name: [max(times) for times in by_round[name]] for name in names}
        for name in names:
            ratios = [a / b for a, b in zip(slowest[name], slowest[BASELINE], strict=True)]
            testbed.report(
                {
                    "part": "exchange",
                    "link": os.environ["DDP_HOOKS_TESTBED_RATE"],
                    "world_size": ranks,
                    "parameters": parameters,
                    "mask_bytes": 8 * words,
                    "method": name,
                    "hops": hops[name],
                    "seconds": harness.quartiles(slowest[name]),
                    "fastest_tenth_seconds": fastest_tenth(slowest[name]),
                    "median_rank_seconds": harness.quartiles([statistics.median(times) for times in by_round[name]]),
                    "baseline": BASELINE,
                    "ratio_to_baseline": harness.quartiles(ratios),
                    "correct": not any(theirs[1][name] for theirs in gathered),
                    "rounds": rounds,
                }
            )


def registration_rank(rounds: int) -> None:
    """Time a step of 200 one-layer buckets, all of them skipped and all of them sent, under each registration.

    Skipped buckets send nothing, so that what differs between two registrations is the host's work.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    import ddp_hooks
    from tools.peers import max_difference

    rank, ranks = dist.get_rank(), dist.get_world_size()

    class Vectors(nn.Module):
        """Vectors; a step uses the last, or all."""

        def __init__(self) -> None:
            super().__init__()
            self.vectors = nn.ParameterList(torch.ones(64) for _ in range(LAYERS))

        def forward(self, all_of_them: bool) -> Any:
            used = list(self.vectors) if all_of_them else [self.vectors[-1]]
            return torch.stack(used).square().mean() * (1 + rank)

    variants: dict[str, tuple[DistributedDataParallel, Any]] = {}
    for name in ("plain", "allreduce_hook", "native", "python"):
        # 256 bytes, the size of a vector: each is a bucket.
        ddp = DistributedDataParallel(Vectors(), find_unused_parameters=True, bucket_cap_mb=256 / 2**20)
        state = None
        if name == "allreduce_hook":
            ddp.register_comm_hook(None, allreduce_hook)
        elif name == "native":
            state = ddp_hooks.register(ddp, policy="skip_unused")
        elif name == "python":
            state = ddp_hooks.SkipUnusedState(ddp, policy="skip_unused")
            ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
        variants[name] = (ddp, state)
    names = list(variants)
    for all_of_them in (False, True):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        hook_seconds: dict[str, float] = {}
        gaps = dict.fromkeys(names, 0.0)
        for turn in range(-3, rounds):
            if turn == 0:
                for _, state in variants.values():
                    if state is not None:
                        state.reset_stats()
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                ddp, _ = variants[name]
                ddp.zero_grad(set_to_none=True)
                loss = ddp(all_of_them)
                dist.barrier()
                start = time.perf_counter()
                loss.backward()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - start)
            if turn < 0:
                found = {
                    n: {k: p.grad for k, p in v[0].named_parameters() if p.grad is not None}
                    for n, v in variants.items()
                }
                gaps = {name: max(gaps[name], max_difference(found[name], found["plain"])) for name in names}
        buckets = LAYERS
        for name, (_, state) in variants.items():
            if state is not None:
                counters = state.stats()
                buckets = (counters.buckets_whole + counters.buckets_packed + counters.buckets_skipped) // rounds
                hook_seconds[name] = counters.hook_seconds / rounds / buckets
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, (seconds, gaps))
        if rank != 0:
            continue
        slowest = {n: [max(times) for times in zip(*(theirs[0][n] for theirs in gathered), strict=True)] for n in names}
        for name in names:
            over_native = [(a - b) / buckets for a, b in zip(slowest[name], slowest["native"], strict=True)]
            ratios = [a / b for a, b in zip(slowest[name], slowest["plain"], strict=True)]
            testbed.report(
                {
                    "part": "registration",
                    "link": os.environ["DDP_HOOKS_TESTBED_RATE"],
                    "world_size": ranks,
                    "used": "all" if all_of_them else f"1 of {LAYERS}",
                    "registration": name,
                    "buckets": buckets,
                    "backward_seconds": harness.quartiles(slowest[name]),
                    "seconds_per_bucket": harness.quartiles([t / buckets for t in slowest[name]]),
                    "over_native_per_bucket_seconds": harness.quartiles(over_native),
                    "hook_per_bucket_seconds": hook_seconds.get(name),
                    "baseline": "plain",
                    "ratio_to_baseline": harness.quartiles(ratios),
                    "gradient_difference": max(theirs[1][name] for theirs in gathered),
                    "correct": all(theirs[1][name] == 0 for theirs in gathered),
                    "rounds": rounds,
                }
            )


def describe_exchange(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    most = max(row["parameters"] for row in rows)
    for link, ranks in dict.fromkeys((row["link"], row["world_size"]) for row in rows):
        texts = []
        for parameters in sorted({100, most}):
            here = [r for r in rows if (r["link"], r["world_size"], r["parameters"]) == (link, ranks, parameters)]
            if not here:
                continue
            here.sort(key=lambda row: row["seconds"]["median"])
            listed = ", ".join(f"{row['method']} {row['seconds']['median'] * 1e6:.0f}" for row in here)
            texts.append(f"{listed} us for {parameters:,} parameters")
        parts.append(f"{ranks} ranks on {link}: {'; '.join(texts)}")
    wrong = sum(not row["correct"] for row in rows)
    verdict = f"{wrong} rows gave a wrong mask." if wrong else "All masks were right."
    crowded = max(row["world_size"] for row in rows) > (os.cpu_count() or 1)
    caveat = " More ranks than cores wait for a core as well as for each other." if crowded else ""
    return f"Slowest rank's median, nothing hidden. {'. '.join(parts)}. {verdict}{caveat}"


def describe_registration(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for used in dict.fromkeys(row["used"] for row in rows):
        here = {row["registration"]: row for row in rows if row["used"] == used}
        costs = ", ".join(f"{name} {row['seconds_per_bucket']['median'] * 1e6:.1f}" for name, row in here.items())
        over = here["python"]["over_native_per_bucket_seconds"]
        parts.append(
            f"with {used} of the vectors used backward takes {costs} us a bucket, the Python path "
            f"{over['median'] * 1e6:+.1f} us ({over['q1'] * 1e6:+.1f} to {over['q3'] * 1e6:+.1f}) against the native"
        )
    wrong = sum(not row["correct"] for row in rows)
    verdict = f"{wrong} rows have gradients that differ from plain DDP's" if wrong else "all gradients are plain DDP's"
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}; {verdict}."
