"""Options of DDP's that not every supported torch has, beyond what the scenarios of test_equivalence.py train."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import test_direct
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from training import register

import ddp_hooks
from ddp_hooks_testing import _C as testing

OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters

lazy = pytest.mark.skipif(
    "lazy_bucket_allocation" not in OPTIONS, reason="this torch has no lazy_bucket_allocation; 2.15 is the first"
)
manual = pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"),
    reason="this torch has no finalize_backward(); 2.15 is the first",
)
hooked = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"),
    reason="this torch has no hooks on a group's collectives; 2.14 is the first",
)
both_ways = pytest.mark.parametrize("native", [False, True], ids=["python", "native"])


class Layers(nn.Module):
    """Two layers; the second one, frozen, makes the first one's gradient what rank and step make of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


@lazy
@both_ways
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks(2)
def test_lazy_buckets_lose_their_memory_after_backward(rank: int, native: bool, views: bool) -> None:
    ddp = DistributedDataParallel(
        Layers(), lazy_bucket_allocation=True, find_unused_parameters=True, gradient_as_bucket_view=views
    )
    register(ddp, "skip_unused", native)
    seen: list[StorageWeakRef] = []

    def look(parameter: torch.Tensor) -> None:
        if parameter is last:
            (bucket,) = testing.probe_reducer(ddp.reducer)["buckets_"]
            seen.append(StorageWeakRef(bucket["gradients"].untyped_storage()))

    last = ddp.module.first.weight
    for parameter in ddp.module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    # Another gradient comes before the last one, and with it the bucket's memory.
    for step in range(3):
        ddp(batch(rank, step)).sum().backward()
        assert len(seen) == step + 1
        # Views of it are .grad until the optimizer lets go of them.
        assert not (views and seen[-1].expired())
        if views:
            ddp.zero_grad()
        # A worker of gloo's lets go of it a moment after it has woken up whoever waits.
        deadline = time.monotonic() + 10
        while not seen[-1].expired():
            assert time.monotonic() < deadline, f"step {step}: something still holds the bucket's memory"
            time.sleep(0.001)
        ddp.zero_grad()


def train_frozen(rank: int, ours: bool, views: bool) -> list[Any]:
    """Four steps with the second layer frozen after wrapping and unfrozen again, or built frozen, without a hook."""
    model = Layers()
    if not ours:
        model.second.requires_grad_(False)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    if ours:
        ddp_hooks.register(ddp, "skip_unused")
        ddp.require_manual_backward_finalization = True
        model.second.requires_grad_(False)
        # Left over of an earlier pass; nobody is to touch it.
        model.second.bias.grad = torch.full((4,), 7.0)
    seen = []
    for step in range(4):
        ddp(batch(rank, step)).sum().backward()
        if ours:
            ddp.finalize_backward()
            assert model.second.weight.grad is None
            assert model.second.bias.grad.eq(7).all()
        seen.append(gradients(model.first))
        model.first.zero_grad()
    if ours:
        model.second.requires_grad_(True)
        # Used past the outputs, so that it reports before they are reached.
        (ddp(batch(rank, 4)).sum() + model.second.weight.sum()).backward()
        ddp.finalize_backward()
        plain = DistributedDataParallel(Layers())
        (plain(batch(rank, 4)).sum() + plain.module.second.weight.sum()).backward()
        assert same(gradients(model)[:3], gradients(plain.module)[:3])
    return seen


@manual
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks(2)
def test_what_is_frozen_is_left_alone_when_the_user_finalises(rank: int, views: bool) -> None:
    expected = train_frozen(rank, False, views)
    found = train_frozen(rank, True, views)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@manual
@both_ways
@on_ranks(2)
def test_what_is_frozen_is_refused_where_ddp_would_write_it_last(rank: int, native: bool) -> None:
    """The Reducer copies, and would write zeros into .grad after everything of ours: so the pass raises."""
    ddp = DistributedDataParallel(Layers(), lazy_bucket_allocation=native)
    register(ddp, "skip_unused", native)
    ddp.require_manual_backward_finalization = True
    ddp.module.second.requires_grad_(False)

    def step() -> None:
        ddp(batch(rank, 0)).sum().backward()
        ddp.finalize_backward()

    with pytest.raises(RuntimeError, match=r"nothing restores afterwards.*find_unused_parameters=True"):
        step()


@manual
@on_ranks(2)
def test_rebuilding_at_the_end_of_backward_is_refused_when_the_user_finalises(rank: int) -> None:
    ddp = DistributedDataParallel(Layers(), find_unused_parameters=True)
    ddp_hooks.register(ddp, "skip_unused", rebuild_after=2)
    ddp.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="leave rebuild_after out"):
        ddp(batch(rank, 0))


@manual
@on_ranks(2)
def test_rebuild_keeps_who_finalises(rank: int) -> None:
    ddp = DistributedDataParallel(Layers())
    ddp_hooks.register(ddp, "skip_unused")
    ddp.require_manual_backward_finalization = True
    ddp.module.second.requires_grad_(False)
    assert ddp_hooks.rebuild(ddp)
    ddp(batch(rank, 0)).sum().backward()
    ddp.finalize_backward()  # refused by a Reducer that finalises by itself
    assert ddp.module.first.weight.grad is not None


@manual
@on_ranks(2)
def test_late_gradients_are_averaged_when_the_user_finalises(rank: int) -> None:
    model = Layers()
    model.second.requires_grad_(False)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp_hooks.register(ddp, "skip_unused")
    ddp.require_manual_backward_finalization = True
    model.second.requires_grad_(True)
    plain = DistributedDataParallel(Layers())
    for step in range(2):
        ddp(batch(rank, step)).sum().backward()
        ddp.finalize_backward()
        plain(batch(rank, step)).sum().backward()
        assert same(gradients(model), gradients(plain.module))
        ddp.zero_grad()
        plain.zero_grad()


@manual
@on_ranks(3)
def test_owners_sum_when_the_user_finalises(rank: int) -> None:
    """What two of three ranks use one of them sums."""
    found = []
    for policy in (None, test_direct.DIRECT):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(test_direct.Heads(2), find_unused_parameters=True)
        state = None if policy is None else ddp_hooks.register(ddp, policy)
        ddp.require_manual_backward_finalization = True
        ddp(torch.ones(2, 64), min(rank, 1)).sum().backward()
        ddp.finalize_backward()
        found.append(gradients(ddp.module))
    assert state is not None
    assert state.stats().owner_bytes > 0
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


@manual
@on_ranks(2)
def test_ranks_that_differ_in_who_finalises_are_told(rank: int) -> None:
    ddp = DistributedDataParallel(Layers(), find_unused_parameters=True)
    ddp.require_manual_backward_finalization = rank == 0
    with pytest.raises(RuntimeError, match="require_manual_backward_finalization"):
        ddp_hooks.register(ddp, "skip_unused")


@hooked
@both_ways
@on_ranks(2)
def test_collectives_may_have_hooks(rank: int, native: bool) -> None:
    """The hooks are Python's, so they take the GIL within the engine, and may ask the state for something."""
    ddp = DistributedDataParallel(Layers(), find_unused_parameters=True, bucket_cap_mb=1e-5)
    state = register(ddp, "skip_unused", native)
    ddp_state = state if isinstance(state, ddp_hooks.SkipUnusedState) else ddp_hooks.states()[0]
    begun: list[Any] = []
    works: list[Any] = []
    ddp.process_group.register_pre_hook(1, lambda args: begun.append((args.op_id, ddp_state.stats().steps)))
    ddp.process_group.register_post_hook(1, lambda args: works.append((args.op_id, args.work)))
    plain = DistributedDataParallel(Layers(), process_group=dist.new_group(range(2)))
    for step in range(3):
        ddp(batch(rank, step)).sum().backward()
        plain(batch(rank, step)).sum().backward()
        assert same(gradients(ddp.module), gradients(plain.module))
        ddp.zero_grad()
        plain.zero_grad()
    ddp.process_group.unregister_pre_hook(1)
    ddp.process_group.unregister_post_hook(1)
    assert len(begun) > 3
    assert [op for op, _ in begun] == [op for op, _ in works]
