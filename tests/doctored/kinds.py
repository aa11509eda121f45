"""Situations that people ask about, each a function; `kinds.py NAME` runs one. Ranks learn from different data."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

KINDS: dict[str, Callable[[], None]] = {}


def kind(run: Callable[[], None]) -> Callable[[], None]:
    KINDS[run.__name__] = run
    return run


class Heads(nn.Module):
    """A trunk and two heads; each may be left out, and each may be computed in a reentrant checkpoint."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, which: str = "both") -> tuple[torch.Tensor, ...]:
        x = torch.relu(self.trunk(x))
        heads = [head for name, head in (("left", self.left), ("right", self.right)) if which in (name, "both")]
        if self.reentrant:
            return tuple(checkpoint(head, x, use_reentrant=True) for head in heads)
        return tuple(head(x) for head in heads)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return total(self(x))


class Opaque:
    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        self.outputs = outputs


class InAnObject(Heads):
    def forward(self, x: torch.Tensor) -> Opaque:  # type: ignore[override]
        return Opaque(super().forward(x))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory, it says")


def total(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([one.square().mean() for one in outputs]).sum()


def batch() -> torch.Tensor:
    return torch.randn(4, 8)


def make(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    # Of its own, so that nothing is left of one kind when another one is run in the same process.
    ddp = DistributedDataParallel(model or Heads(), process_group=dist.new_group(), **options)
    torch.manual_seed(1 + dist.get_rank())
    return ddp


def train(ddp: DistributedDataParallel, step: Callable[[int], object], steps: int = 6) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for i in range(steps):
        optimizer.zero_grad()
        if step(i) is not False:
            optimizer.step()


# --- nothing is wrong


@kind
def plain() -> None:
    ddp = make()
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def accumulated() -> None:
    ddp = make()

    def step(i: int) -> None:
        for part in range(3):
            with nullcontext() if part == 2 else ddp.no_sync():
                total(ddp(batch())).backward()

    train(ddp, step)


@kind
def accumulated_and_sent() -> None:
    ddp = make()

    def step(i: int) -> None:
        for part in range(3):
            loss = total(ddp(batch()))
            # Too late: the forward pass decides.
            with nullcontext() if part == 2 else ddp.no_sync():
                loss.backward()

    train(ddp, step, 4)


@kind
def evaluated_past_ddp() -> None:
    """And at its end one rank does what it likes with the weights."""
    ddp = make()

    def step(i: int) -> None:
        total(ddp(batch())).backward()
        with torch.no_grad():
            ddp.module(batch())

    train(ddp, step)
    if dist.get_rank() == 0:
        for parameter in ddp.parameters():
            parameter.data.mul_(0.5)


@kind
def adversarial() -> None:
    """The generator's step goes past the discriminator's DDP, whose gradients of then are thrown away."""
    generator, discriminator = make(nn.Linear(8, 8)), make(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, discriminator)]
    for _ in range(6):
        fake = generator(batch())
        discriminator.zero_grad()
        (discriminator(batch()) - discriminator(fake.detach())).mean().backward()
        optimizers[1].step()
        generator.zero_grad()
        discriminator.module(fake).mean().backward()
        optimizers[0].step()


@kind
def joined() -> None:
    ddp = make()
    with ddp.join():
        train(ddp, lambda i: total(ddp(batch())).backward(), 6 + 2 * dist.get_rank())


@kind
def checkpointed() -> None:
    ddp = make(Heads(reentrant=True))
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def penalised() -> None:
    ddp = make()

    def step(i: int) -> None:
        x = batch().requires_grad_()
        outputs = ddp(x)
        (gradient,) = torch.autograd.grad(outputs[0].sum(), x, create_graph=True)
        (gradient.square().sum() + total(outputs)).backward()

    train(ddp, step)


@kind
def in_two_parts() -> None:
    """Two backward passes that DDP takes for one, because each reaches other parameters."""
    ddp = make()

    def step(i: int) -> None:
        left, right = ddp(batch())
        left.mean().backward(retain_graph=True, inputs=list(ddp.module.left.parameters()))
        right.mean().backward()

    train(ddp, step)


# --- what DDP waits for


@kind
def one_step() -> None:
    make()(batch())[0].mean().backward()


@kind
def unused_after_accumulating() -> None:
    ddp = make()

    def step(i: int) -> None:
        with ddp.no_sync():
            total(ddp(batch())).backward()
        ddp(batch())[0].mean().backward()

    train(ddp, step)


@kind
def swallowed() -> None:
    ddp = make()
    try:
        train(ddp, lambda i: ddp(batch())[0].mean().backward())
    except RuntimeError:
        print("something went wrong")


@kind
def exited() -> None:
    ddp = make()
    try:
        train(ddp, lambda i: ddp(batch())[0].mean().backward())
    except RuntimeError:
        sys.exit(1)


@kind
def other_words() -> None:
    """As a trainer does it."""
    ddp = make()
    try:
        train(ddp, lambda i: total(ddp(batch(), "both" if i < 3 else "left")).backward())
    except RuntimeError as error:
        raise ValueError("it looks like something was not used") from error


@kind
def left_out() -> None:
    ddp = make(find_unused_parameters=True)
    train(ddp, lambda i: ddp(batch())[0].mean().backward())


@kind
def frozen_without_the_flag() -> None:
    ddp = make()

    def step(i: int) -> None:
        ddp.module.left.requires_grad_(i < 3)
        total(ddp(batch())).backward()

    train(ddp, step)


@kind
def frozen_halfway() -> None:
    ddp = make(find_unused_parameters=True)

    def step(i: int) -> None:
        if i == 4:
            ddp.module.left.requires_grad_(False)
        total(ddp(batch())).backward()

    train(ddp, step, 12)


@kind
def static_and_less() -> None:
    ddp = make(static_graph=True)
    train(ddp, lambda i: total(ddp(batch(), "left" if i == 3 else "both")).backward())


@kind
def static_and_more() -> None:
    ddp = make(static_graph=True)
    train(ddp, lambda i: total(ddp(batch(), "both" if i == 3 else "left")).backward())


@kind
def static_and_left_out() -> None:
    ddp = make(static_graph=True)
    train(ddp, lambda i: ddp(batch())[0].mean().backward())


class Severed(Heads):
    """The inputs are no parameter's, so nothing within the checkpoint gets a gradient."""

    def forward(self, x: torch.Tensor, which: str = "both") -> tuple[torch.Tensor, ...]:
        x = checkpoint(self.trunk, x, use_reentrant=True)
        return self.left(x), self.right(x)


@kind
def severed_checkpoint() -> None:
    ddp = make(Severed())
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def severed_checkpoint_with_the_flag() -> None:
    ddp = make(Severed(), find_unused_parameters=True)
    train(ddp, lambda i: total(ddp(batch())).backward())


class Forgetful(torch.autograd.Function):
    """Scales, and returns no gradient for the scale."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


class Scaled(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, which: str = "both") -> tuple[torch.Tensor, ...]:
        return tuple(Forgetful.apply(head, self.scale) for head in super().forward(x))


@kind
def forgotten_in_backward() -> None:
    ddp = make(Scaled())
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def forgotten_in_backward_with_the_flag() -> None:
    ddp = make(Scaled(), find_unused_parameters=True)
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def reset_while_accumulating() -> None:
    ddp = make(find_unused_parameters=True)

    def step(i: int) -> None:
        with ddp.no_sync():
            total(ddp(batch())).backward()
        ddp.zero_grad()
        total(ddp(batch(), "left")).backward()

    train(ddp, step)


@kind
def loss_of_gradients() -> None:
    """The outputs depend on the last bias, and the loss does not."""
    ddp = make(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), find_unused_parameters=True)

    def step(i: int) -> None:
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    train(ddp, step)


# --- backward passes that raise


@kind
def caught() -> None:
    class Late(Heads):
        def forward(self, x: torch.Tensor, which: str = "both") -> tuple[torch.Tensor, ...]:
            x = torch.relu(self.trunk(x))
            return self.left(x), self.right(Failing.apply(x) if fails[0] else x)

    fails = [False]
    ddp = make(Late())

    def late(i: int) -> object:
        fails[0] = i == 3
        try:
            total(ddp(batch())).backward()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return False
        return None

    train(ddp, late)


@kind
def raised_in_the_loss() -> None:
    ddp = make()

    def step(i: int) -> None:
        loss = total(ddp(batch()))
        (Failing.apply(loss) if i == 3 else loss).backward()

    train(ddp, step)


@kind
def raised_at_its_end() -> None:
    plain()
    raise ValueError("no such folder")


# --- marked ready only once


@kind
def reentrant_with_the_flag() -> None:
    ddp = make(Heads(reentrant=True), find_unused_parameters=True)
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def two_losses() -> None:
    ddp = make()

    def step(i: int) -> None:
        left, right = ddp(batch())
        left.mean().backward(retain_graph=True)
        right.mean().backward()

    train(ddp, step)


@kind
def part_past_forward() -> None:
    ddp = make(find_unused_parameters=True)
    train(ddp, lambda i: ddp.module.right(ddp(batch(), "left")[0].repeat(1, 2)).mean().backward())


@kind
def parameter_in_the_loss() -> None:
    ddp = make(find_unused_parameters=True)
    train(ddp, lambda i: (total(ddp(batch(), "left")) + ddp.module.right.weight.norm()).backward())


@kind
def two_forward_passes() -> None:
    ddp = make(find_unused_parameters=True)
    train(ddp, lambda i: (total(ddp(batch(), "left")) + total(ddp(batch(), "right"))).backward())


@kind
def opaque_output() -> None:
    ddp = make(InAnObject(), find_unused_parameters=True)
    train(ddp, lambda i: total(ddp(batch()).outputs).backward())


# --- what DDP does not average


@kind
def inner_module() -> None:
    ddp = make()
    train(ddp, lambda i: total(ddp.module(batch())).backward())


@kind
def inner_module_now_and_then() -> None:
    ddp = make()
    train(ddp, lambda i: total((ddp.module if i % 2 else ddp)(batch())).backward())


@kind
def part_of_the_module() -> None:
    ddp = make()
    train(ddp, lambda i: ddp.module.left(ddp.module.trunk(batch())).mean().backward())


@kind
def second_backward() -> None:
    ddp = make()

    def step(i: int) -> None:
        first, second = total(ddp(batch())), total(ddp(batch()))
        first.backward()
        second.backward()

    train(ddp, step)


@kind
def second_backward_with_the_flag() -> None:
    ddp = make(find_unused_parameters=True)

    def step(i: int) -> None:
        left, right = ddp(batch())
        (left.mean() + 0 * right.sum()).backward(retain_graph=True)
        right.mean().backward()

    train(ddp, step)


@kind
def never_synchronised() -> None:
    ddp = make()

    def step(i: int) -> None:
        with ddp.no_sync():
            total(ddp(batch())).backward()

    train(ddp, step)


@kind
def rest_not_synchronised() -> None:
    """What is left of an epoch is stepped with, and was not averaged."""
    ddp = make()

    def step(i: int) -> None:
        for _ in range(1 if i % 3 == 2 else 2):
            with ddp.no_sync():
                total(ddp(batch())).backward()
        if i % 3 != 2:
            total(ddp(batch())).backward()

    train(ddp, step, 9)


@kind
def stepped_in_hooks() -> None:
    ddp = make()
    for parameter in ddp.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def weights_of_one_rank() -> None:
    ddp = make()
    for parameter in ddp.parameters():
        parameter.data.add_(0.05 * dist.get_rank())
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def step_left_out() -> None:
    ddp = make()
    train(ddp, lambda i: total(ddp(batch())).backward() if i != 3 or dist.get_rank() == 0 else skip(ddp))


def skip(ddp: DistributedDataParallel) -> bool:
    total(ddp(batch())).backward()
    return False


@kind
def gradients_by_hand() -> None:
    ddp = make()

    def step(i: int) -> None:
        gradients = torch.autograd.grad(total(ddp(batch())), list(ddp.parameters()))
        for parameter, gradient in zip(ddp.parameters(), gradients, strict=True):
            parameter.grad = gradient

    train(ddp, step)


@kind
def cast_afterwards() -> None:
    ddp = make()
    ddp.to(torch.float64)
    train(ddp, lambda i: total(ddp(batch().double())).backward())


@kind
def cast_in_part() -> None:
    class Wide(Heads):
        def forward(self, x: torch.Tensor, which: str = "both") -> tuple[torch.Tensor, ...]:
            x = self.trunk(x)
            return self.left(x), self.right(x.double()).float()

    ddp = make(Wide())
    ddp.module.right.double()
    train(ddp, lambda i: total(ddp(batch())).backward())


@kind
def forward_under_no_sync() -> None:
    ddp = make()

    def step(i: int) -> None:
        with ddp.no_sync():
            loss = total(ddp(batch()))
        loss.backward()

    train(ddp, step)


@kind
def inner_module_for_long() -> None:
    ddp = make()
    train(ddp, lambda i: total(ddp.module(batch())).backward(), 100)
    print("came to its end")


@kind
def all_replaced() -> None:
    ddp = make(find_unused_parameters=True)
    ddp.module.load_state_dict(Heads().state_dict(), assign=True)
    ddp.requires_grad_()
    train(ddp, lambda i: total(ddp(batch())).backward(), 100)
    print("came to its end")


class Margins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return total(tuple(one * self.weight for one in outputs))


def train_with(criterion: nn.Module) -> None:
    ddp = make()
    optimizer = torch.optim.SGD([*ddp.parameters(), *criterion.parameters()], lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        criterion(ddp(batch())).backward()
        optimizer.step()


@kind
def loss_with_weights() -> None:
    train_with(Margins())


@kind
def loss_with_wrapped_weights() -> None:
    train_with(make(Margins()))


@kind
def wrapped_twice() -> None:
    model = Heads()
    model.left = make(model.left)  # type: ignore[assignment]
    ddp = make(model)
    train(ddp, lambda i: total(ddp(batch())).backward())


# --- ranks that run other steps than others


@kind
def one_batch_less() -> None:
    ddp = make()
    train(ddp, lambda i: total(ddp(batch())).backward(), 6 - dist.get_rank())


@kind
def bad_batch() -> None:
    ddp = make()

    def step(i: int) -> object:
        loss = total(ddp(batch()))
        if i == 3 and dist.get_rank() == 1:
            return False
        loss.backward()
        return None

    train(ddp, step)


@kind
def raised_on_one() -> None:
    ddp = make()

    def step(i: int) -> None:
        if i == 3 and dist.get_rank() == 1:
            raise KeyError("label")
        total(ddp(batch())).backward()

    train(ddp, step)


@kind
def unused_on_one() -> None:
    ddp = make()
    train(ddp, lambda i: total(ddp(batch(), "left" if i == 3 and dist.get_rank() else "both")).backward())


@kind
def raised_early_on_one() -> None:
    ddp = make()

    def step(i: int) -> object:
        loss = total(ddp(batch()))
        if i == 3 and dist.get_rank() == 1:
            loss = Failing.apply(loss)
        try:
            loss.backward()
        except RuntimeError:
            return False
        return None

    train(ddp, step)


@kind
def barrier_on_one() -> None:
    ddp = make()

    def step(i: int) -> None:
        total(ddp(batch())).backward()
        if i == 3 and dist.get_rank() == 0:
            dist.barrier()

    train(ddp, step)


@kind
def all_reduce_within_forward() -> None:
    class Logging(Heads):
        def forward(self, x: torch.Tensor, which: str = "both") -> tuple[torch.Tensor, ...]:
            if which == "logged":
                dist.all_reduce(torch.ones(2))
            return super().forward(x)

    ddp = make(Logging())
    train(ddp, lambda i: total(ddp(batch(), "logged" if i == 3 and dist.get_rank() == 0 else "both")).backward())


@kind
def evaluated_on_one() -> None:
    """The forward pass broadcasts buffers, also where nothing is trained."""
    model = Heads()
    model.register_buffer("scale", torch.ones(1000))
    ddp = make(model)

    def step(i: int) -> None:
        total(ddp(batch())).backward()
        if dist.get_rank() == 0:
            with torch.no_grad():
                ddp(batch())
        dist.barrier()

    train(ddp, step)


@kind
def stuck_on_one() -> None:
    ddp = make()

    def step(i: int) -> None:
        if i == 3 and dist.get_rank() == 1:
            time.sleep(1000)
        total(ddp(batch())).backward()

    train(ddp, step)


@kind
def killed_on_one() -> None:
    ddp = make()

    def step(i: int) -> None:
        if i == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total(ddp(batch())).backward()

    train(ddp, step)


@kind
def raised_while_the_other_had_ended() -> None:
    plain()
    if dist.get_rank() == 1:
        raise OSError("disk full")


if __name__ == "__main__":
    if dist.is_initialized():
        KINDS[sys.argv[1]]()
    else:
        dist.init_process_group("gloo")
        KINDS[sys.argv[1]]()
        dist.destroy_process_group()
