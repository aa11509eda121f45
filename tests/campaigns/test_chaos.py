"""Ranks that die, stop or stay away, a data group that reorders what it completes, and runs that are started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import resumable
import torch
import torch.distributed as dist
from spawn import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import register

from ddp_hooks.serving import control_groups
from ddp_hooks_testing import _C as testing

TESTS = Path(__file__).parent
SECONDS = {"kill": 8, "stop": 8, "late": 4, "alone": 6, "slow": 6}


def run_chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "chaos.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", list(SECONDS))
def test_rounds(kind: str) -> None:
    done = run_chaos("--kind", kind, "--seconds", str(SECONDS[kind]), "--stack", "--errors")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "rounds: 0 with problems, 0 ranks hung" in done.stdout


@pytest.mark.thorough
def test_a_frozen_rank_is_noticed() -> None:
    """One round, because it takes the process groups' timeout and more."""
    done = run_chaos("--kind", "freeze", "--rounds", "1", "--stack")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


# --- a rank that alone does not get the agreed mask


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.branches[1](self.branches[0](batch))


def fails_alone(rank: int, native: bool) -> tuple[str, bool]:
    """Fail the mask exchange of rank 1 after rank 0 has got what it needs: a message with nothing in it, made by hand.

    Returns:
        The error of this rank's step, and whether it sent anything.
    """
    data = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    # On which nobody answers.
    silent = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    opened = []

    def open_group(*arguments: Any) -> Any:
        opened.append(open_as_ever(*arguments))
        return silent._get_backend(torch.device("cpu")) if rank == 1 else opened[0]

    open_as_ever = control_groups._open_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_groups, "_open_group", open_group)
        ddp = DistributedDataParallel(Branches(), process_group=data, find_unused_parameters=True, bucket_cap_mb=0.005)
        state = register(ddp, "skip_unused", native)
    if rank == 1:
        # Six words of a header, and one with a bit a parameter.
        words = [torch.zeros(1, 7, dtype=torch.int64) for _ in range(3)]
        opened[0].allgather([words[:2]], words[2:])
    with pytest.raises(RuntimeError) as raised:
        ddp(torch.ones(2, 32)).sum().backward()
    return str(raised.value), state.stats().messages > 0


@pytest.mark.thorough
@pytest.mark.parametrize("native", [False, True])
def test_a_rank_without_the_agreed_mask(native: bool) -> None:
    """Rank 0 sends what was agreed; rank 1 cannot, and must not send the Reducer's used map in its place.

    Messages of different sizes are what gloo ends a process for.
    """
    results = run_ranks(2, fails_alone, native)
    assert [sent for _, sent in results] == [True, False]
    for error, _ in results:
        assert re.search("Timed out waiting|Application timeout", error)


def comes_late_to_a_bucket(rank: int, native: bool) -> bool:
    """Rank 1 comes to the exchange of a later bucket when rank 0 has given up; nobody used what is in the first one.

    Returns:
        Whether the Reducer searches the graph in the next pass, as it did before.
    """
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model = Branches()
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True, bucket_cap_mb=0.004)
    register(ddp, "skip_zeros", native)
    if rank == 1:
        model.branches[0].weight.register_hook(lambda _: time.sleep(3))
    with pytest.raises(RuntimeError):
        ddp(torch.ones(2, 32)).sum().backward()
    return not testing.probe_reducer(ddp.reducer)["static_graph_"]


@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_bucket_after_one_that_nobody_used(native: bool) -> None:
    """The first bucket did not fail, so the Reducer copies it out, and must not wait for the map that was not sent."""
    assert run_ranks(2, comes_late_to_a_bucket, native) == [True, True]


# --- runs that go on from a checkpoint


def train(rank: int, folder: Path, registration: str, steps: int) -> int:
    return resumable.train(folder, registration, steps)


def final(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "final.pt")


def assert_same_weights(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), f"{name}: {tensor} and {b['model'][name]}"


@pytest.mark.thorough
def test_started_again(tmp_path: Path) -> None:
    """A rank dies, torchrun starts all of them again, and weights become those of a run in which nobody died."""
    died, plain = tmp_path / "died", tmp_path / "plain"
    died.mkdir()
    plain.mkdir()
    run_ranks(2, train, plain, "plain", 6)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # The store that torchrun shares by itself still has the addresses of the ranks before the restart (torch 2.13).
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command += [
        "--max-restarts=1",
        "--monitor-interval=0.1",
        str(TESTS.parent / "tools" / "resumable.py"),
        "--registration=native",
    ]
    command += [f"--folder={died}", "--steps=6", "--die-at=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "rank 1 began with step 2" in done.stdout
    assert_same_weights(final(died), final(plain))
    # The steps before the checkpoint are counted, those that were lost are not.
    assert final(died)["steps"] == 6


@pytest.mark.parametrize("registration", ["native", "python"])
def test_resumed_at_another_world_size(tmp_path: Path, registration: str) -> None:
    """From a checkpoint of two ranks one goes on, and comes to what plain DDP comes to in the same way."""
    for kind in ("plain", registration):
        (tmp_path / kind).mkdir()
        assert run_ranks(2, train, tmp_path / kind, kind, 2) == [0, 0]
        assert run_ranks(1, train, tmp_path / kind, kind, 4) == [2]
    assert_same_weights(final(tmp_path / registration), final(tmp_path / "plain"))
    assert final(tmp_path / registration)["steps"] == 4
