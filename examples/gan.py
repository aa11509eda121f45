"""A GAN in one module: a generator learns to write digits, and a discriminator to tell them from real ones.

Each half of a step trains one of the two and freezes the other with `requires_grad_(False)`, as GANs do. What is frozen
is not sent. Plain DDP needs two wrappers for this, or find_unused_parameters=True, with which it sends both gradients
in both halves. Run it with

    torchrun --nproc-per-node 2 examples/gan.py
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

NOISE = 32


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 64),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
        )

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        made = self.generator(noise)
        return self.discriminator(made if real is None else torch.cat([real, made]))


def frechet_distance(some: Tensor, others: Tensor) -> Tensor:
    """Compare means and covariances of two sets of images; 0 if they are the same."""
    means = (some.mean(0) - others.mean(0)).square().sum()
    a, b = some.T.cov().double(), others.T.cov().double()
    return means + a.trace() + b.trace() - 2 * torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN that is one module.")
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    gan = GAN()
    ddp = DistributedDataParallel(gan)
    state = ddp_hooks.register(ddp)
    teach = torch.optim.Adam(gan.discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    learn = torch.optim.Adam(gan.generator.parameters(), lr=5e-4, betas=(0.5, 0.999))

    torch.manual_seed(1 + dist.get_rank())  # other images and other noise on each rank
    is_real = torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])
    for _ in range(steps):
        gan.generator.requires_grad_(False)
        gan.discriminator.requires_grad_(True)
        verdicts = ddp(torch.randn(64, NOISE), images[torch.randint(len(images), (64,))])
        teach.zero_grad()
        functional.binary_cross_entropy_with_logits(verdicts, is_real).backward()
        teach.step()

        gan.generator.requires_grad_(True)
        gan.discriminator.requires_grad_(False)
        verdicts = ddp(torch.randn(64, NOISE))
        learn.zero_grad()
        functional.binary_cross_entropy_with_logits(verdicts, torch.ones(64, 1)).backward()
        learn.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            made = gan.generator(torch.randn(1000, NOISE))
        noise = torch.rand(1000, 64)
        print(
            f"Frechet distance to real digits: {frechet_distance(made, images):.2f} "
            f"(of noise: {frechet_distance(noise, images):.2f})"
        )
        print(state.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
