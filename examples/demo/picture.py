"""Draws which parameters were used in which step, above the bytes that were sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddp_hooks.wording import describe_bytes

from .report import MEGABYTE, Numbers, mean, saved_fraction

# From the palette of Okabe and Ito, which people with any colour vision can tell apart; lightness differs too.
EVERY_RANK, ONE_RANK, SEVERAL_RANKS = "#0072B2", ("#E69F00", "#CC79A7"), "#56B4E9"
NOBODY, FROZEN, HATCH = "#F4F4F4", "#C9C9C9", "#909090"
SAVED, SENT, INK = "#E2E2E2", "#2B4C5E", "#222222"
# With more steps, a cell is too narrow for the number of its rank, and for a line around it.
MOST_STEPS_WITH_TEXT = 60
LEGEND = {"frameon": False, "fontsize": 12.5, "handlelength": 1.6, "columnspacing": 1.6}


def draw(numbers: Numbers, path: Path) -> None:
    """Draw the run described by ``numbers`` (see :func:`demo.training.train`) and write it to ``path`` as a PNG.

    Top: a row for each parameter group, as high as the group is large, and a column for each step, coloured as far down
    as the group was used, so that the coloured area has to be sent. Bottom: the megabytes that each rank sent.
    """
    figure = Figure(figsize=(15, 11.5), dpi=110, facecolor="white")
    grid, bars = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (2.3, 1.0), "hspace": 0.17})
    figure.subplots_adjust(left=0.175, right=0.985, top=0.825, bottom=0.065)
    figure.text(0.015, 0.965, "Which gradients does anybody need, and which bytes leave?", fontsize=22, weight="bold")
    subtitle = (
        f"One model, trained twice on {numbers['ranks']} ranks: with plain DDP(find_unused_parameters=True) and with "
        f"ddp_hooks. Largest difference of the weights: {numbers['weights_difference']:.2g}."
    )
    figure.text(0.015, 0.925, subtitle, fontsize=13.5, color=INK)
    figure.legend(handles=legend(numbers["ranks"]), loc="upper left", bbox_to_anchor=(0.008, 0.915), ncols=5, **LEGEND)
    draw_usage(grid, numbers)
    draw_bytes(bars, numbers)
    start = 0.5
    above = {"ha": "center", "va": "bottom", "fontsize": 13.5, "weight": "bold"}
    for number, phase in enumerate(numbers["phases"], 1):
        end = start + len(phase["steps"])
        middle = (start + end) / 2
        grid.text(middle, -0.012 * grid.get_ylim()[0], f"{number}. {wrap(phase['title'])}", color=INK, **above)
        saved = round(100 * saved_fraction(phase))
        text = f"{saved} % fewer bytes" if saved else "nothing to skip"
        bars.text(middle, bars.get_ylim()[1] / 1.2 * 1.04, text, color=SENT, **above)
        if number > 1:
            for axes in (grid, bars):
                axes.axvline(start, color=INK, linewidth=1.6, zorder=5)
        start = end
    figure.savefig(path)


def draw_usage(axes: Any, numbers: Numbers) -> None:
    """Draw a cell for each parameter group and step."""
    groups, ranks = numbers["groups"], numbers["ranks"]
    steps = [step for phase in numbers["phases"] for step in phase["steps"]]
    x = np.arange(1, len(steps) + 1)
    heights = [group["bytes"] / MEGABYTE for group in groups]
    edges = np.concatenate([[0.0], np.cumsum(heights)])
    gap = 1.2 if len(steps) <= MOST_STEPS_WITH_TEXT else 0.0
    for row, (height, top) in enumerate(zip(heights, edges, strict=False)):
        users = [step["used_by"][row] for step in steps]
        frozen = np.array([step["frozen"][row] and not used_by for step, used_by in zip(steps, users, strict=True)])
        colours = np.where(frozen, FROZEN, NOBODY)
        axes.bar(x, height, 1, bottom=top, color=colours, edgecolor="white", linewidth=gap)
        axes.bar(x[frozen], height, 1, bottom=top, fill=False, hatch="///", edgecolor=HATCH, linewidth=0)
        used = [step["used_bytes"][row] / MEGABYTE for step in steps]
        colours = [colour_of(used_by, ranks) for used_by in users]
        # A line around a few rows of a table would cover them.
        lines = [gap if part == height else 0.0 for part in used]
        axes.bar(x, used, 1, bottom=top, color=colours, edgecolor="white", linewidth=lines)
        for step, used_by in zip(x, users, strict=True):
            if gap and 0 < len(used_by) < min(ranks, 4):
                text = ",".join(map(str, used_by))
                axes.text(step, top + height / 2, text, ha="center", va="center", fontsize=10)
        if groups[row]["label"] == "words":
            write_rows(axes, numbers, top + height / 2)
    axes.hlines(edges[1:-1], 0.5, len(steps) + 0.5, color="white", linewidth=1.2)
    axes.set_ylim(edges[-1], 0)
    labels = [f"{group['label']}  {describe_bytes(group['bytes'])}" for group in groups]
    axes.set_yticks((edges[:-1] + edges[1:]) / 2, labels, fontsize=12)
    axes.set_ylabel("parameters (row height = size)", fontsize=13)
    axes.yaxis.set_label_coords(-0.19, 0.5)
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines[:].set_visible(False)


def write_rows(axes: Any, numbers: Numbers, y: float) -> None:
    """Write into the table's cells how many of its rows were sent if not all were: they are too few to be seen."""
    end = 0.5
    for phase in numbers["phases"]:
        end += len(phase["steps"])
        count = sum(step["rows"] is not None for step in phase["steps"])
        if count:
            text = f"{100 * mean(phase, 'rows') / numbers['table_rows']:.1f} % of the rows"
            axes.text(end - count / 2, y, text, ha="center", va="center", fontsize=12)


def draw_bytes(axes: Any, numbers: Numbers) -> None:
    """Draw what plain DDP and the hook send in each step."""
    steps = [step for phase in numbers["phases"] for step in phase["steps"]]
    x = np.arange(1, len(steps) + 1)
    plain, hook = (np.array([step[key] for step in steps]) / MEGABYTE for key in ("plain_bytes", "hook_bytes"))
    width = 0.86 if len(steps) <= MOST_STEPS_WITH_TEXT else 1.0
    saved = axes.bar(x, plain, width=width, color=SAVED)
    sent = axes.bar(x, hook, width=width, color=SENT)
    line = axes.stairs(plain, np.arange(len(steps) + 1) + 0.5, color=INK, linewidth=2.4, baseline=None)
    axes.set_xlim(0.5, len(steps) + 0.5)
    axes.set_ylim(0, plain.max() * 1.2)
    axes.set_ylabel("MB per step and rank", fontsize=13)
    axes.yaxis.set_label_coords(-0.05, 0.5)
    axes.set_xlabel("step", fontsize=13)
    axes.set_xticks(sorted({1, *np.cumsum([len(phase["steps"]) for phase in numbers["phases"]]).tolist()}))
    axes.tick_params(labelsize=12)
    labels = ["plain DDP sends", "ddp_hooks sends (gradients and usage masks)", "saved"]
    axes.legend([line, sent, saved], labels, loc="lower left", bbox_to_anchor=(-0.008, 0.985), ncols=3, **LEGEND)
    axes.spines[["top", "right"]].set_visible(False)


def colour_of(used_by: list[int], ranks: int) -> str:
    """Return the colour of a cell that these ranks used."""
    if len(used_by) == ranks:
        return EVERY_RANK
    if ranks == 2 and used_by:
        return ONE_RANK[used_by[0]]
    return ONE_RANK[0] if len(used_by) == 1 else SEVERAL_RANKS


def legend(ranks: int) -> list[Patch]:
    """Return what the colours mean."""
    if ranks == 2:
        some = {f"used by rank {rank} only": ONE_RANK[rank] for rank in range(2)}
    else:
        some = {"used by one rank (its number)": ONE_RANK[0], "used by several ranks": SEVERAL_RANKS}
    return [
        *(Patch(facecolor=colour, label=label) for label, colour in {"used by every rank": EVERY_RANK, **some}.items()),
        Patch(facecolor=NOBODY, edgecolor="#BBBBBB", label="used by nobody"),
        Patch(facecolor=FROZEN, edgecolor=HATCH, hatch="///", linewidth=0, label="frozen"),
    ]


def wrap(title: str) -> str:
    """Break ``title`` into two lines as even as its words allow."""
    words = title.split()
    breaks = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    return "\n".join(min(breaks, key=lambda lines: max(map(len, lines)))) if breaks else title
