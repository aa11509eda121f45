"""`python -m ddp_hooks run`: a script that knows nothing of this package, and what is told of it at the end."""

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
from commands import run_captured

import ddp_hooks
from ddp_hooks import __main__ as command_line
from ddp_hooks.cli.run_report import RunReport
from ddp_hooks.enabling import MadeModule

# Leaves nothing behind when it ends: neither modules nor the process group.
SCRIPT = """
import hashlib, os, pickle, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x, head):
        return self.heads[head](x)


def train(rank, **options):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Heads(), find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    for step in range(3):
        ddp(torch.randn(4, 64) + rank, 0).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hashlib.sha256(pickle.dumps([p.detach().numpy() for p in ddp.parameters()])).hexdigest()


dist.init_process_group("gloo")
rank = dist.get_rank()
# The second one cannot be served, and trains as plain DDP.
digests = {train(rank), train(rank, skip_all_reduce_unused_params=True)}
if rank == 0:
    print(len(digests), sys.argv, __name__, pickle.loads(pickle.dumps(Heads)) is Heads)
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""
INTERRUPTED = """
import os, signal, sys, time
from beside import nothing
print(sys.argv, __name__)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(ddp_hooks.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return run_captured(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        timeout=300,
        # What a shell has started in the background ignores Ctrl-C.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def torchrun(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # A port that is free: other tests may run beside this one.
    options = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return run(folder, "-m", "torch.distributed.run", *options, *command)  # what `torchrun` is


def test_a_script_is_served_without_a_line_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    served = torchrun(
        tmp_path,
        *("-m", "ddp_hooks", "run", "--policy", "skip_unused", "--set", "rebuild_after=100", "--set", "direct=false"),
        *("--report", "r.json", "train.py", "0", "--flag"),
    )
    assert served.returncode == 0, served.stderr
    # The same weights with the hook and without it.
    assert served.stdout == "1 ['train.py', '0', '--flag'] __main__ True\n"

    report = json.loads((tmp_path / "r.json").read_text())
    first, second = report["modules"]
    layer = (64 * 64 + 64) * 4
    assert [first[name] for name in ("module", "world_size", "problem")] == ["Heads", 2, None]
    assert first["statistics"]["steps"] == 3
    assert first["statistics"]["dense_bytes"] == 3 * 4 * layer
    assert first["statistics"]["payload_bytes"] == 3 * 1 * layer
    assert "skip_all_reduce_unused_params" in second["problem"]
    assert second["statistics"] is None
    assert report["total"] == first["statistics"]
    expected = ddp_hooks.Policy("skip_unused", rebuild_after=100, tuning=ddp_hooks.Tuning(direct=False))
    assert report["policy"] == first["policy"] == expected.to_dict()
    assert report["script"] == ["train.py", "0", "--flag"]

    # Printed once, by rank 0; each rank says once what is not served.
    assert served.stderr.count("bytes of rank 0") == 1
    assert served.stderr.count("trains as plain DistributedDataParallel. register: refused on every rank") == 2
    table = served.stderr[served.stderr.index(f"ddp_hooks {ddp_hooks.__version__}") :].splitlines()
    assert table[0] == f"ddp_hooks {ddp_hooks.__version__}: policy 'skip_unused', 2 ranks; bytes of rank 0"
    assert table[1].split() == ["module", "steps", "plain", "DDP", "sent", "saved"]
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text().splitlines()
    assert [line for line in table[:4] if line not in page] == []
    assert table[2].split() == ["1", "Heads", "3", "200", "kB", "50.1", "kB", "74.9%"]
    assert table[3].split()[:3] == ["2", "Heads", "-"]
    assert table[4].startswith("    trained as plain DDP: register: refused on every rank.")
    assert [line.split()[-1] for line in table if line.startswith("  total")] == ["74.9%"]


def test_one_process_and_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(INTERRUPTED)
    (tmp_path / "beside.py").write_text("nothing = None")
    done = run(tmp_path, "-m", "ddp_hooks", "run", "-m", "package.program", "--policy", "mine")
    assert done.returncode == -signal.SIGINT
    assert done.stdout == f"{[str(tmp_path / 'package' / 'program.py'), '--policy', 'mine']} __main__\n"
    lines = done.stderr.splitlines()
    # Nothing is said of modules where an error has to be read.
    assert not [line for line in lines if "DistributedDataParallel" in line]
    assert lines[-1] == "KeyboardInterrupt"
    frames = [line for line in lines if line.startswith("  File ")]
    assert len(frames) == 1
    assert "package/program.py" in frames[0]


FOR_A_LAUNCHER = [
    "torch.distributed.init_process_group('gloo')",
    "int(os.environ['LOCAL_RANK'])",
    "torch.distributed.init_process_group()",
    "torch.distributed.init_process_group('gloo', rank=int(os.environ['RANK']))",
]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("run", FOR_A_LAUNCHER[0]),
        *(pytest.param("run", line, marks=pytest.mark.thorough) for line in FOR_A_LAUNCHER[1:]),
        pytest.param("doctor", FOR_A_LAUNCHER[1], marks=pytest.mark.thorough),
    ],
)
def test_without_a_launcher(command: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(f"import os, torch.distributed\n{line}\n")
    done = run(tmp_path, "-m", "ddp_hooks", command, "train.py", "--lr", "0 1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert " ".join(done.stderr.split()).startswith(
        f"ddp_hooks {command}: the script expects to be one of several ranks, but no launcher started it. Start it "
        f"with torchrun, for example: torchrun --nproc-per-node 2 -m ddp_hooks {command} train.py --lr '0 1' "
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("os.environ['RANKS']", {}),
        ("{}['RANK']", {}),
        ("raise ValueError('environment variable HOME expected, but not set')", {}),
        # Started by something; the script's error is its own.
        ("int(os.environ['LOCAL_RANK'])", {"RANK": "0"}),
        ("torch.distributed.init_process_group('gloo')", {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}),
        (
            "d = torch.distributed; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1); "
            "os.environ['LOCAL_RANK']",
            {},
        ),
    ],
)
def test_an_error_of_the_scripts_own_is_shown(
    line: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text(f"import os, torch.distributed\n{line}\n")
    for command in ("run", "doctor"):
        done = run(tmp_path, "-m", "ddp_hooks", command, "train.py")
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert "torchrun" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run"], "expected a script to run, or -m and a module"),
        (["run", "-m"], "expected a script to run, or -m and a module"),
        (["run", "--policy", "fast", "train.py"], "invalid choice: 'fast'"),
        (["run", "--policy", "skip_unsued", "train.py"], "did you mean 'skip_unused'?"),
        (["run", "--polcy", "auto", "train.py"], "unrecognized arguments: --polcy; did you mean '--policy'?"),
        (["run", "--set", "rebuild_afer=3", "train.py"], "received 'rebuild_afer'; did you mean 'rebuild_after'?"),
        (["docter", "train.py"], "did you mean 'doctor'?"),
        (
            ["run", "--set", "speed=3", "train.py"],
            "expected fields of ddp_hooks.Policy or ddp_hooks.Tuning, received",
        ),
        (["run", "--set", "rebuild_after", "train.py"], "expected NAME=VALUE, received 'rebuild_after'"),
        (["run", "--set", "rebuild_after=-1", "train.py"], "Policy.rebuild_after: expected at least 0, received -1"),
        (
            ["run", "--set", "skip_zero_rows=on", "--policy", "allreduce", "train.py"],
            "expected 'off' with skip_unused=False",
        ),
        (["run", "--report", "missing/r.json", "train.py"], "expected a file in a folder that exists"),
        (["run", "--report", ".", "train.py"], "expected a file to write, received the folder '.'"),
        (["doctor"], "expected a script to run, or -m and a module"),
        (["doctor", "--json", "missing/d.json", "train.py"], "expected a file in a folder that exists"),
        (["doctor", "--html", ".", "train.py"], "expected a file to write, received the folder '.'"),
        (["doctor", "--steps", "0", "train.py"], "expected a positive integer, received '0'"),
        (["doctor", "--patience", "inf", "train.py"], "expected a positive number of seconds, received 'inf'"),
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as refusal:
        command_line.main(arguments)
    assert refusal.value.code == 2
    shown = capsys.readouterr().err
    assert complaint in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [[], *([name] for name in ("info", "run", "doctor"))])
def test_help_fits_in_a_terminal(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        command_line.main([*arguments, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("\n\n") >= 2


def test_help_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    shown = capsys.readouterr().out
    assert "::" not in shown
    assert "state = ddp_hooks.register(ddp)" in " ".join(shown.split())


def test_info_names_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["info"]) == 0
    assert f"ddp_hooks  {ddp_hooks.__version__}, for torch " in capsys.readouterr().out


class Served:
    """As much of a state as a report needs."""

    policy = ddp_hooks.policies.PRESETS["auto"]

    def __init__(self, **counters: Any) -> None:
        self.counters = ddp_hooks.statistics.Statistics(**counters)

    def stats(self) -> ddp_hooks.statistics.Statistics:
        return self.counters


def test_a_report_of_many_modules_fits_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = RunReport(ddp_hooks.policies.PRESETS["auto"], ["train.py"])
    monkeypatch.setenv("RANK", "1")
    report.end(failed=False, quiet=False, file=tmp_path / "of rank 1")
    assert (capsys.readouterr().err, list(tmp_path.iterdir())) == ("", [])
    for rank in ("0", "", "first"):
        monkeypatch.setenv("RANK", rank)
        report.end(failed=False, quiet=False, file=None)
        assert "made no DistributedDataParallel module" in capsys.readouterr().err

    large = Served(steps=10**9, dense_bytes=10**16, payload_bytes=10**15, rebuilt_bytes=3 * 10**16)
    report.add(MadeModule("Model" * 20, 0, 64, large, None))  # type: ignore[arg-type]
    report.add(MadeModule("Other", 0, 64, None, "a reason " * 40))
    text = report.describe()
    assert max(map(len, text.splitlines())) <= 80
    assert "40.0 PB" in text
    assert text.splitlines()[2].split()[-1] == "97.5%"
    report.end(failed=False, quiet=True, file=tmp_path / "r.json")
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "r.json").read_text())["total"]["wrapped_bytes"] == 4 * 10**16
    report.end(failed=False, quiet=True, file=tmp_path)
    assert capsys.readouterr().err == f"ddp_hooks: the report could not be written to {tmp_path}: Is a directory\n"
