"""What one rank knows of backward passes that DDP did not reduce, did not finish, or finished without a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from spawn import run_ranks
from test_doctor_calls import Failing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_hooks.doctor.gradient_watch import CHECKPOINT
from ddp_hooks.doctor.recorder import Recorder
from ddp_hooks.doctor.standing import Standing, Unfinished


class Heads(nn.Module):
    """A trunk and two heads; each output may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))
        self.reentrant = self.fails = False

    def forward(self, x: torch.Tensor, which: str = "both") -> tuple[torch.Tensor, ...]:
        x = self.trunk(x)
        if self.fails:
            x = Failing.apply(x)
        heads = [head for name, head in (("left", self.left), ("right", self.right)) if which in (name, "both")]
        if self.reentrant:
            return tuple(checkpoint(head, x, use_reentrant=True) for head in heads)
        return tuple(head(x) for head in heads)


def stand(
    steps: Callable[[DistributedDataParallel], Any], raises: str = "", **options: Any
) -> tuple[Standing, Recorder]:
    ddp = DistributedDataParallel(Heads(), **options)
    recorder = Recorder(ddp)
    if raises:
        with pytest.raises((RuntimeError, ValueError), match=raises):
            steps(ddp)
    else:
        steps(ddp)
    standing = recorder.stand()
    recorder.close()
    return standing, recorder


x = torch.ones(2, 4)


def total(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([one.sum() for one in outputs]).sum()


def train(ddp: DistributedDataParallel, steps: int = 2, which: str = "both") -> None:
    for _ in range(steps):
        total(ddp(x, which)).backward()
        ddp.zero_grad()


def tell_apart(rank: int) -> None:
    standing, _ = stand(train)
    assert standing == Standing(finished=2)

    # The search finds the head, and backward comes to it with nothing.
    def leave_out(ddp: DistributedDataParallel) -> None:
        for keeps in (False, True, True):
            ddp.zero_grad(set_to_none=not keeps)
            ddp(x)[0].sum().backward()

    for views in (False, True):
        standing, recorder = stand(leave_out, find_unused_parameters=True, gradient_as_bucket_view=views)
        assert standing == Standing(finished=3)
        for step in recorder.steps:
            used = {name for name, one in zip(recorder.watch.names, step.received, strict=True) if one}
            assert used == {f"{part}.{kind}" for part in ("trunk", "left") for kind in ("weight", "bias")}

    standing, _ = stand(lambda ddp: ddp(x)[0].sum().backward())
    assert (standing.finished, standing.unfinished) == (0, Unfinished.SHORT)
    assert standing.missing == ("right.weight", "right.bias")

    def fail(ddp: DistributedDataParallel) -> None:
        train(ddp)
        ddp.module.fails = True
        train(ddp)

    standing, _ = stand(fail, "planted")
    assert (standing.finished, standing.unfinished, standing.broken) == (2, Unfinished.RAISED, ())
    assert standing.missing == ("trunk.weight", "trunk.bias")
    assert not standing.twice

    def go_on(ddp: DistributedDataParallel) -> None:
        with pytest.raises(ValueError, match="planted"):
            fail(ddp)
        train(ddp)

    standing, _ = stand(go_on, "finished reduction")
    assert (standing.finished, standing.unfinished, standing.broken) == (2, Unfinished.RAISED, (2,))


def tell_what_is_past_ddp(rank: int) -> None:
    def past(ddp: DistributedDataParallel) -> None:
        for _ in range(3):
            total(ddp.module(x)).backward()

    standing, _ = stand(past)
    assert (standing.finished, standing.inner_calls, standing.unreduced) == (0, 3, (("past DDP", 3),))
    assert len(standing.unreduced_names) == 6

    def again(ddp: DistributedDataParallel) -> None:
        for _ in range(2):
            first, second = ddp(x), ddp(x + 1)
            total(first).backward()
            total(second).backward()

    standing, _ = stand(again)
    assert (standing.finished, standing.unreduced) == (2, (("afterwards", 2),))

    # With the flag the first pass finishes the step, because what it leaves out counts as unused.
    def one_by_one(ddp: DistributedDataParallel) -> None:
        left, right = ddp(x)
        left.sum().backward(retain_graph=True)
        right.sum().backward()

    standing, _ = stand(one_by_one, find_unused_parameters=True)
    assert (standing.finished, standing.unreduced) == (1, (("afterwards", 1),))
    standing, _ = stand(one_by_one, "ready only once")
    assert (standing.unfinished, standing.passes, standing.unreduced) == (Unfinished.RAISED, 2, ())
    assert standing.twice
    assert set(standing.twice) <= {"trunk.weight", "trunk.bias"}

    def accumulate(ddp: DistributedDataParallel) -> None:
        for step in range(4):
            if step % 2:
                total(ddp(x)).backward()
            else:
                with ddp.no_sync():
                    total(ddp(x)).backward()

    standing, _ = stand(accumulate)
    assert (standing.finished, standing.unreduced) == (2, (("no_sync", 2),))

    # Parts of a step: DDP waits for the second pass.
    def apart(ddp: DistributedDataParallel) -> None:
        left, right = ddp(x)
        left.sum().backward(inputs=list(ddp.module.left.parameters()), retain_graph=True)
        right.sum().backward()

    standing, _ = stand(apart)
    assert (standing.finished, standing.unreduced) == (1, ())

    def step_in_hooks(ddp: DistributedDataParallel) -> None:
        def step(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None

        for parameter in ddp.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        train(ddp)

    standing, _ = stand(step_in_hooks)
    assert (standing.finished, len(standing.stepped_early)) == (2, 6)


def tell_who_is_marked_twice(rank: int) -> None:
    def checkpointed(ddp: DistributedDataParallel) -> None:
        ddp.module.reentrant = True
        train(ddp)

    standing, _ = stand(checkpointed, "ready only once", find_unused_parameters=True)
    assert (standing.unfinished, standing.nested_in) == (Unfinished.RAISED, (CHECKPOINT,))
    assert standing.unexpected
    assert set(standing.unexpected) <= {f"{part}.{kind}" for part in ("left", "right") for kind in ("weight", "bias")}
    for options in ({}, {"static_graph": True}):
        standing, _ = stand(checkpointed, **options)
        assert (standing.finished, standing.nested_in, standing.unreduced) == (2, (CHECKPOINT,), ())

    def past_forward(ddp: DistributedDataParallel) -> None:
        for _ in range(2):
            ddp.module.right(ddp(x, "left")[0]).sum().backward()

    standing, _ = stand(past_forward, "ready only once", find_unused_parameters=True)
    assert (standing.unfinished, standing.nested_in, standing.forwards) == (Unfinished.RAISED, (), 1)
    assert standing.unexpected
    assert set(standing.unexpected) <= {"right.weight", "right.bias"}

    def two_forwards(ddp: DistributedDataParallel) -> None:
        (total(ddp(x, "left")) + total(ddp(x, "right"))).backward()

    standing, _ = stand(two_forwards, "ready only once", find_unused_parameters=True)
    assert (standing.unfinished, standing.forwards) == (Unfinished.RAISED, 2)


@pytest.mark.parametrize("check", [tell_apart, tell_what_is_past_ddp, tell_who_is_marked_twice])
def test_passes_are_told_apart(check: Callable[[int], None]) -> None:
    run_ranks(1, check)
