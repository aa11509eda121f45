"""What does it cost to watch plain DDP with `ddp_hooks.diagnose`?

One DDP module runs blocks of steps in pairs, one watched and one not; the order alternates from pair to pair. The time
of a block is the median of its steps, each of which is the mean over the ranks, from the end of one step to the end of
the next. The ratio of a pair is watched over not watched; the row shows its median and quartiles over the pairs. If
hosts have interfaces, the bytes that a host sends in a block are counted there.

    python benchmarks/watching.py                     # needs root and iproute2
    python benchmarks/watching.py --links loopback --size tiny --name try
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tools import harness, testbed

WORKLOADS = ("all_used", "layerdrop", "ncf")


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """On every rank: one row."""
    import torch
    import torch.distributed as dist

    import ddp_hooks
    from tools import peers, workloads

    workload = workloads.make(plan["workload"], plan["size"])
    torch.manual_seed(1234)
    context = peers.Context(workload, workload.build(), dist.get_rank(), [])
    plain = peers.PEERS[peers.BASELINE].build(context)
    steps = -(-plan["steps"] // workload.patterns) * workload.patterns
    harness.run_block(plain, workload.patterns, steps)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    sent: dict[bool, list[float]] = {True: [], False: []}
    gc.collect()
    gc.disable()
    for turn in range(plan["pairs"]):
        for watched in (True, False) if turn % 2 else (False, True):
            if watched:
                with ddp_hooks.diagnose(plain.module):
                    block, moved = harness.run_block(plain, workload.patterns, steps)
            else:
                block, moved = harness.run_block(plain, workload.patterns, steps)
            seconds[watched].append(block)
            sent[watched].append(moved)
    gc.enable()
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    has_counters = all(sent[False])
    return {
        "workload": plan["workload"],
        "label": workload.label,
        "size": plan["size"],
        "link": plan["link"],
        "world_size": dist.get_world_size(),
        "pairs": plan["pairs"],
        "steps_of_a_block": steps,
        "step_seconds": harness.quartiles(seconds[False]),
        "watched_step_seconds": harness.quartiles(seconds[True]),
        "ratio": harness.quartiles(ratios),
        # Acknowledgements and what TCP repeats differ from block to block.
        "sent_bytes": statistics.median(sent[False]) if has_counters else None,
        "watched_sent_bytes": statistics.median(sent[True]) if has_counters else None,
    }


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, the worst first."""
    worst = max(rows, key=lambda row: row["ratio"]["median"])
    best = min(rows, key=lambda row: row["ratio"]["median"])
    changes = [row["watched_sent_bytes"] / row["sent_bytes"] - 1 for row in rows if row["sent_bytes"]]
    text = (
        f"A watched step takes between {best['ratio']['median']:.3f} ({best['label']}, {best['link']}) and "
        f"{worst['ratio']['median']:.3f} ({worst['label']}, {worst['link']}) times one that is not watched"
    )
    if changes:
        text += f"; what a host sends differs by at most {max(map(abs, changes)):.2%}"
    return text + "."


def print_row(rows: Sequence[dict[str, Any]]) -> None:
    (row,) = rows
    ratio = row["ratio"]
    print(
        f"{row['label']:<12} {row['link']:<9} {row['step_seconds']['median'] * 1e3:8.1f} ms, watched "
        f"{row['watched_step_seconds']['median'] * 1e3:8.1f} ms, ratio {ratio['median']:.3f} "
        f"({ratio['q1']:.3f} to {ratio['q3']:.3f})",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options_of_plans(parser, WORKLOADS, [testbed.LOOPBACK, "1gbit"], "watching")
    parser.add_argument("--steps", type=int, default=4, help="of a block, rounded up to whole cycles of patterns")
    parser.add_argument("--pairs", type=int, default=8, help="of blocks on loopback; half as many elsewhere")
    options = parser.parse_args()
    if harness.is_rank():
        harness.report_rows(lambda: [measure(json.loads(options.plan))])
        return 0

    def settings_on(link: str) -> dict[str, int]:
        pairs = options.pairs if link == testbed.LOOPBACK else max(options.pairs // 2, 1)
        return {"steps": options.steps, "pairs": pairs}

    return harness.launch_plans(__file__, options, settings_on, print_row, describe)


if __name__ == "__main__":
    sys.exit(main())
