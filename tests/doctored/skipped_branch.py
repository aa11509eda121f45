"""A script that hangs: one rank skips a branch, and meets the others at a barrier while they are in backward still."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 16)
        self.branch = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, take_branch: bool) -> torch.Tensor:
        x = self.trunk(x)
        return self.branch(x) if take_branch else x


def main() -> None:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(Optional())
    control = dist.new_group(backend="gloo")
    for step in range(10):
        # As where a batch holds none of the samples that the branch is for.
        ddp(torch.randn(4, 16), take_branch=step < 3 or dist.get_rank() == 0).sum().backward()
        dist.barrier(control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
