"""FSDP2 on two ranks, which go apart at the fourth step in the way that is asked for."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

BATCHES = 8


class Block(nn.Module):
    """Two experts, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + self.experts[expert](x)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, expert: int, leaves_out: int) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != leaves_out:
                x = block(x, expert)
        return self.head(x)  # type: ignore[no-any-return]


def main() -> None:
    how = sys.argv[1]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if how != "experts":
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    for batch in range(BATCHES):
        is_apart = batch == 3 and rank == 1
        if how == "uneven" and is_apart:
            break
        if how == "raises" and is_apart:
            raise ValueError("a bad batch")
        expert = 1 if how == "experts" and is_apart else 0
        leaves_out = 1 if how == "layers" and is_apart else -1
        loss = model(torch.randn(4, 16), expert, leaves_out).sum()
        if how == "caught" and is_apart:
            loss.register_hook(_fail)
        try:
            loss.backward()
        except RuntimeError:
            print("skipped a bad batch")
        model.zero_grad()
    dist.destroy_process_group()


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


if __name__ == "__main__":
    main()
