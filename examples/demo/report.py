"""Turns the numbers of :func:`demo.training.train` into a table and a few sentences."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

from ddp_hooks.wording import describe_bytes

# Three ranks and more may add in another order, which rounds differently: by 2e-7 after 400 steps.
TOLERANCE_ON_MORE_RANKS = 1e-5
GIGABIT_LINK_BYTES_PER_SECOND = 1e9 / 8
MEGABYTE, COLUMNS = 1e6, 80
Numbers = dict[str, Any]


def mean(phase: Numbers, key: str) -> float:
    """Return the mean of a field of a phase's steps, without the steps in which it is None."""
    return statistics.fmean(step[key] for step in phase["steps"] if step[key] is not None)


def saved_fraction(phase: Numbers) -> float:
    """Return the fraction of plain DDP's bytes that the hook did not send."""
    return 1 - mean(phase, "hook_bytes") / mean(phase, "plain_bytes")


def timed_steps(phase: Numbers) -> list[Numbers]:
    """Return the steps of a phase without the first one, which warms up."""
    return phase["steps"][1:] or phase["steps"]


def time_ratios(*phases: Numbers) -> list[float]:
    """Return the hook's time over plain DDP's, step by step."""
    return [step["hook_milliseconds"] / step["plain_milliseconds"] for phase in phases for step in timed_steps(phase)]


def weights_agree(numbers: Numbers) -> bool:
    """Say whether the two runs reached the same weights; False if one of them is a NaN."""
    return bool(numbers["weights_difference"] <= (0.0 if numbers["ranks"] == 2 else TOLERANCE_ON_MORE_RANKS))


def describe_setup(numbers: Numbers) -> str:
    """Return a sentence about the machine and the model behind the numbers."""
    return textwrap.fill(
        f"ddp_hooks {numbers['ddp_hooks']}, torch {numbers['torch']}; {numbers['ranks']} ranks of "
        f"{numbers['threads_per_rank']} thread(s), gloo over loopback; {numbers['parameters'] / 1e6:.1f} million "
        f"parameters, {len(numbers['phases'][0]['steps'])} steps a phase (first one not timed)",
        COLUMNS,
    )


def format_table(numbers: Numbers) -> str:
    """Return the table of all phases, plain DDP beside the hook: bytes, medians of times, accuracy on test data."""
    header = (
        f"{'':<33}{'MB a step, rank':^20}{'ms a step':>13}{'accuracy':>14}\n"
        f"{'phase':<33}{'plain':>7}{'hook':>7}{'saved':>6}{'plain':>7}{'hook':>6}{'plain':>7}{'hook':>7}"
    )
    rows = []
    for number, phase in enumerate(numbers["phases"], 1):
        plain_ms, hook_ms = (
            statistics.median(step[f"{run}_milliseconds"] for step in timed_steps(phase)) for run in ("plain", "hook")
        )
        plain_accuracy, hook_accuracy = (statistics.fmean(phase[f"{run}_accuracy"]) for run in ("plain", "hook"))
        rows.append(
            f"{number} {phase['title']:<31}"
            f"{mean(phase, 'plain_bytes') / MEGABYTE:>7.1f}{mean(phase, 'hook_bytes') / MEGABYTE:>7.1f}"
            f"{round(100 * saved_fraction(phase)):>5}%{plain_ms:>7.0f}{hook_ms:>6.0f}"
            f"{plain_accuracy:>7.1%}{hook_accuracy:>7.1%}"
        )
    line = "-" * max(len(row) for row in [*header.splitlines(), *rows])
    return "\n".join([line, header, line, *rows, line])


def describe_outcome(numbers: Numbers) -> str:
    """Return what the table means, and what it does not show."""
    phases = numbers["phases"]
    steps = [step for phase in phases for step in phase["steps"]]
    plain, hook = (sum(step[key] for step in steps) for key in ("plain_bytes", "hook_bytes"))
    if not weights_agree(numbers):
        result = f"FAILED: the weights of the two runs differ by up to {numbers['weights_difference']:.3g}."
    elif numbers["weights_difference"] == 0:
        result = "Both runs reached exactly the same weights."
    else:
        result = "Both runs reached the same weights up to rounding."
    sizes = f"{describe_bytes(hook)} instead of {describe_bytes(plain)}"
    result += f" With ddp_hooks, each rank sent {sizes} in {len(steps)} steps, {1 - hook / plain:.0%} less."
    quartiles = statistics.quantiles(time_ratios(*phases), n=4, method="inclusive")
    low, middle, high = map(describe_change, quartiles)
    # A ring all-reduce sends every byte 2 (n - 1) / n times.
    seconds_per_byte = 2 * (numbers["ranks"] - 1) / numbers["ranks"] / GIGABIT_LINK_BYTES_PER_SECOND
    seconds = (plain - hook) / len(steps) * seconds_per_byte
    items = {
        "Time, measured:": f"a step took {middle} with ddp_hooks (middle half of the steps: {low} to {high}), over "
        "loopback, which is as fast as memory. On a real network, bytes take time.",
        "Time, computed:": f"at 1 Gbit/s the saved bytes would take {seconds:.2g} s per step (ring all-reduce, no "
        "overlap with backward). This was not measured.",
    }
    last = phases[-1]
    if any(step["rows"] is not None for step in last["steps"]):
        rows, table_rows, table_bytes = mean(last, "rows"), numbers["table_rows"], numbers["table_bytes"]
        sizes = f"{describe_bytes(table_bytes * rows / table_rows)} instead of {describe_bytes(table_bytes)}"
        items["Rows:"] = (
            f"in phase {len(phases)}, {rows:,.0f} of the table's {table_rows:,} rows were sent per step, {sizes}. A "
            f"step of this phase took {describe_change(statistics.median(time_ratios(last)))} (measured)."
        )
    texts = [
        textwrap.fill(text, COLUMNS, initial_indent=f"{label:<17}", subsequent_indent=" " * 17)
        for label, text in items.items()
    ]
    return "\n".join([textwrap.fill(result, COLUMNS), "", *texts])


def describe_change(ratio: float) -> str:
    """Say how much more or less time a ratio of times means."""
    percent = round(100 * abs(ratio - 1))
    return f"{percent}% {'more' if ratio > 1 else 'less'} time" if percent else "the same time"
