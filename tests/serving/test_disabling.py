"""DDP_HOOKS_DISABLE=1: scripts run on as they are, and train as plain DDP."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from spawn import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.enabling import Enabling, MadeModule
from ddp_hooks.errors import RefusedError
from ddp_hooks.integrations.hook_of_trainer import HookOfTrainer
from ddp_hooks.statistics import Statistics

VARIABLE = "DDP_HOOKS_DISABLE"


def make_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})


class Half(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers["used"](batch)


def wrap(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Half(), find_unused_parameters=True, **options)


def step(ddp: nn.Module, rank: int) -> list[torch.Tensor | None]:
    ddp.zero_grad()
    ddp(torch.full((2, 8), rank + 1.0)).sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]


def assert_trains_as_plain_ddp(ddp: nn.Module, rank: int) -> None:
    for ours, plain in zip(step(ddp, rank), step(wrap(), rank), strict=True):
        assert (ours is None) == (plain is None)
        assert ours is None or torch.equal(ours, plain)


def everywhere(rank: int) -> dict[str, str]:
    return {VARIABLE: "1"}


def on_rank_1(rank: int) -> dict[str, str]:
    return {VARIABLE: str(rank)}


@on_ranks(2, environment=everywhere)
def test_every_registration_leaves_plain_ddp(rank: int) -> None:
    with pytest.warns(UserWarning, match=f"{VARIABLE} is set, so no hook is registered"):
        ddp_hooks.register(wrap())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so once
        ddp = wrap()
        state = ddp_hooks.register(ddp, "auto")
        assert ddp._comm_hooks == []
        assert_trains_as_plain_ddp(ddp, rank)

        through_python = wrap()
        kept = ddp_hooks.SkipUnusedState(through_python)
        through_python.register_comm_hook(kept, ddp_hooks.skip_unused_hook)
        assert_trains_as_plain_ddp(through_python, rank)

        with ddp_hooks.enable("skip_unused") as enabled:
            made = wrap()
        assert enabled.states[0].serves(made)
        assert_trains_as_plain_ddp(made, rank)

        hook = HookOfTrainer("auto", {}, log=True)
        trained = wrap()
        hook.register(trained)
        hook.register(trained)
        assert_trains_as_plain_ddp(trained, rank)
        assert hook.take_metrics() == {}

        sharded = fully_shard(nn.Linear(8, 8))
        shards = ddp_hooks.fsdp.register(sharded)
        sharded(torch.ones(1, 8)).sum().backward()
        assert (shards.stats(), shards.usage()) == (Statistics(), {})
        shards.close()

        # What a script may do with a state.
        assert ddp_hooks.register(ddp) is state
        assert ddp_hooks.states()[-4:] == [state, kept, *enabled.states, hook.state]
        assert state.serves(ddp)
        assert (state.stats(), state.usage()) == (Statistics(), {})
        assert str(state.stats())
        with state.unused("layers.unused"):
            assert_trains_as_plain_ddp(ddp, rank)
        state.declare_unused("layers.unused")
        state.set_policy("skip_unused", rebuild_after=3)
        assert state.policy.name == "skip_unused"
        state.load_state_dict(state.state_dict())
        state.reset_stats()
        ddp_hooks.freeze(ddp, "layers.unused")
        assert ddp_hooks.rebuild(ddp) is False
        ddp_hooks.unfreeze(ddp, "layers.unused")
        state.close()
        state.close()
        kept.close()
        assert_trains_as_plain_ddp(ddp, rank)
        assert_trains_as_plain_ddp(through_python, rank)

    # Modules that only plain DDP can train are not refused.
    mixed = DistributedDataParallel(nn.Linear(8, 8))
    mixed.mixed_precision = object()
    ddp_hooks.register(mixed)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("hosts", "ranks"))
    over_hosts = fully_shard(nn.Linear(8, 8), mesh=mesh["ranks"])
    with pytest.raises(RefusedError, match=f"{VARIABLE} is set, and without ddp_hooks nothing would average over"):
        ddp_hooks.fsdp.register(over_hosts, mesh=mesh)
    reported: list[MadeModule] = []
    with Enabling(ddp_hooks.policies.PRESETS["auto"], reported.append):
        wrap()
    assert (reported[0].state, reported[0].problem) == (None, f"the environment variable {VARIABLE} is set")
    waits = DistributedDataParallel(Half())
    with pytest.raises(RuntimeError, match=f"{VARIABLE} is set, so register"):
        ddp_hooks.freeze(waits, "layers.unused")
    # A typo is one all the same.
    with pytest.raises(ValueError, match="register: expected one of"):
        ddp_hooks.register(wrap(), "skip_unsued")


@on_ranks(2, environment=on_rank_1)
def test_ranks_that_differ_are_refused(rank: int) -> None:
    differs = f"environment variable {VARIABLE} is set on rank 1 but not on rank 0; set it on every rank or on none"
    ddp = wrap()
    for call in (ddp_hooks.register, ddp_hooks.SkipUnusedState):
        with pytest.raises(RefusedError, match=differs):
            call(ddp)
    with pytest.raises(RefusedError, match=differs):
        ddp_hooks.fsdp.register(fully_shard(nn.Linear(8, 8)))
    with pytest.warns(UserWarning, match=differs), ddp_hooks.enable():
        made = wrap()
    for module in (ddp, made):
        assert_trains_as_plain_ddp(module, rank)
    del os.environ[VARIABLE]
    state = ddp_hooks.register(ddp)
    assert_trains_as_plain_ddp(ddp, rank)
    assert state.stats().steps == 1
