"""Lightning Fabric hides the DDP module that it makes: `enable` serves it, and sends what `register` sends."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from trainers import (
    STEPS,
    Training,
    assert_trained_alike,
    make_model,
    make_optimizer,
    on_launched,
    weights_of,
)

import ddp_hooks


def train(rank: int, *, enabled: bool, accumulated: int = 1) -> Training:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(find_unused_parameters=True))
    fabric.launch()
    model = make_model()
    with ddp_hooks.enable("skip_unused") if enabled else nullcontext() as enabling:
        module, optimizer = fabric.setup(model, make_optimizer(model))
    for step in range(STEPS):
        last = (step + 1) % accumulated == 0
        with fabric.no_backward_sync(module, enabled=not last):
            fabric.backward(module(torch.tensor([2 * step + rank]))["loss"])
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return Training(weights_of(model), enabling.states[0].stats() if enabling is not None else None)


@on_launched
def test_trains_as_plain_ddp(rank: int) -> None:
    assert_trained_alike(rank, train(rank, enabled=True))
    plain, ours = (train(rank, enabled=enabled, accumulated=2) for enabled in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain.weights, ours.weights, strict=True))
    assert ours.statistics is not None
    assert ours.statistics.steps == STEPS // 2
