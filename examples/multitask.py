"""Multi-task training: handwritten digits, wines and tumours share a trunk; each has an encoder and a head of its own.

In each step every rank draws a task for itself, so that ranks use different parameters, and some encoders and heads are
used by no rank. Those are not sent; what one rank alone has used reaches the others. Plain DDP with
find_unused_parameters=True sends zeros for all of them in every step. Run it with

    torchrun --nproc-per-node 2 examples/multitask.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks

WIDTH = 512
TASKS = {"digits": load_digits, "wine": load_wine, "tumours": load_breast_cancer}


class MultiTask(nn.Module):
    def __init__(self, features: dict[str, int], classes: dict[str, int]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({task: nn.Linear(features[task], WIDTH) for task in features})
        self.trunk = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.heads = nn.ModuleDict(
            {
                task: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes[task]))
                for task in classes
            }
        )

    def forward(self, task: str, samples: Tensor) -> Tensor:
        return self.heads[task](self.trunk(self.encoders[task](samples)))


def load(task: str) -> list[Tensor]:
    """Return samples to train with and to test with, and the labels of both."""
    samples, labels = TASKS[task](return_X_y=True)
    samples = torch.tensor(StandardScaler().fit_transform(samples), dtype=torch.float32)
    return train_test_split(samples, torch.tensor(labels), random_state=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train three tasks with one trunk.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    data = {task: load(task) for task in TASKS}
    features = {task: train.shape[1] for task, (train, _, _, _) in data.items()}
    classes = {task: int(labels.max()) + 1 for task, (_, _, labels, _) in data.items()}
    ddp = DistributedDataParallel(MultiTask(features, classes), find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

    torch.manual_seed(1 + dist.get_rank())  # another task and another batch on each rank
    for _ in range(steps):
        task = list(TASKS)[torch.randint(len(TASKS), ())]
        train, _, labels, _ = data[task]
        batch = torch.randint(len(train), (32,))
        optimizer.zero_grad()
        functional.cross_entropy(ddp(task, train[batch]), labels[batch]).backward()
        optimizer.step()

    if dist.get_rank() == 0:
        for task, (_, test, _, labels) in data.items():
            correct = ddp.module(task, test).argmax(1) == labels
            print(f"accuracy on {task}: {correct.float().mean():.1%}")
        print(state.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
