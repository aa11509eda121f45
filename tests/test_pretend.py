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
import test_equivalence as on_cpu
import test_narrow
import torch
from fuzzer.campaign import run_many
from fuzzer.generate import generate
from pairwise import in_turn
from spawn import run_ranks
from test_equivalence import EAGER_AUTO, PACK_ALL, SPLIT_ALL
from test_fuzz import assert_same
from training import Scenario, compare

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


@pytest.mark.parametrize("programs", [15, pytest.param(60, marks=pytest.mark.thorough)])
def test_random_programs(programs: int) -> None:
    """What each program does, and in which order the device runs it, a seed draws: tests/fuzz.py --device pretend."""
    run_many((generate(seed, 2, "pretend") for seed in range(programs)), on_failure=assert_same)
