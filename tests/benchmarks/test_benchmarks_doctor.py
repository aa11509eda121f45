"""The measurements of the doctor: that they run, and that docs/internals/doctor.md shows what they came to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import doctor_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "internals" / "doctor.md"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("watching", doctor_tables.watching_table),
    ],
)
def test_the_tables_in_the_documentation_are_the_results(name: str, table: Any) -> None:
    results, page = read(name), PAGE.read_text()
    assert table(results["rows"]) in page
    assert f"results/{name}.json" in page
    assert " ".join(results["header"]["command"].split()) in " ".join(page.split())
    assert results["header"]["has_uncommitted_changes"] is False


def test_what_the_documentation_promises_is_what_was_measured() -> None:
    for row in read("watching")["rows"]:
        most = 1.13 if row["link"] == "loopback" else 1.02
        assert row["ratio"]["median"] <= most, f"{row['label']} at {row['link']}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("doctor_estimate.py", ["--trial-steps", "12", "--settling", "2", "--rounds", "1"]),
        ("watching.py", ["--pairs", "2"]),
    ],
)
def test_the_scripts_run(script: str, options: list[str], tmp_path: Path) -> None:
    name = f"try_{os.getpid()}"
    argv = [sys.executable, str(ROOT / "benchmarks" / script), "--links", "loopback", "--size", "tiny", *options]
    argv += ["--workloads", "layerdrop", "--folder", str(tmp_path), "--name", name]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / f"{name}.json").read_text())
    assert results["sentence"] in done.stdout
    if script == "watching.py":
        assert [row["pairs"] for row in results["rows"]] == [2]
        assert doctor_tables.watching_table(results["rows"]).count("\n") == 2
    else:
        assert [row["policy"] for row in results["rows"]] == ["plain DDP", "skip_unused", "auto"]
        # Steps leave out different layers.
        assert all(0.8 < row["byte_ratio"] < 1.25 for row in results["rows"] if "byte_ratio" in row)
