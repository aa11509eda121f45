"""A large embedding, for the question which module of Python's standard library a line comes from.

Words and pairs of words are hashed into a table of 100,000 rows, as in fastText. A batch touches a few hundred of them;
the gradients of all others are zeros, which plain DDP sends in every step. The hook finds the rows that some rank has
touched and sends those. The gradient stays an ordinary dense tensor, so that any optimizer will do. Run it with

    torchrun --nproc-per-node 2 examples/embedding.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from lines_of_python import MODULES, load

ROWS, FEATURES = 100_000, 64


class LineClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, FEATURES, mode="mean", padding_idx=0)
        self.head = nn.Linear(FEATURES, len(MODULES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier with a large embedding.")
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    tokens, labels = load(ROWS, length=48)
    train, test = slice(1000, None), slice(1000)
    ddp = DistributedDataParallel(LineClassifier())
    state = ddp_hooks.register(ddp)
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)

    torch.manual_seed(1 + dist.get_rank())  # another batch on each rank
    for _ in range(steps):
        batch = torch.randint(len(tokens[train]), (64,))
        optimizer.zero_grad()
        functional.cross_entropy(ddp(tokens[train][batch]), labels[train][batch]).backward()
        optimizer.step()

    if dist.get_rank() == 0:
        correct = ddp.module(tokens[test]).argmax(1) == labels[test]
        print(f"accuracy on lines from {len(MODULES)} modules: {correct.float().mean():.1%}")
        print(state.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
