"""ddp.join() with uneven inputs: ranks that have joined are asked, and told, as the others are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from test_doctor_page import run
from test_expectations import make
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks

JOIN_HOOK, EXIT = DistributedDataParallel.join_hook, Join.__exit__


def run_block(
    ddp: DistributedDataParallel, batches: Sequence[bool], swallow: bool = False, block: Join | None = None
) -> int:
    """Train within a join block, left or not in each batch; return how many steps ended."""
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    done = 0
    with block or ddp.join():
        for left in batches:
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(torch.ones(2, 6), False, False).backward()
            try:
                ddp(torch.ones(2, 6), left, True).backward()
            except ddp_hooks.errors.UnexpectedUseError:
                if not swallow:
                    raise
            optimizer.step()
            done += 1
    return done


def check_block(ddp: DistributedDataParallel, batches: Sequence[bool]) -> None:
    assert run_block(ddp, batches) == len(batches)


def check_broken_block(ddp: DistributedDataParallel, batches: Sequence[bool]) -> None:
    with pytest.raises(
        ddp_hooks.errors.UnexpectedUseError, match=r"no rank had a gradient for left.bias, left.weight.* step"
    ):
        run_block(ddp, batches)


def same_as_plain(rank: int, policy: str | None) -> None:
    """Nothing is raised, whoever joins first and with however many batches, and the models are plain DDP's."""
    plain, watched = make(policy), make(policy)
    handle = ddp_hooks.expect_used(watched, "left")
    for lengths in ((0, 3), (3, 0), (2, 4), (2, 2)):
        for ddp in (plain, watched):
            # A step of one rank's is enough for all.
            check_block(ddp, [True] * lengths[rank])
        for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
            assert torch.equal(a, b)
        assert DistributedDataParallel.join_hook is not JOIN_HOOK
        run_block(copy.deepcopy(watched), [])
    handle.remove()
    assert DistributedDataParallel.join_hook is JOIN_HOOK


def raise_on_every_rank(rank: int) -> None:
    ddp = make(None)
    ddp_hooks.expect_used(ddp, "left")
    # Rank 1 is still training when it is broken, then rank 0 alone, and then both are.
    check_broken_block(ddp, [] if rank == 0 else [True, True, False, True])
    check_broken_block(ddp, [True, True, False] if rank == 0 else [True])
    check_broken_block(ddp, [True, False])
    # Whoever catches it behind the block goes on, with join and without.
    check_block(ddp, [True] * (1 + rank))
    ddp(torch.ones(2, 6), rank == 1, True).backward()
    # Within the block rank 1 has nobody left to train with, and is told so before it waits.
    if rank == 0:
        check_broken_block(ddp, [])
    else:
        with pytest.raises(RuntimeError, match="catch the error outside of the block"):
            run_block(ddp, [False, True, True], swallow=True)
    check_block(ddp, [True] * (2 - rank))
    # At its end, too, where there is no further batch.
    if rank == 0:
        check_broken_block(ddp, [])
    else:
        with pytest.raises(RuntimeError, match=r"its end without one.* catch the error outside of the block"):
            run_block(ddp, [True, False], swallow=True)
    check_block(ddp, [True] * (2 - rank))
    # The block is over whoever holds it.
    block = ddp.join()
    with pytest.raises(ddp_hooks.errors.UnexpectedUseError):
        run_block(ddp, [True] if rank == 0 else [True, False], block=block)
    ddp(torch.ones(2, 6), True, True).backward()
    # All of them within the block: nobody had joined, and all may go on.
    assert run_block(ddp, [False, True, False], swallow=True) == 3
    del ddp, block
    assert DistributedDataParallel.join_hook is JOIN_HOOK
    assert Join.__exit__ is EXIT


def beside_other_patches(rank: int) -> None:
    """Somebody else's wrapper over ours is left, and nobody is told twice of a pass."""
    ddp = make(None)
    first = ddp_hooks.expect_used(ddp, "left")
    ours = DistributedDataParallel.join_hook

    class Other(JoinHook):
        def __init__(self, hook: JoinHook) -> None:
            self.main_hook, self.post_hook = hook.main_hook, hook.post_hook  # type: ignore[method-assign]

    other = DistributedDataParallel.join_hook = lambda self, **options: Other(ours(self, **options))
    first.remove()
    second = ddp_hooks.expect_used(ddp, "left")
    check_block(ddp, [True] * (1 + 2 * rank))
    with ddp.join(enable=False):
        pass
    second.remove()
    assert DistributedDataParallel.join_hook is other
    DistributedDataParallel.join_hook = JOIN_HOOK


def begin_behind_a_block(rank: int) -> None:
    ddp = make(None)
    run_block(ddp, [True] * rank)
    with pytest.raises(RuntimeError, match=r"expected to be called before `with ddp.join\(\)`.*join\(enable=False\)"):
        ddp_hooks.expect_used(ddp, "left")
    with ddp.join(enable=False):
        pass
    handle = ddp_hooks.expect_used(ddp, "left")
    second = ddp_hooks.expect_used(ddp, "trunk")
    check_block(ddp, [True] * rank)
    check_broken_block(ddp, [False] * rank)
    handle.remove()
    check_block(ddp, [False] * rank)
    second.remove()


def diagnose_joined(rank: int) -> None:
    """Only steps that all ranks ran are compared, the same step of each; also with buckets that DDP builds anew."""
    ddp = make(None)
    with ddp_hooks.diagnose(ddp) as diagnosis:
        for batches in ([[], [True]], [[False, True, True], [False]], [[True], [True]]):
            run_block(ddp, batches[rank])
    found = diagnosis.findings
    # Steps 0, 2 and 3 were one rank's.
    assert found.steps == 2
    assert found.verdict("left.weight").pattern == (".#", ".#")
    assert any("had joined (ddp.join()) in 3 steps" in note for note in found.notes)
    plain = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    with ddp_hooks.diagnose(plain) as diagnosis, plain.join():
        for _ in range(3 * rank):
            plain(torch.ones(2, 4)).sum().backward()
    assert diagnosis.findings.steps == 0


@on_ranks(2, collective_timeout=10)
def test_ranks_that_have_joined_take_part_in_expectations(rank: int) -> None:
    for policy in (None, "skip_zeros"):
        same_as_plain(rank, policy)
    raise_on_every_rank(rank)
    beside_other_patches(rank)
    begin_behind_a_block(rank)
    diagnose_joined(rank)
    dist.barrier()


SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
with ddp.join():
    for _ in range(int(sys.argv[1 + dist.get_rank()])):
        ddp(torch.ones(2, 4)).sum().backward()
print("trained to the end")
dist.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--continue"]])
def test_the_command_ends_with_a_rank_that_has_joined(options: list[str], tmp_path: Path) -> None:
    script = tmp_path / "joins.py"
    script.write_text(SCRIPT)
    command = ["-m", "ddp_hooks", "doctor", "--steps", "4", "--patience", "20", *options, str(script), "10", "2"]
    printed = run(["--nproc-per-node", "2", *command], 0)
    assert "ddp_hooks doctor: 2 steps on 2 ranks" in printed
    assert "had joined (ddp.join()) in 2 steps, which are left out" in " ".join(printed.split())
    assert printed.count("trained to the end") == 2 * len(options)


@on_ranks(3, collective_timeout=10)
def test_of_three_ranks_two_have_joined(rank: int) -> None:
    ddp = make(None)
    ddp_hooks.expect_used(ddp, "left")
    check_block(ddp, [True] * rank)
    check_broken_block(ddp, [[], [True], [True, True, False]][rank])
