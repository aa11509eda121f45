"""The demo, run as a person runs it, and what it says when something goes wrong."""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="the demo needs the `demo` extra")
pytest.importorskip("matplotlib", reason="the demo needs the `demo` extra")

import ddp_hooks
from demo import command, picture, progress, ranks, report, training, workload

DEMO = str(Path(__file__).parent.parent / "examples" / "demo.py")
TIMEOUT_SECONDS = 120


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # The package that this process tests, wherever it was installed.
    package_parent = str(Path(ddp_hooks.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, DEMO, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    directory = tmp_path_factory.mktemp("demo")
    completed = run_command("--size", "128", "--steps", "5", "--batch-size", "8", cwd=directory)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed, directory / "demo-output"


@pytest.fixture
def numbers(finished_demo: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    return json.loads((finished_demo[1] / "demo.json").read_text())  # type: ignore[no-any-return]


def test_both_runs_reach_the_same_weights(numbers: dict[str, Any]) -> None:
    assert numbers["ranks"] == 2
    assert [phase["weights_difference"] for phase in numbers["phases"]] == [0.0] * len(workload.PHASES)
    assert all(phase["ranks_alike"] for phase in numbers["phases"])
    assert numbers["problems"] == []
    for phase in numbers["phases"]:
        assert phase["plain"]["accuracy"] == phase["ddp_hooks"]["accuracy"]


def test_only_used_parameters_are_sent(numbers: dict[str, Any]) -> None:
    sizes = [group["bytes"] for group in numbers["groups"]]
    words = [group["label"] for group in numbers["groups"]].index("words")
    row_bytes = 4 * workload.WORD_FEATURES
    assert sum(sizes) == 4 * numbers["parameters"]
    assert numbers["table_bytes"] == workload.VOCABULARY * row_bytes
    for phase in numbers["phases"]:
        for step in phase["steps"]:
            expected = [size if used_by else 0 for size, used_by in zip(sizes, step["used_by"], strict=True)]
            if step["rows"] is not None:
                expected[words] -= (workload.VOCABULARY - step["rows"]) * row_bytes
            assert step["used_bytes"] == expected
            used_bytes = sum(expected)
            assert used_bytes <= step["payload_bytes"] <= 1.01 * used_bytes
            assert step["dense_bytes"] == step["plain_bytes"] == sum(sizes)
            assert step["mask_bytes"] > 0


def test_rows_that_are_sent_are_the_words_of_the_batch(
    numbers: dict[str, Any], finished_demo: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    data, steps = workload.load_digits(training.SEED), numbers["steps_per_phase"]
    for number, (phase, recorded) in enumerate(zip(workload.PHASES, numbers["phases"], strict=True)):
        expected: list[int | None] = [None] * steps
        if not phase.words_penalised:
            # In its first step the ranks see what they agree on in the next.
            for step in range(1, steps):
                batches = [data.batch(rank, 2, number * steps + step, 8)[0] for rank in range(2)]
                expected[step] = len(torch.cat([workload.read_words(pixels) for pixels in batches]).unique())
        assert [step["rows"] for step in recorded["steps"]] == expected
    rows = numbers["phases"][-1]["rows_per_step"]
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
    sent = [phase["ddp_hooks"]["bytes_per_step"] for phase in numbers["phases"]]
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == len(sent)
    assert sent[-1] < 0.5 * numbers["phases"][-1]["plain"]["bytes_per_step"]


def test_usage_is_what_the_phases_ask_for(numbers: dict[str, Any]) -> None:
    labels = [group["label"] for group in numbers["groups"]]
    for phase, recorded in zip(workload.PHASES, numbers["phases"], strict=True):
        for number, step in enumerate(recorded["steps"]):
            used_by = dict(zip(labels, step["used_by"], strict=True))
            for task_number, task in enumerate(workload.TASKS):
                expected = [rank for rank in range(2) if task_number in phase.tasks(rank, 2, number)]
                assert used_by[f"head: {task.name}"] == expected
            assert used_by["branch"] == [rank for rank in range(2) if phase.takes_branch(rank, 2, number)]
            assert used_by["lower layer 1"] == ([] if phase.lower_frozen else [0, 1])
            assert step["frozen"] == [phase.lower_frozen and label.startswith("lower") for label in labels]


def test_files_and_table_are_for_people(finished_demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    completed, output = finished_demo
    assert max(map(len, f"{completed.stdout}{completed.stderr}".splitlines())) <= 80
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    for text in ("plain", "ddp_hooks", "exactly the same weights", "not measured", str(Path("demo-output/demo.png"))):
        assert text in " ".join(completed.stdout.split())
    for phase in workload.PHASES:
        assert phase.title in completed.stdout
        assert phase.title in completed.stderr, "the progress lines name the phases"


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda numbers: numbers.update(weights_difference=1e-9), "differ by up to 1e-09"),
        (lambda numbers: numbers.update(weights_difference=float("nan")), "differ by up to nan"),
        (lambda numbers: numbers["phases"][1].update(ranks_alike=False), "ranks hold different weights"),
        (lambda numbers: numbers["phases"][2]["steps"][0].update(dense_bytes=1), "plain DDP would send 1"),
        (lambda numbers: numbers["phases"][2]["steps"][0]["used_by"].__setitem__(0, [1]), "is used anywhere"),
    ],
)
def test_problems_are_found_and_told(
    numbers: dict[str, Any], spoil: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    spoiled = copy.deepcopy(numbers)
    spoil(spoiled)
    spoiled["problems"] = report.find_problems(spoiled)
    assert len(spoiled["problems"]) == 1
    assert complaint in spoiled["problems"][0]
    assert "FAILED" in report.describe_outcome(spoiled)


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
        (["--ranks", "1"], "at least 2 ranks"),
        (["--steps", "0"], "positive integer, received '0'"),
        (["--size", "huge"], "received 'huge'"),
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
    text = " ".join(complaint.split())
    assert text.startswith(f"Expected a folder to write demo.png and demo.json to, received {tmp_path / place}: ")
    assert text.endswith("Choose another folder with --output.")
    # A path is never divided.
    assert all(len(line) <= 80 or str(tmp_path) in line for line in complaint.splitlines())


@pytest.mark.thorough
def test_results_that_cannot_be_written_are_told_below_the_table(
    finished_demo: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "demo.json").mkdir()
    options = ["--size", "64", "--steps", "2", "--batch-size", "4", "--output", str(tmp_path)]
    completed = run_command(*options, cwd=tmp_path)
    assert completed.returncode == 1
    assert "Traceback" not in completed.stderr
    assert f"The results could not be written to {tmp_path}: " in completed.stderr
    assert "exactly the same weights" in completed.stdout


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
        [sys.executable, DEMO, "--steps", "1000", "--size", "64"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(ddp_hooks.__file__).parent.parent), "OMP_NUM_THREADS": "1"},
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


def fail_on_rank_one(rank: int, report_progress: Callable[[str], None]) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("the reason")
    dist.all_reduce(torch.ones(1))


def hang_on_rank_one(rank: int, report_progress: Callable[[str], None]) -> int:
    report_progress("before the hang")
    if rank == 1:
        time.sleep(600)
    return rank


def die_on_rank_one(rank: int, report_progress: Callable[[str], None]) -> None:
    if rank == 1:
        os._exit(9)
    time.sleep(600)


def test_traceback_of_a_failing_rank_comes_home() -> None:
    with pytest.raises(ranks.RankFailure, match="--- rank 1 failed:") as failure:
        ranks.run_ranks(fail_on_rank_one, (), world_size=2, timeout_seconds=60, show_progress=lambda message: None)
    assert "ValueError: the reason" in str(failure.value)
    assert "in fail_on_rank_one" in str(failure.value)


@pytest.mark.thorough
def test_hang_is_killed_with_its_stack() -> None:
    messages: list[str] = []
    start = time.monotonic()
    with pytest.raises(ranks.RankFailure, match="No step finished within 40 seconds") as failure:
        ranks.run_ranks(hang_on_rank_one, (), world_size=2, timeout_seconds=40, show_progress=messages.append)
    assert "in hang_on_rank_one" in str(failure.value)
    assert messages == ["before the hang"]
    assert time.monotonic() - start < 120


@pytest.mark.thorough
def test_death_of_a_rank_is_told() -> None:
    with pytest.raises(ranks.RankFailure, match="rank 1 died"):
        ranks.run_ranks(die_on_rank_one, (), world_size=2, timeout_seconds=60, show_progress=lambda message: None)


def test_progress_is_short_in_a_log_and_drawn_in_place_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        bar = progress.ProgressBar(100, stream)
        bar.begin("starting")
        for step in range(100):
            bar.advance("first half" if step < 50 else "second half")
        bar.close()
    assert len(log.getvalue().splitlines()) <= progress.LINES_IN_A_LOG + 4
    assert "100 of 100 steps" in log.getvalue().splitlines()[-1]
    assert "\r" not in log.getvalue()
    assert terminal.getvalue().count("\n") == 1
    assert f"[{'#' * progress.WIDTH}] 100 of 100 steps" in terminal.getvalue()
