"""Makes the tables and figures from the committed JSON; measures nothing.

    python benchmarks/figures.py     # benchmarks/results/*.json -> benchmarks/figures/*.svg, TABLES.md, SCALING.md

Figures need matplotlib; the tables need nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import scaling.tables
from tools import figures, fsdp_tables, harness, tables, width_tables

OURS = ("ours:auto:native", "ours:skip_unused:native", "ours:skip_zeros:native", "ours:skip_unused:python")
COLOURS = {"ours": "#0b6e4f", "oracle": "#8d99ae", "plain": "#c1440e", "find_unused": "#e09f3e"}
SCALING = "scaling_1gbit"  # what the scaling model extrapolates from
HEADINGS = (
    "Peer",
    "Step, ms (quartiles)",
    "/ DDP",
    "/ oracle",
    "/ row oracle",
    "Payload, MB",
    "Wire, MB",
    "Wait, us",
    "Hook, us",
    "max abs d",
)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def timed(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if "samples_seconds" in row and "peer" in row]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [HEADINGS]
    for row in rows:
        step, oracle, row_oracle = row["step_seconds"], row["ratio_to_oracle"], row.get("ratio_to_row_oracle")
        lines.append(
            (
                row["title"] + (" (lossy)" if row["is_lossy"] else ""),
                f"{step['median'] * 1e3:.1f} ({step['q1'] * 1e3:.1f} to {step['q3'] * 1e3:.1f})",
                f"{row['ratio_to_baseline']['median']:.3f}",
                tables.number(oracle and oracle["median"], ".3f"),
                tables.number(row_oracle and row_oracle["median"], ".3f"),
                tables.number(row["payload_bytes"], ".2f", 1e-6),
                tables.number(row["wire_bytes"], ".2f", 1e-6),
                tables.number(row["exchange_wait_seconds"], ".0f", 1e6),
                tables.number(row["hook_seconds"], ".0f", 1e6),
                tables.number(row["gradient_difference"], ".1e"),
            )
        )
    if not any(row.get("ratio_to_row_oracle") for row in rows):  # most runs do not ask what skipping rows could save
        hidden = HEADINGS.index("/ row oracle")
        lines = [(*line[:hidden], *line[hidden + 1 :]) for line in lines]
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([texts[0], "|" + "---|" + "---:|" * (len(lines[0]) - 1), *texts[1:]])


def groups(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["link"], row["world_size"]), []).append(row)
    return found


def write_tables(everything: dict[str, dict[str, Any]], path: Path) -> None:
    parts = ["# Results", "", "Made by `python benchmarks/figures.py`; columns are explained in README.md.", ""]
    for name, results in everything.items():
        parts += [f"## {name}", "", tables.describe_header(results["header"]), ""]
        if timed(results):
            for rows in groups(timed(results)).values():
                row = rows[0]
                parts += [
                    f"### {row['label']}, {row['link']}, {row['world_size']} hosts",
                    "",
                    f"{tables.describe_gradients(row)}, {row['rounds']} rounds.",
                    "",
                    table(rows),
                    "",
                ]
        else:
            own = {**width_tables.TABLES, "fsdp_link": fsdp_tables.fsdp_table}
            make = own.get(results["benchmark"], tables.plain_table)
            parts += [make(results["rows"]), ""]
        for failure in results.get("failures", []):
            parts += [f"Failed: {failure['workload']} on {failure['link']}.", ""]
        parts += [results.get("sentence", "The run did not end."), ""]
    path.write_text("\n".join(parts))


def first_of(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> dict[str, Any] | None:
    return next((row for peer in peers for row in rows if row["peer"] == peer), None)


def draw_speed_up(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """How many times faster than plain DDP, over the fraction that is unused, one panel for each link."""
    frozen = [row for row in rows if row["workload"].startswith("frozen:")]
    links = list(dict.fromkeys(row["link"] for row in frozen))
    if not links:
        return
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, len(links), figsize=(4.2 * len(links), 3.2), squeeze=False, sharey=True)
    for axis, link in zip(axes[0], links, strict=True):
        here = [row for row in frozen if row["link"] == link]
        ours = next((peer for peer in OURS if any(row["peer"] == peer for row in here)), None)
        for peer, colour in ((ours, COLOURS["ours"]), ("oracle", COLOURS["oracle"]), ("plain", COLOURS["plain"])):
            points = sorted((row["fraction_unused"], row) for row in here if row["peer"] == peer)
            if not points:
                continue
            ratios = [row["ratio_to_baseline"] for _, row in points]
            x = [100 * fraction for fraction, _ in points]
            y = [1 / ratio["median"] for ratio in ratios]
            error = [
                [v - 1 / ratio["q3"] for v, ratio in zip(y, ratios, strict=True)],
                [1 / ratio["q1"] - v for v, ratio in zip(y, ratios, strict=True)],
            ]
            dashed = "--" if peer == "oracle" else "-"
            axis.errorbar(
                x, y, error, color=colour, ls=dashed, marker="o", ms=3.5, capsize=2, label=points[0][1]["title"]
            )
        axis.set_title(f"{link}, {here[0]['world_size']} hosts", loc="left")
        axis.set_xlabel("parameters frozen, %")
    axes[0][0].set_ylabel("times faster than plain DDP")
    figures.put_legend_below(figure, axes[0][0])
    figures.save(figure, path)


def draw_breakdown(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Where one step's time goes: computing, waiting for masks, the hook on the host, and the rest: the network."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    wanted = [k for k in dict.fromkeys(row["workload"] for row in rows)]
    if not links or not wanted:
        return
    plt = figures.pyplot()
    parts = (("computing", "#577590"), ("waiting for masks", "#e09f3e"), ("hook on the host", "#0b6e4f"))
    parts += (("sending, not hidden", "#d9d9d9"),)
    height = 0.34 * len(wanted) * 3 + 1
    figure, axes = plt.subplots(1, len(links), figsize=(5 * len(links), height), squeeze=False, sharey=True)
    for axis, link in zip(axes[0], links, strict=True):
        labels, values = [], []
        for workload in wanted:
            here = [row for row in rows if row["link"] == link and row["workload"] == workload]
            for peers in (("plain",), OURS, ("oracle",)):
                row = first_of(here, peers)
                if row is None or row["compute_seconds"] is None:
                    continue
                total = row["step_seconds"]["median"]
                wait, hook = row["exchange_wait_seconds"] or 0.0, row["hook_seconds"] or 0.0
                compute = min(row["compute_seconds"], total - wait - hook)
                values.append([1e3 * v for v in (compute, wait, hook, total - compute - wait - hook)])
                name = "DDP" if peers == ("plain",) else "oracle" if peers == ("oracle",) else "ddp_hooks"
                labels.append(f"{row['label']}: {name}")
        left = [0.0] * len(values)
        for i, (name, colour) in enumerate(parts):
            widths = [value[i] for value in values]
            axis.barh(range(len(values)), widths, left=left, color=colour, label=name, height=0.72)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.set_yticks(range(len(labels)), labels)
        axis.invert_yaxis()
        axis.set_xlabel("ms a step")
        axis.set_title(link, loc="left")
    figures.put_legend_below(figure, axes[0][-1])
    figures.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    parser.add_argument("--out", type=Path, default=harness.FIGURES)
    options = parser.parse_args()
    everything = load(options.results)
    if not everything:
        print(f"no JSON in {options.results}; run a benchmark first", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    write_tables(everything, options.out / "TABLES.md")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("tables written; figures need matplotlib (pip install matplotlib)", file=sys.stderr)
        return 0
    for name, results in everything.items():
        if not any(row["link"] != "loopback" for row in timed(results)):
            continue
        draw_speed_up(timed(results), options.out / f"{name}_speed_up.svg")
        draw_breakdown(timed(results), options.out / f"{name}_breakdown.svg")
    if SCALING in everything:
        return scaling.tables.write(SCALING, options.results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
