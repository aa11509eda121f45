"""How close is the doctor's estimate to the measured step of each policy?

Plain DDP runs some steps under `ddp_hooks.diagnose`, which estimates a step's time under each policy. Then the hook
runs the same steps with that policy, in the same process group, and these steps are timed. A step lasts from the end of
one backward pass to the end of the next. Times are medians over steps of the mean over ranks, and the ratio is
estimated over measured time. Before `auto` is timed, it runs until it sends what the doctor predicts, for at most
`--settling` steps.

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
POLICIES = ("skip_unused", "skip_zeros", "auto")


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
    run_steps(plain, workload.patterns, workload.patterns)
    seconds = run_steps(plain, workload.patterns, steps)
    gc.disable()
    with ddp_hooks.diagnose(plain.module) as diagnosis:
        run_steps(plain, workload.patterns, steps + 1)  # the first warms up
    gc.enable()
    found = diagnosis.findings
    division = found.division
    assert division is not None
    assert division.bytes_per_second is not None
    common = {
        "workload": plan["workload"],
        "label": workload.label,
        "size": plan["size"],
        "link": plan["link"],
        "world_size": dist.get_world_size(),
        "steps": steps,
    }
    rows = [
        {
            **common,
            "policy": "plain DDP",
            "measured_seconds": summarise(seconds),
            "watched_seconds": division.step_seconds,
            "compute_seconds": division.compute_seconds,
            "exposed_seconds": division.exposed_seconds,
            "bytes_per_second": division.bytes_per_second,
            "payload_bytes": found.dense_bytes / found.steps,
        }
    ]
    del plain, diagnosis
    for name in POLICIES:
        outlook = found.policy(name)
        ours = peers.PEERS[f"ours:{name}:native"].build(context)
        settled_steps = settle(ours, workload.patterns, outlook, plan["settling"] if name == "auto" else 0)
        ours.reset_statistics()
        gc.disable()
        seconds = run_steps(ours, workload.patterns, steps)
        gc.enable()
        counted = ours.statistics()
        assert counted is not None
        measured = summarise(seconds)
        # Of whole cycles of patterns: the first step was watched twice.
        expected = sum(outlook.payload_bytes_by_step[1:]) / steps
        rows.append(
            {
                **common,
                "policy": name,
                "measured_seconds": measured,
                "estimated_seconds": outlook.step_seconds,
                "ratio": (outlook.step_seconds or 0.0) / measured["median"],
                "payload_bytes": counted["payload_bytes"] / steps,
                "predicted_payload_bytes": expected,
                "hook_seconds": counted["hook_seconds"] / steps,
                "exchange_wait_seconds": counted["exchange_wait_seconds"] / steps,
                "messages": counted["messages"] / steps,
                "settled_after_steps": settled_steps,
            }
        )
        del ours
    return rows


def run_steps(variant: Any, patterns: int, steps: int) -> list[float]:
    """Run steps one after the other, as training does, and return how long each took on this rank. Seconds."""
    ends = [time.perf_counter()]
    for step in range(steps):
        variant.step(step % patterns)
        variant.clear(step % patterns)
        ends.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(ends)]


def settle(ours: Any, patterns: int, outlook: Any, most_steps: int) -> int:
    """Warm up, and go on until a cycle of patterns sends what the doctor says; return after how many steps it did."""
    wanted = sum(outlook.payload_bytes_by_step[1 : 1 + patterns])
    done = 0
    while True:
        before = ours.statistics()
        run_steps(ours, patterns, max(2, patterns) // patterns * patterns)
        done += max(2, patterns) // patterns * patterns
        sent = ours.statistics()["payload_bytes"] - before["payload_bytes"]
        # The ranks send the same, so they agree about this.
        if done >= most_steps or sent * patterns == wanted * (max(2, patterns) // patterns * patterns):
            return done


def summarise(seconds: Sequence[float]) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    everyone = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(everyone)
    return harness.quartiles((everyone / dist.get_world_size()).tolist())


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, misses included."""
    rated = sorted(((row["ratio"], row) for row in rows if "ratio" in row), key=lambda pair: pair[0])
    inside = sum(1 / 1.2 <= ratio <= 1.2 for ratio, _ in rated)
    ends = [f"{ratio:.2f} ({row['policy']} on {row['label']})" for ratio, row in (rated[0], rated[-1])]
    exact = sum(row["payload_bytes"] == row["predicted_payload_bytes"] for _, row in rated)
    return (
        f"The doctor's estimate is between {ends[0]} and {ends[1]} times the measured step, within 20% in {inside} of "
        f"{len(rated)}; its bytes are what was sent in {exact} of {len(rated)}."
    )


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"\n{first['label']}, {first['world_size']} hosts, {first['link']}: computing "
        f"{first['compute_seconds'] * 1e3:.0f} ms, {first['bytes_per_second'] / 1e6:.1f} MB/s"
    )
    for row in rows:
        measured = row["measured_seconds"]
        text = (
            f"  {row['policy']:<12} {row['payload_bytes'] / 1e6:8.2f} MB  measured {measured['median'] * 1e3:7.1f} ms"
        )
        text += f" ({measured['q1'] * 1e3:.1f} to {measured['q3'] * 1e3:.1f})"
        if "ratio" in row:
            exact = "" if row["payload_bytes"] == row["predicted_payload_bytes"] else "  OTHER BYTES"
            text += f"  estimated {row['estimated_seconds'] * 1e3:7.1f} ms  ratio {row['ratio']:.3f}{exact}"
        else:
            text += f"  watched {row['watched_seconds'] * 1e3:.1f} ms"
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options_of_plans(parser, WORKLOADS, ["1gbit"], "doctor_estimate_1gbit")
    parser.add_argument("--steps", type=int, default=4, help="timed, and watched, of each; whole cycles of patterns")
    parser.add_argument("--settling", type=int, default=24, help="the most steps before auto is timed")
    options = parser.parse_args()
    if harness.is_rank():
        harness.report_rows(lambda: measure(json.loads(options.plan)))
        return 0
    settings = {"steps": options.steps, "settling": options.settling}
    return harness.launch_plans(__file__, options, lambda link: settings, print_table, describe)


if __name__ == "__main__":
    sys.exit(main())
