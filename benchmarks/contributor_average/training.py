"""Trains the tasks on each rank: one hook, draw of the tasks and seed after the other, in one process group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from contributor_average import tasks
from contributor_average.summary import CONTRIBUTORS, PLAIN, RAISED, WORLD
from tools import testbed

# What trains side by side because it has the gradients of one hook. Plain DDP first: the others are compared with it.
HOOKS = ((PLAIN,), (WORLD, RAISED), (CONTRIBUTORS,))
BATCH = 16  # samples a rank and step
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained.

    `plain_seeds`: with how many of the seeds plain DDP trains, too. `checkpoints`: after how many steps losses are
    taken; the last one ends a run.
    """

    seeds: int
    plain_seeds: int
    checkpoints: tuple[int, ...]
    draws: tuple[str, ...]
    rates: dict[str, tuple[float, ...]]  # by optimizer


@dataclass(frozen=True, slots=True)
class Setting:
    """How one of the models side by side is trained."""

    way: str
    optimizer: str
    rate: float


class Optimizer:
    """torch's own, over the rows of the parts, which have a learning rate each."""

    def __init__(self, name: str, parts: Sequence[Tensor], rates: dict[int, tuple[float, float]]) -> None:
        """`rates`: of the trunk and of the heads, by row."""
        self._parts = list(parts)
        self._rows = [{i: part.detach()[i] for i in rates} for part in self._parts]
        groups: list[dict[str, Any]] = []
        for i, (of_trunk, of_heads) in rates.items():
            trunk, *heads = (rows[i] for rows in self._rows)
            groups += [{"params": [trunk], "lr": of_trunk}, {"params": heads, "lr": of_heads}]
        # torch's fused SGD fails where one head has a momentum and another none yet.
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(groups, momentum=MOMENTUM, foreach=False)
            if name == "SGD"
            else torch.optim.AdamW(groups, fused=True)
        )

    def step(self) -> None:
        for part, rows in zip(self._parts, self._rows, strict=True):
            gradients = None if part.grad is None else part.grad.unbind()
            for i, row in rows.items():
                row.grad = None if gradients is None else gradients[i]
        self._optimizer.step()


def train(
    plan: Plan, train_part: tasks.Part, settings: Sequence[Setting], draw: str, seed: int
) -> Iterator[tuple[int, tasks.SideBySide]]:
    """Train one model for each setting; yield them at each checkpoint with the steps so far."""
    import ddp_hooks

    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn = tasks.draw_tasks(draw, plan.checkpoints[-1], ranks, seed)
    batches = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
    models = tasks.SideBySide(len(settings), seed)
    ddp = DistributedDataParallel(models, find_unused_parameters=True)
    way = settings[0].way
    if way != PLAIN:
        average = "contributors" if way == CONTRIBUTORS else "world"
        ddp_hooks.register(ddp, ddp_hooks.Policy(f"average over {average}", average=average))
    raised = ranks / tasks.mean_contributors(drawn)
    optimizers = []
    for name in plan.rates:
        rates = {
            i: (setting.rate, setting.rate * (raised if setting.way == RAISED else 1.0))
            for i, setting in enumerate(settings)
            if setting.optimizer == name
        }
        optimizers.append(Optimizer(name, list(models.parts), rates))
    for step, of_ranks in enumerate(drawn.tolist(), 1):
        chosen = torch.randint(tasks.TRAIN, (BATCH,), generator=batches)
        ddp.zero_grad()
        ddp(train_part.pixels[chosen], train_part.answers[chosen], of_ranks[rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
        if step in plan.checkpoints:
            yield step, models


def finite(values: list[float]) -> list[float] | None:
    """What JSON can hold; None where training has diverged."""
    return values if all(map(math.isfinite, values)) else None


def run_rank(plan: Plan) -> None:
    """Rank 0 reports, for each model at each checkpoint, the losses of its tasks and how far it is from plain DDP's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parts = tasks.load_parts()
    for draw, seed in itertools.product(plan.draws, range(plan.seeds)):
        plain: dict[tuple[int, str, float], Tensor] = {}
        for ways in HOOKS:
            if PLAIN in ways and seed >= plan.plain_seeds:
                continue
            settings = [
                Setting(way, optimizer, rate)
                for way in ways
                for optimizer, rates in plan.rates.items()
                for rate in rates
            ]
            for steps, models in train(plan, parts["train"], settings, draw, seed):
                if dist.get_rank() == 0:
                    report({"draw": draw, "seed": seed, "steps": steps}, settings, models, parts, plain)
    dist.barrier()
    dist.destroy_process_group()


def report(
    case: dict[str, Any],
    settings: Sequence[Setting],
    models: tasks.SideBySide,
    parts: dict[str, tasks.Part],
    plain: dict[tuple[int, str, float], Tensor],
) -> None:
    """One line for each model; remembers plain DDP's weights, and compares the others' with them."""
    validation, test = models.all_losses(parts["validation"]), models.all_losses(parts["test"])
    for i, (setting, weights) in enumerate(zip(settings, models.weights(), strict=True)):
        key = (case["steps"], setting.optimizer, setting.rate)
        if setting.way == PLAIN:
            plain[key] = weights
        distance = None
        if key in plain:
            distance = finite([float((weights - plain[key]).norm() / plain[key].norm())])
        testbed.report(
            {
                **case,
                "way": setting.way,
                "optimizer": setting.optimizer,
                "rate": setting.rate,
                "validation": finite(validation[i]),
                "test": finite(test[i]),
                "distance_to_plain": distance and distance[0],
            }
        )
