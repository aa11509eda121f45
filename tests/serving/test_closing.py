"""`state.close()`: every rank calls it, or all are told who did not; and what closes by itself asks nobody."""

from __future__ import annotations

import gc
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.errors import RanksAbsentError, RefusedError
from ddp_hooks.serving import absentees

TIMEOUT = timedelta(seconds=3)


def wrapped(group: dist.ProcessGroup | None = None, model: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(model or nn.Linear(2, 2), find_unused_parameters=True, process_group=group)


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(1, 2)).sum().backward()


def is_attached(state: ddp_hooks.SkipUnusedState) -> bool:
    return "attached" in repr(state)


def _one_rank_closes(rank: int) -> str:
    group = dist.new_group(timeout=TIMEOUT)
    ddp = wrapped(group)
    state = ddp_hooks.register(ddp)
    for _ in range(3):
        step(ddp)
    message = ""
    if rank == 0:
        with pytest.raises(RanksAbsentError) as caught:
            state.close()
        message = str(caught.value)
    dist.barrier()
    # Nothing has changed: the ranks train on alike. Whoever comes too late is told so.
    assert is_attached(state)
    step(ddp)
    if rank == 1:
        with pytest.raises(RanksAbsentError, match="Every rank called it, but rank 1 called it at least"):
            state.close()
    dist.barrier()
    # Together they can.
    state.close()
    assert not is_attached(state)
    step(ddp)
    return message


def test_a_rank_that_does_not_close_is_named() -> None:
    message, _ = run_ranks(2, _one_rank_closes)
    assert re.match(
        r"close: timed out after 3\.\d s of waiting for rank 1, which did not call it\. Every rank", message
    )
    where = r"waiting in barrier at .*test_closing\.py:\d+ in _one_rank_closes"
    assert re.search(rf"\n  rank 1 \(process \d+ on .*\) has been {where} for .* s, after [\d,]+ steps", message), (
        message
    )


def _within_backward(rank: int) -> None:
    """On one rank alone; the others close between two steps."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    ddp = wrapped(group)
    state = ddp_hooks.register(ddp)
    step(ddp)
    refusals: list[str] = []

    def close(gradient: torch.Tensor) -> None:
        with pytest.raises(RefusedError) as caught:
            state.close()
        refusals.append(str(caught.value))

    if rank == 0:
        handle = ddp.module.weight.register_hook(close)
        step(ddp)
        handle.remove()
    else:
        close(torch.ones(1))
        step(ddp)
    (refusal,) = refusals
    assert refusal.startswith("close: refused on every rank. rank 0: a backward pass is under way")
    step(ddp)
    state.close()
    step(ddp)


def test_within_backward_it_is_refused_on_every_rank() -> None:
    started = time.monotonic()
    run_ranks(2, _within_backward)
    assert time.monotonic() - started < 40


@on_ranks(2)
def test_a_module_that_is_gone_on_one_rank_keeps_nobody_waiting(rank: int) -> None:
    ddp = wrapped()
    state = ddp_hooks.register(ddp)
    step(ddp)
    if rank == 0:
        # It asks nobody.
        del ddp
        gc.collect()
        assert not is_attached(state)
    dist.barrier()
    state.close()
    state.close()  # does nothing
    assert not is_attached(state)
    # Whoever closes alone what another state has taken over waits for nobody either.
    ddp = wrapped()
    first = ddp_hooks.SkipUnusedState(ddp)
    second = ddp_hooks.register(ddp)
    if rank == 0:
        first.close()
    second.close()


@on_ranks(2)
def test_a_group_that_was_destroyed_has_nobody_to_agree_with(rank: int) -> None:
    group, store = dist.new_group(), dist.distributed_c10d._get_default_store()
    own, other = wrapped(group), wrapped()
    states = [ddp_hooks.register(own), ddp_hooks.register(other)]
    step(own)
    dist.barrier()
    dist.destroy_process_group(group)
    if rank == 0:
        states[0].close()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        states[1].close()
        assert not is_attached(states[1])
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)


@on_ranks(1)
def test_one_rank_asks_nobody(rank: int) -> None:
    ddp = wrapped()
    state = ddp_hooks.register(ddp)
    step(ddp)
    state.close()
    step(ddp)
    assert not is_attached(state)


def fail_and_close(state: ddp_hooks.SkipUnusedState) -> None:
    try:
        raise ZeroDivisionError
    finally:
        state.close()


def _while_an_error_is_handled(rank: int) -> float:
    """As in `finally`: the others wait for this rank elsewhere."""
    ddp = wrapped(dist.new_group(timeout=timedelta(seconds=60)))
    state = ddp_hooks.register(ddp)
    step(ddp)
    started = time.monotonic()
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(absentees, "FAILED_SECONDS", 0.5)
            with pytest.raises(ZeroDivisionError):
                fail_and_close(state)
        assert not is_attached(state)
    seconds = time.monotonic() - started
    dist.barrier()
    if rank == 1:
        # That rank has gone on without.
        with pytest.raises(RanksAbsentError, match=r"rank 1 called it at least|for rank 0, which did not call it"):
            state.close()
    return seconds


def test_an_error_that_is_handled_is_not_held_up() -> None:
    seconds, _ = run_ranks(2, _while_an_error_is_handled)
    assert 0.5 <= seconds < 20


@pytest.mark.thorough
@on_ranks(2)
def test_ranks_that_close_different_states(rank: int) -> None:
    """Each is known by its name, so that nobody takes the one for the other."""
    group = dist.new_group(timeout=TIMEOUT)
    modules = [wrapped(group) for _ in range(2)]
    states = [ddp_hooks.register(ddp) for ddp in modules]
    with pytest.raises(RanksAbsentError, match=f"of waiting for rank {1 - rank}, which called it for another state"):
        states[rank].close()
    dist.barrier()
    with pytest.raises(RanksAbsentError):
        states[1 - rank].close()
    dist.barrier()
    for state in states:
        state.close()
    assert not any(map(is_attached, states))
