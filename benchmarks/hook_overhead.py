"""What does the hook cost on the host, on loopback, if none, half or nine tenths of the parameters are unused?

    python benchmarks/hook_overhead.py --rounds 60

The model has 40 linear layers and computes little, so the exchange of gradients is most of the step. The baselines are
plain DDP, which divides while it copies into the bucket, and torch's allreduce_hook, which needs a separate pass to
divide, like any hook.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tools import harness

PEERS = (
    "allreduce_hook",
    "oracle",
    "compute",
    "ours:skip_unused:native",
    "ours:skip_unused:python",
    "ours:auto:native",
    "ours:skip_zeros:native",
    "ours:allreduce:native",
    "ours:skip_unused:native:fu",
)
UNUSED = (0.0, 0.5, 0.9)


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    parts = []
    for unused in UNUSED:
        workload = f"layers:{unused:g}"
        native = harness.select(rows, peer="ours:skip_unused:native", workload=workload)
        python = harness.select(rows, peer="ours:skip_unused:python", workload=workload)
        if native and native[0]["ratio_to_allreduce_hook"]:
            row = native[0]
            text = (
                f"with {unused:.0%} unused the native hook takes {row['ratio_to_allreduce_hook']['median']:.3f} times "
                f"allreduce_hook's step and {row['ratio_to_baseline']['median']:.3f} times plain DDP's"
            )
            if python:
                text += f" (Python registration: {python[0]['ratio_to_baseline']['median']:.3f})"
            parts.append(text)
    return ("; ".join(parts) or "Without ddp_hooks in the run there is nothing to compare") + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, rounds=60)
    parser.add_argument("--links", nargs="+", default=["loopback"])
    parser.add_argument("--unused", nargs="+", type=float, default=list(UNUSED), help="fractions of the parameters")
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    options = parser.parse_args()
    plans = [
        harness.Plan(f"layers:{unused:g}", options.size, tuple(options.peers), options.rounds, options.warm_up)
        for unused in options.unused
    ]
    return harness.main(__file__, plans, options.links, options, describe)


if __name__ == "__main__":
    sys.exit(main())
