"""Prints the tables of committed results and draws the figure of the README; measures nothing.

    python benchmarks/figures.py who_1gbit fsdp_1gbit     # prints the tables of files in results/
    python benchmarks/figures.py slow_link_1gbit --draw   # also draws a figure, in figures/

Drawing needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import harness, tables

OURS = ("ours:auto:native", "ours:skip_unused:native")
COLOURS = {"ours": "#0b6e4f", "oracle": "#8d99ae", "plain": "#c1440e"}


def print_tables(results: dict[str, Any]) -> None:
    print(f"\n{tables.describe_header(results['header'])}")
    rows = results["rows"]
    if "peer" in rows[0] and "link" in rows[0]:
        for _, group in itertools.groupby(rows, key=lambda row: (row["workload"], row["link"])):
            harness.print_table(list(group))
    else:
        print(tables.plain_table(rows))
    print(results["sentence"])


def draw_speed_up(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw how many times faster than plain DDP a step is, over the fraction that is frozen, a panel for each link."""
    import matplotlib

    matplotlib.use("svg")
    # The same JSON gives the same file: no random ids, no date.
    matplotlib.rcParams.update({"svg.hashsalt": "ddp_hooks", "font.size": 9, "legend.frameon": False})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt

    frozen = [row for row in harness.select(rows) if row["workload"].startswith("frozen:")]
    links = list(dict.fromkeys(row["link"] for row in frozen))
    figure, axes = plt.subplots(1, len(links), figsize=(4.2 * len(links), 3.2), squeeze=False, sharey=True)
    for axis, link in zip(axes[0], links, strict=True):
        here = harness.select(frozen, link=link)
        ours = next(peer for peer in OURS if harness.select(here, peer=peer))
        for peer, colour in ((ours, COLOURS["ours"]), ("oracle", COLOURS["oracle"]), ("plain", COLOURS["plain"])):
            points = sorted((row["fraction_unused"], row) for row in harness.select(here, peer=peer))
            ratios = [row["ratio_to_baseline"] for _, row in points]
            speed_ups = [1 / ratio["median"] for ratio in ratios]
            errors = [
                [speed_up - 1 / ratio["q3"] for speed_up, ratio in zip(speed_ups, ratios, strict=True)],
                [1 / ratio["q1"] - speed_up for speed_up, ratio in zip(speed_ups, ratios, strict=True)],
            ]
            axis.errorbar(
                [100 * fraction for fraction, _ in points],
                speed_ups,
                errors,
                color=colour,
                ls="--" if peer == "oracle" else "-",
                marker="o",
                ms=3.5,
                capsize=2,
                label=points[0][1]["title"],
            )
        axis.set_title(f"{link}, {here[0]['world_size']} hosts", loc="left")
        axis.set_xlabel("parameters frozen, %")
    axes[0][0].set_ylabel("times faster than plain DDP")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="results, without folder and ending")
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        results = json.loads((harness.RESULTS / f"{name}.json").read_text())
        print_tables(results)
        if options.draw:
            draw_speed_up(results["rows"], harness.FIGURES / f"{name}_speed_up.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
