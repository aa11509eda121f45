"""Does anything grow, or slow down, when everything is switched on and off for an hour?

    python benchmarks/soak.py --minutes 60

Two ranks on loopback train a small model. Between the steps, by seeds that they share, they change the policy, freeze
and unfreeze (alike, or one rank alone), rebuild, accumulate under no_sync, declare parameters unused, wrap and register
anew in either way, save and load the state, and synchronise without a backward. Every minute each rank counts its
memory, open files, threads and process groups, checks that both hold the same weights, wraps the same model once more,
and times a fixed reference step, taking turns with the same step of plain DDP, whose module is wrapped anew as often.

CPU time, of all threads of the process, is what counts, because other work may run on the machine; wall time is beside
it. `--registration plain` does the same without the hook, as far as plain DDP can, for what the rest of it costs.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools import harness, testbed

RANKS = 2
BRANCHES = 4
# Pairs of reference steps that a minute's median is over.
REFERENCE_STEPS, WARM_UP_STEPS = 40, 5
POLICIES = ("skip_unused", "skip_zeros", "auto", "allreduce")
# What is counted every minute: its name, its unit, and how it is written.
COUNTED = (
    ("rss_bytes", "MB", 1e-6, ".1f"),
    ("open_files", "files", 1, ".0f"),
    ("threads", "threads", 1, ".0f"),
    ("process_groups", "groups", 1, ".0f"),
    ("cpu_seconds", "us", 1e6, ".0f"),
    ("wall_seconds", "us", 1e6, ".0f"),
    ("ratio_of_cpu", "/ DDP", 1, ".3f"),
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """One rank; whatever is drawn from `rng` is drawn alike on both."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        self.options = options
        self.rank = dist.get_rank()
        self.rng = random.Random(options.seed)
        self.generator = torch.Generator().manual_seed(self.rank)
        torch.manual_seed(0)
        self.model = self._build()
        self.plain_model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.batch = torch.randn(16, 64)
        self.actions = 0
        self.registrations = 0
        self.steps = 0
        self.state: Any = None
        self.searches = True
        self.wrap_anew()

    @staticmethod
    def _build() -> Any:
        import torch

        class Branching(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.trunk = torch.nn.Linear(64, 128)
                self.norm = torch.nn.BatchNorm1d(128)
                self.branches = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(BRANCHES))
                self.head = torch.nn.Linear(128, 8)

            def forward(self, batch: Any, branch: int) -> Any:
                return self.head(torch.tanh(self.branches[branch](self.norm(torch.tanh(self.trunk(batch))))))

        return Branching()

    def wrap_anew(self, *, as_reference: bool = False) -> None:
        """Let go of the modules and the state, and make others: at random, or as the reference step is timed."""
        from torch.nn.parallel import DistributedDataParallel

        import ddp_hooks

        # What one rank alone has frozen would make the modules differ.
        self.unfreeze()
        plain = self.options.registration == "plain"
        self.searches = plain or as_reference or self.rng.random() < 0.7
        if not plain and not as_reference and self.rng.random() < 0.5:
            ddp_hooks.freeze(self.model, f"branches.{self.rng.randrange(BRANCHES)}")
        settings = {
            "bucket_cap_mb": 0.1 if as_reference else self.rng.choice((0.02, 0.1, 25)),
            "gradient_as_bucket_view": as_reference or self.rng.random() < 0.5,
        }
        # In either order, and before the next is there.
        if self.rng.random() < 0.5:
            self.ddp = None
        self.state = None
        self.ddp = None
        self.plain = None
        self.optimizer.zero_grad()
        if self.rng.random() < 0.5:
            gc.collect()
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=self.searches, **settings)
        self.plain = DistributedDataParallel(self.plain_model, find_unused_parameters=True, **settings)
        native, policy = self.rng.random() < 0.5, self.rng.choice(POLICIES)
        if as_reference:
            native, policy = True, "skip_unused"
        if native and not plain:
            self.state = ddp_hooks.register(self.ddp, policy)
        elif not plain:
            self.state = ddp_hooks.SkipUnusedState(self.ddp, policy)
            self.ddp.register_comm_hook(self.state, ddp_hooks.skip_unused_hook)
        self.registrations += 1

    def step(self, branches: Sequence[int] | None = None) -> None:
        import torch

        branches = [self.rng.randrange(BRANCHES) for _ in range(RANKS)] if branches is None else branches
        batch = torch.randn(16, 64, generator=self.generator)
        self._backward(batch, branches[self.rank])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def _backward(self, batch: Any, branch: int) -> None:
        if self.searches:
            self.ddp(batch, branch).square().mean().backward()
            return
        others = [f"branches.{i}" for i in range(BRANCHES) if i != branch]
        if self.rng.random() < 0.5:
            self.state.declare_unused(*others)
            self.ddp(batch, branch).square().mean().backward()
        else:
            with self.state.unused(*others):
                output = self.ddp(batch, branch)
            output.square().mean().backward()

    def accumulate(self) -> None:
        branch = self.rng.randrange(BRANCHES)
        if not self.searches:
            # What is used inside no_sync only is reduced at the next backward, so it is not declared unused there.
            self.step([branch] * RANKS)
            return
        with self.ddp.no_sync():
            self.ddp(self.batch, branch).square().mean().backward()
        self.step()

    def freeze(self) -> None:
        import ddp_hooks

        alone = self.rng.randrange(2 * RANKS)
        pattern = f"branches.{self.rng.randrange(BRANCHES)}"
        if alone >= RANKS or alone == self.rank:
            ddp_hooks.freeze(self.model, pattern)

    def unfreeze(self) -> None:
        import ddp_hooks

        ddp_hooks.unfreeze(self.model, "*")

    def rebuild(self) -> None:
        import ddp_hooks

        ddp_hooks.rebuild(self.ddp)

    def set_policy(self) -> None:
        self.state.set_policy(self.rng.choice(POLICIES))

    def checkpoint(self) -> None:
        if self.rng.random() < 0.5:
            self.state.load_state_dict(self.state.state_dict())
        else:
            pickle.loads(pickle.dumps(self.state))

    def synchronise(self) -> None:
        import ddp_hooks

        which = self.rng.randrange(3)
        if which == 0:
            ddp_hooks.sync.broadcast_parameters(self.ddp, src=self.rng.randrange(RANKS))
        elif which == 1:
            ddp_hooks.sync.average_parameters(self.ddp)
        else:
            sync = ddp_hooks.sync.BufferSync(self.ddp, self.rng.choice(("broadcast", "changed")))
            self.step()
            sync.remove()

    def act(self) -> None:
        """Change something, then train a little."""
        often: list[Callable[[], None]] = [self.freeze, self.unfreeze, self.accumulate, self.synchronise]
        if self.state is not None:
            often += [self.rebuild, self.set_policy, self.checkpoint]
        # Making a group takes longer than all the rest.
        action = self.wrap_anew if self.rng.random() < self.options.wrap_share else self.rng.choice(often)
        if self.options.registration == "plain" and action == self.freeze:
            action = self.unfreeze  # plain DDP would crash, or hang
        action()
        self.actions += 1
        for _ in range(self.rng.randrange(1, 4)):
            self.step()

    def measure(self) -> dict[str, Any]:
        """Count, check, and time the reference step, from the same configuration each time."""
        import torch.distributed as dist

        import ddp_hooks

        ddp_hooks.sync.verify_replicas(list(self.model.parameters()), raise_on_difference=True)
        self.wrap_anew(as_reference=True)
        gc.collect()
        seconds: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
        gc.disable()
        for i in range(WARM_UP_STEPS + REFERENCE_STEPS):
            for name in ("ours", "plain") if i % 2 else ("plain", "ours"):
                ddp = self.ddp if name == "ours" else self.plain
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                ddp(self.batch, self.rank).square().mean().backward()
                taken = (time.process_time() - cpu, time.perf_counter() - wall)
                ddp.zero_grad()
                if i >= WARM_UP_STEPS:
                    seconds[name].append(taken)
        gc.enable()
        medians = {
            name: [statistics.median(taken[i] for taken in times) for i in (0, 1)] for name, times in seconds.items()
        }
        ratio = statistics.median(a[0] / b[0] for a, b in zip(seconds["ours"], seconds["plain"], strict=True))
        return {
            "rank": self.rank,
            "rss_bytes": resident_bytes(),
            "open_files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "process_groups": len(dist.distributed_c10d._world.pg_map),
            "cpu_seconds": medians["ours"][0],
            "wall_seconds": medians["ours"][1],
            "plain_cpu_seconds": medians["plain"][0],
            "plain_wall_seconds": medians["plain"][1],
            "ratio_of_cpu": ratio,
            "registrations": self.registrations,
            "actions": self.actions,
            "steps": self.steps,
        }


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    soak = Soak(options)
    rows: list[dict[str, Any]] = []
    header = harness.environment_header(sys.argv, RANKS, [testbed.LOOPBACK]) if soak.rank == 0 else None
    began = time.monotonic()
    minute = 0
    while minute <= options.minutes:
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, soak.measure())
        rows += [{"minute": minute, **row} for row in everyone]
        if header is not None:
            if minute == 0:
                print_heading()
            for row in rows[-RANKS:]:
                print_row(row)
            results = {"benchmark": options.name, "header": header, "rows": rows, "slopes": slopes(rows)}
            results["sentence"] = sentence(rows, options.registration)
            harness.write(options.name, results)
        minute += 1
        # One rank's clock decides when the minute is over.
        is_over = torch.zeros(1)
        while not is_over.item():
            soak.act()
            is_over.fill_(float(time.monotonic() - began >= 60 * min(minute, options.minutes)))
            dist.broadcast(is_over, 0)
    if header is not None:
        print(sentence(rows, options.registration))
    dist.destroy_process_group()


def print_heading() -> None:
    titles = [f"{name.removesuffix('_bytes').removesuffix('_seconds')} {unit}" for name, unit, _, _ in COUNTED]
    print(f"{'minute':>6}{'rank':>6}" + "".join(f"{title:>22}" for title in titles) + f"{'registered':>12}", flush=True)


def print_row(row: dict[str, Any]) -> None:
    cells = [f"{row[name] * scale:{form}}" for name, _, scale, form in COUNTED]
    text = f"{row['minute']:6}{row['rank']:6}" + "".join(f"{cell:>22}" for cell in cells)
    print(text + f"{row['registrations']:12}", flush=True)


def slope(rows: Sequence[dict[str, Any]], name: str) -> float:
    """By how much it grows a minute: least squares, without the first minute, in which everything is warmed up."""
    settled = [row for row in rows if row["minute"] > 0]
    if len(settled) < 2:
        return 0.0
    minutes = [float(row["minute"]) for row in settled]
    values = [float(row[name]) for row in settled]
    return statistics.linear_regression(minutes, values).slope


def slopes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for rank in range(RANKS):
        ours = [row for row in rows if row["rank"] == rank]
        result.append({"rank": rank, **{f"{name}_a_minute": slope(ours, name) for name, *_ in COUNTED}})
    return result


def sentence(rows: Sequence[dict[str, Any]], registration: str) -> str:
    last = rows[-1]
    if last["minute"] < 2:
        return "Too short for slopes: they are taken from the first minute on."
    worst = {name: max((s[f"{name}_a_minute"] for s in slopes(rows)), key=abs) for name, *_ in COUNTED}
    first = statistics.fmean(row["ratio_of_cpu"] for row in rows if row["minute"] == 1)
    at_end = statistics.fmean(row["ratio_of_cpu"] for row in rows if row["minute"] == last["minute"])
    return (
        f"Over {last['minute']} minutes with {last['registrations']} registrations, {last['actions']} changes and "
        f"{last['steps']} steps ({registration}), the worse rank grew by {worst['rss_bytes'] / 1e6:+.3f} MB, "
        f"{worst['open_files']:+.2f} open files, {worst['threads']:+.2f} threads and "
        f"{worst['process_groups']:+.2f} process groups a minute; its reference step by "
        f"{worst['cpu_seconds'] * 1e6:+.1f} us of CPU time a minute, which took {first:.3f} of plain DDP's after the "
        f"first minute and {at_end:.3f} at the end."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--registration", choices=["hook", "plain"], default="hook")
    parser.add_argument(
        "--wrap-share", type=float, default=0.02, help="of the changes: how many wrap and register anew"
    )
    parser.add_argument("--name", default="soak", help="of the result")
    return harness.run_for_minutes(__file__, parser.parse_args(), run_rank, RANKS)


if __name__ == "__main__":
    sys.exit(main())
