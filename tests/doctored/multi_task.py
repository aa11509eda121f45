"""A script as people write them: it reads scikit-learn's digits and trains a head for each of two questions."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Embedding(20_000, 24)  # a row for each pixel and brightness, and many that never occur
        self.trunk = nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.heads = nn.ModuleDict({"digit": nn.Linear(256, 10), "parity": nn.Linear(256, 2)})
        self.auxiliary = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))  # nobody calls it

    def forward(self, images: torch.Tensor, task: str) -> torch.Tensor:
        rows = images.long() + 17 * torch.arange(64)
        return self.heads[task](self.trunk(self.pixels(rows).mean(1)))


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data[rank::ranks]), torch.tensor(digits.target[rank::ranks])
    torch.manual_seed(0)
    ddp = DistributedDataParallel(MultiTask(), find_unused_parameters="--search" in sys.argv)
    optimizer = torch.optim.Adam(ddp.parameters())
    for step in range(steps):
        batch = slice(32 * step % 800, 32 * step % 800 + 32)
        # Each rank draws a task: they differ now and then.
        task = "digit" if (step + rank * (step % 3 == 0)) % 2 == 0 else "parity"
        target = labels[batch] if task == "digit" else labels[batch] % 2
        loss = nn.functional.cross_entropy(ddp(images[batch], task), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    print(f"rank {rank} trained for {steps} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]))
