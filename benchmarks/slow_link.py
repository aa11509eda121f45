"""What is skipping worth when the link is slow? Every workload, on every link, under every peer.

python benchmarks/slow_link.py                                  # everything; needs root and iproute2
python benchmarks/slow_link.py --workloads frozen:0.75 --links 1gbit --rounds 20
python benchmarks/slow_link.py --size tiny --links loopback     # a smoke test that needs nothing
python benchmarks/slow_link.py --workloads e5 ncf --peers ours:auto:native rows_prototype nothing   # what rows save
python benchmarks/slow_link.py --workloads gpt2_autocast gpt2_autocast:float32 linears --peers ours:auto:native nothing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tools import harness, workloads

ALL = (
    "oracle",
    "compute",
    "find_unused",
    "static_graph",
    "skip_all_reduce",
    "allreduce_hook",
    "fp16_compress",
    "powersgd",
    "ours:skip_unused:native",
    "ours:skip_zeros:native",
    "ours:auto:native",
    "ours:skip_unused:python",
)
OURS = ("ours:auto:native", "ours:skip_zeros:native", "ours:skip_unused:native")


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    best: list[tuple[float, str]] = []
    for name in OURS:
        found = harness.select(rows, peer=name)
        if found:
            best = [(row["ratio_to_baseline"]["median"], f"{row['label']} at {row['link']}") for row in found]
            break
    if not best:
        return "Without ddp_hooks in the run there is nothing to say but what the peers do."
    best.sort()
    fastest, slowest = best[0], best[-1]
    text = (
        f"{name} takes {fastest[0]:.2f} times plain DDP's step at best ({fastest[1]}) and {slowest[0]:.2f} times at "
        f"worst ({slowest[1]})"
    )
    for oracle in ("oracle", "row oracle"):
        key = f"ratio_to_{oracle.replace(' ', '_')}"
        ratios = sorted((row[key]["median"], f"{row['label']} at {row['link']}") for row in found if row.get(key))
        if ratios:
            text += f"; against the {oracle} it takes between {ratios[0][0]:.2f} and {ratios[-1][0]:.2f} times"
            text += f", the most on {ratios[-1][1]}"
    return text + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, rounds=24)
    parser.add_argument("--workloads", nargs="+", default=list(workloads.NAMES), help=", ".join(workloads.ALL_NAMES))
    parser.add_argument("--links", nargs="+", default=["1gbit", "10gbit"], help="rates, none, or loopback")
    parser.add_argument("--peers", nargs="+", default=list(ALL))
    options = parser.parse_args()
    try:  # before any host is made
        for workload in options.workloads:
            workloads.make(workload, options.size)
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))
    plans = [
        harness.Plan(workload, options.size, tuple(options.peers), options.rounds, options.warm_up)
        for workload in options.workloads
    ]
    return harness.main(__file__, plans, options.links, options, describe)


if __name__ == "__main__":
    sys.exit(main())
