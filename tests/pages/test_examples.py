"""The examples run as their docstrings say, a few steps of each, and end with what was saved."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from commands import run_captured

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 120
# Steps that are enough to save something, what tells how well the model does, and how many per cent are saved at least.
RUNS = {
    "finetuning": (8, "accuracy on 5 to 9: ", 40),
    "multitask": (6, "accuracy on wine: ", 10),
    "embedding": (6, "accuracy on lines from 12 modules: ", 60),
    "sharded_experts": (6, "accuracy on lines from 12 modules: ", 60),
    "gan": (6, "Frechet distance to real digits: ", 49),
    "lightning_backbone": (12, "accuracy: ", -1),  # against a DDP that does not know the backbone
    "trainer_bert": (6, "accuracy on lines from 12 modules: ", 60),
}


def test_every_example_is_run_and_in_the_index() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    # The demo starts its ranks by itself; test_demo runs it.
    assert scripts == {*RUNS, "demo"}
    index = (EXAMPLES / "README.md").read_text()
    for script in RUNS:
        assert f"torchrun --nproc-per-node 2 examples/{script}.py" in index
        assert f"torchrun --nproc-per-node 2 examples/{script}.py" in (EXAMPLES / f"{script}.py").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_example(name: str) -> None:
    steps, quality, least_saved = RUNS[name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_captured(
        [*command, str(EXAMPLES / f"{name}.py"), "--steps", str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert quality in done.stdout
    summary = re.search(r"(\d+) steps: sent .* \(([\d.]+)% (saved|more, because of masks)\)", done.stdout)
    assert summary is not None, done.stdout
    assert int(summary[1]) == (2 * steps if name == "gan" else steps)
    assert (1 if summary[3] == "saved" else -1) * float(summary[2]) >= least_saved
