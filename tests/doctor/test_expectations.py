"""Assertions by name: every rank raises, in the step that breaks them, and goes on; with the hook and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick import thorough
from spawn import RankFailure, on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_gradients

import ddp_hooks


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        x = self.trunk(x)
        return (self.left(x).sum() if left else 0) + (self.right(x).sum() if right else 0) + x.sum()


def make(policy: str | None) -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Heads(), find_unused_parameters=True)
    if policy is not None:
        ddp_hooks.register(ddp, policy)
    return ddp


def step(ddp: DistributedDataParallel, left: bool, right: bool) -> str | None:
    """Return what is raised, and leave gradients as plain DDP does."""
    ddp.zero_grad()
    try:
        ddp(torch.ones(2, 6), left, right).backward()
    except ddp_hooks.errors.UnexpectedUseError as error:
        return str(error)
    return None


def raise_together(rank: int, policy: str | None) -> list[Any]:
    ddp = make(policy)
    hooks_before = len(ddp._forward_hooks)
    mine: list[str] = []
    handle_of_user = ddp.module.left.weight.register_post_accumulate_grad_hook(lambda p: mine.append("user"))
    first = ddp_hooks.expect_used(ddp, "left", ddp.module.trunk)
    second = ddp_hooks.expect_unused(ddp, ddp.module.right.weight, "right.bias")
    assert first.names == ("left.bias", "left.weight", "trunk.bias", "trunk.weight")
    raised = [
        step(ddp, True, False),
        step(ddp, rank == 0, False),  # used on one rank is used
        step(ddp, False, False),  # nobody uses left
        step(ddp, True, False),  # DDP is none the worse
        step(ddp, True, rank == 1),  # rank 1 uses right
        step(ddp, False, True),  # both are broken
    ]
    with ddp.no_sync():  # a gradient of before counts for the step that reduces it
        ddp(torch.ones(2, 6), rank == 1, False).backward()
    raised.append(step_without_zeroing(ddp))
    first.remove()
    raised.append(step(ddp, False, False))
    second.remove()
    second.remove()
    raised.append(step(ddp, True, True))
    assert len(ddp._forward_hooks) == hooks_before
    assert list(ddp.module.left.weight._post_accumulate_grad_hooks.values()) == [
        ddp.module.left.weight._post_accumulate_grad_hooks[handle_of_user.id]
    ]
    assert mine
    # What was reduced when it was raised is what plain DDP leaves.
    other = make(None)
    guard = ddp_hooks.expect_used(ddp, "left")
    assert step(ddp, False, True) is not None
    assert step(other, False, True) is None
    assert_same_gradients(ddp, other)
    guard.remove()
    # A frozen parameter is not used; a wrong argument of one rank is an error on both.
    ddp.module.left.requires_grad_(False)
    frozen = ddp_hooks.expect_used(ddp, "left.weight")
    assert "no rank had a gradient for left.weight" in (step(ddp, True, False) or "")
    frozen.remove()
    for what in (("lfet",), ("left" if rank else "right",), () if rank else ("left",)):
        with pytest.raises((ValueError, RuntimeError), match=r"expect_used|expected something that names parameters"):
            ddp_hooks.expect_used(ddp, *what)
    assert step(ddp, False, False) is None
    return raised


def step_without_zeroing(ddp: DistributedDataParallel) -> str | None:
    try:
        ddp(torch.ones(2, 6), False, False).backward()
    except ddp_hooks.errors.UnexpectedUseError as error:
        return str(error)
    return None


@pytest.mark.parametrize("policy", [None, "skip_zeros"])
def test_every_rank_raises_in_the_same_step(policy: str | None) -> None:
    both = run_ranks(2, raise_together, policy)
    for raised in both:
        assert [bool(text) for text in raised] == [False, False, True, False, True, True, False, False, False]
        assert "no rank had a gradient for left.bias, left.weight" in raised[2]
        assert "step 2 " in raised[2]
        assert "right.bias" in raised[4]
        assert "expect_used" in raised[5]
        assert "expect_unused" in raised[5]
    assert both[0][2] == both[1][2]
    assert "other ranks, not this one" in both[0][4]
    assert "this rank, too" in both[1][4]


def break_it_and_do_not_catch(rank: int) -> None:
    ddp = make(None)
    ddp_hooks.expect_used(ddp, "left")
    for i in range(20):
        ddp(torch.ones(2, 6), i < 3, True).backward()


def test_nobody_hangs_when_nobody_catches_it() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, break_it_and_do_not_catch)
    assert str(caught.value).count("UnexpectedUseError: expect_used: expected some rank") == 2
    assert "hung" not in str(caught.value)


def call_it_in_backward(rank: int) -> None:
    ddp = make(None)
    errors: list[str] = []

    def call(parameter: torch.Tensor) -> None:
        with pytest.raises(RuntimeError) as caught:
            ddp_hooks.expect_used(ddp, "left")
        errors.append(str(caught.value))

    ddp.module.trunk.weight.register_post_accumulate_grad_hook(call)
    assert step(ddp, True, True) is None
    (error,) = errors
    assert "expect_used: a backward pass is under way; call it between two steps" in error
    assert "block" not in error


def remove_on_one_rank(rank: int, keep: bool) -> None:
    """Expect something after an expectation was taken back on rank 1 only, the last one or not."""
    ddp = make(None)
    handles = [ddp_hooks.expect_used(ddp, "trunk")] if keep else []
    handles.append(ddp_hooks.expect_used(ddp, "left"))
    if rank == 1:
        handles[-1].remove()
    with pytest.raises(RuntimeError, match=r"remove\(\) takes one back on every rank\): expected .*expect_used left"):
        ddp_hooks.expect_unused(ddp, "right")
    if rank == 0:
        handles[-1].remove()
    second = ddp_hooks.expect_unused(ddp, "right")
    assert "expect_unused" in (step(ddp, True, rank == 0) or "")
    second.remove()


@pytest.mark.parametrize("place", ["of DDP", "around the model", *thorough("around DDP", "of the model")])
@on_ranks(2)
def test_what_is_compiled_is_heard_and_left_whole(rank: int, place: str) -> None:
    """Expectations, and a diagnosis, hear of the steps of a compiled call, and leave the model's graph whole."""
    graphs: list[list[str]] = []

    def compile_it(graph: torch.fx.GraphModule, inputs: Any, graphs: list[list[str]] = graphs) -> Any:
        graphs.append([node.op for node in graph.graph.nodes])
        return graph

    outcomes = []
    for watched in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        model = Heads()
        if place == "of the model":
            model.compile(backend=compile_it, fullgraph=True)
        inner = torch.compile(model, backend=compile_it, fullgraph=True) if place == "around the model" else model
        ddp = DistributedDataParallel(inner, find_unused_parameters=True)  # type: ignore[arg-type]
        if place == "of DDP":
            ddp.compile(backend=compile_it)
        called: Any = torch.compile(ddp, backend=compile_it) if place == "around DDP" else ddp
        handle = ddp_hooks.expect_used(called, model.left) if watched else None
        raised = [step(called, left, False) for left in (True, False, rank == 1, False)]
        assert [error is not None for error in raised] == [False, watched, False, watched], (place, raised)
        model.left.requires_grad_(False)
        if handle is not None:
            handle.remove()
            with ddp_hooks.diagnose(called) as diagnosis:
                assert step(called, True, rank == 0) is None
                model.left.requires_grad_(True)  # unfrozen, so the watch has to look again
                assert step(called, True, False) is None
            found = diagnosis.findings
            prefix = "_orig_mod." if place == "around the model" else ""
            assert found.steps == 2
            assert found.verdict(f"{prefix}right.weight").pattern == ("#.", "..")
            assert found.verdict(f"{prefix}left.weight").pattern == ("-#", "-#")
            (cost,) = [one for one in found.answers if one.question == "What does the search of the graph cost?"]
            assert (cost.verdict == "not timed") == (place != "around the model")
        else:
            assert step(called, True, rank == 0) is None
            model.left.requires_grad_(True)
            assert step(called, True, False) is None
        outcomes.append(list(graphs))
    assert outcomes[0] == outcomes[1], place


@on_ranks(2, collective_timeout=8)
def test_calls_that_do_not_fit_are_errors_on_every_rank(rank: int) -> None:
    call_it_in_backward(rank)
    remove_on_one_rank(rank, keep=False)
    remove_on_one_rank(rank, keep=True)
