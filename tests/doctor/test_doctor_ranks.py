"""The doctor on three ranks: who used what, the command, and a run that hangs."""

from __future__ import annotations

import contextlib
import io
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from test_doctor_page import doctors_part, run, without_times
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.cli import doctor as command
from ddp_hooks.doctor.noticeboard import Noticeboard

RANKS = 3

SCRIPT = textwrap.dedent(
    """
    import sys

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    # The process group is there already.
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("trunk", "odd", "even", "never")})
    model.forward = lambda x, head: model[head](model["trunk"](x))
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(int(sys.argv[1])):
        ddp(torch.ones(2, 8), "odd" if (step + dist.get_rank()) % 3 == 1 else "even").sum().backward()
        ddp.zero_grad()
    print("trained to the end")
    """
)


class Heads(nn.Module):
    """A trunk, and a head for each rank and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 512)
        self.heads = nn.ModuleList(nn.Linear(512, 512) for _ in range(RANKS + 1))

    def forward(self, x: torch.Tensor, heads: list[int]) -> torch.Tensor:
        x = self.trunk(x)
        return sum((self.heads[head](x) for head in heads), start=x).square().mean()


def diagnose_heads(rank: int) -> str:
    ddp = DistributedDataParallel(Heads(), find_unused_parameters=True)
    with ddp_hooks.diagnose(ddp) as diagnosis:
        for step in range(4):
            # Rank 2's own head rests now and then, and rank 1's always.
            heads = [] if rank == 1 or (rank == 2 and step % 2) else [rank]
            ddp(torch.randn(4, 16), [*heads, RANKS] if step == 3 else heads).backward()
            ddp.zero_grad()
    found = diagnosis.findings
    assert found.ranks == RANKS
    assert found.verdict("heads.0.weight").pattern == ("####", "....", "....")
    assert found.verdict("heads.2.bias").pattern == ("....", "....", "#.#.")
    assert found.verdict("heads.2.bias").ranks_used == (2,)
    assert found.verdict("heads.1.weight").verdict == "never used"
    assert found.verdict(f"heads.{RANKS}.weight").verdict == "used in some steps"
    assert found.verdict("trunk.weight").verdict == "used"
    return str(diagnosis)


def run_command(script: str, **options: Any) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert command.run(command.Options((script, "10"), **options)) == 0
    return printed.getvalue()


def diagnose_and_run(rank: int, script: str, result: str) -> tuple[str, str, str, str]:
    text = diagnose_heads(rank)
    printed = run_command(script, steps=6, json=Path(result))
    tried = run_command(script, steps=8)
    watched = run_command(script, steps=8, only_watch=True)
    dist.barrier()
    return text, printed, tried, watched


def test_three_ranks_are_told_apart(tmp_path: Path) -> None:
    script, result = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    outcomes = run_ranks(RANKS, diagnose_and_run, str(script), str(result))
    # Wherever lines end.
    texts, printed, tried, watched = zip(*([" ".join(one.split()) for one in each] for each in outcomes), strict=True)
    assert len(set(texts)) == 1
    assert (
        "heads.0 1.05 MB not used by every rank: some rank used it in every step, all did in none; rank 0 did"
        in texts[0]
    )
    assert (
        "heads.2 1.05 MB not used by every rank: some rank used it in 2 of 4 steps, all did in none; rank 2" in texts[0]
    )
    assert printed[1] == printed[2] == ""
    assert "6 steps on 3 ranks" in printed[0]
    assert "some rank used it in every step, all did in none; ranks 0, 1, 2 did" in printed[0]
    assert "Stopped your script after 6 steps; --continue lets it go on." in printed[0]
    assert "trained to the end" not in printed[0]
    assert "no policy was tried, because that takes 8 steps" in printed[0]
    assert "were measured: skip_unused in 2 steps and auto in 2 steps of this run" in tried[0]
    assert "What ddp_hooks sends" not in watched[0]
    assert "tried" not in watched[0]
    (diagnosis,) = json.loads(result.read_text())["diagnoses"]
    patterns = {one["name"]: one["pattern"] for one in diagnosis["parameters"]}
    assert patterns["odd.weight"] == [".#..#.", "#..#..", "..#..#"]
    assert patterns["even.weight"] == ["#.##.#", ".##.##", "##.##."]
    assert patterns["never.bias"] == ["......"] * 3


@pytest.mark.thorough
def test_a_hang_of_three_ranks_is_named() -> None:
    arguments = ["--nproc-per-node", "3", "-m", "ddp_hooks", "doctor", "--patience", "2"]
    printed = without_times(doctors_part(run([*arguments, "tests/doctored/skipped_branch.py"], 1)))
    assert "rank 0: none: it has all of its gradients" in printed
    assert "rank 1: branch.weight, branch.bias rank 2: branch.weight, branch.bias" in printed
    assert (
        "The ranks use different parameters: after 3 finished steps, backward left out branch on ranks 1, 2" in printed
    )
    assert "rank 0: in backward after 3 finished steps" in printed
    for rank in range(1, RANKS):
        assert f"rank {rank}: waits in barrier, after 3 finished steps (tests/doctored/skipped_branch.py:" in printed


@on_ranks(2)
def test_ranks_of_another_group_are_not_called(rank: int) -> None:
    groups = [dist.new_group([other]) for other in range(2)]
    board = Noticeboard("0", groups[rank])
    if rank == 0:
        board.leave({"said": "here"})
    dist.barrier()
    assert board.someone_calls() == (rank == 0)
    assert board.read(0.1) == ({0: {"said": "here"}} if rank == 0 else {})
    dist.barrier()
    board.close()
