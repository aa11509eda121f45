"""How the table of tested versions is made, without installing any."""

from __future__ import annotations

from pathlib import Path

import matrix


def test_an_entry_says_what_pip_is_asked_for() -> None:
    assert matrix.parse("2.14.1@3.12") == matrix.Entry("2.14.1", "3.12")
    assert matrix.parse("2.14.1").requirement == "torch==2.14.1"
    from_pypi = matrix.parse("===2.13.0")
    assert (from_pypi.version, from_pypi.requirement) == ("2.13.0", "torch===2.13.0")
    assert from_pypi.folder != matrix.parse("2.13.0").folder


def test_a_table_replaces_the_last_one_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert matrix.after_table(page) == ""
    rows = [
        matrix.Row(matrix.parse("2.13.0"), "2.13.0+cpu", "4.2", ("1 passed",) * len(matrix.MODULES)),
        matrix.Row(matrix.parse("2.15.0@3.14"), problem="pip finds no torch", unavailable=True),
    ]
    page.write_text("# Old\n\n| old |\n\n## Trainers\n\nThese.\n\n## More\n")
    text = matrix.table(rows, "0123", [], quick=True)
    page.write_text(text + matrix.after_table(page))
    assert page.read_text().endswith("| pip finds no torch |\n\n## Trainers\n\nThese.\n\n## More\n")
    assert "| 2.13.0+cpu | " in text
    assert "`make matrix MATRIX=--quick`" in text
    assert "old" not in page.read_text()
