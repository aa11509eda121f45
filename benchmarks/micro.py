"""Microbenchmarks: what the parts of a step cost by themselves.

    python benchmarks/micro.py exchange --hosts 2 3 4 --links loopback 1gbit

`exchange` measures the mask exchange's collective alone: gloo's all-reduce with BOR over masks of 100 to 100,000
parameters, awaited at once, so nothing hides its latency. The other parts call test bindings in ``ddp_hooks._C``; what
the installed extension does not offer is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import testbed

PARAMETERS = (100, 1_000, 10_000, 100_000)


def exchange_rank(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    ranks = dist.get_world_size()
    # Reducing a gather by hand is the other way that gloo offers: n - 1 messages at once in place of 2(n - 1) hops.
    methods = ("all_reduce_bor", "all_gather")
    for parameters in PARAMETERS:
        words = (parameters + 63) // 64 + 2  # and a step counter and a hash
        mask = torch.arange(words, dtype=torch.int64)
        everyone = torch.zeros(ranks * words, dtype=torch.int64)
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        for turn in range(rounds + 5):
            for method in methods:
                dist.barrier()
                start = time.perf_counter()
                if method == "all_reduce_bor":
                    dist.all_reduce(mask, op=dist.ReduceOp.BOR, group=group)
                else:
                    dist.all_gather_into_tensor(everyone, mask, group=group)
                if turn >= 5:
                    seconds[method].append(time.perf_counter() - start)
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, seconds)
        if dist.get_rank() == 0:
            for method in methods:
                slowest = [max(times) for times in zip(*(theirs[method] for theirs in gathered), strict=True)]
                testbed.report(
                    {
                        "part": "exchange",
                        "method": method,
                        "world_size": ranks,
                        "link": os.environ["DDP_HOOKS_TESTBED_RATE"],
                        "parameters": parameters,
                        "mask_bytes": mask.nbytes,
                        "seconds": harness.quartiles(slowest),
                        "rounds": rounds,
                    }
                )
    dist.destroy_process_group()


def run_exchange(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for link in options.links:
        for hosts in options.hosts:
            argv = [__file__, "exchange", "--plan", json.dumps({"rounds": options.rounds})]
            rows += testbed.launch(argv, hosts, link, options.timeout, echo_rank=None)[0].results
    return rows


def describe(rows: Sequence[dict[str, Any]]) -> str:
    first = [row for row in rows if row["part"] == "exchange" and row["method"] == "all_reduce_bor"]
    if not first:
        return "Nothing was measured."
    ranked = sorted(first, key=lambda row: row["seconds"]["median"])
    low, high = ranked[0], ranked[-1]

    def name(row: dict[str, Any]) -> str:
        return (
            f"{row['seconds']['median'] * 1e6:.0f} us ({row['world_size']} ranks, {row['parameters']:,} parameters, "
            f"{row['link']})"
        )

    return f"An exchange that nothing hides takes between {name(low)} and {name(high)}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["exchange"])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit"])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if harness.is_rank():
        exchange_rank(json.loads(options.plan)["rounds"])
        return 0
    header = harness.environment_header(sys.argv, max(options.hosts), options.links)
    try:
        rows = run_exchange(options)
    except testbed.TestbedUnavailable as error:
        print(f"cannot run here: {error}", file=sys.stderr)
        return 69
    print(f"{'link':10}{'ranks':>6}{'parameters':>12}{'method':>16}{'us':>9}{'q1..q3':>18}")
    for row in rows:
        s = row["seconds"]
        print(
            f"{row['link']:10}{row['world_size']:>6}{row['parameters']:>12,}{row['method']:>16}"
            f"{s['median'] * 1e6:>9.0f}{s['q1'] * 1e6:>9.0f}..{s['q3'] * 1e6:<7.0f}"
        )
    sentence = describe(rows)
    harness.write(
        "micro_exchange", {"benchmark": "micro_exchange", "header": header, "rows": rows, "sentence": sentence}
    )
    print(sentence)
    return 0


if __name__ == "__main__":
    sys.exit(main())
