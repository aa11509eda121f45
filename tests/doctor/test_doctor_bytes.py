"""What the doctor predicts against what the hook then sends, to the byte, for random contributors."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks

SIZES = (40, 300, 900, 1300, 1700, 2500)  # of the branches; from 256 KiB on what one rank has is broadcast
DENSITIES = (0.0, 0.04, 0.5, 0.93, 0.97, 1.0)
ROWS = 6000
Mode = dict[str, Any]


class Branches(nn.Module):
    """A table and branches; a step uses some of them, and some of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 64)
        self.trunk = nn.Linear(64, 64)
        self.branches = nn.ModuleList(nn.Linear(64, size) for size in SIZES)
        self.branches[2].double()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows: torch.Tensor, masks: dict[int, torch.Tensor]) -> torch.Tensor:
        x = self.trunk(self.table(rows).mean(0)) * self.scale
        loss = x.sum()
        for number, mask in masks.items():
            branch = self.branches[number]
            loss = loss + (branch(x.to(branch.weight.dtype)) * mask).sum().float()
        return loss


def draw(seed: int, step: int, rank: int, mode: Mode) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Which rows of the table, which branches, and which of their rows; the numbers depend on nothing else."""
    alike = random.Random(f"{seed} {step}")
    own = random.Random(f"{seed} {step} {rank}")
    if mode.get("find_unused_parameters"):
        # Now and then every rank draws the same.
        choice = own if alike.random() < 0.8 else alike
        chosen = [i for i in range(len(SIZES)) if choice.random() < 0.5]
    elif mode.get("static_graph"):
        chosen = [i for i in range(len(SIZES)) if random.Random(f"{seed} {i}").random() < 0.6]
    else:
        chosen = list(range(len(SIZES)))
    generator = torch.Generator().manual_seed(own.randrange(1 << 30))
    masks = {i: torch.rand(SIZES[i], generator=generator) < own.choice(DENSITIES) for i in chosen}
    used = max(1, int(ROWS * own.choice((0.001, 0.1, 0.3, 0.95))))
    return torch.randint(ROWS, (used,), generator=generator), masks


def make(mode: Mode, frozen: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches(), bucket_cap_mb=1, **mode)
    if frozen:
        ddp.module.branches[1].requires_grad_(False)
    return ddp


def run_step(ddp: DistributedDataParallel, inputs: tuple[torch.Tensor, dict[int, torch.Tensor]], to_none: bool) -> None:
    ddp.zero_grad(set_to_none=to_none)
    ddp(*inputs).backward()


MODES: tuple[tuple[Mode, bool, bool], ...] = (
    # what DDP is told, whether gradients are set to None, whether something is frozen after wrapping
    ({"find_unused_parameters": True}, True, False),
    ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, True, True),
    ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, False, False),
    ({"find_unused_parameters": True}, False, False),
    ({"static_graph": True}, True, False),
    ({}, True, False),
    ({"gradient_as_bucket_view": True}, False, False),
)


def compare_random_steps(rank: int) -> dict[str, int]:
    """Each policy that is exact, over some steps, for each way to set DDP up."""
    seen = {"broadcast": 0, "all-reduced": 0, "left over": 0}
    if dist.get_world_size() > 2:
        seen["summed by owners"] = 0
    for seed, (mode, to_none, frozen) in enumerate(MODES):
        steps = [draw(seed, step, rank, mode) for step in range(6)]
        plain = make(mode, frozen)
        with ddp_hooks.diagnose(plain) as diagnosis:
            for inputs in steps:
                run_step(plain, inputs, to_none)
        recorder = diagnosis.recorder
        assert recorder is not None
        seen["left over"] += sum(step.left_over for step in recorder.steps)
        for policy in ("skip_unused", "skip_zeros"):
            found = diagnosis.findings.policy(policy)
            ours = make(mode, frozen)
            state = ddp_hooks.register(ours, policy)
            sent = []
            for inputs in steps:
                before = state.stats()
                run_step(ours, inputs, to_none)
                sent.append(state.stats() - before)
            where = (policy, mode, to_none, frozen)
            assert found.payload_bytes_by_step == tuple(one.payload_bytes for one in sent), where
            total = state.stats()
            assert found.payload_bytes == total.payload_bytes, where
            assert found.broadcast_bytes == total.broadcast_bytes, where
            assert found.sent_bytes[rank] == total.sent_bytes, where
            seen["broadcast"] += total.broadcast_bytes
            if dist.get_world_size() > 2:
                seen["summed by owners"] += total.owner_bytes
            seen["all-reduced"] += total.payload_bytes - total.broadcast_bytes - total.owner_bytes
    return seen


def compare_auto(rank: int, cycles: int) -> None:
    """``auto`` against the hook after it has settled: steps that pay always, or never, come round again and again."""
    mode = {"find_unused_parameters": True}
    every = torch.arange(ROWS)
    cycle = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        masks = {
            0: torch.ones(SIZES[0], dtype=torch.bool),
            # Mostly zero rows, on every rank others.
            3: torch.rand(SIZES[3], generator=generator) < 0.1,
            # Dense: not worth an exchange.
            4: torch.ones(SIZES[4], dtype=torch.bool),
        }
        if step == rank % 2:
            masks[5] = torch.ones(SIZES[5], dtype=torch.bool)  # by some rank alone, on two ranks
        if step == 0:
            masks[2] = torch.zeros(SIZES[2], dtype=torch.bool)  # used, and zero
        rows = every[rank::7] if rank == 0 else torch.randint(ROWS, (40,), generator=generator)
        cycle.append((rows, masks))
    plain = make(mode, False)
    with ddp_hooks.diagnose(plain) as diagnosis:
        for inputs in cycle * 2:
            run_step(plain, inputs, True)
    found = diagnosis.findings.policy("auto")
    assert not found.exact
    ours = make(mode, False)
    state = ddp_hooks.register(ours, "auto")
    for inputs in cycle * cycles:
        run_step(ours, inputs, True)
    settled = state.stats()
    sent = []
    for inputs in cycle * 2:
        before = state.stats()
        run_step(ours, inputs, True)
        sent.append((state.stats() - before).payload_bytes)
    total = state.stats() - settled
    assert found.payload_bytes_by_step == tuple(sent)
    assert found.payload_bytes == total.payload_bytes
    assert found.broadcast_bytes == total.broadcast_bytes
    assert found.sent_bytes[rank] == total.sent_bytes
    # It is in between: it has looked into the table, and leaves the dense branch alone.
    assert total.skip_zero_rows_steps == 4
    assert found.payload_bytes < diagnosis.findings.policy("skip_unused").payload_bytes


class Narrow(nn.Module):
    """Layers that autocast computes in 16 bits, some of them on one rank alone, and a table that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 64)
        self.layers = nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300), nn.Linear(300, 700))
        self.other = nn.Linear(700, 500)

    def forward(self, rows: torch.Tensor, takes_other: bool) -> torch.Tensor:
        x = self.layers(self.table(rows))
        return (self.other(x) if takes_other else x).float().square().mean()


def compare_narrow(rank: int, cycles: int) -> None:
    """``auto`` under autocast, after it has settled, and with two passes a step, which leave nothing narrow."""
    cycle = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        cycle.append((torch.randint(ROWS, (500,), generator=generator), step == 0 or rank == 0))

    def make_narrow() -> DistributedDataParallel:
        torch.manual_seed(0)
        return DistributedDataParallel(Narrow(), bucket_cap_mb=1, find_unused_parameters=True)

    def run(ddp: DistributedDataParallel, inputs: tuple[torch.Tensor, bool], passes: int) -> None:
        ddp.zero_grad()
        for number in range(passes):
            rows, takes_other = inputs
            with nullcontext() if number + 1 == passes else ddp.no_sync(), torch.autocast("cpu", torch.bfloat16):
                loss = ddp((rows + 17 * number) % ROWS, takes_other)
            with nullcontext() if number + 1 == passes else ddp.no_sync():
                loss.backward()

    narrow_fractions = []
    for passes in (1, 2):
        plain = make_narrow()
        with ddp_hooks.diagnose(plain) as diagnosis:
            for inputs in cycle * 2:
                run(plain, inputs, passes)
        found = diagnosis.findings.policy("auto")
        ours = make_narrow()
        state = ddp_hooks.register(ours, "auto")
        for inputs in cycle * cycles:
            run(ours, inputs, passes)
        settled = state.stats()
        sent = []
        for inputs in cycle * 2:
            before = state.stats()
            run(ours, inputs, passes)
            sent.append((state.stats() - before).payload_bytes)
        total = state.stats() - settled
        assert found.payload_bytes_by_step == tuple(sent)
        assert (found.broadcast_bytes, found.narrow_bytes) == (total.broadcast_bytes, total.narrow_bytes)
        assert found.sent_bytes[rank] == total.sent_bytes
        assert diagnosis.findings.narrow_fraction is not None
        narrow_fractions.append(diagnosis.findings.narrow_fraction)
        text = " ".join(str(diagnosis).split())
        asked = [one for one in diagnosis.findings.answers if "bits" in one.question or "bytes" in one.question]
        assert [one.verdict for one in asked] == ["yes"] * passes, text
        assert ("Does accumulation cost bytes?" in text) == (passes == 2)
        if passes == 1:
            assert found.narrow_bytes > 0
            assert f"{narrow_fractions[0]:.0%} of their bytes are exactly numbers of half as many bits" in text
    # Sums of two 16-bit numbers are none; rows that one pass alone looked up are no sums.
    assert narrow_fractions[0] > 0.5 > 0.3 > narrow_fractions[1]


def compare_everything(rank: int) -> dict[str, int]:
    compare_auto(rank, 12)
    compare_narrow(rank, 12)
    seen = compare_random_steps(rank)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    return {name: sum(each[name] for each in everyone) for name in seen}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_every_byte_is_predicted(ranks: int) -> None:
    check: Callable[..., Any] = compare_everything
    seen = run_ranks(ranks, check)[0]
    # The steps were worth it: every transport was used, and gradients of earlier passes were met.
    assert all(seen.values()), seen
