"""What few ranks contribute does not go round a ring: who contributes, how it then travels, and what comes of it."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import slow_group
import test_units
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, Trainer, assert_same_gradients, compare, register
from tuned import Tuning, with_settings

import ddp_hooks
from ddp_hooks import _C, Policy
from ddp_hooks_testing import _C as testing

DIRECT = Policy("direct", tuning=Tuning(owners=True, min_direct_bytes=0, segment_bytes=300, min_owner_saving=0))
DIRECT_ROWS = with_settings(DIRECT, name="direct rows", skip_zero_rows="on", min_divided_bytes=0, min_unit_bytes=1)


# --- how it travels


def test_owners_sum_only_if_they_are_asked_to() -> None:
    assert testing.transport_for(0b0011, 4, True) == testing.Transport.BY_OWNER
    assert testing.transport_for(0b0011, 4, False) == testing.Transport.ALL_REDUCE
    assert testing.transport_for(0b0010, 4, False) == testing.Transport.BROADCAST  # nothing to sum
    # Two coded contributions to each of three others may take half of a ring's transfers.
    assert testing.transport_for(0b0011, 4, False, HALVES) == testing.Transport.BROADCAST


HALVES = testing.CodedParts(contribution=0.5, sum=1.0)


def transfers(contributors: int, ranks: int, coded: testing.CodedParts | None) -> dict[testing.Transport, float]:
    """How often a byte crosses a link, counted by hand."""
    count = contributors.bit_count()
    part, sums = (1.0, 1.0) if coded is None else (coded.contribution, coded.sum)
    return {
        testing.Transport.ALL_REDUCE: 2 * (ranks - 1),
        testing.Transport.BROADCAST: count * part * (ranks - 1),
        testing.Transport.BY_OWNER: (count - 1) * part + (ranks - 1) * sums,
    }


@pytest.mark.parametrize(
    "coded",
    [None, HALVES, testing.CodedParts(contribution=0.875, sum=0.875)],
    ids=["uncoded", "contributions by half", "both by an eighth"],
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_transport_with_the_fewest_transfers(ranks: int, coded: testing.CodedParts | None) -> None:
    for contributors in range(1, 2**ranks):
        possible = transfers(contributors, ranks, coded)
        chosen = testing.transport_for(contributors, ranks, True, coded)
        # But a second phase that saves next to nothing is not worth its latency.
        least = min(possible.values())
        assert possible[chosen] == least or possible[chosen] * 0.9 < least
    everybody = 2**ranks - 1
    assert testing.transport_for(everybody, ranks, True) == testing.Transport.ALL_REDUCE
    assert testing.transport_for(0, ranks, True) == testing.Transport.ALL_REDUCE  # nobody knows who


class Case:
    """Random parameters, and who contributes to which."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.ranks = draw.choice([2, 3, 4])
        self.parameters = draw.randint(1, 30)
        buckets, parameter = [], 0
        while parameter < self.parameters:
            slices, offset = [], 0
            for _ in range(min(draw.randint(1, 5), self.parameters - parameter)):
                length = draw.choice([0, 1, 7, 100, 1000])
                slices.append(_C.ParameterSlice(parameter, offset, length))
                offset += length
                parameter += 1
            buckets.append(_C.BucketLayout(slices, 4, draw.choice([0, 0, 1])))
        self.layout = _C.LayoutOfBuckets(buckets, self.parameters)
        self.by_rank = [_C.UsageMask(self.parameters) for _ in range(self.ranks)]
        self.agreed = _C.UsageMask(self.parameters)
        share = draw.choice([0.2, 0.5, 0.9])
        for mask in self.by_rank:
            for i in range(self.parameters):
                if draw.random() < share:
                    mask.set(i)
            self.agreed.merge(mask)
        self.segment_bytes = draw.choice([1, 40, 400, 10_000])

    def contributors(self, parameter: int) -> int:
        return sum(mask.test(parameter) << rank for rank, mask in enumerate(self.by_rank))

    def plan(self, least: int = 0) -> list[testing.BucketPlan]:
        direct = _C.DirectSettings(
            direct=True,
            world_size=self.ranks,
            owners=True,
            segment_bytes=self.segment_bytes,
            min_direct_bytes=least,
            min_owner_saving=0.0,
        )
        settings = _C.PlanSettings(in_place_bytes=400, pack_bytes=4000, gap_fraction=0.0, direct=direct)
        return testing.make_reduction_plan(self.layout, self.agreed, settings, by_rank=self.by_rank)


@pytest.mark.parametrize("seed", range(60))
def test_every_used_element_travels_once(seed: int) -> None:
    case = Case(seed)
    elements: Counter[tuple[int, int]] = Counter()
    touching: Counter[int] = Counter()
    for ready, plan in enumerate(case.plan()):
        for message in plan.launches:
            touching.update({piece.place for piece in message.stretches})
            for piece in message.stretches:
                elements.update((piece.place, piece.offset + i) for i in range(piece.length))
        for message in plan.direct:
            places = {part.place for group in message.groups for part in group.parts}
            assert max(places) == ready  # when the last of its gradients is there, and no later
            assert len({case.layout.buckets[place].element_bytes for place in places}) == 1
            touching.update(places)
            assert message.numel == sum(group.numel for group in message.groups)
            for group in message.groups:
                assert group.numel == sum(part.length for part in group.parts)
                elements.update((part.place, part.offset + i) for part in group.parts for i in range(part.length))
    used: Counter[tuple[int, int]] = Counter()
    for b, bucket in enumerate(case.layout.buckets):
        for piece in bucket.slices:
            if case.agreed.test(piece.parameter):
                used.update((b, piece.offset + i) for i in range(piece.length))
    assert elements == used
    assert {b: plan.messages_touching for b, plan in enumerate(case.plan()) if plan.messages_touching} == touching


@pytest.mark.parametrize("seed", range(60))
def test_owners_contribute_and_messages_are_small(seed: int) -> None:
    case = Case(seed)
    where = {
        (b, piece.offset + i): piece.parameter
        for b, bucket in enumerate(case.layout.buckets)
        for piece in bucket.slices
        for i in range(piece.length)
    }
    segment = max(1, case.segment_bytes // 4)
    for message in itertools.chain.from_iterable(plan.direct for plan in case.plan()):
        by_owner: Counter[int] = Counter()
        for group in message.groups:
            by_owner[group.owner] += group.numel
            for part in group.parts:
                assert part.contributors >> group.owner & 1
                assert (part.contributors.bit_count() > 1) == message.is_summed
                assert case.contributors(where[part.place, part.offset]) == part.contributors
        assert max(by_owner.values()) <= segment


def test_so_little_is_all_reduced() -> None:
    case = Case(3)
    assert any(plan.direct for plan in case.plan())
    assert not any(plan.direct for plan in case.plan(least=1 << 30))


# --- against plain DDP


class RandomRanks(Scenario):
    """Each layer is used by a random set of ranks, from nobody to everybody."""

    steps = 8
    tolerance = 1e-5

    def build(self) -> nn.Module:
        class Layers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(width, width) for width in (8, 16, 8, 4, 24, 8))
                self.head = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
                for i in used:
                    layer = self.layers[i]
                    width = layer.in_features
                    wide = x if width < 8 else torch.cat([x] * 3, 1)
                    x = x + nn.functional.pad(layer(wide[:, :width]), (0, 8))[:, :8]
                return self.head(x)

        return Layers()

    def step(self, t: Trainer, i: int) -> None:
        used = [layer for layer in range(6) if t.generator.initial_seed() * 7919 + layer * 31 + i * 17 & 3 > 1]
        t.ddp(t.batch(3, 8), used).square().mean().backward()


class Half(RandomRanks):
    tolerance = 1e-2

    def build(self) -> nn.Module:
        return super().build().bfloat16()

    def step(self, t: Trainer, i: int) -> None:
        used = [layer for layer in range(6) if (layer + i + t.rank) % 3 == 0]
        t.ddp(t.batch(3, 8, dtype=torch.bfloat16), used).float().square().mean().backward()


class KeptGradients(RandomRanks):
    """What is left of an earlier step is sent again where another rank uses the parameter."""

    def run(self, t: Trainer) -> None:
        for i in range(self.steps):
            self.step(t, i)
            t.record()
            if i % 3 == 2:
                t.optimizer.step()
                t.optimizer.zero_grad()


class ManyBuckets(RandomRanks):
    ddp_options = {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True}


SCENARIOS = [RandomRanks, Half, KeptGradients, ManyBuckets]
ROWS = [
    test_units.OnOneRank,
    test_units.RankBuckets,
    test_units.Rows,
    test_units.Views,
    test_units.GradientsStay,
    test_units.BrainExperts,
    test_units.ComplexExperts,
    test_units.SpecialNumbers,
    test_units.NegativeZeros,
    test_units.NoSync,
]


WAYS = [
    (DIRECT, True),
    (DIRECT, False),
    (with_settings(DIRECT, in_place_bytes=0, segment_bytes=64), True),
    (with_settings(DIRECT, skip_zeros="on"), True),
]


@pytest.mark.parametrize(
    ("world_size", "every_policy"),
    [(3, False), *(pytest.param(ranks, True, marks=pytest.mark.thorough) for ranks in (2, 3, 4))],
)
@on_ranks(timeout=300.0)
def test_same_as_plain_ddp(rank: int, every_policy: bool) -> None:
    for number, scenario in enumerate(SCENARIOS):
        # All of them, or the first and the next of the others.
        for policy, native in WAYS if every_policy else [WAYS[0], WAYS[1 + number % 3]]:
            compare(rank, scenario(), policy, native)
    for number, scenario in enumerate(ROWS):
        compare(rank, scenario(), DIRECT_ROWS, True)
        if every_policy or number % 3 == 0:
            compare(rank, scenario(), DIRECT, True)


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(heads))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.tanh(self.trunk(x)))


def bytes_by_transport(rank: int, world_size: int) -> None:
    """A head for each rank, and two that half of the ranks use."""
    ddp = DistributedDataParallel(Heads(world_size + 2), find_unused_parameters=True)
    state = register(ddp, DIRECT, True)
    head = sum(p.numel() for p in ddp.module.trunk.parameters()) * 4
    ddp(torch.ones(2, 64), rank).sum().backward()
    stats = state.stats()
    assert stats.payload_bytes == head * (world_size + 1)
    assert (stats.broadcast_bytes, stats.owner_bytes) == (head * world_size, 0)
    ring = 2 * (world_size - 1) * head // world_size
    assert stats.sent_bytes == ring + (world_size - 1) * head
    assert state.usage()[f"heads.{rank}.weight"].ranks == (rank,)
    assert state.usage()["trunk.weight"].ranks == tuple(range(world_size))
    assert state.usage()[f"heads.{world_size}.weight"].ranks == ()
    assert "sent directly by the ranks that used them" in " ".join(str(stats).split())

    ddp.zero_grad()
    state.reset_stats()
    ddp(torch.ones(2, 64), world_size + rank % 2).sum().backward()
    stats = state.stats()
    if world_size == 4:
        assert (stats.broadcast_bytes, stats.owner_bytes) == (0, 2 * head)
        # Each of a head's two contributors owns half of it: receives the other's, and sends the sum to three.
        assert stats.sent_bytes == pytest.approx(ring + head / 2 + 3 * head / 2, rel=0.02)
    state.set_policy(with_settings(DIRECT, direct=False))
    state.reset_stats()
    ddp(torch.ones(2, 64), rank).sum().backward()
    assert (state.stats().broadcast_bytes, state.stats().owner_bytes) == (0, 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_by_transport(world_size: int) -> None:
    run_ranks(world_size, bytes_by_transport, world_size)


@pytest.mark.thorough
@on_ranks(6, timeout=300.0)
def test_on_a_grid(rank: int) -> None:
    """Six ranks are two axes; who contributes is known there, too."""
    ddp = DistributedDataParallel(Heads(8), find_unused_parameters=True)
    state = register(ddp, DIRECT, True)
    plain = DistributedDataParallel(Heads(8), find_unused_parameters=True)
    plain.load_state_dict(ddp.state_dict())
    head = sum(p.numel() for p in ddp.module.trunk.parameters()) * 4
    for head_of_rank in (rank, 6 + rank % 2):
        for module in (ddp, plain):
            module.zero_grad()
            module(torch.full((2, 64), 0.1 * rank), head_of_rank).sum().backward()
        assert_same_gradients(ddp, plain, exact=False)
    assert state.stats().broadcast_bytes == 6 * head
    assert state.stats().owner_bytes == 2 * head
    assert state.usage()["heads.6.weight"].ranks == (0, 2, 4)
    assert state.usage()["heads.5.weight"].ranks == ()


def values_by_rank(rank: int) -> None:
    """What one rank alone has travels as with `skip_unused`, also where values are looked at."""
    ddp = DistributedDataParallel(Heads(2), find_unused_parameters=True)
    state = register(ddp, DIRECT, True)
    sent = []
    for policy in (DIRECT, with_settings(DIRECT, skip_zeros="on")):
        state.set_policy(policy)
        for head in (rank, 1 - rank, 0):
            state.reset_stats()
            ddp.zero_grad()
            ddp(torch.ones(2, 64), head).sum().backward()
            stats = state.stats()
            sent.append((stats.payload_bytes, stats.broadcast_bytes, stats.sent_bytes))
    assert sent[:3] == sent[3:]
    assert sent[0][1] > 0


class Weighted(nn.Module):
    """Both layers are in every graph, but the gradient of one that counts nothing is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        return sum(weight * layer(x) for weight, layer in zip(weights, self.layers, strict=True))


def zeros_by_rank(rank: int) -> None:
    ddp = DistributedDataParallel(Weighted())
    state = register(ddp, with_settings(DIRECT, skip_zeros="on"), True)
    ddp(torch.ones(2, 64), (float(rank == 0), float(rank == 1))).sum().backward()
    layer = sum(p.numel() for p in ddp.module.layers[0].parameters()) * 4
    assert (state.stats().payload_bytes, state.stats().broadcast_bytes) == (2 * layer, 2 * layer)
    assert state.stats().sent_bytes == layer
    assert torch.equal(ddp.module.layers[0].weight.grad, torch.ones(64, 64))


@pytest.mark.parametrize("body", [values_by_rank, zeros_by_rank])
def test_values_by_rank(body: Callable[[int], None]) -> None:
    run_ranks(2, body)


@on_ranks(2)
def test_rows_by_rank(rank: int) -> None:
    ddp = DistributedDataParallel(test_units.Table(300))
    state = register(ddp, DIRECT_ROWS, True)
    ddp(torch.tensor([[1, 2 + rank, 7 + rank, 100]])).square().mean().backward()
    units = state.usage()["table.weight"].units
    assert units == ddp_hooks.statistics.UnitUsage(300, 4, 6, (4, 4))
    row = 8 * 4
    assert state.stats().broadcast_bytes == 4 * row


@on_ranks(2)
def test_halves_pay(rank: int) -> None:
    """Two halves of a table make all of it; but what one rank has alone costs half."""
    ddp = DistributedDataParallel(test_units.Table(1024, 64))
    state = register(ddp, with_settings(test_units.ADAPTIVE, direct=True, min_direct_bytes=0), True)
    half = torch.arange(1024).reshape(2, -1)[rank][None]
    for _ in range(4):
        ddp(half).sum().backward()
        ddp.zero_grad()
    assert state.stats().skip_zero_rows_steps == 3
    assert state.stats().broadcast_bytes == 3 * 1024 * 64 * 4


@on_ranks(2)
def test_gradient_by_hand(rank: int) -> None:
    """Rank 0 makes a gradient of what it said it would not use, which rank 1 alone then would not receive."""
    ddp = DistributedDataParallel(Heads(2), find_unused_parameters=True)
    register(ddp, DIRECT, True)
    other = ddp.module.heads[1].weight

    def make(_: torch.Tensor) -> None:
        if rank == 0:
            other.grad = torch.ones_like(other)

    ddp.module.trunk.weight.register_hook(make)
    ddp.module.heads[0].weight.register_hook(make)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"parameter 'heads.1.weight' was unused here when .* was not sent"):
            ddp(torch.ones(2, 64), 0).sum().backward()
    else:
        ddp(torch.ones(2, 64), 1).sum().backward()


@pytest.mark.parametrize("bucket_view", [False, True])
@on_ranks(2)
def test_gradient_by_hand_beside_late(rank: int, bucket_view: bool) -> None:
    """As above, and the other rank waits for this one to average an unmanaged parameter, and to rebuild."""
    module = Heads(2)
    module.trunk.bias.requires_grad_(False)
    ddp = DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
    state = register(ddp, with_settings(DIRECT, rebuild_after=1), True)
    module.trunk.bias.requires_grad_(True)
    reducer = ddp.reducer
    for makes in (rank == 0, False):
        # The second pass runs on the new Reducer, which knows the bias and need not average it apart.
        handle = module.trunk.weight.register_hook(
            lambda _, makes=makes: setattr(module.heads[1].weight, "grad", torch.ones(64, 64)) if makes else None
        )
        if makes:
            with pytest.raises(RuntimeError, match=r"parameter 'heads.1.weight' was unused here when"):
                ddp(torch.ones(2, 64), rank).sum().backward()
        else:
            ddp(torch.ones(2, 64), rank).sum().backward()
        handle.remove()
        assert ddp.reducer is not reducer
        bias = module.trunk.bias.grad
        others = [torch.empty_like(bias) for _ in range(2)]
        dist.all_gather(others, bias)
        assert bias.count_nonzero() > 0
        assert torch.equal(*others)
        ddp.zero_grad()
    assert state.stats().steps == 2


@on_ranks(2)
def test_gradient_by_hand_beside_others(rank: int) -> None:
    """As above, and the other rank waits in what another module and an expectation have queued for the end."""
    one, frozen = Heads(2), Heads(2)
    frozen.trunk.bias.requires_grad_(False)
    modules = [DistributedDataParallel(module, find_unused_parameters=True) for module in (one, frozen)]
    for ddp in modules:
        register(ddp, DIRECT, True)
    frozen.trunk.bias.requires_grad_(True)
    ddp_hooks.expect_used(modules[0], "trunk")
    handle = one.trunk.weight.register_hook(lambda _: setattr(one.heads[1].weight, "grad", torch.ones(64, 64)))
    if rank == 1:
        handle.remove()
    # Backward reaches first what ran last.
    outputs = [ddp(torch.ones(2, 64), rank) for ddp in reversed(modules)]
    loss = sum(output.sum() for output in outputs)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"parameter 'heads.1.weight' was unused here when"):
            loss.backward()
        handle.remove()
    else:
        loss.backward()
    for ddp in modules:
        ddp.zero_grad()
    sum(ddp(torch.ones(2, 64), rank).sum() for ddp in modules).backward()


@pytest.mark.parametrize("search", [False, True])
@on_ranks(2)
def test_retried_with_another_head(rank: int, search: bool) -> None:
    """Rank 0's pass fails half-way, and is run again with what nobody has announced."""
    ddp = DistributedDataParallel(Heads(3), find_unused_parameters=search)
    state, x = register(ddp, DIRECT, True), torch.ones(2, 64)

    def forward(head: int) -> torch.Tensor:
        if not search:
            state.declare_unused(*[other for i, other in enumerate(ddp.module.heads) if i != head])
        return ddp(x, head)

    if rank == 0:

        def fail(_: torch.Tensor) -> None:
            raise ValueError("half-way")

        output = forward(0)
        output.register_hook(fail)
        with pytest.raises(ValueError, match="half-way"):
            output.sum().backward()
        with pytest.raises(RuntimeError, match=r"parameter 'heads.2.\w+' was unused here when .* was not sent"):
            forward(2).sum().backward()
    else:
        forward(1).sum().backward()
        assert ddp.module.heads[2].weight.grad is None
    ddp.zero_grad()
    forward(rank).sum().backward()
    trunk = ddp.module.trunk.weight.grad
    others = [torch.empty_like(trunk) for _ in range(2)]
    dist.all_gather(others, trunk)
    assert torch.equal(*others)


@on_ranks(3)
def test_gradient_by_hand_beside_sums(rank: int) -> None:
    """As above, of what the two other ranks used: they wait for this one to take its part in sums by owner."""
    ddp = DistributedDataParallel(Heads(2), find_unused_parameters=True)
    state = register(ddp, DIRECT, True)
    x, used = torch.ones(2, 64), ddp.module.heads[1].weight

    def make(_: torch.Tensor) -> None:
        used.grad = torch.ones_like(used)

    first = None
    if rank == 0:
        handle = ddp.module.trunk.weight.register_hook(make)
        with pytest.raises(RuntimeError, match=r"parameter 'heads.1.weight' was unused here when .* was not sent"):
            ddp(x, 0).sum().backward()
        handle.remove()
    else:
        ddp(x, 1).sum().backward()
        first = used.grad.clone()
    assert state.stats().owner_bytes > 0
    ddp.zero_grad()
    ddp(x, min(rank, 1)).sum().backward()
    assert first is None or torch.equal(used.grad, first)


class WaitsForAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@on_ranks(4)
def test_sums_wait_for_nobody(rank: int) -> None:
    """Rank 0 has all buckets before a collective of backward, for which the owners of what it lacks wait."""
    group = dist.new_group([0, 1, 2, 3])

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stems = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor, stems: list[int]) -> torch.Tensor:
            for stem in stems:
                x = self.stems[stem](x)
            return self.heads[rank // 2](WaitsForAll.apply(x, group))

    x = torch.ones(2, 64).requires_grad_()
    gradients = []
    for policy in (None, DIRECT):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Stem(), find_unused_parameters=True)
        state = None if policy is None else register(ddp, policy, True)
        for stems in ([], [0, 1], [1, 2], [2, 0]), ([2], [1, 2], [1], []):
            ddp(x, stems[rank]).sum().backward()
        gradients.append([p.grad for p in ddp.parameters()])
    assert state.stats().owner_bytes > 0
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain)


@on_ranks(3)
def test_sums_of_a_static_graph(rank: int) -> None:
    """In the first pass the Reducer hands over all buckets, and waits for them, within one call."""
    gradients = []
    for policy in (None, DIRECT):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Heads(2), static_graph=True)
        state = None if policy is None else register(ddp, policy, True)
        for _ in range(3):
            ddp(torch.ones(2, 64), min(rank, 1)).sum().backward()
        gradients.append([p.grad for p in ddp.parameters()])
    assert state.stats().owner_bytes > 0
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain)


class AnyOrder(slow_group.SlowGroup):
    """Contributions come to owners in any order, in a thread that is not gloo's."""

    name_told = slow_group.BACKEND

    def getBackendName(self) -> str:
        return self.name_told

    def all_to_all_single(self, received: Any, sent: Any, received_numels: Any, sent_numels: Any, options: Any) -> Any:
        return self._later(
            lambda: self._inner.alltoall_base(received, sent, received_numels, sent_numels, options), [received, sent]
        )

    alltoall_base = all_to_all_single  # as torch before 2.13 calls it


@on_ranks(3)
def test_contributions_in_any_order(rank: int) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(40, 16) for _ in range(4))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return sum(table(rows).square().sum() for table in self.tables)

    def create(store: Any, rank: int, size: int, timeout: Any) -> AnyOrder:
        return AnyOrder(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), 1)

    dist.Backend.register_backend("any_order", create, devices=["cpu"])
    group = dist.new_group(backend="any_order")
    gradients = []
    for policy in (None, DIRECT_ROWS):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Tables(), process_group=group if policy else None, bucket_cap_mb=0.001)
        if policy is not None:
            group.name_told = "gloo"  # others are handed no all-to-all
            state = register(ddp, policy, True)
        for step in range(6):
            ddp(torch.arange(18) + 9 * rank + step % 2).backward()
        gradients.append([p.grad for p in ddp.parameters()])
    assert state.stats().owner_bytes > 0
    assert group.overtaken > 0
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain)
        everywhere = [torch.empty_like(ours) for _ in range(3)]
        dist.all_gather(everywhere, ours)
        assert all(torch.equal(everywhere[0], other) for other in everywhere)


@on_ranks(3)
def test_statistics_while_sums_wait(rank: int) -> None:
    """Whoever sums waits for what comes in through gloo's threads, and these may be asking for statistics."""

    class Stems(nn.Module):
        """Their bucket is the last, behind those whose callbacks take gloo's threads."""

        def __init__(self) -> None:
            super().__init__()
            self.stems = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
            self.trunk = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

        def forward(self, x: torch.Tensor, stem: int) -> torch.Tensor:
            return self.trunk(self.stems[stem](x))

    ddp = DistributedDataParallel(Stems(), find_unused_parameters=True, bucket_cap_mb=0.001)
    state = ddp_hooks.SkipUnusedState(ddp, with_settings(DIRECT, in_place_bytes=0))
    x = torch.ones(2, 64)

    def look(future):  # type: ignore[no-untyped-def]
        time.sleep(0.2)  # until backward has come to its end
        assert state.stats().steps > 0
        return future.value()

    ddp.register_comm_hook(state, lambda state, bucket: ddp_hooks.skip_unused_hook(state, bucket).then(look))
    for _ in range(2):
        ddp.zero_grad()
        ddp(x, min(rank, 1)).sum().backward()
    assert state.stats().owner_bytes > 0


@on_ranks(2)
def test_masks_of_a_failed_pass(rank: int) -> None:
    """Both ranks take up masks of a pass that failed, which say that each uses the other's head."""
    ddp = DistributedDataParallel(Heads(2), find_unused_parameters=True)
    register(ddp, DIRECT, True)
    x = torch.ones(2, 64)

    def fail(_: object) -> None:
        raise ValueError("on purpose")

    output = ddp(x, rank)
    output.grad_fn.register_prehook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        (output * 1.0).sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 'heads\..*' was unused here when .* was not sent"):
        ddp(x, 1 - rank).sum().backward()
    ddp.zero_grad()
    ddp(x, 1 - rank).sum().backward()
    assert all(p.grad is not None for p in ddp.parameters())
