"""How long should the units of a gradient be? The measurement behind Policy's min_unit_bytes and max_unit_bytes.

    python benchmarks/unit_sizes.py                    # two hosts at 1 Gbit/s; needs root and iproute2
    python benchmarks/unit_sizes.py --links loopback

Tables whose rows have 256 bytes, put together to units of 256 and more; and stacked experts, whose rows have 1.8 and
0.9 MB, divided into units of up to as many bytes as the policy says. The policy is `auto` but for that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from tools import harness

SIZES = {
    "ncf": ("min_unit_bytes", (256, 1 << 10, 4 << 10, 16 << 10)),
    "mixtral": ("max_unit_bytes", (16 << 10, 64 << 10, 256 << 10, 1 << 20)),
}


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: the best size for each workload."""
    parts = []
    for label in dict.fromkeys((row["link"], row["label"]) for row in rows):
        medians = {
            row["peer"]: row["step_seconds"]["median"]
            for row in rows
            if (row["link"], row["label"]) == label and row["peer"].startswith("ours:")
        }
        best = min(medians, key=lambda peer: medians[peer])
        parts.append(f"{label[1]} at {label[0]} {best}")
    return "Fastest: " + ", ".join(parts) + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser, rounds=8)
    parser.add_argument("--links", nargs="+", default=["1gbit"], help="rates, none, or loopback")
    options = parser.parse_args()
    plans = [
        harness.Plan(
            workload,
            options.size,
            tuple(f"ours:auto:native:{setting}={size}" for size in sizes),
            options.rounds,
            options.warm_up,
        )
        for workload, (setting, sizes) in SIZES.items()
    ]
    return harness.main(__file__, plans, options.links, options, describe)


if __name__ == "__main__":
    sys.exit(main())
