"""Local SGD: torch's schedule with our averaging, and that it learns."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from spawn import on_ranks, run_ranks
from torch import nn
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer

import ddp_hooks

WORLD_SIZES = [2, 3]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def step(model, optimizer, rank, i):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * i + rank)
    model(torch.randn(4, 4, generator=generator)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("groups", [False, True])
@on_ranks()
def test_same_schedule_and_means_as_torch(rank, groups):
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    theirs = averagers.PeriodicModelAverager(period=3, warmup_steps=2)
    ours = ddp_hooks.sync.PeriodicModelAverager(period=3, warmup_steps=2)
    assert isinstance(ours, averagers.PeriodicModelAverager)
    for i in range(9):
        for model, optimizer, averager in zip(models, optimizers, (theirs, ours), strict=True):
            step(model, optimizer, rank, i)
            averager.average_parameters(optimizer.param_groups if groups else model.parameters())
        assert ours.step == theirs.step == i + 1
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(a, b)
        in_step = ddp_hooks.sync.verify_replicas(models[1], gradients=False).in_step
        assert in_step == (i in (2, 5, 8))


@on_ranks(2)
def test_a_gradient_on_one_rank_counts_on_all(rank):
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank)
    # The first layer has a gradient on rank 0 only, the last on none.
    if rank == 0:
        model[0](torch.ones(1, 4)).sum().backward()
    pointers = [p.data_ptr() for p in model.parameters()]
    ddp_hooks.sync.PeriodicModelAverager(period=2).average_parameters(model.parameters())
    assert all(p.eq(0.5).all() for p in model[0].parameters())
    assert all(p.eq(rank).all() for p in model[2].parameters())
    assert pointers == [p.data_ptr() for p in model.parameters()]


@on_ranks(2)
def test_refusals(rank):
    with pytest.raises(ValueError, match="period"):
        ddp_hooks.sync.PeriodicModelAverager(period=0)
    averager = ddp_hooks.sync.PeriodicModelAverager(period=2)
    parameters = list(make_model().parameters())
    with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match="missing on rank 1"):
        averager.average_parameters(parameters[: 3 if rank else 4])
    used_up = iter(parameters[:0])
    for empty, match in (
        ([], "an empty list; pass"),
        (used_up, "an empty list_iterator, which may have been"),
    ):
        with pytest.raises(ValueError, match=match):
            averager.average_parameters(empty)
    if rank == 0:
        with pytest.raises(TypeError, match="received int at position 1"):
            averager.average_parameters([parameters[0], 3])
    else:
        with pytest.raises(ddp_hooks.errors.RanksDisagreeError, match="rank 0 refused: TypeError"):
            averager.average_parameters(parameters)


@on_ranks(2)
def test_inside_torchs_post_local_sgd_optimizer(rank):
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        averager = ddp_hooks.sync.PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(optim=torch.optim.SGD(model.parameters(), lr=0.01), averager=averager)
    for i in range(4):
        step(model, optimizer, rank, i)
    assert ddp_hooks.sync.verify_replicas(model, gradients=False).in_step
    state = copy.deepcopy(optimizer.state_dict())
    averager.step = 0
    optimizer.load_state_dict(state)
    assert averager.step == 4


def accuracy(model, images, labels):
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def _digits(rank, period):
    world_size = dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]
    # Each rank sees its own classes only, in different shares: alone, it cannot learn the others.
    mine = train[(labels[train] % world_size) == rank]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    alone = copy.deepcopy(model)
    results = []
    for trained, averager in (
        (model, ddp_hooks.sync.PeriodicModelAverager(period=period, warmup_steps=period)),
        (alone, None),
    ):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(50 * period):
            batch = mine[torch.randint(len(mine), (32,), generator=generator)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(images[batch]), labels[batch]).backward()
            optimizer.step()
            if averager is not None:
                averager.average_parameters(trained.parameters())
        if averager is not None:
            ddp_hooks.sync.average_parameters(trained)
        results.append(accuracy(trained, images[held_out], labels[held_out]))
    assert ddp_hooks.sync.verify_replicas(model, gradients=False).in_step
    return results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_local_sgd_learns_what_no_rank_sees_alone(world_size):
    together, alone = run_ranks(world_size, _digits, 8)[0]
    assert alone < 0.7
    assert together > 0.85
