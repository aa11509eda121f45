"""What does the hook cost on the host of a GPU, and how long does a step take with everything used?

    python benchmarks/cuda_step.py                 # needs a GPU and a build with the CUDA kernels

It runs on one GPU: NCCL with one rank, gloo with two ranks, and NCCL with two ranks, each of which claims to be on its
own host (NCCL does not support this; if it refuses, the row says so). The variants exist side by side and take turns. A
step is forward, backward and the exchange, until the device is synchronised. Two ranks on one GPU share its time, so
their steps compare variants and say nothing about two GPUs.

Host time is the time that a bucket takes in the thread that runs backward, from the call of the hook to its return,
without the wait for masks. With registration through Python, it includes the Python function. max |d| is the largest
difference of a gradient from plain DDP's, as a share of the largest element of that parameter's gradient.

Two NCCL ranks send through a socket here, so bytes cost as much as on a slow network. The other workloads, in which not
everything is used, are measured there: a table with few rows looked up, and linear layers under autocast, whose
gradients are bfloat16 numbers in float32, compared with torch's hook that rounds to bfloat16.

    python benchmarks/cuda_step.py --workloads table autocast --name cuda_step_socket

A timeline of one step is written next to the JSON file, which is written after each world. The exit status is 1 if a
gradient differs, or if a world other than NCCL with two ranks could not be run."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tools import harness, testbed

LAYERS, WIDTH = 24, 1024
ROWS, ROW, TOKENS = 400_000, 64, 4_096
BUCKET_MEGABYTES = 8
WORLDS = (("nccl", 1), ("gloo", 2), ("nccl", 2))
SOCKET = ("nccl", 2)
# By workload: name of the variant, share of the layers that are frozen.
DENSE = (
    ("ddp", 0.0),
    ("allreduce_hook", 0.0),
    ("ours:native", 0.0),
    ("ours:python", 0.0),
    ("ours:native:frozen", 0.5),
    ("ours:python:frozen", 0.5),
    ("ours:zeros:native", 0.0),
    ("ours:auto:native", 0.0),
)
TABLE = (("ddp", 0.0), ("allreduce_hook", 0.0), ("ours:auto:native", 0.0), ("ours:on:native", 0.0))
AUTOCAST = (*TABLE, ("bf16_compress_hook", 0.0))
WORKLOADS = {"dense": DENSE, "table": TABLE, "autocast": AUTOCAST}
LARGEST_DIFFERENCE = 1e-6  # to plain DDP's gradient, as a share of the largest element of that
WARM_UP_STEPS = 24  # for its first ten passes DDP reads timers, which wait for the device; then `auto` has settled


class Variant:
    """A model, wrapped and hooked in one way."""

    def __init__(self, workload: str, name: str, frozen: float) -> None:
        import ddp_hooks

        torch.manual_seed(0)
        self.name = name
        self.autocast = workload == "autocast"
        if workload == "table":
            self.model = nn.Sequential(nn.Embedding(ROWS, ROW), nn.Linear(ROW, ROW), nn.Tanh()).cuda()
        else:
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MEGABYTES, gradient_as_bucket_view=True)
        self.state: Any = None
        self.python_seconds: list[float] = []
        if name in ("allreduce_hook", "bf16_compress_hook"):
            self.ddp.register_comm_hook(None, getattr(default_hooks, name))
        elif name.startswith("ours"):
            on = ddp_hooks.Policy("rows", skip_zero_rows="on")
            policy = {"zeros": "skip_zeros", "auto": "auto", "on": on}.get(name.split(":")[1], "skip_unused")
            if "python" in name:
                self.state = ddp_hooks.SkipUnusedState(self.ddp, policy)
                self.ddp.register_comm_hook(self.state, self._timed_hook(ddp_hooks.skip_unused_hook))
            else:
                self.state = ddp_hooks.register(self.ddp, policy)
        if frozen:
            # Every other layer, so that what travels is in pieces.
            ddp_hooks.freeze(self.ddp, *self.model[: int(LAYERS * frozen * 2) : 2])

    def _timed_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        seconds = self.python_seconds

        def timed(state, bucket):  # DDP compares annotations as objects; these are strings here
            started = time.perf_counter()
            future = hook(state, bucket)
            seconds.append(time.perf_counter() - started)
            return future

        return timed

    def step(self, batch: torch.Tensor) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            loss = self.ddp(batch).float().square().mean()
        loss.backward()

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def host_seconds_per_bucket(self, waited: float) -> float | None:
        if self.state is None:
            return None
        stats = self.state.stats()
        buckets = stats.buckets_whole + stats.buckets_packed + stats.buckets_skipped
        if self.python_seconds:
            return (sum(self.python_seconds) - waited) / buckets
        return stats.hook_seconds / buckets


def run_rank(
    rank: int, world_size: int, backend: str, port: int, workloads: Sequence[str], rounds: int, folder: str
) -> None:
    os.environ.update(
        NCCL_HOSTID=f"ddp_hooks_{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    rows = []
    for workload in workloads:
        rows += measure(workload, backend, rounds, Path(folder) if rank == 0 else None)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def measure(workload: str, backend: str, rounds: int, folder: Path | None) -> list[dict[str, Any]]:
    variants = [Variant(workload, name, frozen) for name, frozen in WORKLOADS[workload]]
    torch.manual_seed(1 + dist.get_rank())  # ranks have to differ, or nothing is seen of the averaging
    batch = torch.randn(32, WIDTH, device="cuda")
    if workload == "table":
        batch = torch.randint(ROWS, (TOKENS,), device="cuda")
    for variant in variants:
        for _ in range(WARM_UP_STEPS):
            variant.step(batch)
            variant.clear()
        if variant.state is not None:
            variant.state.reset_stats()
            variant.python_seconds.clear()
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    enqueued: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(rounds):
        first = turn % len(variants)
        for variant in variants[first:] + variants[:first]:
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            started = time.perf_counter()
            variant.step(batch)
            enqueued[variant.name].append(time.perf_counter() - started)
            torch.cuda.synchronize()
            seconds[variant.name].append(time.perf_counter() - started)
            variant.clear()
    plain = variants[0]
    plain.step(batch)
    expected = [parameter.grad.clone() for parameter in plain.model.parameters()]
    plain.clear()
    rows = []
    for variant in variants:
        stats = None if variant.state is None else variant.state.stats()
        waited = 0.0 if stats is None else stats.exchange_wait_seconds
        per_bucket = variant.host_seconds_per_bucket(waited)
        variant.step(batch)
        gaps = [
            float((parameter.grad - gradient).abs().max() / gradient.abs().max())
            for parameter, gradient in zip(variant.model.parameters(), expected, strict=True)
            if parameter.grad is not None
        ]
        variant.clear()
        mine, base, hook = seconds[variant.name], seconds["ddp"], seconds["allreduce_hook"]
        rows.append(
            {
                "workload": workload,
                "backend": backend,
                "world_size": dist.get_world_size(),
                "variant": variant.name,
                "step_seconds": harness.quartiles(mine),
                "host_step_seconds": harness.quartiles(enqueued[variant.name]),
                "baseline": {"variant": "ddp", "step_seconds": harness.quartiles(base)},
                "ratio_to_ddp": harness.quartiles([a / b for a, b in zip(mine, base, strict=True)]),
                "ratio_to_allreduce_hook": harness.quartiles([a / b for a, b in zip(mine, hook, strict=True)]),
                "host_seconds_per_bucket": per_bucket,
                "python_call_seconds": statistics.median(variant.python_seconds) if variant.python_seconds else None,
                "exchange_wait_seconds_per_step": None if stats is None else waited / stats.steps,
                "statistics": None if stats is None else stats.to_dict(),
                "gradient_difference": max(gaps),
                "rounds": rounds,
            }
        )
    if workload == "dense" and folder is not None:
        draw_timeline(variants, batch, folder)
    elif workload == "dense":
        for variant in variants:
            if "frozen" in variant.name:
                variant.step(batch)
    torch.cuda.synchronize()
    return rows


def draw_timeline(variants: Sequence[Variant], batch: torch.Tensor, folder: Path) -> None:
    """One step of each variant that skips something, with the engine's ranges, for chrome://tracing or Perfetto."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for variant in variants:
            if "frozen" in variant.name:
                with torch.profiler.record_function(f"step:{variant.name}"):
                    variant.step(batch)
                    torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / "timeline.json.gz"))


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    parts = []
    for row in rows:
        if row.get("workload") not in (None, "dense"):
            parts.append(
                f"{row['workload']} on {row['world_size']}: {row['variant']} takes {row['ratio_to_ddp']['median']:.3f} "
                "times plain DDP's step"
            )
        elif row.get("variant") in ("ours:native", "ours:python"):
            host = row["host_seconds_per_bucket"]
            parts.append(
                f"{row['backend']} on {row['world_size']}: {row['variant']} takes {host * 1e6:.0f} us of the host per "
                f"bucket and {row['ratio_to_allreduce_hook']['median']:.3f} times allreduce_hook's step, "
                f"{row['ratio_to_ddp']['median']:.3f} times plain DDP's"
            )
        elif "left_out" in row:
            parts.append(f"{row['backend']} on {row['world_size']} could not be run")
    return "; ".join(parts) + "."


def write(options: argparse.Namespace, header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    result = {"benchmark": "cuda_step", "header": header, "rows": rows, "sentence": describe(rows)}
    harness.write(options.name, result, options.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["dense"])
    every = [f"{backend}:{ranks}" for backend, ranks in WORLDS]
    parser.add_argument("--worlds", nargs="+", choices=every, default=every, help="backends and numbers of ranks")
    parser.add_argument("--name", default="cuda_step", help="of the JSON")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for JSON and timelines")
    options = parser.parse_args()
    from ddp_hooks import _C

    if not torch.cuda.is_available() or _C.why_unserved(torch.device("cuda")):
        print("cannot run here: needs a GPU and a build with the CUDA kernels (DDP_HOOKS_CUDA=1)", file=sys.stderr)
        return 69
    header = harness.environment_header(sys.argv, 2, [], backend="nccl and gloo, see rows")
    options.out.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    failed = False
    for backend, world_size in WORLDS:
        # Ranks that share a GPU and send through the host take many times as long.
        rounds = options.rounds if world_size == 1 else max(10, options.rounds // 4)
        workloads = [name for name in options.workloads if name == "dense" or (backend, world_size) == SOCKET]
        if not workloads or f"{backend}:{world_size}" not in options.worlds:
            continue
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, backend, testbed.free_port(), workloads, rounds, folder)
            try:
                mp.spawn(run_rank, args=arguments, nprocs=world_size)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                reason = str(error).strip().splitlines()[-1]
                rows.append({"backend": backend, "world_size": world_size, "left_out": reason})
                print(f"left out: {backend} on {world_size} ranks: {reason}")
                failed |= (backend, world_size) != SOCKET
                write(options, header, rows)
                continue
            found = json.loads(Path(folder, "rows.json").read_text())
            if "dense" in workloads:
                timeline = Path(folder, "timeline.json.gz")
                (options.out / f"cuda_timeline_{backend}_{world_size}.json.gz").write_bytes(timeline.read_bytes())
        rows += found
        rounded = ("bf16_compress_hook",)
        failed |= not all(
            row["gradient_difference"] <= LARGEST_DIFFERENCE for row in found if row["variant"] not in rounded
        )
        write(options, header, rows)
        print(f"\n{backend}, {world_size} ranks")
        print(
            f"{'workload':10}{'variant':20}{'step us':>9}{'q1..q3':>16}{'/ DDP':>7}{'/ hook':>8}{'us/bucket':>11}"
            f"{'wait us':>9}{'max |d|':>9}"
        )
        for row in found:
            step, host = row["step_seconds"], row["host_seconds_per_bucket"]
            wait = row["exchange_wait_seconds_per_step"]
            print(
                f"{row['workload']:10}{row['variant']:20}"
                f"{step['median'] * 1e6:>9.0f}{step['q1'] * 1e6:>8.0f}..{step['q3'] * 1e6:<6.0f}"
                f"{row['ratio_to_ddp']['median']:>7.3f}{row['ratio_to_allreduce_hook']['median']:>8.3f}"
                f"{'-' if host is None else format(host * 1e6, '.1f'):>11}"
                f"{'-' if wait is None else format(wait * 1e6, '.0f'):>9}{row['gradient_difference']:>9.1e}",
                flush=True,
            )
    print(describe(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
