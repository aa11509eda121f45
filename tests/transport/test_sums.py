"""Sums by owners, as all-gathers and all-to-alls bring them; and ranks that die in one of their phases."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from profiling import profiled
from spawn import RankFailure, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import register
from tuned import Tuning

from ddp_hooks import Policy

SUMMED = Policy("summed", tuning=Tuning(min_direct_bytes=0, min_owner_saving=0))
TOLD = "as it should be"


def sums(rank: int, users: list[list[int]]) -> set[str]:
    """Sum layers that some ranks use, and compare with a sum in the order of ranks; return which collectives ran."""
    layers = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in users)
    ddp = DistributedDataParallel(Layers(layers), find_unused_parameters=True)
    register(ddp, SUMMED, True)
    # Of rank and layer: what each rank's gradient is.
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(dist.get_world_size(), len(users), 96, 96, generator=generator)
    used = [i for i, ranks in enumerate(users) if rank in ranks]
    with profiled(all_threads=True) as profile:
        ddp(used, gradients[rank]).backward()
    for i, ranks in enumerate(users):
        expected = torch.zeros(96, 96)
        for contributor in ranks:
            expected += gradients[contributor, i] / dist.get_world_size()
        assert torch.equal(layers[i].weight.grad, expected)
    return {event.name() for event in profile.profiler.kineto_results.events() if event.name().startswith("ddp_hooks")}


class Layers(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, used: list[int], gradients: torch.Tensor) -> torch.Tensor:
        return torch.stack([(self.layers[i].weight * gradients[i]).sum() for i in used]).sum()


# Three of four ranks use a layer, so that the order in which they are added matters.
BALANCED = [[rank for rank in range(4) if rank != i % 4] for i in range(8)]
UNBALANCED = [[0, 1, 2], [1, 2, 3]]


def test_all_gathers_and_all_to_alls_bring_the_same_sums() -> None:
    for names in run_ranks(4, sums, BALANCED):
        assert {"ddp_hooks::all_gather", "ddp_hooks::all_to_all"} <= names
    for names in run_ranks(4, sums, UNBALANCED):
        assert "ddp_hooks::all_gather" not in names
        assert "ddp_hooks::all_to_all" in names


def expect_a_death(ranks: int, function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(ranks, function, *args, collective_timeout=5.0)
    assert "died with exit code 3" in str(caught.value)
    assert str(caught.value).count(f"RuntimeError: {TOLD}") == ranks - 1


def dies_in_a_step(rank: int, phase: str, users: list[list[int]]) -> None:
    layers = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in users)
    ddp = DistributedDataParallel(Layers(layers), find_unused_parameters=True)
    state = register(ddp, SUMMED, True)
    used = [i for i, ranks in enumerate(users) if rank in ranks]

    def step() -> None:
        ddp.zero_grad()
        loss = ddp(used, torch.ones(len(users), 96, 96))
        if dying:
            loss.register_hook(begin)
        loss.backward()

    def die(*_: Any) -> None:
        time.sleep(0.5)  # the others have sent theirs, and have had this rank's
        os._exit(3)

    def begin(_: torch.Tensor) -> None:
        # Nothing of this rank's has been sent yet.
        if phase == "masks":
            die()
        # At the end of backward, before rank 0 has sent what this rank sums.
        if phase == "sums":
            torch.autograd.Variable._execution_engine.queue_callback(die)

    dying = False
    step()
    assert state.stats().owner_bytes > 0
    dying = rank == 1
    if dying and phase == "contributions":
        layers[used[0]].weight.register_hook(die)
    if phase == "sums" and rank == 0:
        layers[used[0]].weight.register_hook(lambda _: time.sleep(1.5))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)closed|reset|timed out|timeout|broken pipe"):
        step()
    assert time.monotonic() - started < 15
    raise RuntimeError(TOLD)


@pytest.mark.parametrize(
    "users",
    [
        pytest.param([[0, 1], [1, 2], [0, 2]], id="gathered"),
        pytest.param([[0, 1], [0, 1], [2]], id="all-to-all", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("phase", [pytest.param("masks", marks=pytest.mark.thorough), "contributions", "sums"])
def test_a_rank_that_dies_in_a_phase(phase: str, users: list[list[int]]) -> None:
    expect_a_death(3, dies_in_a_step, phase, users)
