"""The scripts for a borrowed GPU, rehearsed on the pretended device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_pretend import pytestmark as pytestmark

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def smoke(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, str(BENCHMARKS / "gpu_smoke.py"), "--device", "pretend", "--out", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, json.loads((folder / "gpu_smoke_pretend.json").read_text())["rows"]


@pytest.mark.thorough
def test_every_part_runs_and_registration_takes_no_memory(tmp_path: Path) -> None:
    parts = ["hook", "doctor", "sync", "memory", "hangs", "fsdp"]
    code, rows = smoke(tmp_path, "--parts", *parts, "--hang-seconds", "3")
    assert [row["part"] for row in rows if "failed" not in row] == parts
    assert code == 0
    assert rows[3]["registered"] == rows[3]["wrapped"]
    assert rows[4]["steps"] > 3


@pytest.mark.thorough
def test_a_part_that_fails_leaves_the_others(tmp_path: Path) -> None:
    # With one rank there is nothing to try.
    code, rows = smoke(tmp_path, "--ranks", "1", "--parts", "doctor", "memory")
    assert code == 1
    assert "AssertionError" in rows[0]["failed"]
    assert "registered" in rows[1]


def test_no_step_of_the_script_begins_after_the_end(tmp_path: Path) -> None:
    """A machine is lent for 560 s: whatever is left then is left out, and the exit status counts it."""
    script = BENCHMARKS / "run_on_gpu.sh"
    total = re.search(r"TOTAL_SECONDS:-(\d+)", script.read_text())
    assert total is not None
    assert int(total[1]) <= 560
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "TOTAL_SECONDS": "5"}
    command = ["bash", str(script), "--device", "pretend", "memory"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stdout.count("left out, no time remains") == 2
