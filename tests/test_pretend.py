"""The hook on a pretended device: everything that only asynchrony shows, without a GPU.

See tests/pretend/queues.h. The scenarios are those of the CPU; a seed decides what runs when.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import test_cuda_hook
import test_direct
import test_equivalence as on_cpu
import test_freezing
import test_narrow
import test_units
import torch
from fuzzer.campaign import run_many
from fuzzer.generate import generate
from pairwise import in_turn
from spawn import run_ranks
from test_equivalence import EAGER_AUTO, PACK_ALL, SPLIT_ALL
from test_fuzz import assert_same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, compare, register

import ddp_hooks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ddp_hooks_testing._pretend") is None,
    reason="the pretended device is built in a checkout with torch 2.13, without CUDA and sanitizers",
)

BACKEND = "cpu:gloo,pretend:pretend"


def environment(rank: int) -> dict[str, str]:
    return {"DDP_HOOKS_IMPORT_FIRST": "pretend"}


def _on_device(rank: int, seed: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    from ddp_hooks_testing import _pretend

    _pretend.seed(1000 * (seed + int(os.environ.get("DDP_HOOKS_PRETEND_SEED", "0"))) + rank, 0.3)
    result = function(rank, *args)
    _pretend.synchronize()  # throws what went wrong on the device
    return result


def run_pretended(ranks: int, seed: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    # What runs late takes long.
    options = {"timeout": 240.0, **options}
    return run_ranks(ranks, _on_device, seed, function, args, backend=BACKEND, environment=environment, **options)


def on_device(scenario: Scenario) -> Scenario:
    scenario.device = "pretend"
    return scenario


# That of many parameters takes half a minute each.
FEW = [scenario for scenario in test_cuda_hook.FEW if scenario is not on_cpu.ManyTinyParameters]


WAYS = {
    "graph-native": ("skip_unused", True),
    "values-native": ("skip_zeros", True),
    "graph-python": ("skip_unused", False),
    "auto-python": (EAGER_AUTO, False),
}
PACKED = [on_cpu.StepBranches, on_cpu.MixedDtypes, on_cpu.SmallBuckets]
UNDER_AUTOCAST = [
    test_narrow.Autocast,
    test_narrow.Float16Autocast,
    test_narrow.Accumulated,
    test_narrow.AutocastBucketViews,
]


@pytest.mark.parametrize(("scenario", "way"), in_turn(FEW, list(WAYS)))
def test_same_as_plain_ddp(scenario: type[Scenario], way: str) -> None:
    run_pretended(2, 1, compare, on_device(scenario()), *WAYS[way])


@pytest.mark.parametrize(("scenario", "policy"), in_turn(PACKED, [PACK_ALL, SPLIT_ALL, "allreduce"]))
def test_every_way_to_pack(scenario: type[Scenario], policy: ddp_hooks.Policy | str) -> None:
    run_pretended(2, 2, compare, on_device(scenario()), policy, True)


NARROW_POLICIES = [test_narrow.NARROW, test_narrow.SMALL_SEGMENTS, test_narrow.ADAPTIVE]


@pytest.mark.parametrize(("scenario", "policy"), in_turn(UNDER_AUTOCAST, NARROW_POLICIES))
def test_narrow_under_autocast(scenario: type[Scenario], policy: ddp_hooks.Policy) -> None:
    run_pretended(2, 3, compare, on_device(scenario()), policy, True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_odd_numbers(ranks: int) -> None:
    run_pretended(ranks, 4, test_narrow.odd, 0, torch.float32, test_narrow.SMALL_SEGMENTS, True, "pretend")


UNITS = [
    test_units.Rows,
    test_units.ManyBuckets,
    test_units.RankBuckets,
    test_units.OnOneRank,
    test_units.Experts,
    test_units.Views,
    test_units.NoSync,
]


@pytest.mark.parametrize(
    ("scenario", "policy"), in_turn(UNITS, [test_units.EVERY_ROW, test_units.ADAPTIVE, test_units.WITH_VALUES])
)
def test_units_of_rows(scenario: type[Scenario], policy: ddp_hooks.Policy) -> None:
    run_pretended(2, 5, compare, on_device(scenario()), policy, True)


DIRECT = [test_direct.RandomRanks, test_direct.Half, test_direct.KeptGradients, test_direct.ManyBuckets]


@pytest.mark.parametrize("scenario", DIRECT)
def test_every_transport(scenario: type[Scenario]) -> None:
    run_pretended(3, 6, compare, on_device(scenario()), test_direct.DIRECT, True)


def made_there(rank: int, function: Callable[..., None], *args: Any) -> None:
    with torch.device("pretend"):
        function(rank, *args)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (test_freezing.random_freezing, (False, False, "adamw", "skip_unused", True, 15)),
        (test_freezing.random_freezing, (True, True, "sgd", "skip_zeros", False, 15)),
        (test_freezing.unfrozen_under_any_policy, ("auto",)),
        (test_freezing.unfrozen_after_rebuild, (True, False)),
        (test_freezing.declared_unused, (False, True, False)),
        (test_freezing.late_in_every_dtype, (True, torch.bfloat16)),
        (test_freezing.frozen_on_one_rank, (False,)),
        (test_freezing.static_graph, ()),
        (test_direct.bytes_by_transport, (2,)),
        (test_units.masks_that_grow, ()),
        (test_units.dropped_gradients, ()),
    ],
)
def test_as_on_the_cpu(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Freezing, rebuilding, transports and masks: what the CPU's tests do, with tensors made on the device."""
    run_pretended(2, 7, made_there, function, *args)


class Tables(nn.Module):
    """Tables of which few rows are used, in buckets of their own; the last one's gradient is there first."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(64, 64) for _ in range(5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = torch.ones((), device=rows.device)
        for table in self.tables:
            x = torch.tanh(x + table(rows))
        return x


def dropped_within_backward(rank: int, policy: ddp_hooks.Policy) -> None:
    """A gradient that somebody drops while its rows are under way: what takes its memory stays what it is."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Tables().to("pretend"), bucket_cap_mb=0.001)
    register(ddp, policy, True)
    *_, early = ddp.parameters()
    taken = []

    def drop(_: torch.Tensor) -> None:
        early.grad = None
        taken.append(torch.full_like(early, 7.0))

    next(ddp.parameters()).register_post_accumulate_grad_hook(drop)
    for step in range(6):
        ddp(torch.tensor([step + rank], device="pretend")).square().mean().backward()
        ddp.zero_grad()
    assert len(taken) == 6
    assert all(bool((tensor == 7).all()) for tensor in taken)


@pytest.mark.parametrize("policy", [test_units.EVERY_ROW, test_direct.DIRECT_ROWS], ids=lambda policy: policy.name)
def test_dropped_within_backward(policy: ddp_hooks.Policy) -> None:
    for seed in range(5):
        run_pretended(2, seed, dropped_within_backward, policy)


def sampled_on_another_stream(rank: int) -> None:
    """Gradients are sampled on the stream of the accumulators, and dropped on that which they were made on."""
    ddp = DistributedDataParallel(test_units.Table(4000).to("pretend"))
    state = register(ddp, "auto", True)
    own = torch.Stream(device="pretend")
    own.wait_stream(torch.accelerator.current_stream())
    with own:
        for step in range(6):
            state.reset_stats()
            ddp(torch.tensor([[1, 2 + step]], device="pretend")).square().mean().backward()
            ddp.zero_grad()
            assert state.stats().skip_zero_rows_steps == (step > 0)


def test_sampled_on_another_stream() -> None:
    for seed in range(8):
        run_pretended(2, seed, sampled_on_another_stream)


@pytest.mark.parametrize("programs", [15, pytest.param(60, marks=pytest.mark.thorough)])
def test_random_programs(programs: int) -> None:
    """What each program does, and in which order the device runs it, a seed draws: tests/fuzz.py --device pretend."""
    run_many((generate(seed, 2, "pretend") for seed in range(programs)), on_failure=assert_same)
