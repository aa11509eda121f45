"""What every trainer is made to train, and the same training by hand with DDP, which all of them have to equal.

An item of the data set is a number; it seeds what a rank computes with it. Ranks take turns, so in step s rank r has
item 2 s + r in every trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from spawn import on_ranks, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import ddp_hooks

STEPS = 6
WIDTH = 32


def environment(rank: int) -> dict[str, str]:
    """Set what torchrun sets; that is where trainers look."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "tests",
    }


def run_launched(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(rank, *args)`` on two ranks that look as if torchrun had started them."""
    return run_ranks(2, function, *args, environment=environment)


on_launched = on_ranks(2, environment=environment)


class Items(Dataset[dict[str, int]]):
    def __init__(self, steps: int = STEPS) -> None:
        self.items = range(2 * steps)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"item": self.items[index]}


class Branching(nn.Module):
    """Takes one of three branches, which depends on the item."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, item: Tensor) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(int(item))
        branch = self.branches[int(torch.randint(3, (), generator=generator))]
        samples = torch.randn(4, WIDTH, generator=generator).to(self.head.weight.device)
        return {"loss": self.head(torch.relu(branch(torch.relu(self.backbone(samples))))).square().mean()}


def make_model() -> Branching:
    torch.manual_seed(0)
    return Branching()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass
class Training:
    """What a training left behind on this rank; the statistics are None without the hook."""

    weights: list[Tensor]
    statistics: ddp_hooks.statistics.Statistics | None


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_by_hand(rank: int, policy: str | None, steps: int = STEPS) -> Training:
    model = make_model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = None if policy is None else ddp_hooks.register(ddp, policy)
    optimizer = make_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.tensor([2 * step + rank]))["loss"].backward()
        optimizer.step()
    return Training(weights_of(model), None if state is None else state.stats())


def sent(statistics: ddp_hooks.statistics.Statistics | None) -> tuple[int, int, int, int]:
    """Return steps and dense, payload and mask bytes."""
    assert statistics is not None
    return statistics.steps, statistics.dense_bytes, statistics.payload_bytes, statistics.mask_bytes


def assert_trained_alike(rank: int, ours: Training) -> None:
    """Assert plain DDP's weights, bit by bit, and the bytes that :func:`ddp_hooks.register` sends."""
    plain, registered = train_by_hand(rank, None), train_by_hand(rank, "skip_unused")
    for index, (a, b) in enumerate(zip(ours.weights, plain.weights, strict=True)):
        assert torch.equal(a, b), f"weight {index} differs by up to {(a - b).abs().max()}"
    assert sent(ours.statistics) == sent(registered.statistics)
    assert ours.statistics is not None
    assert 0.2 < ours.statistics.saved_fraction < 0.8


def differ_between_ranks(weights: list[Tensor]) -> bool:
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    return len(set(digests)) > 1
