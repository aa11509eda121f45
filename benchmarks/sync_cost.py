"""What does it cost to bring a model in step, or to ask whether it is?

Each row times one call of this package and its baseline, one after the other, in pairs: first the one, then the other,
then the other way round. The ratio is the median over the pairs. Formulas: a ratio below 1 means faster than the
baseline; GB/s are 1e9 bytes of tensors a second.

    python benchmarks/sync_cost.py [--links loopback,1gbit] [--world-size 2] [--pairs 9] [--json out.json]

The baselines work on warm memory, and so does ours from the second call on. A "floor" row is the baseline's collective
while each rank makes the copies that are due if no tensor may be half written (into a staging buffer where it sends,
out of it where it receives), with nothing waiting for anything: no division into messages can be expected to beat it
on these cores. On a link other than loopback the ranks are hosts of a testbed, which needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddp_hooks
from ddp_hooks import _C, sync
from tools import harness, testbed

LARGE_TENSORS = 500
SMALL_TENSORS = 2000
SMALL_NUMEL = 256


def measure_pairs(ours: Callable[[], Any], baseline: Callable[[], Any], pairs: int) -> dict[str, Any]:
    """Seconds of both, pair by pair; every rank has to have finished before the next begins."""
    seconds: dict[Any, list[float]] = {ours: [], baseline: []}
    for i in range(pairs + 1):
        for function in (ours, baseline) if i % 2 else (baseline, ours):
            dist.barrier()
            started = time.perf_counter()
            function()
            dist.barrier()
            if i:  # the first pair warms up
                seconds[function].append(time.perf_counter() - started)
    return _compare(seconds[ours], seconds[baseline])


def _compare(ours: list[float], baseline: list[float]) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(ours, baseline, strict=True))
    return {
        "seconds": statistics.median(ours),
        "baseline_seconds": statistics.median(baseline),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
    }


def in_step(tensors: list[torch.Tensor]) -> bool:
    return ddp_hooks.sync.verify_replicas(tensors, gradients=False).in_step


def transformer_sizes(parameters: int, tensors: int) -> list[int]:
    """Sizes like a transformer's: of four tensors, a large matrix, a square one, and two vectors."""
    layers = tensors // 4
    width = int((parameters / layers / 5) ** 0.5)
    return [4 * width * width, width * width, width, width] * layers


class Floor:
    """A collective on a flat tensor, and beside it the copies between tensors and staging buffers."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._parts = sync.messages.split(tensors)
        length = max(sum(tensor.numel() for tensor in part) for part in self._parts)
        self._staging = [torch.zeros(length), torch.zeros(length)]

    def _copy(self, *, gathers: bool, scatters: bool) -> None:
        for i, part in enumerate(self._parts):
            staging = self._staging[i % 2][: sum(tensor.numel() for tensor in part)]
            if gathers:
                _C.gather_tensors(staging, part)
            if scatters:
                _C.scatter_tensors(staging, part)

    def broadcast(self, flat: torch.Tensor) -> None:
        work = dist.broadcast(flat, 0, async_op=True)
        self._copy(gathers=dist.get_rank() == 0, scatters=dist.get_rank() != 0)
        work.wait()

    def average(self, flat: torch.Tensor) -> None:
        work = dist.all_reduce(flat, async_op=True)
        self._copy(gathers=True, scatters=True)
        work.wait()


def measure_messages(rank: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    flat = torch.rand(arguments.parameters)
    models = {
        f"{LARGE_TENSORS} equal tensors": [arguments.parameters // LARGE_TENSORS] * LARGE_TENSORS,
        f"{LARGE_TENSORS} tensors of a transformer": transformer_sizes(arguments.parameters, LARGE_TENSORS),
    }
    group = dist.group.WORLD
    for model, sizes in models.items():
        tensors = [torch.rand(size) + rank for size in sizes]
        same_bytes = flat[: sum(sizes)]
        floor = Floor([torch.rand(size) for size in sizes])
        for name, baseline_name, ours, baseline in (
            (
                "broadcast_parameters",
                "broadcast of one flat tensor",
                lambda tensors=tensors: ddp_hooks.sync.broadcast_parameters(tensors),
                lambda same_bytes=same_bytes: dist.broadcast(same_bytes, 0),
            ),
            (
                "broadcast_parameters",
                "the coalesced broadcast of DDP's constructor",
                lambda tensors=tensors: ddp_hooks.sync.broadcast_parameters(tensors),
                lambda tensors=tensors: dist._broadcast_coalesced(group, tensors, 250 * 1024 * 1024, 0),
            ),
            (
                "average_parameters",
                "all-reduce of one flat tensor",
                lambda tensors=tensors: ddp_hooks.sync.average_parameters(tensors),
                lambda same_bytes=same_bytes: dist.all_reduce(same_bytes),
            ),
            (
                "broadcast, floor",
                "broadcast of one flat tensor",
                lambda floor=floor, same_bytes=same_bytes: floor.broadcast(same_bytes),
                lambda same_bytes=same_bytes: dist.broadcast(same_bytes, 0),
            ),
            (
                "average, floor",
                "all-reduce of one flat tensor",
                lambda floor=floor, same_bytes=same_bytes: floor.average(same_bytes),
                lambda same_bytes=same_bytes: dist.all_reduce(same_bytes),
            ),
        ):
            for tensor in tensors:
                tensor.fill_(rank)
            same_bytes.fill_(1.0)
            timing = measure_pairs(ours, baseline, arguments.pairs)
            if name.endswith("floor"):
                rows.append({"what": name, "model": model, "baseline": baseline_name, **timing, "correct": True})
                continue
            wanted = 0.0 if name == "broadcast_parameters" else (dist.get_world_size() - 1) / 2
            correct = in_step(tensors) and all(tensor.eq(wanted).all() for tensor in tensors)
            rows.append({"what": name, "model": model, "baseline": baseline_name, **timing, "correct": correct})

    small = [torch.full((SMALL_NUMEL,), float(rank)) for _ in range(SMALL_TENSORS)]

    def broadcast_loop() -> None:
        for tensor in small:
            dist.broadcast(tensor, 0)

    def average_loop() -> None:
        for tensor in small:
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()

    for name, ours, baseline in (
        ("broadcast_parameters", lambda: ddp_hooks.sync.broadcast_parameters(small), broadcast_loop),
        ("average_parameters", lambda: ddp_hooks.sync.average_parameters(small), average_loop),
    ):
        timing = measure_pairs(ours, baseline, arguments.pairs)
        model = f"{SMALL_TENSORS} tensors of {SMALL_NUMEL}"
        rows.append(
            {"what": name, "model": model, "baseline": "loop over tensors", **timing, "correct": in_step(small)}
        )
    return rows


def measure_verification(rank: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    tensors = [torch.full((arguments.parameters // LARGE_TENSORS,), 1.0) for _ in range(LARGE_TENSORS)]
    copies = [torch.zeros_like(tensor) for tensor in tensors]

    def copy() -> None:
        torch._foreach_copy_(copies, tensors)

    rows = []
    if rank == 0:
        # On one core, with nothing else running on this machine's other ranks but waiting.
        timing = _measure_alone(lambda: _C.hash_tensors(tensors), copy, arguments.pairs)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        rows.append(
            {
                "what": f"hash at {nbytes / timing['seconds'] / 1e9:.1f} GB/s",
                "model": f"{LARGE_TENSORS} equal tensors",
                "baseline": f"memcpy at {nbytes / timing['baseline_seconds'] / 1e9:.1f} GB/s",
                **timing,
                "correct": True,
            }
        )
    dist.barrier()
    report = ddp_hooks.sync.verify_replicas(tensors)
    timing = measure_pairs(lambda: ddp_hooks.sync.verify_replicas(tensors), copy, arguments.pairs)
    rows.append(
        {
            "what": f"verify_replicas, in step, {report.exchanged_bytes} bytes",
            "model": f"{LARGE_TENSORS} equal tensors",
            "baseline": "memcpy",
            **timing,
            "correct": report.in_step,
        }
    )
    tensors[7][3] += rank
    report = ddp_hooks.sync.verify_replicas(tensors)
    timing = measure_pairs(lambda: ddp_hooks.sync.verify_replicas(tensors), copy, arguments.pairs)
    rows.append(
        {
            "what": f"verify_replicas, one differs, {report.exchanged_bytes} bytes",
            "model": f"{LARGE_TENSORS} equal tensors",
            "baseline": "memcpy",
            **timing,
            "correct": [difference.name for difference in report.differences] == ["7"],
        }
    )
    return rows


def _measure_alone(ours: Callable[[], Any], baseline: Callable[[], Any], pairs: int) -> dict[str, Any]:
    seconds: dict[Any, list[float]] = {ours: [], baseline: []}
    for _ in range(pairs):
        for function in (ours, baseline):
            started = time.perf_counter()
            function()
            seconds[function].append(time.perf_counter() - started)
    return _compare(seconds[ours], seconds[baseline])


def run_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = measure_messages(rank, arguments)
    if os.environ["DDP_HOOKS_TESTBED_RATE"] == testbed.LOOPBACK:
        rows += measure_verification(rank, arguments)  # next to nothing of it travels
    if rank == 0:
        for row in rows:
            testbed.report(row)
    dist.barrier()
    dist.destroy_process_group()


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    ratios = ", ".join(
        f"{row['what']} of {row['model']} ({row['link']}, against {row['baseline']}) {row['ratio']:.2f}" for row in rows
    )
    return f"Time over the baseline's, below 1 faster: {ratios}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default=testbed.LOOPBACK, help="separated by commas: loopback, 10gbit, 1gbit")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds, for each link")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if harness.is_rank():
        run_rank(arguments)
        return
    links = arguments.links.split(",")
    header = harness.environment_header(["benchmarks/sync_cost.py", *sys.argv[1:]], arguments.world_size, links)
    rows = []
    for link in links:
        outcomes = testbed.launch([__file__, *sys.argv[1:]], arguments.world_size, link, arguments.timeout)
        rows += [{"link": link, **row} for row in outcomes[0].results]
    print(
        f"{'link':<9} {'what':<46} {'model':<32} {'baseline':<46} {'ms':>8} {'base ms':>8} "
        f"{'ratio (quartiles)':>20} correct"
    )
    for row in rows:
        ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
        print(
            f"{row['link']:<9} {row['what']:<46} {row['model']:<32} {row['baseline']:<46} {row['seconds'] * 1e3:>8.1f} "
            f"{row['baseline_seconds'] * 1e3:>8.1f} {ratio:>20} {row['correct']}"
        )
    if arguments.json:
        result = {"benchmark": "sync_cost", "header": header, "rows": rows, "sentence": describe(rows)}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
