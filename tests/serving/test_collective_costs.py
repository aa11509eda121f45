"""What collectives take: measured the same on every rank, and what ranks decide by it."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import spawn
import test_direct
import torch
import torch.distributed as dist
from pairwise import thorough
from profiling import profiled
from spawn import RankFailure, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import register
from tuned import Tuning, with_settings

import ddp_hooks
from ddp_hooks import _C, Policy
from ddp_hooks.serving import collective_costs, registration

COSTS = [name for name in dir(_C.CollectiveCosts) if "seconds" in name]
CHEAP_ALL_TO_ALLS = _C.CollectiveCosts(all_to_all_seconds_per_byte=0.1)
DEAR_ALL_TO_ALLS = _C.CollectiveCosts(all_to_all_seconds_per_byte=100.0)
DEAR_MESSAGES = _C.CollectiveCosts(all_to_all_seconds=1e9)


# --- the rule


def elements_leaving(case: test_direct.Case, **settings: Any) -> int:
    """How many elements leave the all-reduces."""
    return sum(message.numel for plan in case.plan(**settings) for message in plan.direct)


@pytest.mark.parametrize("seed", range(20))
def test_dear_all_to_alls_are_avoided_and_cheap_ones_used(seed: int) -> None:
    case = test_direct.Case(seed)
    assert elements_leaving(case, costs=DEAR_MESSAGES) == 0
    # What two ranks have for each other they gather.
    assert all(m.is_gathered for plan in case.plan(costs=DEAR_ALL_TO_ALLS) for m in plan.direct)
    # Nothing but what everybody contributes stays.
    direct = elements_leaving(case, costs=CHEAP_ALL_TO_ALLS)
    everybody = 2**case.ranks - 1
    expected = sum(
        piece.length
        for bucket in case.layout.buckets
        for piece in bucket.slices
        if case.agreed.test(piece.parameter) and case.contributors(piece.parameter) not in (0, everybody)
    )
    assert direct == expected


@pytest.mark.parametrize("owners", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_dearer_an_all_to_all_the_less_leaves(seed: int, owners: bool) -> None:
    case = test_direct.Case(seed)
    if owners:
        # Of what one rank alone has, more may leave together with sums than without.
        for i in range(case.parameters):
            if case.contributors(i).bit_count() == 1:
                for mask in case.by_rank[:2]:
                    mask.set(i)
    for name in ("all_to_all_seconds", "all_to_all_seconds_per_byte"):
        leaving = [
            elements_leaving(case, owners=owners, costs=_C.CollectiveCosts(**{name: 1.3**power}))
            for power in range(-10, 40, 2)
        ]
        assert leaving == sorted(leaving, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_only_bytes_count_without_a_measurement(seed: int) -> None:
    """Whatever a byte takes, if it takes the same everywhere; tests of the model say what that comes to."""
    case = test_direct.Case(seed)
    alike = _C.CollectiveCosts(all_reduce_seconds_per_byte=2.0, all_to_all_seconds_per_byte=2.0)
    without, with_costs = (
        [[(m.is_summed, m.numel) for m in plan.direct] for plan in case.plan(costs=costs)] for costs in (None, alike)
    )
    assert without == with_costs


# --- the measurement


def measured(rank: int) -> list[float]:
    costs = collective_costs.measure_collective_costs(dist.group.WORLD, torch.device("cpu"))
    return [getattr(costs, name) for name in COSTS]


@pytest.mark.parametrize("world_size", [2, *thorough(3)])
def test_every_rank_measures_the_same(world_size: int) -> None:
    by_rank = run_ranks(world_size, measured)
    assert len(by_rank[0]) == len(COSTS) == 6
    assert all(0 < seconds < 1 for seconds in by_rank[0])
    assert all(costs == by_rank[0] for costs in by_rank)


class Measured:
    """What a state measures, in place of a measurement; counts how often that is asked for."""

    def __init__(self, costs: _C.CollectiveCosts | Callable[..., Any]) -> None:
        self.costs, self.count = costs, 0
        registration.measure_collective_costs = self

    def __call__(self, group: dist.ProcessGroup, device: torch.device) -> Any:
        self.count += 1
        return self.costs(group, device) if callable(self.costs) else self.costs


DIRECT = Policy("direct", tuning=Tuning(min_direct_bytes=0, calibrate=True))


def costs_stay(rank: int) -> None:
    measurement = Measured(DEAR_MESSAGES)
    ddp = DistributedDataParallel(test_direct.Heads(3), find_unused_parameters=True)
    state = register(ddp, DIRECT, True)

    def broadcast_bytes() -> int:
        state.reset_stats()
        ddp.zero_grad()
        ddp(torch.ones(2, 64), rank).sum().backward()
        return state.stats().broadcast_bytes

    assert broadcast_bytes() == 0
    state.set_policy(with_settings(DIRECT, in_place_bytes=0))
    assert broadcast_bytes() == 0
    ddp.module.heads[2].requires_grad_(False)
    assert ddp_hooks.rebuild(ddp)
    assert broadcast_bytes() == 0
    state.set_policy(with_settings(DIRECT, calibrate=False))
    assert broadcast_bytes() > 0
    state.set_policy(DIRECT)
    assert broadcast_bytes() == 0
    # A second module shares the groups, and what was measured on them.
    again = DistributedDataParallel(ddp.module, find_unused_parameters=True)
    other = register(again, DIRECT, True)
    again(torch.ones(2, 64), rank).sum().backward()
    assert (measurement.count, other.stats().broadcast_bytes) == (1, 0)
    uncalibrated = DistributedDataParallel(test_direct.Heads(3), find_unused_parameters=True)
    state = register(uncalibrated, with_settings(DIRECT, calibrate=False), True)
    uncalibrated(torch.ones(2, 64), rank).sum().backward()
    assert measurement.count == 1
    assert state.stats().broadcast_bytes > 0


def test_a_new_policy_and_a_rebuilt_reducer_keep_what_was_measured() -> None:
    run_ranks(2, costs_stay)


def costs_known_on_a_rank(rank: int) -> None:
    """Of two wrappers of one model only the second has costs, and on a rank that one is gone."""
    measurement = Measured(DEAR_MESSAGES)
    model = test_direct.Heads(3)
    wrappers = [DistributedDataParallel(model, find_unused_parameters=True) for _ in range(3)]
    states = [register(wrappers[0], with_settings(DIRECT, calibrate=False), True), register(wrappers[1], DIRECT, True)]
    assert measurement.count == 1
    if rank == 0:
        del states[1], wrappers[1]
        gc.collect()
    state = register(wrappers[-1], DIRECT, True)
    wrappers[-1](torch.ones(2, 64), rank).sum().backward()
    assert (measurement.count, state.stats().broadcast_bytes) == (2, 0)


def test_ranks_agree_on_whether_costs_are_known() -> None:
    run_ranks(2, costs_known_on_a_rank)


def deterministic_on_a_rank(rank: int) -> None:
    measurement = Measured(DEAR_MESSAGES)
    torch.use_deterministic_algorithms(rank == 1)
    ddp = DistributedDataParallel(test_direct.Heads(3), find_unused_parameters=True)
    state = register(ddp, DIRECT, True)
    torch.use_deterministic_algorithms(False)
    ddp(torch.ones(2, 64), rank).sum().backward()
    assert (measurement.count, state.stats().broadcast_bytes > 0) == (0, True)


def test_nothing_is_measured_where_runs_have_to_have_the_same_bits() -> None:
    run_ranks(2, deterministic_on_a_rank)


def coded_steps(rank: int, coded: Any, all_to_all_seconds_per_byte: float) -> int:
    Measured(_C.CollectiveCosts(all_to_all_seconds_per_byte=all_to_all_seconds_per_byte))
    ddp = DistributedDataParallel(nn.Linear(256, 256))
    state = register(ddp, with_settings(DIRECT, coded=coded), True)
    for _ in range(4):
        ddp.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ddp(torch.ones(8, 256)).float().sum().backward()
    return state.stats().coded_steps


@pytest.mark.parametrize(("coded", "seconds", "steps"), [("auto", 8e-9, 4), ("auto", 1e-10, 0), ("on", 1e-10, 4)])
def test_nothing_is_coded_on_links_that_are_faster(coded: str, seconds: float, steps: int) -> None:
    assert run_ranks(2, coded_steps, coded, seconds) == [steps, steps]


# --- against plain DDP, with what is really measured


def as_measured(rank: int, coded: bool, all_to_all_seconds_per_byte: float | None = None) -> set[str]:
    """Return what the steps have recorded."""
    if all_to_all_seconds_per_byte is None:
        Measured(collective_costs.measure_collective_costs)
    else:
        Measured(_C.CollectiveCosts(all_to_all_seconds_per_byte=all_to_all_seconds_per_byte))
    torch.manual_seed(0)
    model = test_direct.Heads(3)
    plain, ours = (DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True) for _ in range(2))
    register(ours, with_settings(DIRECT, coded="on" if coded else "off", min_divided_bytes=1024), True)
    torch.manual_seed(rank)
    with profiled(all_threads=True) as profile:
        for i in range(6):
            batch, head = torch.randn(4, 64), (rank + i) % 3 if i % 2 else i % 3
            grads = []
            for ddp in (plain, ours):
                ddp.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=coded):
                    ddp(batch, head).float().square().sum().backward()
                grads.append([None if p.grad is None else p.grad.clone() for p in ddp.parameters()])
            for theirs, mine in zip(*grads, strict=True):
                assert (theirs is None) == (mine is None)
                assert theirs is None or torch.equal(theirs, mine)
    return {event.name() for event in profile.profiler.kineto_results.events()}


@pytest.mark.parametrize("coded", [False, True])
def test_two_ranks_bit_by_bit(coded: bool) -> None:
    run_ranks(2, as_measured, coded)


@pytest.mark.parametrize(("all_to_all_seconds_per_byte", "gather"), [(1.0, False), (100.0, True)])
def test_two_ranks_swap_in_the_collective_that_takes_less(all_to_all_seconds_per_byte: float, gather: bool) -> None:
    for names in run_ranks(2, as_measured, True, all_to_all_seconds_per_byte):
        assert ("ddp_hooks::all_gather" in names, "ddp_hooks::all_to_all" in names) == (gather, not gather)


# --- sums that an all-gather brings, and an all-to-all


def sums(rank: int, users: list[list[int]]) -> set[str]:
    """Sum layers that some ranks use, and compare with a sum in the order of ranks; return which collectives ran."""
    layers = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in users)
    ddp = DistributedDataParallel(Layers(layers), find_unused_parameters=True)
    register(ddp, with_settings(DIRECT, min_owner_saving=0, calibrate=False), True)
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


# --- ranks that die

TOLD = "as it should be"


def dies_while_measured(rank: int, at: int) -> None:
    """Rank 1 dies in its round number `at`."""
    really_measure, rounds = collective_costs._round, []

    def round_or_die(*arguments: Any) -> Any:
        rounds.append(arguments)
        if rank == 1 and len(rounds) > at:
            os._exit(3)
        return really_measure(*arguments)

    collective_costs._round = round_or_die
    Measured(collective_costs.measure_collective_costs)
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    started = time.monotonic()
    with pytest.raises(
        ddp_hooks.errors.RanksAbsentError, match=r"register: .* of waiting for rank 1, which did not call"
    ):
        ddp_hooks.register(ddp, calibrate=True)
    assert time.monotonic() - started < 20
    raise RuntimeError(TOLD)


@pytest.mark.parametrize("at", [3, *thorough(0)])
def test_a_rank_that_dies_while_it_measures_is_named(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    expect_a_death(monkeypatch, 3, dies_while_measured, at)


def expect_a_death(monkeypatch: pytest.MonkeyPatch, ranks: int, function: Callable[..., Any], *args: Any) -> None:
    monkeypatch.setattr(spawn, "GRACE_SECONDS", 30.0)  # how long the others may live on
    with pytest.raises(RankFailure) as caught:
        run_ranks(ranks, function, *args, collective_timeout=5.0)
    assert "died with exit code 3" in str(caught.value)
    assert str(caught.value).count(f"RuntimeError: {TOLD}") == ranks - 1


def dies_in_a_step(rank: int, phase: str, users: list[list[int]]) -> None:
    layers = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in users)
    ddp = DistributedDataParallel(Layers(layers), find_unused_parameters=True)
    state = register(ddp, with_settings(DIRECT, min_owner_saving=0, calibrate=False), True)
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
def test_a_rank_that_dies_in_a_phase(monkeypatch: pytest.MonkeyPatch, phase: str, users: list[list[int]]) -> None:
    expect_a_death(monkeypatch, 3, dies_in_a_step, phase, users)
