"""figures.py reads every committed result, and draws the figure of the README from one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import figures
from tools import harness


@pytest.mark.parametrize("path", sorted(harness.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_tables_are_printed_with_command_and_sentence(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads(path.read_text())
    figures.print_tables(results)
    printed = capsys.readouterr().out
    assert results["header"]["command"] in printed
    assert results["sentence"] in printed
    for row in results["rows"]:
        assert row.get("peer", "") in printed


def test_the_figure_of_the_readme_shows_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the `demo` extra")
    rows = json.loads((harness.RESULTS / "slow_link_1gbit.json").read_text())["rows"]
    figures.draw_speed_up(rows, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    committed = (harness.FIGURES / "slow_link_1gbit_speed_up.svg").read_text()
    for text in ("1gbit, 2 hosts", "times faster than plain DDP"):
        assert text in drawn
        assert text in committed
    # Versions of matplotlib differ in details, but not in how much they draw.
    assert 0.8 < len(drawn) / len(committed) < 1.25
