"""Fine-tuning with gradual unfreezing: a network that knows the digits 0 to 4 learns to tell 5 to 9 apart.

At first only the new head is trained; then the encoder's layers are unfrozen one after the other, from the top down. A
layer's gradient is sent from the step on in which it is unfrozen. Plain DDP has laid out its buckets for all layers: it
would send every gradient in every step, or stop with "Expected to have finished reduction in the prior iteration"
without find_unused_parameters=True. Run it with

    torchrun --nproc-per-node 2 examples/finetuning.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        self.encoder = nn.Sequential(*layers)
        self.head = nn.Linear(512, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images))


def load(digits: range) -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    chosen = (labels >= digits.start) & (labels < digits.stop)
    return torch.tensor(images[chosen] / 16, dtype=torch.float32), torch.tensor(labels[chosen] - digits.start)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    batch = torch.randint(len(images), (32,))
    optimizer.zero_grad()
    functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune with gradual unfreezing.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")

    # What would be downloaded elsewhere: a network that was trained on other digits.
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = load(range(0, 5))
    for _ in range(200):
        train_step(model, optimizer, images, labels)
    model.head = nn.Linear(512, 5)

    images, labels = load(range(5, 10))
    train_images, train_labels, test_images, test_labels = images[200:], labels[200:], images[:200], labels[:200]
    ddp = DistributedDataParallel(model)
    state = ddp_hooks.register(ddp)
    schedule = ddp_hooks.FreezeSchedule(
        ddp,
        freeze={0: "encoder"},
        unfreeze={steps // 4: "encoder.4", steps // 2: "encoder.2", 3 * steps // 4: "encoder.0"},
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())  # another batch on each rank
    for _ in range(steps):
        schedule.step()
        train_step(ddp, optimizer, train_images, train_labels)

    if dist.get_rank() == 0:
        correct = model(test_images).argmax(1) == test_labels
        print(f"accuracy on 5 to 9: {correct.float().mean():.1%}")
        print(state.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
