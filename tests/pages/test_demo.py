"""The demo, run as a person runs it, and what it says when something goes wrong."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_captured

pytest.importorskip("sklearn", reason="the demo needs the `demo` extra")
pytest.importorskip("matplotlib", reason="the demo needs the `demo` extra")

import ddp_hooks
from demo import command, picture, report, training, workload

DEMO = str(Path(__file__).parents[2] / "examples" / "demo.py")
TIMEOUT_SECONDS = 120


# The package that this process tests, wherever it was installed.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(ddp_hooks.__file__).parent.parent), "OMP_NUM_THREADS": "1"}


def run_command(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **variables}
    return run_captured([sys.executable, DEMO, *arguments], cwd=cwd, env=environment, timeout=TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    directory = tmp_path_factory.mktemp("demo")
    completed = run_command("--width", "64", "--steps", "3", "--batch-size", "8", cwd=directory)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed, directory / "demo-output"


@pytest.fixture
def numbers(finished_demo: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    return json.loads((finished_demo[1] / "demo.json").read_text())  # type: ignore[no-any-return]


def test_both_runs_reach_the_same_weights(numbers: dict[str, Any]) -> None:
    assert numbers["ranks"] == 2
    assert [phase["weights_difference"] for phase in numbers["phases"]] == [0.0] * len(workload.PHASES)
    for phase in numbers["phases"]:
        assert phase["plain_accuracy"] == phase["hook_accuracy"]


def test_only_used_parameters_are_sent(numbers: dict[str, Any]) -> None:
    sizes = [group["bytes"] for group in numbers["groups"]]
    words = list(workload.GROUPS).index("words")
    row_bytes = 4 * workload.WORD_FEATURES
    assert sum(sizes) == 4 * numbers["parameters"]
    assert numbers["table_bytes"] == workload.VOCABULARY * row_bytes
    for phase in numbers["phases"]:
        for step in phase["steps"]:
            expected = [size if used_by else 0 for size, used_by in zip(sizes, step["used_by"], strict=True)]
            if step["rows"] is not None:
                expected[words] -= (workload.VOCABULARY - step["rows"]) * row_bytes
            assert step["used_bytes"] == expected
            assert sum(expected) <= step["payload_bytes"] <= 1.01 * sum(expected)
            assert step["plain_bytes"] == sum(sizes)
            assert step["mask_bytes"] > 0


def test_rows_that_are_sent_are_the_words_of_the_batch(
    numbers: dict[str, Any], finished_demo: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    data = workload.Digits(training.SEED)
    for index, (phase, recorded) in enumerate(zip(workload.PHASES, numbers["phases"], strict=True)):
        steps = len(recorded["steps"])
        expected: list[int | None] = [None] * steps
        if not phase.words_penalised:
            # In the first step, the ranks see what they agree on in the next one.
            for step in range(1, steps):
                batches = [data.batch(rank, 2, index * steps + step, 8)[0] for rank in range(2)]
                expected[step] = len(torch.cat([workload.read_words(pixels) for pixels in batches]).unique())
        assert [step["rows"] for step in recorded["steps"]] == expected
    rows = report.mean(numbers["phases"][-1], "rows")
    assert 0 < rows < 0.01 * workload.VOCABULARY
    shown = " ".join(finished_demo[0].stdout.split())
    assert f"{rows:,.0f} of the table's {workload.VOCABULARY:,} rows" in shown


def test_words_tell_patches_apart() -> None:
    pixels = torch.zeros(3, 8, 8)
    pixels[1, 2:4, 4:6] = torch.tensor([[1.0, 0.0], [2.0, 16.0]])
    pixels[2] = 16
    words = workload.read_words(pixels.view(3, -1) / 8 - 1)
    assert words[0].tolist() == [0] * 16
    assert words[1].tolist() == [0] * 6 + [1 + 2 * 17**2 + 16 * 17**3] + [0] * 9
    assert words[2].tolist() == [workload.VOCABULARY - 1] * 16


def test_each_phase_sends_less_than_the_one_before(numbers: dict[str, Any]) -> None:
    saved = [report.saved_fraction(phase) for phase in numbers["phases"]]
    assert saved == sorted(set(saved))
    assert saved[-1] > 0.5


def test_usage_is_what_the_phases_ask_for(numbers: dict[str, Any]) -> None:
    for phase, recorded in zip(workload.PHASES, numbers["phases"], strict=True):
        for number, step in enumerate(recorded["steps"]):
            used_by = dict(zip(workload.GROUPS, step["used_by"], strict=True))
            for task_number, task in enumerate(workload.TASKS):
                expected = [rank for rank in range(2) if task_number in phase.tasks(rank, 2, number)]
                assert used_by[f"head: {task.name}"] == expected
            assert used_by["branch"] == [rank for rank in range(2) if phase.takes_branch(rank, 2, number)]
            assert used_by["lower layer 1"] == ([] if phase.lower_frozen else [0, 1])
            assert step["frozen"] == [phase.lower_frozen and label.startswith("lower") for label in workload.GROUPS]


def test_files_and_table_are_for_people(finished_demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    completed, output = finished_demo
    assert max(map(len, f"{completed.stdout}{completed.stderr}".splitlines())) <= 80
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    for text in ("plain", "ddp_hooks", "exactly the same weights", "not measured", str(Path("demo-output/demo.png"))):
        assert text in " ".join(completed.stdout.split())
    for phase in workload.PHASES:
        assert phase.title in completed.stdout
        assert phase.title in completed.stderr, "the progress lines name the phases"
    assert len(completed.stderr.splitlines()) <= 12


@pytest.mark.parametrize("difference", [1e-9, float("nan")])
def test_weights_that_differ_are_told(numbers: dict[str, Any], difference: float) -> None:
    assert report.weights_agree(numbers)
    numbers["weights_difference"] = difference
    assert not report.weights_agree(numbers)
    assert f"FAILED: the weights of the two runs differ by up to {difference:.3g}." in report.describe_outcome(numbers)
    numbers["ranks"] = 3  # sums of three have several orders
    assert report.weights_agree(numbers) == (difference == 1e-9)


def test_picture_of_many_ranks_and_steps(numbers: dict[str, Any], tmp_path: Path) -> None:
    numbers["ranks"] = 5
    for phase in numbers["phases"]:
        phase["steps"] = phase["steps"] * 5
        for step in phase["steps"]:
            step["used_by"] = [[0, 2, 3], [4], [], *([[0, 1, 2, 3, 4]] * (len(step["used_by"]) - 3))]
    picture.draw(numbers, tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 0


def test_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "The demo needs matplotlib: pip install matplotlib\n"
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert command.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "The demo needs scikit-learn and matplotlib: pip install scikit-learn matplotlib\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "1"], "expected an integer of at least 2, received '1'"),
        (["--steps", "0"], "expected an integer of at least 1, received '0'"),
        (["--width", "huge"], "expected an integer of at least 8, received 'huge'"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_told_before_training(
    place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert command.main(["--output", str(tmp_path / place)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"Cannot write to {tmp_path / place}: ")
    assert complaint.endswith("Use another --output folder.\n")


@pytest.mark.thorough
def test_a_rank_that_fails_is_told_with_its_traceback(tmp_path: Path) -> None:
    completed = run_command("--width", "64", cwd=tmp_path, GLOO_SOCKET_IFNAME="no_such_interface")
    assert completed.returncode == 1
    assert "The demo failed." in completed.stderr
    assert "in run_rank" in completed.stderr
    assert "no_such_interface" in completed.stderr


def interrupt(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C, once more if nothing happens: Python may drop an interrupt that comes in a destructor."""
    for _ in range(4):
        os.killpg(process.pid, signal.SIGINT)
        try:
            return process.communicate(timeout=TIMEOUT_SECONDS / 8)[1]
        except subprocess.TimeoutExpired:
            continue
    return process.communicate(timeout=TIMEOUT_SECONDS / 2)[1]


@pytest.mark.thorough
def test_an_interrupt_is_a_sentence(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, DEMO, "--steps", "50", "--width", "64"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the ranks, too
        # What a shell has started in the background ignores it.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        shown = [process.stderr.readline()]
        while "everything is used" not in shown[-1]:
            shown.append(process.stderr.readline())
            assert shown[-1], "".join(shown)
        rest = interrupt(process)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in rest
    assert rest.endswith("The demo was interrupted. Its ranks were stopped, and nothing was written.\n")


def test_help_fits_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
