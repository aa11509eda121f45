"""The experiment on averages over contributors: how rates are chosen, that it runs, and what the page says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contributor_average import summary

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "contributor_average.py"


def made_up_run(way: str, rate: float, seed: int, validation: list[float] | None, test: list[float] | None) -> Any:
    case = {"optimizer": "SGD", "draw": "often", "steps": 10, "distance_to_plain": None}
    return {**case, "way": way, "rate": rate, "seed": seed, "validation": validation, "test": test}


def test_a_rate_is_chosen_without_looking_at_the_test() -> None:
    runs = [
        made_up_run(way, rate, seed, validation, test)
        for way, shift in ((summary.WORLD, 0.0), (summary.RAISED, 0.0), (summary.CONTRIBUTORS, 0.5))
        for rate, validation, test in (
            (0.4, [3.0, 1.0], [1.0, 2.0]),
            (0.1, [1.0, 1.0], [4.0 + shift, 8.0 + shift]),
            (0.8, None, None),  # has diverged
        )
        for seed in (1, 0)
    ]
    world, _, ours = summary.summarise(runs, {"often": [0.75, 0.25]})
    assert (world["best_rate"], world["test_loss"], world["test_loss_as_drawn"]) == (0.1, 6.0, 5.0)
    assert world["test_loss_at_quarter_of_it"] is None  # nobody trained with 0.025
    assert (ours["test_loss"], ours["minus_world"], ours["minus_world_deviation"]) == (6.5, 0.5, 0.0)
    losses = {(row["way"], row["rate"]): row["test"] for row in summary.sweep(runs)}
    assert losses[summary.WORLD, 0.4] == 1.5
    assert losses[summary.WORLD, 0.8] is None


def test_ways_are_compared_at_the_same_rate_too() -> None:
    best = {summary.WORLD: 0.4, summary.RAISED: 0.1, summary.CONTRIBUTORS: 0.1}
    runs = [
        made_up_run(way, rate, 0, [abs(rate - best[way])], [10 * rate])
        for way in summary.COMPARED
        for rate in (0.4, 0.1)
    ]
    world, _, ours = summary.summarise(runs, {"often": [1.0]})
    assert (world["best_rate"], ours["best_rate"]) == (0.4, 0.1)
    assert ours["test_loss"] == 1.0
    assert ours["minus_world"] == -3.0
    assert ours["test_loss_at_best_rate_of_world"] == 4.0
    assert ours["test_loss_at_quarter_of_it"] == 1.0


@pytest.mark.thorough
def test_the_script_runs(tmp_path: Path) -> None:
    argv = [sys.executable, str(SCRIPT), "--size", "tiny", "--hosts", "2", "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "contributor_average.json").read_text())
    assert results["header"]["world_size"] == 2
    assert results["sentence"] in done.stdout
    assert summary.table(results["rows"]) in done.stdout
    # The average over the world is plain DDP's; dividing by contributors is something else, which SGD shows at once.
    assert all(distance < 1e-5 for distance in results["distance_to_plain"].values())
    last = {row["way"]: row for row in results["rows"] if row["optimizer"] == "SGD" and row["steps"] == 12}
    assert last.keys() == set(summary.COMPARED)
    gap = last[summary.CONTRIBUTORS]["test_loss_at_best_rate_of_world"] - last[summary.WORLD]["test_loss"]
    assert abs(gap) > 1e-4


def test_the_table_in_the_documentation_is_the_result() -> None:
    page = (ROOT / "docs" / "internals" / "averages.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "contributor_average.json").read_text())
    assert summary.table(results["rows"]) in page
    assert results["header"]["command"] in page
    assert results["header"]["has_uncommitted_changes"] is False


@pytest.mark.parametrize("part", ["validation", "test"])
def test_one_diverged_seed_spoils_a_rate(part: str) -> None:
    fine = made_up_run(summary.WORLD, 0.1, 0, [1.0], [1.0])
    bad = {**made_up_run(summary.WORLD, 0.1, 1, [1.0], [1.0]), part: None}
    assert summary.losses_by_seed([bad, fine], part) == [1.0, summary.DIVERGED]
    (row,) = summary.sweep([fine, bad])
    assert row[part] is None
