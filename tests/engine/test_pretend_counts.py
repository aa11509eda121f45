"""What a step asks of a pretended device: launches, collectives and waits of the host, beside plain DDP's gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hosts import on_hosts
from test_pretend import on_pretended, run_pretended
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from training import register
from tuned import Tuning

import ddp_hooks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ddp_hooks_testing._pretend") is None,
    reason="the pretended device is built in a checkout with torch 2.13, without CUDA and sanitizers",
)

COUNTS = ("launches", "host_waits", "collectives")
# By then DDP has rebuilt its buckets.
SETTLED = 3


class Layers(nn.Module):
    """Layers of 17 kB, perhaps behind a table of 512 kB."""

    def __init__(self, layers: int, *, has_table: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 64) if has_table else None
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.table(rows) if self.table else 0.1 * rows[:, None].expand(-1, 64)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([step, 3 * step + rank, 40 + rank], device="pretend")


def count(
    rank: int,
    policy: ddp_hooks.Policy | str | None,
    change: Callable[[int, DistributedDataParallel], None] = lambda step, ddp: None,
    *,
    layers: int = 12,
    has_table: bool = False,
    steps: int = 6,
    plain: bool = False,
) -> tuple[list[dict[str, int]], list[list[torch.Tensor | None]], Any]:
    """Train with a policy, with ``allreduce_hook`` if it is None, or with plain DDP."""
    from ddp_hooks_testing import _pretend

    torch.manual_seed(0)
    module = Layers(layers, has_table=has_table).to("pretend")
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.06, find_unused_parameters=plain)
    state = None
    if policy is not None:
        state = register(ddp, policy, True)
    elif not plain:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    counted, gradients = [], []
    for step in range(steps):
        change(step, ddp)
        ddp.zero_grad()
        loss = ddp(batch(rank, step)).square().mean()
        seen = _pretend.counts()
        loss.backward()
        counted.append({name: after - seen[name] for name, after in _pretend.counts().items() if name in COUNTS})
        gradients.append([None if p.grad is None else p.grad.cpu() for p in module.parameters()])
    return counted, gradients, state


def assert_equal(ours: list[list[torch.Tensor | None]], plain: list[list[torch.Tensor | None]]) -> None:
    for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None), step
            assert x is None or torch.equal(x, y), step


@on_pretended(2, 0)
def test_nothing_to_skip_costs_nothing(rank: int) -> None:
    everywhere = [count(rank, policy, steps=8)[0][-1] for policy in (None, "skip_unused", "auto")]
    hook, *ours = everywhere
    for counts in ours:
        assert counts["host_waits"] == 0
        assert counts["launches"] <= hook["launches"]
        assert counts["collectives"] <= hook["collectives"]


@on_pretended(2, 0)
def test_steps_open_by_bytes(rank: int) -> None:
    """The first message leaves with the bucket that completes so many bytes, at the latest with the last one."""
    from ddp_hooks_testing import _pretend

    for opening_bytes, native in ((0, True), (70_000, True), (130_000, False), (None, True)):
        ddp = DistributedDataParallel(Layers(12, has_table=False).to("pretend"), bucket_cap_mb=0.06)
        tuning = Tuning(opening_bytes=opening_bytes, in_place_bytes=0)
        register(ddp, ddp_hooks.Policy("opening", tuning=tuning), native)
        sent_before: list[tuple[int, int]] = []  # of each gradient: its bytes, and how many messages had left

        def note(parameter: torch.Tensor, sent_before: list[tuple[int, int]] = sent_before) -> None:
            sent_before.append((parameter.nbytes, _pretend.counts()["collectives"]))

        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        for step in range(SETTLED + 1):
            ddp.zero_grad()
            loss = ddp(batch(rank, step)).square().mean()
            sent_before.clear()
            before = _pretend.counts()["collectives"]
            loss.backward()
        held = sum(size for size, sent in sent_before if sent == before)
        if opening_bytes is None:
            assert held == sum(size for size, _ in sent_before)
        else:
            assert opening_bytes <= held < opening_bytes + 100_000
        assert _pretend.counts()["collectives"] - before == 3  # as many as buckets


@on_pretended(2, 1)
def test_half_frozen_sends_at_most_a_message_for_each_bucket(rank: int) -> None:
    def freeze(step: int, ddp: DistributedDataParallel) -> None:
        if step == SETTLED:
            for layer in ddp.module.layers[::2]:
                layer.requires_grad_(False)

    buckets = count(rank, None)[0][-1]["collectives"]
    plain = count(rank, None, freeze, plain=True)[1]
    for in_place_bytes in (0, 1 << 20):
        policy = ddp_hooks.Policy("gaps", tuning=Tuning(in_place_bytes=in_place_bytes, pack_bytes=1 << 13))
        counted, gradients, state = count(rank, policy, freeze)
        assert_equal(gradients, plain)
        assert all(counts["collectives"] <= buckets for counts in counted[SETTLED:])
        assert all(counts["host_waits"] == 0 for counts in counted)
        assert state.stats().payload_bytes < state.stats().dense_bytes


@on_pretended(2, 2)
def test_rows_of_one_table(rank: int) -> None:
    more = []
    for layers in (4, 12):
        hook = count(rank, None, layers=layers, has_table=True)[0][-1]
        counted, gradients, state = count(rank, "auto", layers=layers, has_table=True)
        assert_equal(gradients, count(rank, None, layers=layers, has_table=True, plain=True)[1])
        assert counted[-1]["host_waits"] <= 2
        assert state.stats().skip_zero_rows_steps > 0
        more.append(counted[-1]["launches"] - hook["launches"])
    assert more[1] <= more[0]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return torch.stack([self.branches[index](x).sum() for index in used]).sum()


@on_pretended(3, 3)
def test_owners_sum_on_a_device_only_if_they_are_asked_to(rank: int) -> None:
    """Two of three ranks use a branch, and the third another one."""
    for owners in (None, True):
        ddp = DistributedDataParallel(Branches().to("pretend"), find_unused_parameters=True)
        tuning = Tuning(owners=owners, min_direct_bytes=0, min_owner_saving=0)
        state = register(ddp, ddp_hooks.Policy("owners", tuning=tuning), True)
        for _ in range(2):
            ddp(torch.ones(2, 64, device="pretend"), [int(rank == 2)]).backward()
        assert (state.stats().owner_bytes > 0) == bool(owners)


@on_pretended(4, 3)
def test_hosts_that_add_up_on_a_device(rank: int) -> None:
    """Each rank uses a branch of its own: what a host has of them travels in one message, or in two."""
    from ddp_hooks_testing import _pretend

    on_hosts(rank, "2 x 2")
    branch = 4 * 65 * 64
    counted = []
    for owners, segment_bytes in ((None, branch), (True, branch), (True, branch // 2)):
        ddp = DistributedDataParallel(Branches().to("pretend"), find_unused_parameters=True)
        tuning = Tuning(owners=owners, segment_bytes=segment_bytes, min_direct_bytes=0)
        state = register(ddp, ddp_hooks.Policy("hosts", tuning=tuning), True)
        for _ in range(SETTLED):
            ddp.zero_grad()
            loss = ddp(torch.ones(2, 64, device="pretend"), [rank])
            before = _pretend.counts()
            loss.backward()
            counts = {name: after - before[name] for name, after in _pretend.counts().items() if name in COUNTS}
        assert (state.stats().broadcast_bytes > 0) == bool(owners)
        counted.append(counts)
    unasked, one_message, two_messages = counted
    assert one_message["host_waits"] == unasked["host_waits"]
    assert one_message["collectives"] == unasked["collectives"] - 1 + 3
    # Packed, added up, packed, added up, and two shares put back.
    more = {"launches": 6, "host_waits": 0, "collectives": 3}
    assert {name: two_messages[name] - one_message[name] for name in COUNTS} == more


def unmanaged(rank: int) -> None:
    """Parameters that were frozen when the Reducer was made; one is used on a rank, and one nowhere."""
    from ddp_hooks_testing import _pretend

    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        module = Branches().to("pretend")
        for branch in module.branches[1:] if ours else ():
            branch.requires_grad_(False)
        ddp = DistributedDataParallel(module, find_unused_parameters=True)
        if ours:
            state = register(ddp, "skip_unused", True)
            ddp_hooks.unfreeze(ddp, "branches.*")
        gradients = []
        for step in range(5):
            ddp.zero_grad(set_to_none=step != 3)
            loss = ddp(torch.full((2, 64), 0.1 * (step + rank), device="pretend"), [0, 1, *([2] if rank else [])])
            before = _pretend.counts()
            loss.backward()
            after = _pretend.counts()
            assert not ours or after["host_waits"] == before["host_waits"]
            gradients.append([None if p.grad is None else p.grad.cpu() for p in module.parameters()])
        found.append(gradients)
    assert_equal(*found)
    assert found[0][0][-1] is None
    assert state.stats().messages >= 10


def test_unmanaged_gradients_stay_on_the_device() -> None:
    for seed in (4, 86):
        run_pretended(2, seed, unmanaged)
