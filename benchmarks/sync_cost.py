"""What does it cost to bring a model in step, or to ask whether it is?

Each row times one call of this package and its baseline, one after the other, in pairs: first the one, then the other,
then the other way round. The ratio is the median over the pairs. Formulas: a ratio below 1 means faster than the
baseline; GB/s are 1e9 bytes of tensors a second.

    python benchmarks/sync_cost.py [--world-size 2] [--pairs 9] [--parameters 100000000] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ddp_hooks
from ddp_hooks import _C

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness

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
    ratios = sorted(a / b for a, b in zip(seconds[ours], seconds[baseline], strict=True))
    return {
        "seconds": statistics.median(seconds[ours]),
        "baseline_seconds": statistics.median(seconds[baseline]),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
    }


def in_step(tensors: list[torch.Tensor]) -> bool:
    return ddp_hooks.verify_replicas(tensors, gradients=False).in_step


def transformer_sizes(parameters: int, tensors: int) -> list[int]:
    """Sizes like a transformer's: of four tensors, a large matrix, a square one, and two vectors."""
    layers = tensors // 4
    width = int((parameters / layers / 5) ** 0.5)
    return [4 * width * width, width * width, width, width] * layers


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
        for name, baseline_name, ours, baseline in (
            (
                "broadcast_parameters",
                "broadcast of one flat tensor",
                lambda tensors=tensors: ddp_hooks.broadcast_parameters(tensors),
                lambda same_bytes=same_bytes: dist.broadcast(same_bytes, 0),
            ),
            (
                "broadcast_parameters",
                "the coalesced broadcast of DDP's constructor",
                lambda tensors=tensors: ddp_hooks.broadcast_parameters(tensors),
                lambda tensors=tensors: dist._broadcast_coalesced(group, tensors, 250 * 1024 * 1024, 0),
            ),
            (
                "average_parameters",
                "all-reduce of one flat tensor",
                lambda tensors=tensors: ddp_hooks.average_parameters(tensors),
                lambda same_bytes=same_bytes: dist.all_reduce(same_bytes),
            ),
        ):
            for tensor in tensors:
                tensor.fill_(rank)
            timing = measure_pairs(ours, baseline, arguments.pairs)
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
        ("broadcast_parameters", lambda: ddp_hooks.broadcast_parameters(small), broadcast_loop),
        ("average_parameters", lambda: ddp_hooks.average_parameters(small), average_loop),
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
    report = ddp_hooks.verify_replicas(tensors)
    timing = measure_pairs(lambda: ddp_hooks.verify_replicas(tensors), copy, arguments.pairs)
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
    report = ddp_hooks.verify_replicas(tensors)
    timing = measure_pairs(lambda: ddp_hooks.verify_replicas(tensors), copy, arguments.pairs)
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
    ratios = sorted(a / b for a, b in zip(seconds[ours], seconds[baseline], strict=True))
    return {
        "seconds": statistics.median(seconds[ours]),
        "baseline_seconds": statistics.median(seconds[baseline]),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[len(ratios) // 4],
        "ratio_high": ratios[-1 - len(ratios) // 4],
    }


def run_rank(rank: int, arguments: argparse.Namespace, store_file: str, result_file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_file, arguments.world_size),
        rank=rank,
        world_size=arguments.world_size,
    )
    rows = measure_messages(rank, arguments) + measure_verification(rank, arguments)
    if rank == 0:
        Path(result_file).write_text(json.dumps(rows))
    dist.destroy_process_group()


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    ratios = ", ".join(f"{row['what']} of {row['model']} {row['ratio']:.2f}" for row in rows)
    return f"Time over the baseline's, below 1 faster: {ratios}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    command = ["benchmarks/sync_cost.py", *sys.argv[1:]]
    header = harness.environment_header(command, arguments.world_size, ["loopback"])
    with tempfile.TemporaryDirectory() as directory:
        result_file = f"{directory}/rows.json"
        mp.spawn(run_rank, args=(arguments, f"{directory}/store", result_file), nprocs=arguments.world_size)
        rows = json.loads(Path(result_file).read_text())
    print(f"{'what':<46} {'model':<32} {'baseline':<46} {'ms':>8} {'base ms':>8} {'ratio (quartiles)':>20} correct")
    for row in rows:
        ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
        print(
            f"{row['what']:<46} {row['model']:<32} {row['baseline']:<46} {row['seconds'] * 1e3:>8.1f} "
            f"{row['baseline_seconds'] * 1e3:>8.1f} {ratio:>20} {row['correct']}"
        )
    if arguments.json:
        result = {"benchmark": "sync_cost", "header": header, "rows": rows, "sentence": describe(rows)}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
