"""What does it cost that a thread would notice if ranks waited for each other? On loopback, where it would show.

    python benchmarks/hang_overhead.py

One DDP module with the hook runs blocks of steps, with the thread of `ddp_hooks.hangs` and without it, in turn: a pair
of blocks with one first, then a pair with the other first. A block's time is the median of its steps', each the mean
over the ranks. The ratio is made within a pair, with the thread over without it; its median and quartiles are over the
pairs. `again` is a block without the thread over another one without it: the noise.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from typing import Any

from tools import harness, testbed

WORKLOADS = ("layers:0", "layers:0.5")
HOOK = "ours:auto:native"


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """On every rank: one row."""
    import torch
    import torch.distributed as dist

    from ddp_hooks.hangs import watcher
    from tools import peers, workloads

    def switch(on: bool) -> None:
        if on:
            watcher.begin(watcher.REPORT_AFTER_SECONDS)
        else:
            watcher.end()

    workload = workloads.make(plan["workload"], plan["size"])
    torch.manual_seed(1234)
    context = peers.Context(workload, workload.build(), dist.get_rank(), [])
    hook = peers.PEERS[HOOK].build(context)
    steps = -(-plan["steps"] // workload.patterns) * workload.patterns
    harness.run_block(hook, workload.patterns, steps)
    ratios: dict[str, list[float]] = {"watched": [], "again": []}
    seconds: dict[str, list[float]] = {"watched": [], "without": []}
    gc.collect()
    gc.disable()
    for turn in range(plan["pairs"]):
        blocks: dict[str, float] = {}
        order = ("watched", "without", "again") if turn % 2 else ("again", "without", "watched")
        for kind in order:
            switch(kind == "watched")
            blocks[kind], _ = harness.run_block(hook, workload.patterns, steps)
        for kind in ratios:
            ratios[kind].append(blocks[kind] / blocks["without"])
        for kind in seconds:
            seconds[kind].append(blocks[kind])
    gc.enable()
    return {
        "workload": plan["workload"],
        "label": workload.label,
        "size": plan["size"],
        "link": plan["link"],
        "world_size": dist.get_world_size(),
        "pairs": plan["pairs"],
        "steps_of_a_block": steps,
        "step_seconds": harness.quartiles(seconds["without"]),
        "watched_step_seconds": harness.quartiles(seconds["watched"]),
        "ratio": harness.quartiles(ratios["watched"]),
        "ratio_of_noise": harness.quartiles(ratios["again"]),
    }


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, the worst first."""
    parts = [
        f"{row['ratio']['median']:.3f} ({row['ratio']['q1']:.3f} to {row['ratio']['q3']:.3f}) of a step of "
        f"{row['step_seconds']['median'] * 1e3:.1f} ms without it in {row['label']}, where two blocks without it are "
        f"{row['ratio_of_noise']['median']:.3f} ({row['ratio_of_noise']['q1']:.3f} to "
        f"{row['ratio_of_noise']['q3']:.3f}) of each other"
        for row in sorted(rows, key=lambda row: -row["ratio"]["median"])
    ]
    return f"With the thread a step takes {'; and '.join(parts)}."


def print_row(rows: Sequence[dict[str, Any]]) -> None:
    (row,) = rows
    print(f"{row['label']:<12} {row['link']:<9} {describe(rows)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options_of_plans(parser, WORKLOADS, [testbed.LOOPBACK], "hang_overhead")
    parser.add_argument("--steps", type=int, default=40, help="of a block, rounded up to whole cycles of patterns")
    parser.add_argument("--pairs", type=int, default=16, help="of blocks")
    options = parser.parse_args()
    if harness.is_rank():
        harness.report_rows(lambda: [measure(json.loads(options.plan))])
        return 0
    settings = {"steps": options.steps, "pairs": options.pairs}
    return harness.launch_plans(__file__, options, lambda link: settings, print_row, describe)


if __name__ == "__main__":
    sys.exit(main())
