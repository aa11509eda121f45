"""The hook on CUDA tensors, over gloo and NCCL: the scenarios of test_equivalence.py, and what only a GPU can show.

Two ranks share one GPU (gpu.py). NCCL does not support that: where it refuses, those tests are skipped with its
message; DDP_HOOKS_REQUIRE_NCCL_PAIR=1 makes them fail.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import gpu
import pytest
import test_direct
import test_equivalence as on_cpu
import test_freezing
import test_units
import torch
import torch.distributed as dist
from fuzzer.campaign import run_many
from fuzzer.generate import generate
from spawn import RankFailure, run_ranks
from test_equivalence import EAGER_AUTO, PACK_ALL, SPLIT_ALL, Branches, StepBranches, loss_of
from test_fuzz import assert_same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, Trainer, compare, register

import ddp_hooks

pytestmark = pytest.mark.cuda

LONG_SLEEP_CYCLES = 1_000_000_000  # more than half a second
OUR_KERNELS = ("ddp_hooks::cuda", "ddp_hooks4cuda")  # their namespace, demangled or not
# For its first ten passes DDP reads timers, which may wait, and may not be captured.
WARM_UP_STEPS = 12


def _on_gpu(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    gpu.prepare()
    return function(rank, *args)


def run_on_gpu(world_size: int, backend: str, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    options = {"environment": gpu.environment, "before_import": True, **options}
    return run_ranks(world_size, _on_gpu, function, args, backend=backend, **options)


def _all_reduce(rank: int) -> float:
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    return total.item()


@functools.cache
def _why_no_nccl_pair() -> str | None:
    try:
        assert run_on_gpu(2, "nccl", _all_reduce, timeout=60.0) == [2.0, 2.0]
    except RankFailure as failure:
        lines = [line.strip() for line in str(failure).splitlines() if "nccl" in line.lower() or "Error" in line]
        return "NCCL refuses two ranks on one GPU: " + " | ".join(lines[-3:])
    return None


@pytest.fixture(params=["gloo alone", "gloo", "nccl alone", "nccl"])
def world(request: pytest.FixtureRequest) -> tuple[int, str]:
    """A world size and a backend."""
    if request.param == "three on gloo":
        return 3, "gloo"
    backend, _, alone = request.param.partition(" ")
    if request.param == "nccl" and (why := _why_no_nccl_pair()) is not None:
        if os.environ.get("DDP_HOOKS_REQUIRE_NCCL_PAIR") == "1":
            pytest.fail(f"DDP_HOOKS_REQUIRE_NCCL_PAIR=1, but {why}", pytrace=False)
        pytest.skip(why)
    return (1 if alone else 2), backend


def on_cuda(scenario: Scenario) -> Scenario:
    scenario.device = "cuda"
    return scenario


# --- the scenarios of the CPU


@pytest.mark.parametrize("scenario", on_cpu.SCENARIOS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("policy", ["skip_unused", "skip_zeros"])
def test_same_as_plain_ddp_on_gloo(scenario: type[Scenario], policy: str) -> None:
    run_on_gpu(2, "gloo", compare, on_cuda(scenario()), policy, True)


# NCCL reduces no sparse tensors, not for plain DDP either.
FEW = [
    on_cpu.AllUsed,
    on_cpu.BucketsAreRebuilt,
    on_cpu.StepBranches,
    on_cpu.BucketViews,
    on_cpu.ZeroedBucketViews,
    on_cpu.NoSync,
    on_cpu.StaticGraph,
    on_cpu.Joined,
    on_cpu.MixedDtypes,
    on_cpu.Complex,
    on_cpu.SpecialValues,
    on_cpu.ManyTinyParameters,
    on_cpu.FrozenAfterWrapping,
    on_cpu.MaskedGradients,
    on_cpu.Experts,
]


@pytest.mark.parametrize("scenario", FEW, ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    ("policy", "native"),
    [("skip_unused", True), ("skip_unused", False), ("skip_zeros", True), (EAGER_AUTO, False)],
    ids=["graph-native", "graph-python", "values-native", "auto-python"],
)
@pytest.mark.parametrize("world", ["nccl alone", "nccl"], indirect=True)
def test_same_as_plain_ddp_on_nccl(
    scenario: type[Scenario], policy: ddp_hooks.Policy | str, native: bool, world: tuple[int, str]
) -> None:
    run_on_gpu(*world, compare, on_cuda(scenario()), policy, native)


@pytest.mark.parametrize("scenario", [on_cpu.StepBranches, on_cpu.MixedDtypes, on_cpu.ManyTinyParameters])
@pytest.mark.parametrize("policy", [PACK_ALL, SPLIT_ALL, "allreduce"], ids=["pack", "split", "allreduce"])
def test_every_way_to_pack(scenario: type[Scenario], policy: ddp_hooks.Policy | str, world: tuple[int, str]) -> None:
    run_on_gpu(*world, compare, on_cuda(scenario()), policy, True)


# --- rows, and what only some ranks have

UNITS = [test_units.Rows, test_units.ManyBuckets, test_units.OnOneRank, test_units.Views, test_units.Experts]
UNIT_POLICIES = [test_units.EVERY_ROW, test_units.ADAPTIVE, test_units.WITH_VALUES]


@pytest.mark.parametrize("scenario", UNITS)
@pytest.mark.parametrize("policy", UNIT_POLICIES)
def test_units_of_rows(scenario: type[Scenario], policy: ddp_hooks.Policy, world: tuple[int, str]) -> None:
    run_on_gpu(*world, compare, on_cuda(scenario()), policy, True)


@pytest.mark.parametrize("scenario", [test_units.OnOneRank, test_units.RankBuckets, on_cpu.StepBranches])
@pytest.mark.parametrize("world", ["gloo", "three on gloo", "nccl"], indirect=True)
def test_every_transport(scenario: type[Scenario], world: tuple[int, str]) -> None:
    run_on_gpu(*world, compare, on_cuda(scenario()), test_direct.DIRECT_ROWS, True)


# --- streams, loss scaling, mixed groups


class OnASideStream(StepBranches):
    """Everything runs on a stream that is not the default one, behind a long kernel."""

    def run(self, t: Trainer) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            super().run(t)
        torch.cuda.current_stream().wait_stream(side)

    def step(self, t: Trainer, i: int) -> None:
        torch.cuda._sleep(20_000_000)
        super().step(t, i)


class EachStepOnItsOwnStream(StepBranches):
    """The stream changes from step to step, so that buffers kept between steps change streams."""

    def step(self, t: Trainer, i: int) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            super().step(t, i)
        here.wait_stream(side)


class LossScaling(Scenario):
    """float16 autocast with a GradScaler; in one step a gradient overflows on one rank, and all ranks skip the step."""

    ddp_options = {"bucket_cap_mb": 0.01}
    tolerance = 2e-3

    def build(self) -> nn.Module:
        return Branches()

    def run(self, t: Trainer) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for i in range(self.steps):
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(t.ddp(t.batch(4, 8), i % 2 == 0, t.rank == 0))
            if i == 2 and t.rank == t.world_size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            t.record()
            before = scaler.get_scale()
            scaler.step(t.optimizer)
            scaler.update()
            assert (scaler.get_scale() < before) == (i == 2), "the overflow reached this rank in another step"
            t.optimizer.zero_grad()


class ThroughPinnedMemory(StepBranches):
    """Batches come from the host without waiting, as a DataLoader with pin_memory hands them over."""

    def step(self, t: Trainer, i: int) -> None:
        batch = t.batch(4, 8).cpu().pin_memory().to("cuda", non_blocking=True)
        loss_of(t.ddp(batch, i % 3 == 0, i % 3 == 1 and t.rank == 0)).backward()


@pytest.mark.parametrize(
    "scenario", [OnASideStream, EachStepOnItsOwnStream, LossScaling, ThroughPinnedMemory], ids=lambda s: s.__name__
)
@pytest.mark.parametrize(
    ("policy", "native"),
    [("skip_unused", True), ("skip_unused", False), ("skip_zeros", True), (PACK_ALL, True)],
    ids=["graph-native", "graph-python", "values-native", "pack-native"],
)
def test_what_gpus_add(
    scenario: type[Scenario], policy: ddp_hooks.Policy | str, native: bool, world: tuple[int, str]
) -> None:
    run_on_gpu(*world, compare, on_cuda(scenario()), policy, native)


@pytest.mark.parametrize("scenario", [on_cpu.StepBranches, on_cpu.NoSync])
@pytest.mark.parametrize("policy", ["skip_unused", "skip_zeros"])
def test_a_group_with_a_backend_for_each_device(scenario: type[Scenario], policy: str) -> None:
    run_on_gpu(1, "cpu:gloo,cuda:nccl", compare, on_cuda(scenario()), policy, True)
    run_on_gpu(2, "cpu:gloo,cuda:gloo", compare, on_cuda(scenario()), policy, True)


@pytest.mark.parametrize("views", [False, True], ids=["gradients", "views"])
@pytest.mark.parametrize("policy", ["skip_unused", "skip_zeros"])
def test_random_freezing(views: bool, policy: str) -> None:
    run_on_gpu(2, "gloo", test_freezing.random_freezing, True, views, "sgd", policy, True, 30, "cuda")


# --- what happens after the Reducer's last act, which for a GPU may be in autograd's thread


def unfrozen_and_rebuilt(rank: int, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to(device)
    twin = copy.deepcopy(model)
    for module in (model, twin):
        ddp_hooks.freeze(module, "0")
    ddp = DistributedDataParallel(model)
    ddp_hooks.register(ddp, ddp_hooks.Policy("test", rebuild_after=2))
    reducers = []
    for step in range(10):
        for module in (ddp, twin):
            if step == 2:
                ddp_hooks.unfreeze(module, "0")
            if step == 5:
                ddp_hooks.freeze(module, "2")
            module.zero_grad()
            module(torch.full((2, 8), float(rank + 1), device=device)).square().sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), f"step {step}"
            if theirs.grad is not None:
                theirs.grad /= dist.get_world_size()
                dist.all_reduce(theirs.grad)
                assert torch.equal(ours.grad, theirs.grad), f"step {step}"
        if ddp.reducer not in reducers:
            reducers.append(ddp.reducer)
    assert len(reducers) == 3, "for the layer that was unfrozen, and for the one that was frozen"


def test_unfrozen_and_rebuilt(world: tuple[int, str]) -> None:
    run_on_gpu(*world, unfrozen_and_rebuilt, "cuda")


# --- the host runs ahead of the device


@contextlib.contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _half_frozen(
    policy: ddp_hooks.Policy | str, native: bool, search: bool = False
) -> tuple[DistributedDataParallel, ddp_hooks.SkipUnusedState]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=search)
    state = register(ddp, policy, native)
    ddp_hooks.freeze(ddp, model[0], model[1], model[2], model[3])
    return ddp, state


def backward_does_not_wait(rank: int, native: bool, search: bool) -> None:
    # With a search plain DDP waits here: it copies its map of used parameters to the host.
    ddp, state = _half_frozen("skip_unused", native, search)
    batch = torch.ones(16, 64, device="cuda")
    for _ in range(WARM_UP_STEPS):  # buckets are rebuilt, NCCL connects, allocators fill up
        ddp(batch).sum().backward()
        ddp.zero_grad()
    torch.cuda.synchronize()
    before = state.stats()
    with _no_waiting():
        torch.cuda._sleep(LONG_SLEEP_CYCLES)
        loss = ddp(batch).sum()
        loss.backward()
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the host was behind the device when backward returned"
    torch.cuda.synchronize()
    assert state.stats().steps == before.steps + 1
    if dist.get_world_size() > 1:
        assert 0 < state.stats().payload_bytes - before.payload_bytes < state.stats().dense_bytes - before.dense_bytes


# Not gloo where it has something to reduce: it waits for the device by itself, because it does that in host memory.
# With a search it has, on one rank as well, the Reducer's map of what was used.
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize(
    ("search", "world"),
    [(False, "gloo alone"), *itertools.product([False, True], ["nccl alone", "nccl"])],
    indirect=["world"],
    ids=lambda value: value if isinstance(value, str) else "searching" if value else "told",
)
def test_the_host_never_waits_for_the_device(native: bool, search: bool, world: tuple[int, str]) -> None:
    run_on_gpu(*world, backward_does_not_wait, native, search)


def bucket_futures_are_ready_in_stream_order(rank: int) -> None:
    # Gradients are read right after backward, without a word to the device, and have to be the averaged ones.
    ddp, _ = _half_frozen(PACK_ALL, True)
    for step in range(5):
        torch.cuda._sleep(50_000_000)
        ddp(torch.full((16, 64), float(rank + 1 + step), device="cuda")).sum().backward()
        mine = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
        ddp.zero_grad()
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine)
        assert all(torch.equal(mine, other) for other in theirs)
        assert bool(mine.isfinite().all())
        assert bool((mine != 0).any())


def test_gradients_can_be_read_when_backward_returns(world: tuple[int, str]) -> None:
    run_on_gpu(*world, bucket_futures_are_ready_in_stream_order)


def _kernels_of_a_step(ddp: DistributedDataParallel, batch: torch.Tensor) -> list[str]:
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        ddp(batch).sum().backward()
        torch.cuda.synchronize()
    ddp.zero_grad()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def skipped_buckets_launch_nothing(rank: int) -> None:
    ddp, state = _half_frozen(PACK_ALL, True)
    batch = torch.ones(16, 64, device="cuda")
    for _ in range(WARM_UP_STEPS):
        ddp(batch).sum().backward()
        ddp.zero_grad()
    before = state.stats()
    kernels = _kernels_of_a_step(ddp, batch)
    after = state.stats()
    alone = dist.get_world_size() == 1
    messages = after.messages - before.messages
    assert (messages == 0) == alone
    assert after.buckets_skipped > before.buckets_skipped
    ours = [name for name in kernels if any(kernel in name for kernel in OUR_KERNELS)]
    # One launch gathers a message, one scatters it.
    assert len(ours) == 2 * messages, ours
    reduced = [name for name in kernels if "nccl" in name.lower() and "AllReduce" in name]
    assert len(reduced) in (0, messages), reduced  # gloo has no kernels, nor has NCCL for one rank


def test_skipped_buckets_launch_nothing(world: tuple[int, str]) -> None:
    run_on_gpu(*world, skipped_buckets_launch_nothing)


# --- whatever a program may do


@pytest.mark.parametrize("first", range(0, 100, 20))
@pytest.mark.parametrize("world", ["gloo", "nccl"], indirect=True)
def test_random_programs(first: int, world: tuple[int, str]) -> None:
    ranks, backend = world
    programs = [generate(seed, ranks, "cuda") for seed in range(first, first + 20)]
    for program in programs:
        program.options.group = "stream" if backend == "nccl" else "host"
    run_many(programs, on_failure=assert_same)


# --- what is refused


def capture_is_refused(rank: int) -> None:
    ddp, _ = _half_frozen("skip_unused", True)
    batch = torch.ones(16, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            ddp(batch).sum().backward()
            ddp.zero_grad()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            # A graph would replay this step's agreed masks for ever.
            with pytest.raises(RuntimeError, match=r"ddp_hooks: .*CUDA graph"):
                ddp(batch).sum().backward()
        finally:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()


def test_capture_is_refused() -> None:
    # Ranks of their own: an error during a capture leaves its mark on a process.
    run_on_gpu(1, "nccl", capture_is_refused, environment=lambda rank: {**gpu.environment(rank), "CAPTURES": "1"})
