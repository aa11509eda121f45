"""How close is the doctor's report on each policy to a longer run with this policy?

Plain DDP runs `--trial-steps` steps under `ddp_hooks.diagnose`, which tries policies in three quarters of them. Then
blocks of steps of plain DDP and of each policy take turns, in the same process group. A step lasts from the end of one
backward pass to the end of the next. Times are medians over steps of the mean over ranks. `ratio` is the estimated over
the measured time, each as a fraction of plain DDP's step at that time; `byte_ratio` compares bytes in the same way.

    python benchmarks/doctor_estimate.py                      # needs root and iproute2
    python benchmarks/doctor_estimate.py --workloads ncf --links loopback --size tiny --name try
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from tools import harness

WORKLOADS = ("frozen:0.9", "layerdrop", "multitask", "mixture", "zero_times_sum", "all_used", "ncf", "omnireduce:0.1")
POLICIES = ("skip_unused", "auto")


def measure(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: one row for plain DDP, and one for each policy."""
    import torch
    import torch.distributed as dist

    import ddp_hooks
    from tools import peers, workloads

    workload = workloads.make(plan["workload"], plan["size"])
    torch.manual_seed(1234)
    context = peers.Context(workload, workload.build(), dist.get_rank(), [])
    steps = -(-plan["steps"] // workload.patterns) * workload.patterns

    plain = peers.PEERS[peers.BASELINE].build(context)
    run_steps(plain, workload.patterns, 2)
    gc.disable()
    with ddp_hooks.diagnose(plain.module, trial_steps=plan["trial_steps"]) as diagnosis:
        run_steps(plain, workload.patterns, plan["trial_steps"])
    found = diagnosis.findings
    assert found.division is not None
    ours = {name: peers.PEERS[f"ours:{name}:native"].build(context) for name in POLICIES}
    for variant in ours.values():
        run_steps(variant, workload.patterns, plan["settling"])
        variant.reset_statistics()
    # Whole cycles of patterns.
    steps = -(-plan["steps"] // workload.patterns) * workload.patterns
    seconds: dict[str, list[float]] = {}
    for _ in range(plan["rounds"]):
        for name, variant in {"plain DDP": plain, **ours}.items():
            seconds.setdefault(name, []).extend(run_steps(variant, workload.patterns, steps + 1)[1:])
    gc.enable()
    measured = {name: summarise(some) for name, some in seconds.items()}
    common = {
        "workload": plan["workload"],
        "label": workload.label,
        "size": plan["size"],
        "link": plan["link"],
        "world_size": dist.get_world_size(),
        "trial_steps": plan["trial_steps"],
    }
    rows = [
        {
            **common,
            "policy": "plain DDP",
            "measured_seconds": measured["plain DDP"],
            "watched_seconds": found.division.step_seconds,
            "compute_seconds": found.division.compute_seconds,
            "step_bytes": found.dense_bytes / found.steps,
        }
    ]
    for name, variant in ours.items():
        counted, tried = variant.statistics(), found.policy(name)
        assert counted is not None
        assert tried.step_seconds is not None
        step_bytes = (counted["payload_bytes"] + counted["mask_bytes"]) / counted["steps"]
        estimated = tried.step_seconds / found.division.step_seconds
        rows.append(
            {
                **common,
                "policy": name,
                "measured_seconds": measured[name],
                "estimated_seconds": tried.step_seconds,
                "ratio": estimated / (measured[name]["median"] / measured["plain DDP"]["median"]),
                "step_bytes": step_bytes,
                "byte_ratio": tried.step_bytes / step_bytes,
                "hook_seconds": counted["hook_seconds"] / counted["steps"],
            }
        )
    return rows


def run_steps(variant: Any, patterns: int, steps: int) -> list[float]:
    """Run steps one after the other, as training does, and return how long each took on this rank. Seconds."""
    ends = [time.perf_counter()]
    for step in range(steps):
        variant.step(step % patterns)
        variant.clear(step % patterns)
        ends.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(ends)]


def summarise(seconds: Sequence[float]) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    everyone = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(everyone)
    return harness.quartiles((everyone / dist.get_world_size()).tolist())


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, misses included."""
    tried = [row for row in rows if "ratio" in row]
    times, sizes = ([row[kind] for row in tried] for kind in ("ratio", "byte_ratio"))
    return (
        f"The doctor's times are {min(times):.2f} to {max(times):.2f} of the measured ones, its bytes "
        f"{min(sizes):.3f} to {max(sizes):.3f}."
    )


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{first['label']}, {first['world_size']} hosts, {first['link']}")
    for row in rows:
        measured = row["measured_seconds"]
        text = f"  {row['policy']:<12} {row['step_bytes'] / 1e6:8.2f} MB  measured {measured['median'] * 1e3:7.1f} ms"
        text += f" ({measured['q1'] * 1e3:.1f} to {measured['q3'] * 1e3:.1f})"
        if "ratio" in row:
            text += f"  estimated {row['estimated_seconds'] * 1e3:7.1f} ms"
            text += f"  ratio {row['ratio']:.3f}, bytes {row['byte_ratio']:.3f}"
        else:
            text += f"  watched {row['watched_seconds'] * 1e3:.1f} ms"
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options_of_plans(parser, WORKLOADS, ["1gbit"], "doctor_estimate_1gbit")
    parser.add_argument("--trial-steps", type=int, default=48, help="under the doctor")
    parser.add_argument("--settling", type=int, default=24, help="steps with each policy before any is timed")
    parser.add_argument("--steps", type=int, default=4, help="of a block; whole cycles of patterns")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each")
    options = parser.parse_args()
    if harness.is_rank():
        harness.report_rows(lambda: measure(json.loads(options.plan)))
        return 0
    settings = {name: getattr(options, name) for name in ("trial_steps", "settling", "steps", "rounds")}
    return harness.launch_plans(__file__, options, lambda link: settings, print_table, describe)


if __name__ == "__main__":
    sys.exit(main())
