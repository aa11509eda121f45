"""What is made of the losses: each way at its best learning rate and at the others', a table, and a sentence.

A rate is chosen by the losses on the validation samples, means over seeds; the losses that are told are the test's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PLAIN, WORLD, RAISED, CONTRIBUTORS = "plain DDP", "world", "world, heads' rate raised", "contributors"
COMPARED = (WORLD, RAISED, CONTRIBUTORS)
# What is told of a loss that is no number: more than any that was met.
DIVERGED = math.inf


def choose(runs: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [run for run in runs if all(run[key] == value for key, value in wanted.items())]


def mean_loss(losses: Sequence[float] | None) -> float:
    return DIVERGED if losses is None else statistics.fmean(losses)


def weigh(losses: Sequence[float] | None, shares: Sequence[float]) -> float:
    return DIVERGED if losses is None else sum(loss * share for loss, share in zip(losses, shares, strict=True))


def losses_by_seed(runs: Sequence[dict[str, Any]], part: str) -> list[float]:
    return [mean_loss(run[part]) for run in sorted(runs, key=lambda run: run["seed"])]


def best_rate(runs: Sequence[dict[str, Any]]) -> float:
    """Of runs that differ in rate and seed: the rate with the lowest mean validation loss."""
    rates = dict.fromkeys(run["rate"] for run in runs)
    return min(rates, key=lambda rate: statistics.fmean(losses_by_seed(choose(runs, rate=rate), "validation")))


def cases(runs: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The runs that compare: alike in optimizer, draw of the tasks, and steps."""
    keys = ("optimizer", "draw", "steps")
    for values in sorted({tuple(run[key] for key in keys) for run in runs}, key=lambda values: values[::-1]):
        case = dict(zip(keys, values, strict=True))
        yield case, choose(runs, **case)


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summarise(runs: Sequence[dict[str, Any]], shares: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """One row for each case and way: at its best rate, and at the best rate of the average over the world.

    `shares`: how often each task is drawn, by draw; weighed by it, losses make what the average over
    the world descends.
    """
    rows = []
    for case, here in cases(runs):
        by_way = {way: choose(here, way=way) for way in COMPARED}
        rate_of_world = best_rate(by_way[WORLD])
        base = losses_by_seed(choose(by_way[WORLD], rate=rate_of_world), "test")
        for way, of_way in by_way.items():
            rate = best_rate(of_way)
            best = choose(of_way, rate=rate)
            losses = losses_by_seed(best, "test")
            as_drawn = [weigh(run["test"], shares[case["draw"]]) for run in best]
            gaps = [a - b for a, b in zip(losses, base, strict=True)]
            rows.append(
                {
                    **case,
                    "way": way,
                    "best_rate": rate,
                    "test_loss": number(statistics.fmean(losses)),
                    "test_loss_as_drawn": number(statistics.fmean(as_drawn)),
                    "test_loss_of_seeds": [number(loss) for loss in losses],
                    "minus_world": number(statistics.fmean(gaps)),
                    "minus_world_deviation": number(statistics.stdev(gaps)) if len(gaps) > 1 else None,
                    "test_loss_at_best_rate_of_world": number(
                        statistics.fmean(losses_by_seed(choose(of_way, rate=rate_of_world), "test"))
                    ),
                    "test_loss_at_quarter_of_it": at_rate(of_way, rate_of_world / 4),
                }
            )
    return rows


def at_rate(runs: Sequence[dict[str, Any]], rate: float) -> float | None:
    found = choose(runs, rate=rate)
    return number(statistics.fmean(losses_by_seed(found, "test"))) if found else None


def sweep(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every rate's mean losses over seeds, for whoever wants to choose otherwise."""
    rows = []
    for case, here in cases(runs):
        for way in COMPARED:
            of_way = choose(here, way=way)
            for rate in dict.fromkeys(run["rate"] for run in of_way):
                at = choose(of_way, rate=rate)
                means = {part: number(statistics.fmean(losses_by_seed(at, part))) for part in ("validation", "test")}
                rows.append({**case, "way": way, "rate": rate, **means})
    return rows


def distance_to_plain(runs: Sequence[dict[str, Any]], steps: int) -> float:
    """How far weights are from plain DDP's with the average over the world, in parts of their norm: the largest."""
    found = [run["distance_to_plain"] for run in choose(runs, way=WORLD, steps=steps)]
    return max(distance for distance in found if distance is not None)


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The longest runs in Markdown, as they stand in docs/internals/averages.md."""
    lines = [
        "| Loss with | DDP's average | contributors (deviation) | DDP's at a quarter of its rate | heads' rate raised "
        "| contributors |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    longest = choose(rows, steps=max(row["steps"] for row in rows))
    for name in dict.fromkeys((row["optimizer"], row["draw"]) for row in longest):
        of_way = {row["way"]: row for row in longest if (row["optimizer"], row["draw"]) == name}
        ours = of_way[CONTRIBUTORS]
        deviation = ours["minus_world_deviation"]
        cells = [cell(of_way[WORLD]["test_loss"]), cell(ours["test_loss"])]
        cells[1] += "" if deviation is None else f" ({deviation:.3f})"
        cells += [cell(of_way[way]["test_loss_at_quarter_of_it"]) for way in COMPARED]
        lines.append(f"| {', '.join(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(rows: Sequence[dict[str, Any]], distance: float) -> str:
    """One sentence for each optimizer, about the longest runs."""
    steps = max(row["steps"] for row in rows)
    parts = []
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        for draw in dict.fromkeys(row["draw"] for row in rows):
            of_way = {row["way"]: row for row in choose(rows, optimizer=optimizer, draw=draw, steps=steps)}
            world, ours = of_way[WORLD], of_way[CONTRIBUTORS]
            parts.append(
                f"{optimizer}, {draw}: {cell(world['test_loss'])} over the world and {cell(ours['test_loss'])} over "
                f"contributors at each one's best rate, {cell(world['test_loss_at_quarter_of_it'])} and "
                f"{cell(ours['test_loss_at_quarter_of_it'])} at a quarter of the world's best"
            )
    return (
        f"Test loss after {steps} steps, mean over tasks: {'; '.join(parts)}. Weights under average='world' "
        f"differ from plain DDP's by at most {distance:.1e} of their norm at the first checkpoint."
    )
