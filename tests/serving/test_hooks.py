"""The state and the registration: statistics, usage, checkpoints, and errors on every rank."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from profiling import profiled
from spawn import RankFailure, on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_gradients, register
from tuned import Tuning

import ddp_hooks
from ddp_hooks.hangs.activity import activity
from ddp_hooks.serving import control_groups
from ddp_hooks.serving import modules as ddp_modules
from ddp_hooks.serving.engine_settings import engine_settings
from ddp_hooks.serving.topology import Topology

# Probes soon and often, so that a few steps see skip_zeros="adaptive" at work.
EAGER_AUTO = ddp_hooks.Policy(
    "eager_auto",
    skip_zeros="adaptive",
    tuning=Tuning(first_pause_steps=1, longest_pause_steps=2, hold_steps=1),
)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(torch.tanh(self.branches[branch](torch.tanh(self.trunk(x)))))


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Branches(), **{"find_unused_parameters": True, **options})


def run_step(ddp: DistributedDataParallel, branch: int) -> None:
    ddp.zero_grad()
    ddp(torch.ones(2, 8), branch).sum().backward()


def error_of(function: Callable[[], Any], kind: type[BaseException] = RuntimeError) -> str:
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


# --- statistics and usage


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_statistics_and_usage(rank: int, native: bool) -> None:
    ddp = wrapped()
    state = register(ddp, "skip_unused", native)
    assert state.usage() == {}
    assert state.stats() == ddp_hooks.statistics.Statistics()
    run_step(ddp, rank)
    run_step(ddp, rank)
    used = bytes_of(ddp.module) - bytes_of(ddp.module.branches[2])
    stats = state.stats()
    assert (stats.steps, stats.exchanges, stats.skip_zeros_steps) == (2, 2, 0)
    assert stats.payload_bytes == 2 * used
    assert stats.dense_bytes == 2 * bytes_of(ddp.module)
    assert stats.plan_cache_hits + stats.plan_cache_misses == 2
    assert stats.mask_bytes == 2 * (6 + 1) * 8
    assert stats.hook_seconds > 0
    ddp.module.branches[2].requires_grad_(False)
    usage = state.usage()
    assert list(usage) == [name for name, _ in ddp.module.named_parameters()]
    expected = ddp_hooks.statistics.ParameterUsage("branches.1.weight", 256, rank == 1, True, False, ranks=(1,))
    assert usage["branches.1.weight"] == expected
    unused = ddp_hooks.statistics.ParameterUsage("branches.2.bias", 16, False, False, True, ranks=())
    assert usage["branches.2.bias"] == unused
    assert "saved" in str(stats)
    state.reset_stats()
    assert state.stats() == ddp_hooks.statistics.Statistics()


@on_ranks(2)
def test_values_show_in_usage(rank: int) -> None:
    ddp = wrapped()
    state = ddp_hooks.register(ddp, "skip_zeros")
    output = ddp(torch.ones(2, 8), 0)
    (output.sum() + 0 * ddp.module.branches[0].weight.sum()).backward()
    for parameter in ddp.module.head.parameters():
        parameter.grad = None
    ddp.module.head.weight.register_hook(lambda gradient: gradient * (rank == 0))
    run_step(ddp, 0)
    usage = state.usage()["head.weight"]
    assert (usage.used_here, usage.used_anywhere) == (rank == 0, True)


@on_ranks(2)
def test_collectives_are_counted(rank: int) -> None:
    """The statistics against an independent witness: the profiler's record of every gloo collective."""
    ddp = wrapped()
    state = ddp_hooks.register(ddp, "skip_unused")
    run_step(ddp, 0)
    state.reset_stats()
    with profiled(record_shapes=True) as profile:
        run_step(ddp, 0)
    stats = state.stats()

    def elements(name: str) -> list[int]:
        shapes = [event.input_shapes for event in profile.events() if event.name == name]
        return sorted(torch.Size(dims).numel() for shape in shapes for dims in shape if dims)

    used = (bytes_of(ddp.module) - 2 * bytes_of(ddp.module.branches[1])) // 4
    # One message of gradients, and the Reducer's own map of used parameters, which DDP reduces with or without a hook.
    assert elements("gloo:all_reduce") == sorted([used, 10])
    # One exchange of masks: six header words and one of bits.
    assert elements("gloo:all_gather") == [7]
    assert stats.mask_bytes == 7 * 8
    assert (stats.messages, stats.exchanges) == (1, 1)
    assert stats.payload_bytes == used * 4


# --- the mask exchange in a large world


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (1, [1]),
        (2, [2]),
        (4, [4]),
        (6, [3, 2]),
        (17, [17]),
        (24, [4, 3, 2]),
        (34, [2, 17]),
        (64, [4, 4, 4]),
        (1000, [4, 2, 5, 5, 5]),
        (4096, [4, 4, 4, 4, 4, 4]),
    ],
)
def test_grid(ranks: int, axes: list[int]) -> None:
    assert control_groups.grid(ranks, 4) == axes


@on_ranks(4)
def test_exchange_on_a_grid(rank: int) -> None:
    """Four ranks as two times two: what one rank uses reaches those on neither of its axes."""
    control_groups.LARGEST_AXIS = 2
    ddp = wrapped()
    state = ddp_hooks.register(ddp, "skip_zeros")
    plain = wrapped()
    for step in range(6):
        branch = step % 3 if rank == step % 4 else 0
        for model in (ddp, plain):
            run_step(model, branch)
        assert_same_gradients(ddp, plain, exact=False)
        assert state.usage()[f"branches.{step % 3}.weight"].used_anywhere
    # In each step the graph's mask and the one bucket's, along two axes; along the second a rank hands on the masks of
    # two, because it is asked who. Words: six of a header and one of bits; of a compressed mask, two more.
    assert (state.stats().exchanges, state.stats().mask_bytes) == (6 * 2, 6 * (7 + 9) * (1 + 2) * 8)
    if rank == 3:
        state._service.engine.configure(
            engine_settings(ddp_hooks.Policy("skip_zeros"), {"drift": "on purpose"}, Topology(((0,),))), None
        )
    assert "rank 3: exchange 12" in error_of(lambda: run_step(ddp, 0))


# --- many steps


@pytest.mark.parametrize(
    ("world_size", "native"),
    [(2, False), (3, True), *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((2, True), (3, False)))],
)
@on_ranks()
def test_random_steps(rank: int, native: bool) -> None:
    """50 random steps: branches by rank and step, accumulation, freezing; weights equal to plain DDP's."""

    def train(policy: str | None) -> tuple[list[torch.Tensor], ddp_hooks.statistics.Statistics | None]:
        ddp = wrapped(bucket_cap_mb=0.001)
        state = None
        if policy is not None:
            state = register(ddp, policy, native)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        shared = torch.Generator().manual_seed(7)
        own = torch.Generator().manual_seed(rank)

        def draw(n: int, generator: torch.Generator) -> int:
            return int(torch.randint(n, (), generator=generator))

        for _ in range(50):
            for parameter in ddp.module.trunk.parameters():
                parameter.requires_grad_(draw(3, shared) > 0)
            for parameter in ddp.module.branches[0].parameters():
                parameter.requires_grad_(draw(2, own) > 0)
            for _ in range(draw(3, shared)):
                with ddp.no_sync():
                    ddp(torch.randn(2, 8, generator=own), draw(3, own)).square().sum().backward()
            ddp(torch.randn(2, 8, generator=own), draw(3, own)).square().sum().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=draw(2, shared) == 0)
        return [parameter.detach() for parameter in ddp.parameters()], state.stats() if state else None

    plain, _ = train(None)
    for policy in ("skip_unused", "skip_zeros", "auto", "allreduce"):
        ours, stats = train(policy)
        assert stats is not None
        assert stats.steps == 50
        for a, b in zip(ours, plain, strict=True):
            if dist.get_world_size() == 2:
                assert torch.equal(a, b), f"{policy}: weights differ by up to {(a - b).abs().max()}"
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [weight.numpy().tobytes() for weight in ours])
        assert all(other == gathered[0] for other in gathered)


@on_ranks(2)
def test_auto_follows_the_model(rank: int) -> None:
    """The adaptive detector goes on when gradients become zero, and off again."""
    policy = ddp_hooks.Policy(
        "test", skip_zeros="adaptive", tuning=Tuning(first_pause_steps=2, longest_pause_steps=4, hold_steps=3)
    )
    ddp = wrapped(find_unused_parameters=False)
    state = ddp_hooks.register(ddp, policy)

    def steps(count: int, zeros: bool) -> int:
        before = state.stats().skip_zeros_steps
        for _ in range(count):
            ddp.zero_grad()
            output = ddp(torch.ones(2, 8), 0)
            idle = sum(p.sum() for branch in ddp.module.branches[1:] for p in branch.parameters())
            (output.sum() + (0 if zeros else 1) * idle).backward()
        return state.stats().skip_zeros_steps - before

    assert 2 <= steps(20, zeros=False) <= 8
    assert steps(20, zeros=True) >= 15
    assert steps(20, zeros=False) <= 10


# --- a state that no module calls


def told(function: Callable[[], Any]) -> int:
    """Return how often somebody was told that the hook is not registered."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    mine = [each for each in caught if "without a communication hook" in str(each.message)]
    for each in mine:
        assert each.category is UserWarning
        assert "ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)" in str(each.message)
        assert "ddp_hooks.register(ddp)" in str(each.message)
        assert each.filename == __file__
    return len(mine)


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5}], ids=str
)
@on_ranks(2)
def test_never_registered(rank: int, options: dict[str, Any], held: bool) -> None:
    """It is said once, at the end of the first pass that is reduced."""
    ddp = wrapped(**options)
    state = ddp_hooks.SkipUnusedState(ddp)
    if not held:
        del state
    if not ddp.static_graph:  # whose first pass torch wants to be reduced
        with ddp.no_sync():
            assert told(lambda: run_step(ddp, 0)) == 0
    assert [told(lambda: run_step(ddp, 0)) for _ in range(4)] == [1, 0, 0, 0]
    assert told(lambda: run_step(copy.deepcopy(ddp), 0)) == 0


def raise_on_purpose(gradient: torch.Tensor) -> torch.Tensor:
    raise ValueError("on purpose")


def reaches_some(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    loss.backward(inputs=list(ddp.module[2].parameters()))


def reaches_all(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    loss.backward(inputs=list(ddp.parameters()))


def asks_for_gradients(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, list(ddp.parameters()))


def fails_at_the_outputs(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    loss.register_hook(raise_on_purpose)
    error_of(loss.backward, ValueError)


def fails_half_way(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    handle = ddp.module[0].weight.register_hook(raise_on_purpose)
    error_of(loss.backward, ValueError)
    handle.remove()


def fails_with_the_last_gradient(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    handle = ddp.module[0].weight.register_post_accumulate_grad_hook(raise_on_purpose)
    error_of(loss.backward, ValueError)
    handle.remove()


def is_another_modules(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    plain = DistributedDataParallel(nn.Linear(2, 2))
    plain(torch.ones(1, 2)).sum().backward()


def is_closed(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    ddp_hooks.states()[-1].close()
    loss.backward()


def registers_before_backward(ddp: DistributedDataParallel, loss: torch.Tensor) -> None:
    ddp.register_comm_hook(ddp_hooks.states()[-1], ddp_hooks.skip_unused_hook)
    loss.backward()


UNTOLD = [
    *(reaches_some, reaches_all, asks_for_gradients, fails_at_the_outputs, fails_half_way),
    *(fails_with_the_last_gradient, is_another_modules, is_closed, registers_before_backward),
]


@on_ranks(2)
def test_passes_without_a_word(rank: int) -> None:
    for unusual in UNTOLD:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
        state = ddp_hooks.SkipUnusedState(ddp)
        assert told(lambda ddp=ddp, unusual=unusual: unusual(ddp, ddp(torch.ones(1, 4)).sum())) == 0, unusual
        del state, ddp
    # Nobody has asked for this one to be reduced.
    ddp = wrapped()
    state = ddp_hooks.SkipUnusedState(ddp)
    assert told(lambda: ddp.module(torch.ones(2, 8), 0).sum().backward()) == 0
    assert told(lambda: run_step(ddp, 0)) == 1
    assert state.stats().steps == 0


@on_ranks(2)
def test_reduced_in_parts(rank: int) -> None:
    """A pass that is reduced in two goes, and one with a backward pass within it."""
    ddp = DistributedDataParallel(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    ddp.module.forward = lambda x: [layer(x).sum() for layer in ddp.module]
    state = ddp_hooks.SkipUnusedState(ddp)
    first, second = ddp(torch.ones(1, 4))
    assert told(first.backward) == 0
    assert told(second.backward) == 1
    assert state.stats().steps == 0

    inner, outer = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(inner, outer)
    model.forward = lambda x: outer(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=True))
    ddp = DistributedDataParallel(model)
    state = ddp_hooks.SkipUnusedState(ddp)
    assert sum(told(lambda: ddp(torch.ones(1, 4, requires_grad=True)).sum().backward()) for _ in range(3)) == 1
    assert state.stats().steps == 0


@on_ranks(2)
def test_registered_one_way_or_another(rank: int) -> None:
    """Whoever has registered anything is told nothing, even where that does not call this package's hook at once."""
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": False, "static_graph": True}):
        for native in (False, True):
            ddp = wrapped(**options)
            state = register(ddp, "auto", native)
            assert [told(lambda ddp=ddp: run_step(ddp, 0)) for _ in range(3)] == [0] * 3
            assert state.stats().steps == 3

    ddp = wrapped()
    state = ddp_hooks.SkipUnusedState(ddp)
    passes: list[int] = []

    def later(own: None, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects
        if len(passes) < 2:
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
        return ddp_hooks.skip_unused_hook(state, bucket)

    ddp.register_comm_hook(None, later)
    for _ in range(4):
        assert told(lambda: run_step(ddp, 0)) == 0
        passes.append(1)
    assert state.stats().steps == 2

    for native in (False, True):
        ddp = wrapped()
        state = register(ddp, "auto", native)

        def train(ddp: DistributedDataParallel = ddp) -> None:
            with ddp.join():
                for _ in range(1 + 2 * rank):
                    run_step(ddp, 0)

        assert told(train) == 0
        assert state.stats().steps == 3


# --- checkpoints and copies


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_detached_state(rank: int, native: bool) -> None:
    """A state that was copied serves no module, and cannot be made to: it says how to go on whatever it is asked."""
    ddp = wrapped()
    state = register(ddp, "skip_unused", native)
    run_step(ddp, 0)
    before = state.stats()
    twin = copy.deepcopy(ddp)
    for copied in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), twin._comm_hooks[0][1]):
        assert copied.policy == state.policy
        assert copied.stats() == before
        assert not hasattr(copied, "bind")
        assert ("attached" in repr(state), "detached" in repr(copied)) == (True, True)
        refused = wrapped()
        refused.register_comm_hook(copied, ddp_hooks.skip_unused_hook)
        for call in (
            copied.usage,
            lambda copied=copied: copied.set_policy("auto"),
            lambda ddp=refused: run_step(ddp, 0),
        ):
            message = error_of(call)
            assert "ddp_hooks.register(ddp)" in message
            assert "load_state_dict(" in message
        assert copied.stats() == before

        # What it says.
        resumed = wrapped()
        fresh = ddp_hooks.register(resumed)
        fresh.load_state_dict(copied.state_dict())
        run_step(resumed, 0)
        assert fresh.policy.name == "auto"
        assert fresh.stats().payload_bytes == 2 * before.payload_bytes
        assert fresh.stats().steps == 2


@on_ranks(2)
def test_state_dict(rank: int) -> None:
    ddp = wrapped()
    state = ddp_hooks.register(ddp, "skip_unused")
    run_step(ddp, 0)
    file = io.BytesIO()
    torch.save({"model": ddp.state_dict(), "hook": state.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["hook"]

    # The program's policy stays in force, and a rank may load on its own.
    resumed = wrapped()
    fresh = ddp_hooks.register(resumed, "skip_zeros")
    if rank == 0:
        fresh.load_state_dict(loaded)
        assert fresh.stats() == state.stats()
    assert fresh.policy == ddp_hooks.policies.PRESETS["skip_zeros"]
    run_step(resumed, 0)
    assert fresh.stats().skip_zeros_steps == 1
    assert fresh.stats().steps == (2 if rank == 0 else 1)
    newer = {**loaded, "policy": {"name": "of a later version"}}
    fresh.load_state_dict(newer)
    assert fresh.stats() == state.stats()
    assert "version" in error_of(lambda: fresh.load_state_dict({}), ValueError)


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_copied_module(rank: int, native: bool) -> None:
    """DDP drops the hook when it is copied; the copy must train as plain DDP and take a state of its own."""
    ddp = wrapped()
    held = register(ddp, "skip_unused", native)
    run_step(ddp, 0)
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        run_step(twin, 0)
        state = register(twin, "skip_unused", native)
        run_step(twin, 0)
        assert state.stats().steps == 1
        assert torch.equal(twin.module.head.weight.grad, ddp.module.head.weight.grad)
    run_step(ddp, 0)
    assert held.stats().steps == 2


@on_ranks(2)
def test_changed_policy(rank: int) -> None:
    ddp = wrapped()
    state = ddp_hooks.register(ddp, "allreduce")
    run_step(ddp, 0)
    assert state.stats().payload_bytes == bytes_of(ddp.module)
    state.set_policy("skip_unused")
    run_step(ddp, 0)
    assert state.stats().payload_bytes == 2 * bytes_of(ddp.module) - 2 * bytes_of(ddp.module.branches[1])
    message = error_of(lambda: state.set_policy("skip_zeros" if rank == 0 else "auto"))
    assert "the ranks disagree: policy: expected Policy(name='skip_zeros'" in message
    assert "received Policy(name='auto'" in message
    if rank == 0:
        assert "received 'fast'" in error_of(lambda: state.set_policy("fast"), ValueError)
    else:
        assert "rank 0: expected one of allreduce" in error_of(lambda: state.set_policy("auto"))
    assert state.policy.name == "skip_unused"
    run_step(ddp, 0)


# --- errors at registration


@on_ranks(2)
def test_ranks_disagree(rank: int) -> None:
    ddp = wrapped()
    message = error_of(lambda: ddp_hooks.SkipUnusedState(ddp, "auto" if rank == 0 else "skip_zeros"))
    assert "policy: expected Policy(name='auto'" in message
    assert "received Policy(name='skip_zeros'" in message
    assert "on rank 1" in message

    model = Branches()
    model.branches[0].requires_grad_(rank == 0)
    other = DistributedDataParallel(model, find_unused_parameters=True, init_sync=False)
    message = error_of(lambda: ddp_hooks.register(other))
    assert "parameters: expected 10 with" in message
    assert "received 8 with" in message
    # One rank's bad module is every rank's error, so that none is left waiting.
    bad = wrapped(skip_all_reduce_unused_params=rank == 1)
    message = error_of(lambda: ddp_hooks.register(bad))
    assert "rank 1: DDP(skip_all_reduce_unused_params=True)" in message
    assert "rank 0:" not in message


class OnDevice(torch.Tensor):
    """A parameter that says it lies elsewhere."""

    device = torch.device("cpu")


@on_ranks(2)
def test_ranks_that_place_a_model_differently_are_told_so(rank: int) -> None:
    ddp = wrapped()

    def on_devices(numbers: list[int]) -> Any:
        def parameters_of(ddp: DistributedDataParallel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            reduced, unmanaged = ddp_modules.parameters_of(ddp)
            for i, parameter in enumerate(reduced):
                reduced[i] = parameter.detach().as_subclass(OnDevice)
                reduced[i].device = torch.device("cuda", numbers[i % len(numbers)])
            return reduced, unmanaged

        return parameters_of

    with pytest.MonkeyPatch.context() as patch:
        # As many on each, but not the same ones.
        patch.setattr(
            ddp_hooks.serving.registration, "parameters_of", on_devices([[0, 1], [1, 1, 0, 0, 1, 0, 1, 0, 1, 0]][rank])
        )
        message = error_of(lambda: ddp_hooks.register(ddp))
        assert "the ranks disagree: devices: expected 2, with 5 and 5 parameters" in message
        assert "received 2, with 5 and 5 parameters" in message
        patch.setattr(ddp_hooks.serving.registration, "parameters_of", on_devices([[0, 1], [0]][rank]))
        message = error_of(lambda: ddp_hooks.register(ddp))
        assert "devices: expected 2, with 5 and 5 parameters" in message
        assert message.split("received ")[1].startswith("one on rank 1.")
    ddp_hooks.register(ddp)


def test_the_description_of_devices_leaves_out_their_numbers() -> None:
    def describe(*devices: str) -> str:
        return ddp_modules.describe_devices([SimpleNamespace(device=torch.device(name)) for name in devices])  # type: ignore[misc]

    assert describe() == describe("cpu", "cpu") == describe("cuda:3") == "one"
    assert describe("cuda:0", "cuda:1", "cuda:0") == describe("cuda:7", "cuda:2", "cuda:7")
    described = {describe(*(f"cuda:{i}" for i in numbers)) for numbers in ("000", "001", "010", "011", "012")}
    assert len(described) == 5
    assert describe("cuda:0", "cuda:1", "cuda:0").startswith("2, with 2 and 1 parameters (")


@on_ranks(2)
def test_refused_modules(rank: int) -> None:
    assert "expected a DistributedDataParallel" in error_of(lambda: ddp_hooks.register(Branches()), TypeError)
    ddp = wrapped()
    assert "expected one of allreduce" in error_of(lambda: ddp_hooks.register(ddp, "fast"), ValueError)
    assert "expected a ddp_hooks.Policy" in error_of(lambda: ddp_hooks.register(ddp, 3), TypeError)
    ddp_hooks.register(ddp)
    assert "a communication hook is already registered" in error_of(lambda: ddp_hooks.SkipUnusedState(ddp))
    run_step(ddp, 0)

    model = Branches()
    model.head.requires_grad_(False)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    delayed = DistributedDataParallel(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=named[0][1])
    assert "delay_all_reduce_named_params" in error_of(lambda: ddp_hooks.register(delayed))


@on_ranks(2)
def test_reduced_twice(rank: int) -> None:
    """A DDP module within the module sends everything by itself, unless its parameters are left to it."""
    twice = DistributedDataParallel(DistributedDataParallel(nn.Linear(4, 4)))
    for door in (ddp_hooks.register, ddp_hooks.SkipUnusedState):
        message = error_of(lambda door=door: door(twice))
        assert "the model in it is also a DistributedDataParallel module" in message
        assert "the full gradients of module.weight, module.bias" in message
        assert "wrap the model only once" in message
    # On one rank alone it is every rank's error.
    part = DistributedDataParallel(nn.Linear(4, 4)) if rank else nn.Linear(4, 4)
    if not rank:
        DistributedDataParallel(part)  # which is a collective call
    model = nn.ModuleDict({"part": part, "rest": nn.Linear(4, 4)})
    message = error_of(lambda: ddp_hooks.register(DistributedDataParallel(model)))
    assert "rank 1: expected a model that was wrapped once, but its submodule 'part' is also" in message
    # What is left to the inner module is well.
    inner = DistributedDataParallel(nn.Linear(4, 4))
    model = nn.Sequential(inner, nn.Linear(4, 4))
    names = [f"0.{name}" for name, _ in inner.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = DistributedDataParallel(model)
    state = ddp_hooks.register(ddp)
    ddp(torch.ones(1, 4)).sum().backward()
    assert state.stats().dense_bytes == 80
    # So is one that is alone, or is not to reduce.
    alone = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4), process_group=own_group(rank)))
    ddp_hooks.register(DistributedDataParallel(alone))
    silent = DistributedDataParallel(nn.Linear(4, 4))
    silent.require_backward_grad_sync = False
    ddp_hooks.register(DistributedDataParallel(nn.Sequential(silent)))


def own_group(rank: int) -> dist.ProcessGroup:
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    return groups[rank]


@on_ranks(2)
def test_replaced_parameters(rank: int) -> None:
    """Each way to put new parameters into a registered model is noticed, once, and nothing else is."""

    def make() -> tuple[DistributedDataParallel, ddp_hooks.SkipUnusedState]:
        model = nn.ModuleDict({"trunk": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
        model.forward = lambda batch: model["head"](model["trunk"](batch))
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        return ddp, ddp_hooks.register(ddp, "skip_unused")

    def said(ddp: DistributedDataParallel, steps: int = 1) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                ddp(torch.ones(1, 4)).sum().backward()
        return [str(each.message) for each in caught if "put into the model" in str(each.message)]

    def put_head(ddp: DistributedDataParallel) -> None:
        ddp.module["head"] = nn.Linear(4, 4)

    def assign(ddp: DistributedDataParallel) -> None:
        state_dict = {name: value.clone() for name, value in ddp.module["head"].state_dict().items()}
        ddp.module["head"].load_state_dict(state_dict, assign=True)

    def set_weight(ddp: DistributedDataParallel) -> None:
        ddp.module["head"].weight = nn.Parameter(torch.zeros(4, 4))

    def add(ddp: DistributedDataParallel) -> None:
        ddp.module["added"] = nn.Linear(4, 4, bias=False)

    both = "head.bias, head.weight were"
    for change, names in (
        (put_head, both),
        (assign, both),
        (set_weight, "head.weight was"),
        (add, "added.weight was"),
    ):
        # At the next forward pass, if it is the first one, and otherwise within 16 steps.
        for before, after in ((0, 1), (3, 16)):
            ddp, state = make()
            assert said(ddp, before) == []
            change(ddp)
            (message,) = said(ddp, after)
            assert f"{names} put into the model after it was registered" in message
            assert "nothing averages the new ones" in message
            assert said(ddp, 20) == []
            state.close()

    # Not what stays, is frozen, is taken out, or was moved.
    ddp, _ = make()
    ddp_hooks.freeze(ddp, "head.bias")
    ddp.module.double().float()
    ddp.module.load_state_dict(ddp.module.state_dict())
    del ddp.module["trunk"].bias
    ddp.module["trunk"].bias = None
    ddp.module["head"].extra = nn.Parameter(torch.zeros(1), requires_grad=False)
    assert said(ddp, 20) == []
    # Nor what stands there for one call only.
    values = {name: value.detach() * 2 for name, value in ddp.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(17):
            torch.func.functional_call(ddp, values, torch.ones(1, 4))
    assert said(ddp, 17) == []


@on_ranks(2)
def test_compiled_autograd(rank: int) -> None:
    """Without the Python reducer plain DDP says what to do, and so does a module with the hook."""
    for with_hook in (False, True):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        if with_hook:
            ddp_hooks.register(ddp)
        loss = ddp(torch.ones(1, 4)).sum()
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            assert 'use torch._dynamo.config.optimize_ddp="python_reducer"' in error_of(loss.backward)


@on_ranks(2)
def test_float8_gradients(rank: int) -> None:
    def make(trained: bool) -> nn.Module:
        weight = torch.zeros(4, 4).to(torch.float8_e4m3fn if rank == 0 or not trained else torch.float32)
        model = nn.Linear(4, 4)
        model.table = nn.Parameter(weight, requires_grad=trained)
        return model

    message = error_of(lambda: ddp_hooks.register(DistributedDataParallel(make(True), init_sync=False)))
    assert "expected trained parameters of torch.float32, torch.float64, torch.float16, torch.bfloat16" in message
    assert "received table of torch.float8_e4m3fn; freeze them before wrapping" in message
    ddp_hooks.register(DistributedDataParallel(make(False), init_sync=False))


def test_before_the_process_group_is_there() -> None:
    message = error_of(lambda: ddp_hooks.register(nn.Linear(2, 2)), TypeError)
    assert "received Linear; call torch.distributed.init_process_group() on every rank first, and then" in message


@on_ranks(2)
def test_one_bad_argument(rank: int) -> None:
    """A mistake on one rank is an error on every rank, and the next try works."""
    ddp = wrapped()
    if rank == 0:
        assert "received 'fast'" in error_of(lambda: ddp_hooks.register(ddp, "fast"), ValueError)
    else:
        message = error_of(lambda: ddp_hooks.register(ddp))
        assert "rank 0: expected one of allreduce" in message
    assert "the ranks disagree" in error_of(lambda: ddp_hooks.register(ddp, "auto" if rank else "skip_unused"))
    state = ddp_hooks.register(ddp, "skip_unused")
    run_step(ddp, 0)
    assert state.stats().steps == 1


@on_ranks(2)
def test_registered_in_another_order(rank: int) -> None:
    """Modules of as many parameters and elements, which each rank's own digest tells apart."""
    modules = [DistributedDataParallel(nn.Linear(*sizes, bias=False)) for sizes in ((4, 8), (8, 4))]
    message = error_of(lambda: ddp_hooks.register(modules[rank]))
    assert "parameters: expected 1 with 32 elements (digest" in message
    assert "several modules, pass them in the same order" in message
    for module in modules:
        ddp_hooks.register(module)
        module(torch.ones(1, module.module.in_features)).sum().backward()
    # What DDP never sends may differ.
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(*((4, 2), (2, 4))[rank], bias=False).requires_grad_(False))
    ddp_hooks.register(DistributedDataParallel(model, init_sync=False))


# A group that goes with its last reference may wait for a worker that waits for the GIL (torch's own).
_kept_groups: list[dist.ProcessGroup] = []


@on_ranks(2)
def test_group_that_was_destroyed(rank: int) -> None:
    group = dist.new_group()
    _kept_groups.append(group)
    ddp = wrapped(process_group=group)
    state = ddp_hooks.register(ddp)
    run_step(ddp, 0)
    dist.barrier()
    dist.destroy_process_group(group)
    for call in (
        lambda: state.set_policy("skip_zeros"),
        lambda: ddp_hooks.register(ddp),
        lambda: ddp_hooks.rebuild(ddp),
    ):
        assert "received one that was destroyed; make a new one, and wrap the" in error_of(call, ValueError)
    state.close()
    assert "received one that was destroyed" in error_of(lambda: ddp_hooks.register(ddp), ValueError)


# --- errors in training


@on_ranks(2)
def test_hook_without_state(rank: int) -> None:
    ddp = wrapped()
    ddp.register_comm_hook(None, ddp_hooks.skip_unused_hook)
    message = error_of(lambda: run_step(ddp, 0))
    assert "expected a SkipUnusedState that serves this module, received NoneType" in message
    # The Reducer is not left broken: the same error again, not an internal assert.
    assert "received NoneType" in error_of(lambda: run_step(ddp, 0))


@on_ranks(2)
def test_state_of_another_module(rank: int) -> None:
    first = wrapped()
    second = DistributedDataParallel(nn.Linear(5, 5), find_unused_parameters=True)
    state = ddp_hooks.SkipUnusedState(first)
    first.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    second.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    message = error_of(lambda: second(torch.ones(1, 5)).sum().backward())
    assert "one DistributedDataParallel module; make one for each" in message


@on_ranks(2)
def test_registered_during_backward(rank: int) -> None:
    ddp = wrapped(bucket_cap_mb=0.0001)
    message: list[str] = []

    def register(gradient: torch.Tensor) -> None:
        if not message:
            message.append(error_of(lambda: ddp_hooks.register(ddp)))

    ddp.module.trunk.weight.register_hook(register)
    run_step(ddp, 0)
    assert "make the state before backward() begins" in message[0]


@on_ranks(2)
def test_drifting_ranks(rank: int) -> None:
    """Rank 1 tampers with its policy behind the others' backs; every rank is told so."""
    ddp = wrapped()
    state = ddp_hooks.register(ddp, "skip_unused")
    run_step(ddp, 0)
    if rank == 1:
        other = ddp_hooks.Policy("other")
        description = {"policy": repr(other)}
        state._service.engine.configure(engine_settings(other, description, Topology(((0,), (1,)))), None)
    message = error_of(lambda: run_step(ddp, 0))
    assert "the ranks drifted apart" in message
    assert "rank 0: exchange 1" in message
    assert "rank 1: exchange 1" in message
    assert "drifted apart" in error_of(lambda: run_step(ddp, 0))


class FailsOnce(torch.autograd.Function):
    """Between the module's last parameter and its output; raises in backward when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("out of luck")
        return gradient, None


class Failing(Branches):
    def forward(self, x: torch.Tensor, branch: int, fails: bool = False) -> torch.Tensor:
        return FailsOnce.apply(super().forward(x, branch), fails)


def wrapped_and_failing() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Failing(), find_unused_parameters=True)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("failing_ranks", [(0,), (0, 1)])
@on_ranks(2)
def test_failed_backward(rank: int, failing_ranks: tuple[int, ...], native: bool) -> None:
    """Backward fails before any gradient is ready, is tried again, and no rank is left waiting: as with plain DDP."""
    ddp = wrapped_and_failing()
    register(ddp, "skip_unused", native)
    for step in range(6):
        if step in (2, 4) and rank in failing_ranks:
            with pytest.raises(ArithmeticError):
                ddp(torch.ones(2, 8), 0, True).sum().backward()
        run_step(ddp, 0)
    everywhere = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, ddp.module.head.bias.grad)
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


@on_ranks(2)
def test_failed_backward_then_collective(rank: int) -> None:
    """One rank's failed pass leaves an exchange under way; what uses the control group next waits for it everywhere."""
    ddp = wrapped_and_failing()
    state = ddp_hooks.register(ddp, "skip_unused")

    def fail_on_rank_0() -> None:
        if rank == 0:
            with pytest.raises(ArithmeticError):
                ddp(torch.ones(2, 8), 0, True).sum().backward()

    run_step(ddp, 0)
    fail_on_rank_0()
    state.set_policy("skip_zeros")
    run_step(ddp, 1)
    fail_on_rank_0()
    ddp_hooks.freeze(ddp, "trunk")
    assert ddp_hooks.rebuild(ddp)
    run_step(ddp, 0)
    assert state.stats().steps == 3


class WaitsForAll(torch.autograd.Function):
    """An identity whose backward is a collective on a group of its own, as in synchronised batch normalisation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(torch.ones(1), group=ctx.group)
        return gradient, None


def collectives_in_backward(rank: int, policy: str | ddp_hooks.Policy, native: bool) -> None:
    """Branches that one rank takes alone come first in backward; behind them every rank waits for every other."""
    group = dist.new_group()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(8, 16)
            self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.frozen = nn.Linear(2, 2).requires_grad_(False)  # so that there is an exchange with any policy

        def forward(self, x: torch.Tensor, alone: bool) -> torch.Tensor:
            x = WaitsForAll.apply(torch.tanh(self.trunk(x)), group)
            for branch in self.branches if alone else []:
                x = torch.tanh(branch(x))
            return x

    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model(), find_unused_parameters=True, bucket_cap_mb=0.0001)
    state = register(ddp, policy, native)
    for step in range(8):
        ddp.zero_grad()
        ddp(torch.ones(2, 8), rank == step % 2).sum().backward()
    assert state.stats().steps == 8


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(
    "policy",
    ["skip_unused", "skip_zeros", EAGER_AUTO, ddp_hooks.Policy("values alone", skip_unused=False, skip_zeros="on")],
    ids=["graph", "values", "auto", "values_alone"],
)
def test_collectives_in_backward(policy: str | ddp_hooks.Policy, native: bool) -> None:
    run_ranks(2, collectives_in_backward, policy, native)


@pytest.mark.parametrize("policy", ["skip_zeros", EAGER_AUTO], ids=["values", "auto"])
@on_ranks(2)
def test_collectives_behind_a_kept_gradient(rank: int, policy: str | ddp_hooks.Policy) -> None:
    """An adapter counts as used on both ranks: on one for an earlier pass, so that the masks are the same."""
    group = dist.new_group()

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.adapter, self.trunk = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor, adapt: bool) -> torch.Tensor:
            x = self.stem(x)
            return self.trunk(WaitsForAll.apply(self.adapter(x) if adapt else x, group))

    torch.manual_seed(0)
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}
    plain, ddp = (DistributedDataParallel(Adapted(), **options) for _ in range(2))
    ddp.module.load_state_dict(plain.module.state_dict())
    state = register(ddp, policy, True)
    for step in range(3):
        for each in (plain, ddp):
            each.zero_grad()
            with each.no_sync():
                each(torch.ones(2, 8), True).sum().backward()
            each(torch.ones(2, 8), rank == step % 2).sum().backward()
        assert_same_gradients(ddp, plain)
    assert state.stats().steps == 3


@pytest.mark.parametrize("policy", ["skip_unused", "skip_zeros"])
@on_ranks(4)
def test_collectives_in_backward_on_a_grid(rank: int, policy: str | ddp_hooks.Policy) -> None:
    """The later axes of a grid, too, must not need anybody to wait for the exchange."""
    control_groups.LARGEST_AXIS = 2
    try:
        collectives_in_backward(rank, policy, True)
    finally:
        control_groups.LARGEST_AXIS = 4


@on_ranks(2)
def test_watched_by_a_thread(rank: int) -> None:
    """Another thread reads the statistics all the time; neither waits for the other."""
    ddp = wrapped(bucket_cap_mb=0.0001)
    state = ddp_hooks.SkipUnusedState(ddp, "skip_unused")
    ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            state.stats()
            state.usage()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    for _ in range(25):
        run_step(ddp, 0)
    done.set()
    watcher.join()
    assert state.stats().steps == 25


def dying_rank(rank: int) -> None:
    ddp = wrapped()
    ddp_hooks.register(ddp)
    run_step(ddp, 0)
    if rank == 1:
        os._exit(3)
    started = time.monotonic()
    error_of(lambda: [run_step(ddp, 0) for _ in range(100)])
    assert time.monotonic() - started < 20
    raise RuntimeError("rank 0 was told")


def test_dying_rank() -> None:
    """A rank that dies leaves the others with the process group's error, not with a hang."""
    with pytest.raises(RankFailure, match="rank 0 was told") as caught:
        run_ranks(2, dying_rank, collective_timeout=10.0)
    assert "died with exit code 3" in str(caught.value)


def silent_rank(rank: int) -> None:
    ddp = wrapped()
    ddp_hooks.register(ddp)
    run_step(ddp, 0)
    if rank == 1:
        time.sleep(8)
        raise RuntimeError("rank 1 stays away")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
        run_step(ddp, 0)
    assert time.monotonic() - started < 7
    raise RuntimeError("rank 0 was told")


@pytest.mark.thorough
def test_silent_rank() -> None:
    """The control group has the data group's timeout."""
    with pytest.raises(RankFailure, match="rank 0 was told"):
        run_ranks(2, silent_rank, collective_timeout=3.0)


# --- gradients in the engine's hands


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_forward_passes_unwatched(rank: int, views: bool) -> None:
    """What a step left detached is filled in one whose forward pass nobody watched, as in a compiled graph."""
    ours, plain = (wrapped(gradient_as_bucket_view=views) for _ in range(2))
    state = ddp_hooks.register(ours, "skip_unused")
    watch = dict(ours._forward_hooks)
    for step in range(8):
        ours._forward_hooks.clear()
        if step % 2 == 0:
            ours._forward_hooks.update(watch)
        for ddp in (ours, plain):
            if step == 5:
                with ddp.no_sync():
                    ddp(torch.full((2, 8), rank + 1.0), 2).sum().backward()
            if step in (3, 6):  # what is not cleared is averaged again
                ddp(torch.full((2, 8), rank - 2.0), (step + rank) % 3).sum().backward()
            else:
                run_step(ddp, (step + rank) % 3) if step != 5 else ddp(torch.ones(2, 8), 0).sum().backward()
        assert_same_gradients(ours, plain)
    assert state.stats().steps == 8


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_unused_is_not_touched(rank: int, native: bool) -> None:
    """Neither a gradient nor a bucket's slot is written for what no rank uses; through Python both are."""
    ddp = wrapped(find_unused_parameters=False)
    register(ddp, "skip_unused", native)
    ddp_hooks.freeze(ddp, "branches.1", "branches.2")
    run_step(ddp, 0)  # the Reducer rebuilds its buckets once
    run_step(ddp, 0)
    output = ddp(torch.ones(2, 8), 0)
    with profiled(record_shapes=True) as profile:
        output.sum().backward()
    assert all(p.grad is None for p in ddp.module.branches[1].parameters())
    zeroed = [event.input_shapes[0] for event in profile.events() if event.name == "aten::zero_"]
    weight = list(ddp.module.branches[1].weight.shape)
    assert zeroed.count(weight) == (0 if native else 2)


@pytest.mark.parametrize("native", [False, True])
@on_ranks(2)
def test_used_map_is_reduced(rank: int, native: bool) -> None:
    """After backward the Reducer's map says how many ranks used each parameter, as torch's own tests read it."""
    ddp = wrapped()
    register(ddp, "skip_unused", native)
    of_parameter = [name.split(".") for name, _ in ddp.module.named_parameters()]
    for step in range(50):
        branches = [step % 3, step % 2]
        run_step(ddp, branches[rank])
        expected = [branches.count(int(path[1])) if path[0] == "branches" else 2 for path in of_parameter]
        assert ddp.reducer._get_local_used_map().tolist() == expected


class OneOrTwoBranches(Branches):
    def forward(self, x: torch.Tensor, count: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        return self.head(sum(branch(hidden) for branch in self.branches[:count]))


@on_ranks(2)
def test_failed_future(rank: int) -> None:
    """After a pass whose futures failed, the Reducer asks the other ranks again what they used."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(OneOrTwoBranches(), find_unused_parameters=True)
    state = ddp_hooks.SkipUnusedState(ddp, "skip_unused")
    step = 0

    def fail(future):  # type: ignore[no-untyped-def]
        raise RuntimeError("broken on purpose")

    def skip_and_fail_once(state, bucket):  # type: ignore[no-untyped-def]
        future = ddp_hooks.skip_unused_hook(state, bucket)
        return future.then(fail) if step == 1 else future

    ddp.register_comm_hook(state, skip_and_fail_once)
    run_step(ddp, 1)
    step = 1
    assert "broken on purpose" in error_of(lambda: run_step(ddp, 1))
    step = 2
    run_step(ddp, 2 if rank == 0 else 1)
    assert all(p.grad is not None for p in ddp.module.branches[1].parameters())


@on_ranks(2)
def test_hooks_around_ours(rank: int) -> None:
    """A hook that is wrapped around ours finds the gradients in the bucket."""
    ddp = wrapped()
    state = ddp_hooks.SkipUnusedState(ddp, "skip_unused")
    sums = []

    def note_and_skip(state, bucket):  # type: ignore[no-untyped-def]
        sums.append([gradient.sum().item() for gradient in bucket.gradients()])
        return ddp_hooks.skip_unused_hook(state, bucket)

    ddp.register_comm_hook(state, note_and_skip)
    run_step(ddp, 0)
    run_step(ddp, 0)
    plain = wrapped()
    with plain.no_sync():
        run_step(plain, 0)
    expected = [0.0 if p.grad is None else p.grad.sum().item() for p in plain.module.parameters()]
    assert sorted(sums[0]) == sorted(sums[1]) == pytest.approx(sorted(expected))


# --- around the hook


@on_ranks(3)
def test_subgroups(rank: int) -> None:
    """Modules on different subgroups of the world; only the members take part."""
    pair = dist.new_group([0, 1])
    single = dist.new_group([2])
    group = pair if rank < 2 else single
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, process_group=group)
    state = ddp_hooks.register(ddp, "skip_unused")
    for _ in range(rank + 1 if rank == 2 else 3):
        run_step(ddp, min(rank, 1))
    used = bytes_of(ddp.module) - bytes_of(ddp.module.branches[2])
    assert state.stats().payload_bytes == (3 * used if rank < 2 else 0)


@on_ranks(2)
def test_wrapped_by_fp16(rank: int) -> None:
    """torch's own wrappers hand over a buffer of another dtype; half as many bytes travel."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

    ddp = wrapped()
    state = ddp_hooks.SkipUnusedState(ddp, "skip_unused")
    ddp.register_comm_hook(state, fp16_compress_wrapper(ddp_hooks.skip_unused_hook))
    run_step(ddp, rank)
    run_step(ddp, rank)
    used = bytes_of(ddp.module) - bytes_of(ddp.module.branches[2])
    assert state.stats().payload_bytes == 2 * used // 2
    ours = {name: p.grad for name, p in ddp.module.named_parameters()}
    plain = wrapped()
    run_step(plain, rank)
    for name, parameter in plain.module.named_parameters():
        if parameter.grad is None:
            assert ours[name] is None
        else:
            # Where this rank had no gradient, torch's wrapper leaves one of the compressed dtype.
            torch.testing.assert_close(ours[name].float(), parameter.grad, rtol=1e-2, atol=1e-3)


@on_ranks(2)
def test_exchange_starts_early(rank: int) -> None:
    """The exchange is under way before the first bucket, however late that comes."""
    ddp = wrapped()
    state = ddp_hooks.register(ddp, "skip_unused")
    run_step(ddp, 0)
    exchanges: list[int] = []
    ddp.module.head.weight.register_hook(lambda gradient: exchanges.append(state.stats().exchanges))
    before = state.stats().exchanges
    run_step(ddp, 0)
    assert exchanges == [before + 1]
    # A forward pass alone starts nothing.
    ddp(torch.ones(2, 8), 0)
    assert state.stats().exchanges == before + 1


@on_ranks(2)
def test_module_goes_away(rank: int) -> None:
    """State and module do not keep each other alive."""
    ddp = wrapped()
    state = ddp_hooks.register(ddp)
    run_step(ddp, 0)
    reference = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert reference() is None
    assert "module no longer exists" in error_of(state.usage)


@on_ranks(2)
def test_module_goes_away_in_a_cycle(rank: int) -> None:
    """What serves it goes at the same moment, when nobody can ask it any more."""
    ddp = wrapped()
    ddp_hooks.register(ddp)
    run_step(ddp, 0)
    watched = len(activity.modules)
    ddp.register_forward_hook(lambda *_, module=ddp: None)
    del ddp
    gc.collect()
    assert len(activity.modules) == watched - 1


TORCHRUN_SCRIPT = """
import torch, torch.distributed as dist, ddp_hooks
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), find_unused_parameters=True)
state = ddp_hooks.register(ddp)
for _ in range(3):
    ddp(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 0:
    print(state.stats())
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 steps: sent" in done.stdout


# --- settings


@on_ranks(2)
def test_settings_at_every_door(rank: int) -> None:
    """A preset's name, and fields to set differently."""
    expected = dataclasses.replace(ddp_hooks.policies.PRESETS["auto"], rebuild_after=10, skip_zero_rows="off")
    settings = {"rebuild_after": 10, "skip_zero_rows": "off"}
    ddp = DistributedDataParallel(nn.Linear(4, 4), find_unused_parameters=True)
    state = ddp_hooks.register(ddp, "auto", **settings)
    assert state.policy == expected
    assert ddp_hooks.register(ddp, "auto", **settings) is state
    with pytest.raises(RuntimeError, match=r"already has \(Policy\(name='auto', .*rebuild_after=10\)\), received Poli"):
        ddp_hooks.register(ddp)
    state.set_policy("skip_unused", rebuild_after=3)
    assert state.policy == ddp_hooks.Policy("skip_unused", rebuild_after=3)
    with pytest.raises((TypeError, RuntimeError), match=r"set_policy: .* received 'speed'"):
        state.set_policy("auto", **({"speed": 1} if rank == 0 else {}))
    state.close()

    own = ddp_hooks.SkipUnusedState(ddp, "auto", **settings)
    assert own.policy == expected
    own.close()
    with ddp_hooks.enable("auto", **settings) as enabled:
        DistributedDataParallel(nn.Linear(4, 4))
    assert [each.policy for each in enabled.states] == [expected]

    # Refused on every rank, also where one rank alone is wrong, and where ranks differ.
    for door in (ddp_hooks.register, ddp_hooks.SkipUnusedState):
        for wrong, kind, text in (
            ({"rebuild_afer": 10}, TypeError, r"expected fields of .* received 'rebuild_afer'; did"),
            ({"rebuild_after": -1}, ValueError, r"Policy\.rebuild_after: expected at least 0, received -1"),
        ):
            with pytest.raises(kind if rank == 0 else ddp_hooks.errors.RefusedError, match=text):
                door(ddp, "auto", **(wrong if rank == 0 else {}))
        with pytest.raises(ddp_hooks.errors.RefusedError, match=r"policy: expected .*rebuild_after=1"):
            door(ddp, "auto", rebuild_after=10 + rank)


# --- modules that shard or replicate by themselves


@pytest.mark.thorough
@on_ranks(2)
def test_other_wrappers_are_told_apart(rank: int) -> None:
    import torch.distributed.fsdp as fsdp
    from torch.distributed._composable import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    part = nn.Sequential(fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Linear(4, 4))
    sharded = [
        fsdp.FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
        fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh),
        part,
        torch.compile(fsdp.fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)),
    ]
    replicated = [replicate(nn.Linear(4, 4)), replicate_by_fsdp(nn.Linear(4, 4), mesh=mesh)]
    for door in (ddp_hooks.register, ddp_hooks.SkipUnusedState, ddp_hooks.diagnose, ddp_hooks.rebuild):
        for modules, text in ((sharded, "FSDP, which shards"), (replicated, r"replicate\(\), which averages")):
            # FSDP2 can be watched.
            for module in modules[:1] if door is ddp_hooks.diagnose else modules:
                with pytest.raises(TypeError, match=text) as caught:
                    door(module)
                assert "expected a DistributedDataParallel module" in str(caught.value)
                assert "wrap the model in DistributedDataParallel instead" in str(caught.value)
        with pytest.raises(TypeError, match="received Sequential; wrap the model first"):
            door(nn.Sequential(nn.Linear(4, 4)))


# --- states that serve nothing


@on_ranks(2)
def test_a_state_that_serves_nothing_says_why(rank: int) -> None:
    def complaint(state: ddp_hooks.SkipUnusedState) -> str:
        with pytest.raises(RuntimeError, match="expected a state that serves a module, received one ") as caught:
            state.usage()
        text = str(caught.value)
        assert sum(cause in text for cause in ("no longer exists", "was closed", "unpickled", "another state")) == 1, (
            text
        )
        return text

    ddp = DistributedDataParallel(nn.Linear(4, 4))
    closed, gone = ddp_hooks.register(ddp), ddp_hooks.register(DistributedDataParallel(nn.Linear(4, 4)))
    gc.collect()
    assert "whose module no longer exists" in complaint(gone)
    closed.close()
    assert "that was closed" in complaint(closed)
    # Also where the module goes later.
    first = ddp_hooks.SkipUnusedState(ddp)
    second = ddp_hooks.register(ddp)  # the first one was never registered
    assert "whose module another state now serves" in complaint(first)
    assert "that was unpickled or copied" in complaint(pickle.loads(pickle.dumps(second)))
    assert "that was unpickled or copied" in complaint(copy.deepcopy(second))
    second.close()
    del ddp
    gc.collect()
    assert "that was closed" in complaint(second)
    assert "whose module another state now serves" in complaint(first)
