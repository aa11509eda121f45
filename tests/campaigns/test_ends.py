"""Programs that train a little end as they would with plain DDP, whatever order things go in; see ends.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ENDS = Path(__file__).with_name("ends.py")
SECONDS = 15


def run_ends(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ENDS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("registration", ["native", "python"])
def test_programs_end(registration: str) -> None:
    done = run_ends("--registration", registration, "--seconds", str(SECONDS), "--stack")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert ": 0 hung, 0 crashed, 0 with a wrong exit code" in done.stdout
    # A machine that is very slow shall be noticed as such; what hangs in torch alone takes longer than all the others.
    runs, torchs_own = (
        int(re.search(pattern, done.stdout)[1])  # type: ignore[index]
        for pattern in (rf"\n{registration}: (\d+) runs", r"(\d+) went wrong as plain DDP does")
    )
    assert runs >= 3 or torchs_own, f"expected a run a few seconds at most, had {runs} in {SECONDS} s\n{done.stdout}"


@pytest.mark.thorough
def test_a_hang_is_seen() -> None:
    """What does not end within the limit is reported as such; no program ends as soon as that."""
    done = run_ends("--runs", "1", "--registration", "plain", "--limit", "0.02")
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "plain: 1 runs: 1 hung" in done.stdout
