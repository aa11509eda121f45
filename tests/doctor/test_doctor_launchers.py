"""The doctor on scripts that start their ranks themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quick import thorough

from ddp_hooks.doctor.children import follow

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/doctored/starts_ranks.py"


def diagnose(how: str, steps: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_hooks", "doctor", *options, SCRIPT, how, str(steps)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def words(text: str) -> str:
    return " ".join(text.split())


# That what torch.multiprocessing spawns is followed is seen with fully_shard, too.
@pytest.mark.parametrize("how", ["fork", *thorough("spawn", "again")])
def test_ranks_are_followed(how: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run = diagnose(how, 5, "--json", str(file))
    assert run.returncode == 0, run.stderr
    assert words(run.stdout).count("5 steps on 2 ranks, 4 parameters") == 1
    assert "No parameter of spare got a gradient" in words(run.stdout)
    assert "came to its end" in run.stdout
    assert json.loads(file.read_text())["diagnoses"][0]["steps"] == 5


@pytest.mark.thorough
def test_all_are_stopped_when_enough_was_seen() -> None:
    run = diagnose("fork", 10_000, "--steps", "3")
    assert run.returncode == 0, run.stderr
    assert "3 steps on 2 ranks" in run.stdout
    assert "Stopped your script after 3 steps" in run.stdout
    assert "came to its end" not in run.stdout


@pytest.mark.thorough
def test_an_error_of_a_rank_stays_one() -> None:
    run = diagnose("raises", 5)
    assert run.returncode == 1
    told = words(run.stderr)
    assert "ValueError: on purpose" in told
    assert "3 steps on" in told
    assert "came to its end" not in run.stdout


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 is read from torch 2.13 on")
def test_fully_shard_is_watched() -> None:
    run = diagnose("fsdp2", 60)
    assert run.returncode == 0, run.stderr
    assert "48 steps on 2 ranks, 4 parameters" in words(run.stdout)
    assert "No parameter of spare got a gradient" in words(run.stdout)


@pytest.mark.thorough
def test_it_says_why_nothing_was_seen() -> None:
    for how, told in (
        ("nothing", "made no DistributedDataParallel module, and ran none with fully_shard."),
        ("program", "It started other programs (true): if the training runs there, start the script with the doctor"),
    ):
        run = diagnose(how, 2)
        assert run.returncode == 2, (how, run.stderr)
        assert told in words(run.stderr), how


def _run_nothing(call: object) -> str:
    return "nothing"


def test_what_was_patched_is_put_back() -> None:
    from multiprocessing.process import BaseProcess

    before = BaseProcess.start, BaseProcess.join, subprocess.Popen.__init__
    with follow(_run_nothing, ["train.py"], ["-m", "x"], lambda children: None) as children:
        assert (BaseProcess.start, BaseProcess.join, subprocess.Popen.__init__) != before
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        again = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=False)
    assert "No module named x" in again.stderr
    assert children.commands == [Path(sys.executable).name]
    assert not children.are_gone()
    assert (BaseProcess.start, BaseProcess.join, subprocess.Popen.__init__) == before
