"""From which size on should a run of used gradients be reduced in place? Policy's defaults are based on this.

    python benchmarks/thresholds.py                    # loopback, two ranks
    python benchmarks/thresholds.py --links 1gbit      # on the testbed; needs root and iproute2

Every other layer of the model is unused, so that every run of used gradients is one layer. Each size of a layer is
measured with policies that gather everything, that reduce every run in place, and with the default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tools import harness

PEERS = ("allreduce_hook", "ours:gather", "ours:in_place", "ours:skip_unused:native")
RUN_BYTES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: which way is faster at each size."""
    parts = []
    for label in dict.fromkeys((row["link"], row["label"]) for row in rows):
        medians = {row["peer"]: row["step_seconds"]["median"] for row in rows if (row["link"], row["label"]) == label}
        if {"ours:gather", "ours:in_place"} <= medians.keys():
            ratio = medians["ours:in_place"] / medians["ours:gather"]
            parts.append(f"{label[1]} at {label[0]} {ratio:.2f}")
    return "Time in place over time gathered: " + ", ".join(parts) + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, rounds=30)
    parser.add_argument("--links", nargs="+", default=["loopback"], help="rates, none, or loopback")
    options = parser.parse_args()
    plans = [
        harness.Plan(f"alternate:{run_bytes}", options.size, PEERS, options.rounds, options.warm_up)
        for run_bytes in RUN_BYTES
    ]
    return harness.main(__file__, plans, options.links, options, describe)


if __name__ == "__main__":
    sys.exit(main())
