"""The commands of docs/doctor.md print what the page says they print; times differ, names and bytes do not.

`python tests/doctor/test_doctor_page.py` runs them and writes what they print into the page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "doctor.md"
BLOCK = re.compile(r"^```console\n\$ torchrun ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(arguments: list[str], expected_status: int | None = None) -> str:
    """Run torchrun, and return what the ranks print."""
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    if expected_status is not None:
        assert finished.returncode == expected_status, finished.stdout
    return finished.stdout


def doctors_part(text: str) -> str:
    """Return from what was printed what the doctor says, without the tracebacks and torchrun's words after it."""
    lines = text[text.index("ddp_hooks doctor:") :].splitlines()
    end = next(
        (i for i, line in enumerate(lines) if re.match(r"\[rank\d|[WE]\d{4} |Traceback|wrote ", line)), len(lines)
    )
    return "\n".join(lines[:end]).strip() + "\n"


def without_times(text: str) -> str:
    """Leave out what differs from run to run, and where lines end."""
    text = " ".join(text.split())
    text = re.sub(r"~?[\d.,]+ ms( \(\d+%\))?", "<time>", text)
    text = re.sub(r"[\d.,]+% of a step", "<part>", text)
    text = re.sub(r" and about \d+% of a step(, because [^.]*)?|( and about)? <part>(, because [^.]*)?", "", text)
    text = re.sub(r"the link carries [\d.,]+ \w+", "the link carries <rate>", text)
    text = re.sub(r"(no step has ended for|waiting, for) \d+ s", "stood still", text)
    return text


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(3))
def test_the_page_shows_what_is_printed(number: int, tmp_path: Path) -> None:
    command, shown = BLOCK.findall(PAGE.read_text())[number]
    arguments = command.split()
    if number == 0:
        place = arguments.index("doctor") + 1
        arguments[place:place] = ["--json", str(tmp_path / "d.json"), "--html", str(tmp_path / "d.html")]
    printed = run(arguments, 0 if number == 0 else 1)
    assert without_times(doctors_part(printed)) == without_times(shown)
    if number == 0:
        assert "trained for" not in printed, "the run went on after the last step that is watched"
        assert printed.count("Stopped your script after 24 steps; --continue lets it go on.") == 1
        found = json.loads((tmp_path / "d.json").read_text())
        (diagnosis,) = found["diagnoses"]
        assert diagnosis["ranks"] == 2
        assert {one["name"]: one["verdict"] for one in diagnosis["parameters"]}["trunk.0.weight"] == "used"
        page = (tmp_path / "d.html").read_text()
        assert not re.search(r"(src|href)=|@import|url\(|<script", page), "the page loads something"
        assert all(one["name"] in page for one in diagnosis["parameters"])
        assert max(map(len, doctors_part(printed).splitlines())) <= 80
    elif number == 1:
        assert "Expected to have finished reduction" in printed


@pytest.mark.thorough
def test_the_script_goes_on_if_that_is_asked_for() -> None:
    script = ["tests/doctored/multi_task.py", "6", "--search"]
    printed = run(["--nproc-per-node", "2", "-m", "ddp_hooks", "doctor", "--steps", "2", "--continue", *script], 0)
    assert "ddp_hooks doctor: 2 steps on 2 ranks" in printed
    assert printed.count("trained for 6 steps") == 2
    assert "Stopped your script" not in printed


@pytest.mark.thorough
def test_a_script_that_ends_by_itself_was_not_stopped() -> None:
    script = ["tests/doctored/multi_task.py", "3", "--search"]
    printed = run(["--nproc-per-node", "2", "-m", "ddp_hooks", "doctor", "--steps", "4", *script], 0)
    assert "ddp_hooks doctor: 3 steps on 2 ranks" in printed
    assert "Stopped your script" not in printed


def write_page() -> None:
    text = PAGE.read_text()
    for command, shown in BLOCK.findall(text):
        text = text.replace(f"{command}\n{shown}```", f"{command}\n{doctors_part(run(command.split()))}```")
    PAGE.write_text(text)


if __name__ == "__main__":
    write_page()
