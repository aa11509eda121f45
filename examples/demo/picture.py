"""Draws which parameters were used in which step, above the bytes that left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .report import MEGABYTE, format_size

Numbers = dict[str, Any]

# From the palette of Okabe and Ito, which people of every colour vision tell apart; they differ in lightness too.
EVERY_RANK = "#0072B2"
ONE_RANK = ("#E69F00", "#CC79A7")
SEVERAL_RANKS = "#56B4E9"
NOBODY = "#F4F4F4"
FROZEN = "#C9C9C9"
SAVED = "#E2E2E2"
SENT = "#2B4C5E"
INK = "#222222"
# Beyond, a cell is too narrow for the number of its rank.
MOST_STEPS_WITH_TEXT = 60


def draw(numbers: Numbers, path: Path) -> None:
    """Draw the run described by ``numbers`` (see :func:`report.summarize`) and write it to ``path`` as a PNG.

    Top: a row for each parameter group, as high as the group is large, and a column for each step, coloured as far down
    as the group was used; so the coloured area is what has to travel. Bottom: the megabytes each rank handed to
    collectives in each step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [step for phase in numbers["phases"] for step in phase["steps"]]
    figure = Figure(figsize=(15, 11.5), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    grid, bars = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2.3, 1.0), "hspace": 0.17})
    figure.subplots_adjust(left=0.175, right=0.985, top=0.825, bottom=0.065)
    figure.text(0.015, 0.965, "Which gradients does anybody need, and which bytes leave?", fontsize=22, weight="bold")
    figure.text(
        0.015,
        0.925,
        f"One model, trained twice on {numbers['ranks']} ranks: with plain DDP(find_unused_parameters=True) and with "
        f"ddp_hooks. Largest difference of the weights: {numbers['weights_difference']:.2g}.",
        fontsize=13.5,
        color=INK,
    )
    _draw_usage(grid, numbers, steps)
    _draw_bytes(bars, numbers, steps)
    _mark_phases(grid, bars, numbers)
    figure.legend(
        handles=_legend(numbers["ranks"]),
        loc="upper left",
        bbox_to_anchor=(0.008, 0.915),
        ncols=5,
        fontsize=12.5,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.6,
    )
    figure.savefig(path)


def _draw_usage(axes: Any, numbers: Numbers, steps: list[Numbers]) -> None:
    from matplotlib.patches import Rectangle

    sizes = [group["bytes"] / MEGABYTE for group in numbers["groups"]]
    edges = np.concatenate([[0.0], np.cumsum(sizes)])
    # White lines between cells would cover cells that are narrower than the lines.
    gap = 1.2 if len(steps) <= MOST_STEPS_WITH_TEXT else 0.0
    for column, step in enumerate(steps):
        for row, used_by in enumerate(step["used_by"]):
            colour, hatch = _style(used_by, step["frozen"][row], numbers["ranks"])
            corner, height = (column + 0.5, edges[row]), sizes[row]
            used_height = step["used_bytes"][row] / MEGABYTE if used_by else height
            if used_height < height:
                axes.add_patch(Rectangle(corner, 1, height, facecolor=NOBODY, edgecolor="white", linewidth=gap))
            # A line around a few rows of a table would cover them.
            line = gap if used_height == height else 0.0
            axes.add_patch(Rectangle(corner, 1, used_height, facecolor=colour, edgecolor="white", linewidth=line))
            if hatch:
                axes.add_patch(Rectangle(corner, 1, height, fill=False, hatch=hatch, edgecolor="#909090", linewidth=0))
            if 0 < len(used_by) < min(numbers["ranks"], 4) and gap:
                axes.text(
                    column + 1,
                    edges[row] + height / 2,
                    ",".join(map(str, used_by)),
                    ha="center",
                    va="center",
                    fontsize=10,
                    color="black",
                )
    _write_rows(axes, numbers, edges)
    axes.hlines(edges[1:-1], 0.5, len(steps) + 0.5, color="white", linewidth=1.2)
    axes.set_ylim(edges[-1], 0)
    axes.set_yticks((edges[:-1] + edges[1:]) / 2)
    axes.set_yticklabels(
        [f"{group['label']}  {format_size(group['bytes'])}" for group in numbers["groups"]], fontsize=12
    )
    axes.set_ylabel("parameters (row height = size)", fontsize=13)
    axes.yaxis.set_label_coords(-0.19, 0.5)
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write_rows(axes: Any, numbers: Numbers, edges: Any) -> None:
    """Write into the table's cells how many of its rows were sent, where not all were: they are too few to be seen."""
    row = [group["label"] for group in numbers["groups"]].index("words")
    end = 0.5
    for phase in numbers["phases"]:
        end += len(phase["steps"])
        if phase["rows_per_step"] is not None:
            count = sum(step["rows"] is not None for step in phase["steps"])
            text = f"{100 * phase['rows_per_step'] / numbers['table_rows']:.1f} % of the rows"
            axes.text(end - count / 2, (edges[row] + edges[row + 1]) / 2, text, ha="center", va="center", fontsize=12)


def _draw_bytes(axes: Any, numbers: Numbers, steps: list[Numbers]) -> None:
    x = np.arange(1, len(steps) + 1)
    plain = np.array([step["plain_bytes"] for step in steps]) / MEGABYTE
    hooks = np.array([step["ddp_hooks_bytes"] for step in steps]) / MEGABYTE
    width = 0.86 if len(steps) <= MOST_STEPS_WITH_TEXT else 1.0
    saved = axes.bar(x, plain, width=width, color=SAVED)
    sent = axes.bar(x, hooks, width=width, color=SENT)
    line = axes.stairs(plain, np.arange(len(steps) + 1) + 0.5, color=INK, linewidth=2.4, baseline=None)
    highest = float(plain.max())
    start = 0
    for phase in numbers["phases"]:
        count = len(phase["steps"])
        fewer = round(100 * (1 - phase["ddp_hooks"]["bytes_per_step"] / phase["plain"]["bytes_per_step"]))
        axes.text(
            start + count / 2 + 0.5,
            highest * 1.04,
            f"{fewer} % fewer bytes" if fewer else "nothing to skip",
            ha="center",
            va="bottom",
            fontsize=13,
            weight="bold",
            color=SENT,
        )
        start += count
    axes.set_xlim(0.5, len(steps) + 0.5)
    axes.set_ylim(0, highest * 1.2)
    axes.set_ylabel("MB per step and rank", fontsize=13)
    axes.yaxis.set_label_coords(-0.05, 0.5)
    axes.set_xlabel("step", fontsize=13)
    axes.set_xticks(sorted({1, *np.cumsum([len(phase["steps"]) for phase in numbers["phases"]]).tolist()}))
    axes.tick_params(labelsize=12)
    axes.legend(
        [line, sent, saved],
        ["plain DDP sends", "ddp_hooks sends (gradients and usage masks)", "saved"],
        loc="lower left",
        bbox_to_anchor=(-0.008, 0.985),
        ncols=3,
        fontsize=12.5,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.6,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _mark_phases(grid: Any, bars: Any, numbers: Numbers) -> None:
    start = 0
    for number, phase in enumerate(numbers["phases"], 1):
        count = len(phase["steps"])
        if start:
            for axes in (grid, bars):
                axes.axvline(start + 0.5, color=INK, linewidth=1.6, zorder=5)
        grid.text(
            start + count / 2 + 0.5,
            -0.012 * grid.get_ylim()[0],
            f"{number}. {_wrap(phase['title'])}",
            ha="center",
            va="bottom",
            fontsize=13.5,
            weight="bold",
            color=INK,
        )
        start += count


def _style(used_by: list[int], frozen: bool, ranks: int) -> tuple[str, str]:
    if used_by:
        if len(used_by) == ranks:
            return EVERY_RANK, ""
        if ranks == 2:
            return ONE_RANK[used_by[0]], ""
        return (ONE_RANK[0] if len(used_by) == 1 else SEVERAL_RANKS), ""
    return (FROZEN, "///") if frozen else (NOBODY, "")


def _legend(ranks: int) -> list[Any]:
    from matplotlib.patches import Patch

    some = (
        [Patch(facecolor=ONE_RANK[rank], label=f"used by rank {rank} only") for rank in range(2)]
        if ranks == 2
        else [
            Patch(facecolor=ONE_RANK[0], label="used by one rank (its number)"),
            Patch(facecolor=SEVERAL_RANKS, label="used by several ranks"),
        ]
    )
    return [
        Patch(facecolor=EVERY_RANK, label="used by every rank"),
        *some,
        Patch(facecolor=NOBODY, edgecolor="#BBBBBB", label="used by nobody"),
        Patch(facecolor=FROZEN, edgecolor="#909090", hatch="///", linewidth=0, label="frozen"),
    ]


def _wrap(title: str) -> str:
    """Break ``title`` into two lines as even as its words allow."""
    words = title.split()
    breaks = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    return "\n".join(min(breaks, key=lambda lines: max(map(len, lines)))) if breaks else title
