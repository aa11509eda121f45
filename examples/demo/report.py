"""Turns what the ranks brought home into numbers, a table and a sentence."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

import torch

from . import workload
from .command import COLUMNS
from .training import PhaseRecord, RankRecord, Settings, StepRecord

# A sum of two numbers has one order; from three on, another order rounds differently. About 2e-7 is what is seen on
# three ranks after 400 steps.
TOLERANCE_ON_TWO_RANKS = 0.0
TOLERANCE_ON_MORE_RANKS = 1e-5

GIGABIT_LINK_BYTES_PER_SECOND = 1e9 / 8
MEGABYTE = 1e6
Numbers = dict[str, Any]


def summarize(settings: Settings, records: list[RankRecord], threads: int, version: str) -> Numbers:
    """Gather everything that the table, the picture and the JSON file show.

    Args:
        settings: what was trained.
        records: what each rank brought home, in rank order.
        threads: threads of each rank.
        version: version of ddp_hooks.

    Returns:
        A dictionary that is written as JSON as it is. Sizes are in bytes, for one rank; times in milliseconds, of the
        slowest rank in each step, without the first step of each phase.
    """
    first = records[0]
    tolerance = TOLERANCE_ON_TWO_RANKS if settings.world_size <= 2 else TOLERANCE_ON_MORE_RANKS
    phases = [_summarize_phase(index, records) for index in range(len(first.phases))]
    numbers: Numbers = {
        "ddp_hooks": version,
        "torch": torch.__version__,
        "backend": "gloo",
        "link": "loopback",
        "ranks": settings.world_size,
        "threads_per_rank": threads,
        "hidden": settings.hidden,
        "steps_per_phase": settings.steps,
        "batch_size_per_rank": settings.batch_size,
        "parameters": first.parameters,
        "tasks": [task.name for task in workload.TASKS],
        "groups": [
            {"label": group.label, "bytes": size}
            for group, size in zip(workload.GROUPS, first.group_bytes, strict=True)
        ],
        "table_rows": workload.VOCABULARY,
        "table_bytes": first.table_bytes,
        "phases": phases,
        "total": {
            "plain_bytes": sum(step["plain_bytes"] for phase in phases for step in phase["steps"]),
            "ddp_hooks_bytes": sum(step["ddp_hooks_bytes"] for phase in phases for step in phase["steps"]),
            "time_ratio_quartiles": _quartiles(
                [
                    step["ddp_hooks_milliseconds"] / step["plain_milliseconds"]
                    for phase in phases
                    for step in _without_warm_up(phase["steps"])
                ]
            ),
        },
        "weights_difference": max(phase["weights_difference"] for phase in phases),
        "tolerance": tolerance,
        "statistics": first.statistics,
    }
    numbers["problems"] = find_problems(numbers)
    return numbers


def _summarize_phase(index: int, records: list[RankRecord]) -> Numbers:
    ranks: list[PhaseRecord] = [record.phases[index] for record in records]
    steps = [_summarize_step([rank.steps[step] for rank in ranks]) for step in range(len(ranks[0].steps))]
    timed = _without_warm_up(steps)
    return {
        "title": workload.PHASES[index].title,
        "plain": {
            "bytes_per_step": _mean([step["plain_bytes"] for step in steps]),
            **_spread([step["plain_milliseconds"] for step in timed]),
            "loopback_bytes_per_step": _mean_if_known([step["plain_loopback_bytes"] for step in steps]),
            "accuracy": list(ranks[0].plain_accuracy),
            "mean_accuracy": _mean(ranks[0].plain_accuracy),
        },
        "ddp_hooks": {
            "bytes_per_step": _mean([step["ddp_hooks_bytes"] for step in steps]),
            "payload_bytes_per_step": _mean([step["payload_bytes"] for step in steps]),
            "mask_bytes_per_step": _mean([step["mask_bytes"] for step in steps]),
            **_spread([step["ddp_hooks_milliseconds"] for step in timed]),
            "loopback_bytes_per_step": _mean_if_known([step["ddp_hooks_loopback_bytes"] for step in steps]),
            "accuracy": list(ranks[0].hooks_accuracy),
            "mean_accuracy": _mean(ranks[0].hooks_accuracy),
        },
        "weights_difference": max(rank.weights_difference for rank in ranks),
        "ranks_alike": all(rank.ranks_alike for rank in ranks),
        "rows_per_step": _mean_or_none([step["rows"] for step in steps if step["rows"] is not None]),
        "steps": steps,
    }


def _summarize_step(ranks: list[StepRecord]) -> Numbers:
    first = ranks[0]
    payload_bytes = max(rank.hooks_payload_bytes for rank in ranks)
    mask_bytes = max(rank.hooks_mask_bytes for rank in ranks)
    groups = range(len(first.used_here))
    return {
        "plain_bytes": first.plain_bytes,
        "plain_milliseconds": 1e3 * max(rank.plain_seconds for rank in ranks),
        "plain_loopback_bytes": first.plain_loopback_bytes,
        "ddp_hooks_bytes": payload_bytes + mask_bytes,
        "ddp_hooks_milliseconds": 1e3 * max(rank.hooks_seconds for rank in ranks),
        "ddp_hooks_loopback_bytes": first.hooks_loopback_bytes,
        "dense_bytes": max(rank.hooks_dense_bytes for rank in ranks),
        "payload_bytes": payload_bytes,
        "mask_bytes": mask_bytes,
        "used_by": [[r for r, rank in enumerate(ranks) if rank.used_here[group]] for group in groups],
        "used_anywhere": list(first.used_anywhere),
        "frozen": list(first.frozen),
        "used_bytes": list(first.used_bytes),
        "rows": first.rows,
    }


def find_problems(numbers: Numbers) -> list[str]:
    """Return what must not be: weights that differ, ranks that differ, and accounts that do not add up."""
    problems = []
    if not numbers["weights_difference"] <= numbers["tolerance"]:
        problems.append(
            f"the weights of the two runs differ by up to {numbers['weights_difference']:.3g}, "
            f"allowed is {numbers['tolerance']:g} on {numbers['ranks']} ranks"
        )
    for phase in numbers["phases"]:
        if not phase["ranks_alike"]:
            problems.append(f"the ranks hold different weights after the phase '{phase['title']}'")
        for number, step in enumerate(phase["steps"]):
            where = f"step {number + 1} of the phase '{phase['title']}'"
            if step["dense_bytes"] != step["plain_bytes"]:
                problems.append(
                    f"{where}: the model has {step['plain_bytes']} bytes of parameters, "
                    f"but ddp_hooks says plain DDP would send {step['dense_bytes']}"
                )
            if step["used_anywhere"] != [bool(used_by) for used_by in step["used_by"]]:
                problems.append(f"{where}: what ddp_hooks says is used anywhere is not what is used on some rank")
    return problems


def format_table(numbers: Numbers) -> str:
    """Return the table of all phases, plain DDP beside the hook: bytes, medians of times, accuracy on test data."""
    header = (
        f"{'':<33}{'MB a step, rank':^20}{'ms a step':>13}{'accuracy':>14}\n"
        f"{'phase':<33}{'plain':>7}{'hook':>7}{'saved':>6}{'plain':>7}{'hook':>6}{'plain':>7}{'hook':>7}"
    )
    rows = []
    for number, phase in enumerate(numbers["phases"], 1):
        plain, hooks = phase["plain"], phase["ddp_hooks"]
        saved = 100 * (1.0 - hooks["bytes_per_step"] / plain["bytes_per_step"])
        rows.append(
            f"{number} {phase['title']:<31}"
            f"{plain['bytes_per_step'] / MEGABYTE:>7.1f}{hooks['bytes_per_step'] / MEGABYTE:>7.1f}{round(saved):>5d}%"
            f"{plain['milliseconds_median']:>7.0f}{hooks['milliseconds_median']:>6.0f}"
            f"{plain['mean_accuracy']:>7.1%}{hooks['mean_accuracy']:>7.1%}"
        )
    line = "-" * max(len(row) for row in [*header.splitlines(), *rows])
    return "\n".join([line, header, line, *rows, line])


def describe_outcome(numbers: Numbers) -> str:
    """Return the table's meaning in a sentence, and what it does not show."""
    plain, hooks = numbers["total"]["plain_bytes"], numbers["total"]["ddp_hooks_bytes"]
    steps = len(numbers["phases"]) * numbers["steps_per_phase"]
    if numbers["problems"]:
        verdict = "FAILED: " + "; ".join(numbers["problems"][:3]) + "."
    else:
        same = "exactly the same weights" if numbers["weights_difference"] == 0 else "the same weights up to rounding"
        verdict = (
            f"Both runs reached {same}; with ddp_hooks each rank handed {format_size(hooks)} instead of "
            f"{format_size(plain)} to collectives in {steps} steps, {100 * (1 - hooks / plain):.0f} % less."
        )
    low, middle, high = (_describe_change(ratio - 1.0) for ratio in numbers["total"]["time_ratio_quartiles"])
    ranks = numbers["ranks"]
    # A ring all-reduce sends every byte 2 (n - 1) / n times.
    seconds_per_byte = 2 * (ranks - 1) / ranks / GIGABIT_LINK_BYTES_PER_SECOND
    saved_seconds = (plain - hooks) / steps * seconds_per_byte
    lines = [
        textwrap.fill(verdict, COLUMNS),
        "",
        _item(
            "Time, measured:",
            f"a step took {middle} with ddp_hooks (middle half of the steps: {low} to {high}). The ranks talk over "
            "loopback, which is as fast as memory: bytes are what counts here, time is won on a real network.",
        ),
        _item(
            "Time, computed:",
            f"over 1 Gbit/s the bytes saved would have taken {saved_seconds:.2g} s per step (ring all-reduce, nothing "
            "hidden behind backward); this was not measured.",
        ),
        *_describe_rows(numbers, seconds_per_byte),
    ]
    seen = [
        sum(phase[run]["loopback_bytes_per_step"] for phase in numbers["phases"]) / len(numbers["phases"])
        for run in ("plain", "ddp_hooks")
        if all(phase[run]["loopback_bytes_per_step"] is not None for phase in numbers["phases"])
    ]
    if len(seen) == 2:
        lines.append(
            _item(
                "Cross-check:",
                f"the kernel counted {format_size(seen[0])} per step on the loopback interface with plain DDP and "
                f"{format_size(seen[1])} with ddp_hooks (all ranks together, and any other program that used it "
                "meanwhile).",
            )
        )
    return "\n".join(lines)


def _describe_rows(numbers: Numbers, seconds_per_byte: float) -> list[str]:
    """Return what the last phase sent of the table of words, and what that saved; nothing if it was sent whole."""
    phase = numbers["phases"][-1]
    if phase["rows_per_step"] is None:
        return []
    rows, table_rows, table_bytes = phase["rows_per_step"], numbers["table_rows"], numbers["table_bytes"]
    sent_bytes = table_bytes * rows / table_rows
    first_step = next(number for number, step in enumerate(phase["steps"], 1) if step["rows"] is not None)
    ratios = [step["ddp_hooks_milliseconds"] / step["plain_milliseconds"] for step in _without_warm_up(phase["steps"])]
    change = _describe_change(_median(ratios) - 1.0)
    return [
        _item(
            "Rows:",
            f"from step {first_step} of phase {len(numbers['phases'])} on, {rows:,.0f} of the table's {table_rows:,} "
            f"rows travelled in a step, {format_size(sent_bytes)} instead of {format_size(table_bytes)}. Over 1 Gbit/s "
            f"the other rows would have taken {(table_bytes - sent_bytes) * seconds_per_byte:.2g} s per step (computed "
            f"as above). All that this phase skips together: {change} per step (measured).",
        )
    ]


def _item(label: str, text: str) -> str:
    return textwrap.fill(text, COLUMNS, initial_indent=f"{label:<17}", subsequent_indent=" " * 17)


def _describe_change(change: float) -> str:
    percent = round(100 * abs(change))
    return f"{percent} % {'more' if change > 0 else 'less'} time" if percent else "the same time"


def describe_setup(numbers: Numbers) -> str:
    """Return a sentence about the machine's and the model's part in the numbers."""
    return textwrap.fill(
        f"ddp_hooks {numbers['ddp_hooks']}, torch {numbers['torch']}; {numbers['ranks']} ranks of "
        f"{numbers['threads_per_rank']} thread(s), gloo over loopback; {numbers['parameters'] / 1e6:.1f} million "
        f"parameters, {len(numbers['tasks'])} tasks, {numbers['steps_per_phase']} steps a phase (first one not timed)",
        COLUMNS,
    )


def format_size(size: float) -> str:
    """Return ``size``, in bytes, with a unit that suits it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.995 * scale:
            return f"{size / scale:.{2 if unit == 'GB' else 1}f} {unit}"
    return f"{size:.0f} B"


def _without_warm_up(steps: list[Numbers]) -> list[Numbers]:
    return steps[1:] if len(steps) > 1 else steps


def _mean(values: Any) -> float:
    return float(statistics.fmean(values))


def _mean_if_known(values: list[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _mean_or_none(values: list[int]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: list[float]) -> float:
    return float(statistics.median(values))


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def _spread(milliseconds: list[float]) -> Numbers:
    return {
        "milliseconds_median": _median(milliseconds),
        "milliseconds_fastest": min(milliseconds),
        "milliseconds_slowest": max(milliseconds),
    }
