"""Registering for FSDP2: what one rank cannot do every rank hears of at once, by name; what is held is let go of."""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from test_fsdp import ON, Block, Case, blocks, local
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import fsdp
from ddp_hooks.errors import RefusedError
from ddp_hooks.fsdp import exchange, param_groups
from ddp_hooks.serving.engine_settings import SHARED_HOSTS

IS_SERVED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
served = pytest.mark.skipif(not IS_SERVED, reason="FSDP2 of this torch is refused")

# Far below the timeout of a collective, after which ranks that wait for each other would end.
AT_ONCE_SECONDS = 10.0


def register_apart(
    rank: int, odd_rank: int, module: nn.Module, odd_one: Any, error: type[Exception], why: str, **settings: Any
) -> None:
    """Register a module, but another one or otherwise on the odd rank; every rank has to raise."""
    start = time.monotonic()
    if rank == odd_rank:
        odd_settings = odd_one if isinstance(odd_one, dict) else {}
        with pytest.raises(error, match=why):
            fsdp.register(module if isinstance(odd_one, dict) else odd_one, **{**settings, **odd_settings})
    else:
        with pytest.raises(RefusedError, match=rf"rank {odd_rank}.*{why}"):
            fsdp.register(module, **settings)
    assert time.monotonic() - start < AT_ONCE_SECONDS
    # Nothing has changed, and the next one works.
    assert all(group.owner is None for group in param_groups.find(module))


@served
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.thorough)])
@on_ranks()
def test_what_one_rank_cannot_do_every_rank_hears_of(rank: int) -> None:
    linear = nn.Linear(8, 8)
    ddp = DistributedDataParallel(copy.deepcopy(linear))
    first = FullyShardedDataParallel(copy.deepcopy(linear), device_id=torch.device("cpu"))
    module = fully_shard(copy.deepcopy(linear))
    for odd_one, error, why in (
        (linear, TypeError, "fully_shard first"),
        (first, TypeError, "FSDP1"),
        (ddp, TypeError, r"use ddp_hooks\.register"),
        (3, TypeError, "received a int"),
        ({"policy": "nothing"}, ValueError, "one of allreduce"),
        ({"policy": 3}, TypeError, "received 3"),
        ({"rebuild_after": 2}, ValueError, "rebuild_after=0"),
        ({"unheard_of": 2}, TypeError, "unheard_of"),
        ({"mesh": 2}, TypeError, "DeviceMesh"),
    ):
        register_apart(rank, 1, module, odd_one, error, why)

    # Within a pass, on one rank only.
    group = module._get_fsdp_state()._fsdp_param_groups[0]
    states = _fsdp_param_group.TrainingState
    group._training_state = states.FORWARD if rank == 1 else states.IDLE
    register_apart(rank, 1, module, {}, RefusedError, "under way")
    group._training_state = states.IDLE

    # A mesh on one rank only.
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("hosts", "local"))
    with pytest.raises(RefusedError, match="the ranks disagree: mesh"):
        fsdp.register(module, mesh=mesh if rank == 0 else None)

    # One that has a state, and one that has none.
    state = fsdp.register(module, ON)
    if rank == 1:
        state.close()
    with pytest.raises(RefusedError, match="module: expected already registered as on rank 0, received not registered"):
        fsdp.register(module, ON)
    # Rank 1 could be served otherwise than before.
    with pytest.raises(RuntimeError, match=r"registered with policy=Policy\(name='on'") as caught:
        fsdp.register(module, "skip_unused")
    assert (type(caught.value) is RefusedError) == (rank == 1)
    state.close()
    state = fsdp.register(module, ON)
    assert fsdp.register(module, ON) is state

    # A part of what is registered now.
    outer = nn.Sequential(module, nn.Linear(8, 8))
    fully_shard(outer)
    with pytest.raises(RefusedError, match="a part of the module is already registered on its own"):
        fsdp.register(outer, ON)
    state.close()
    fsdp.register(outer, ON).close()


@pytest.mark.skipif(IS_SERVED, reason="this torch is served; the probes play others")
@on_ranks(2)
def test_an_older_torch_is_refused(rank: int) -> None:
    with pytest.raises(
        RuntimeError, match=r"FSDP2 of torch .* has other internals .* Use torch 2\.13 or a later version"
    ):
        fsdp.register(fully_shard(nn.Linear(8, 8)))


@served
@on_ranks(4)
def test_other_hosts_hear_of_it(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "local"))
    module = fully_shard(nn.Linear(8, 8), mesh=mesh["local"])
    # The odd rank knows of no mesh, and two of the others share no group with it but the default one.
    register_apart(rank, 3, module, nn.Linear(8, 8), TypeError, "fully_shard first")
    register_apart(rank, 3, module, nn.Linear(8, 8), TypeError, "fully_shard first", mesh=mesh)
    # What differs within a host.
    for over in (None, mesh):
        start = time.monotonic()
        with pytest.raises(RefusedError, match="policy: expected"):
            fsdp.register(module, "skip_unused" if rank == 3 else "auto", mesh=over)
        assert time.monotonic() - start < AT_ONCE_SECONDS
    fsdp.register(module, "skip_unused" if rank >= 2 else "auto")  # hosts that have nothing to do with each other


# --- what is read of torch


def owner_of(instance: Any, name: str) -> Any:
    """Return the class that has an attribute, as torch makes some a property, or the instance."""
    return type(instance) if name in vars(type(instance)) else instance


@contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """Take an attribute away from an object or a class, as if torch had given it another name."""
    value = vars(owner)[name]
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)


@contextmanager
def without_key(names: dict[str, Any], name: str) -> Iterator[None]:
    value = names.pop(name)
    try:
        yield
    finally:
        names[name] = value


@served
@on_ranks(2)
def test_each_attribute_that_is_read_is_asked_for(rank: int) -> None:
    module = fully_shard(nn.Linear(8, 8))
    state = module._get_fsdp_state()
    group = state._fsdp_param_groups[0]
    parameter = group.fsdp_params[0]
    taken: list[tuple[str, Callable[[], Any]]] = [
        ("its modules have no _fsdp_param_groups", lambda: without(state, "_fsdp_param_groups")),
        *((name, lambda name=name: without(owner_of(group, name), name)) for name in param_groups._ATTRIBUTES),
        *(
            (f"{name} of a parameter", lambda name=name: without(owner_of(parameter, name), name))
            for name in param_groups._PARAMETER_ATTRIBUTES
        ),
        *(
            (
                f"{name} of a parameter",
                lambda name=name: without_key(_fsdp_param.FSDPParam.__annotations__, name),
            )
            for name in param_groups._DECLARED_ATTRIBUTES
        ),
        *((f"{name} of a mesh", lambda name=name: without(group.mesh_info, name)) for name in param_groups._SHARDING),
    ]
    for name, takes in taken:
        with (
            takes(),
            pytest.raises((RefusedError, RuntimeError), match=rf"has other internals .*{name}.*Use torch 2\.13 or"),
        ):
            fsdp.register(module)

    class Renamed(param_groups.ReduceScatter):  # type: ignore[misc, name-defined]
        def __call__(self, output: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            pass

    known, param_groups.ReduceScatter = param_groups.ReduceScatter, Renamed  # type: ignore[misc]
    with pytest.raises(RefusedError, match="has no output_tensor of a reduce-scatter"):
        fsdp.register(module)
    param_groups.ReduceScatter = known  # type: ignore[misc]
    fsdp.register(module)
    # What is declared is there after a forward pass.
    module(torch.ones(2, 8)).sum().backward()
    assert all(hasattr(parameter, name) for name in param_groups._DECLARED_ATTRIBUTES)


# --- what is held


@served
@on_ranks(2)
def test_memory_goes_with_the_state(rank: int) -> None:
    gc.collect()
    gc.disable()
    model = Case(blocks).make()
    state = fsdp.register(model, ON)
    model(torch.arange(12).view(4, 3)).sum().backward()
    model.zero_grad()
    held = [weakref.ref(each) for each in (state, *state._served, *(served.reduce_scatter for served in state._served))]
    messages = [weakref.ref(each) for each in state._staging._buffers.values()]
    assert messages
    # The module holds the state, also where nobody else does.
    del state
    assert all(each() is not None for each in held)
    held[0]().close()  # type: ignore[union-attr]
    assert all(each() is None for each in held)
    # A thread of gloo's may still be busy with a message.
    deadline = time.monotonic() + 5
    while any(each() is not None for each in messages) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(each() is None for each in messages)

    # A closed state holds no module; nor does an open one hold more than plain FSDP2, which has cycles of its own.
    state = fsdp.register(model, ON)
    model(torch.arange(12).view(4, 3)).sum().backward()
    shard = weakref.ref(local(next(model.parameters())))
    del model
    gc.collect()
    assert shard() is None
    assert state.stats().steps == 1
    assert len(state.usage()) > 0
    state.close()
    before = weakref.ref(state)
    del state
    assert before() is None
    gc.enable()


def test_layouts_are_bounded() -> None:
    made = []
    recent: exchange.Recent[int, str] = exchange.Recent()
    for key in [*range(100), 99, 80]:
        assert recent.get(key, lambda key=key: made.append(key) or str(key)) == str(key)  # type: ignore[misc]
    assert len(recent) == 32
    assert made == [*range(100)]  # what was asked for lately is still there
    recent.get(0, lambda: "0")
    assert recent.get(80, lambda: "anew") == "80"
    assert recent.get(68, lambda: "anew") == "anew"


@served
@on_ranks(2)
def test_layouts_of_changing_participants(rank: int) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
            for i, parameter in enumerate(self.parameters()):
                if chosen >> i & 1:
                    x = x + parameter.sum()
            return x

    model = fully_shard(Choosing())
    state = fsdp.register(model, ON)
    for chosen in range(1, 101):
        model(torch.ones(2, 24), chosen).sum().backward()
    assert len(state._served[0].reduce_scatter._layouts) == 32


@served
@on_ranks(2)
def test_why_gradients_are_not_coded(rank: int) -> None:
    def why(**settings: Any) -> str:
        state = fsdp.register(fully_shard(nn.Linear(8, 8)), **settings)
        assert state.host_stats().why_uncoded == ""  # there are no hosts to average over
        return state.stats().why_uncoded

    assert why() == ""
    os.environ["DDP_HOOKS_HOST"] = "one for both"
    assert why() == SHARED_HOSTS
    assert why(coded="on") == why(policy="skip_zeros") == ""
