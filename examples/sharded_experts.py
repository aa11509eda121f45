"""Experts under FSDP2, for the question which module of Python's standard library a line comes from.

In each step every rank draws two of eight experts for its batch, so ranks use different ones; at the end all of them
answer together. Plain FSDP2 sends zeros for the experts that were not drawn. With one line they are not sent, nor are
rows of the table that nobody looked up. What is sent travels in 16 bits, because parameters are bfloat16 in forward and
backward. Run it with

    torchrun --nproc-per-node 2 examples/sharded_experts.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import ddp_hooks.fsdp
from lines_of_python import MODULES, load

ROWS, FEATURES, EXPERTS = 20_000, 64, 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 4 * FEATURES), nn.GELU(), nn.Linear(4 * FEATURES, FEATURES))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        return x + torch.stack([self.experts[i](x) for i in chosen]).mean(0)


class LineClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, FEATURES, mode="mean", padding_idx=0)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(FEATURES, len(MODULES))

    def forward(self, tokens: Tensor, chosen: list[int]) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, chosen)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier with experts.")
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    tokens, labels = load(ROWS, length=48)
    train, test = slice(1000, None), slice(1000)
    model = LineClassifier()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    model.set_reduce_scatter_unused_params(True)  # ranks use different experts
    state = ddp_hooks.fsdp.register(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    torch.manual_seed(1 + dist.get_rank())  # another batch on each rank
    for _ in range(steps):
        batch = torch.randint(len(tokens[train]), (64,))
        chosen = torch.randperm(EXPERTS)[:2].tolist()
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens[train][batch], chosen).float(), labels[train][batch]).backward()
        optimizer.step()

    with torch.no_grad():  # on all ranks: each holds a part of the parameters
        correct = model(tokens[test], list(range(EXPERTS))).argmax(1) == labels[test]
    if dist.get_rank() == 0:
        print(f"accuracy on lines from {len(MODULES)} modules: {correct.float().mean():.1%}")
        print(state.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
