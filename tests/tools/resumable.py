"""A training that torchrun may start again: rank 1 may die once, and the next start goes on from the checkpoint.

torchrun --max-restarts 1 ... tests/tools/resumable.py --folder FOLDER --steps 8 --die-at 5 --registration native
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, batch: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.tanh(self.trunk(batch)))


def train(folder: Path, registration: str, steps: int, die_at: int | None = None) -> int:
    """Train up to a step, from the folder's checkpoint if there is one; return the step that it began with."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = None
    if registration == "native":
        state = ddp_hooks.register(ddp, "auto")
    elif registration == "python":
        state = ddp_hooks.SkipUnusedState(ddp, "auto")
        ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    first = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if state is not None:
            state.load_state_dict(saved["state"])
        first = saved["step"]
    for step in range(first, steps):
        if step == die_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ddp(torch.randn(4, 8, generator=generator), (step + rank) % 4).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 2 == 1:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            if state is not None:
                saved["state"] = state.state_dict()
            torch.save(saved, checkpoint.with_suffix(".partial"))
            checkpoint.with_suffix(".partial").replace(checkpoint)
        # Nobody dies before the checkpoint is there.
        dist.barrier()
    if rank == 0:
        counted = None if state is None else state.stats().steps
        torch.save({"model": model.state_dict(), "steps": counted}, folder / "final.pt")
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint and the final weights")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--die-at", type=int, help="the step in which rank 1 kills itself, once")
    parser.add_argument("--registration", choices=["plain", "native", "python"], required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = train(options.folder, options.registration, options.steps, options.die_at)
    print(f"rank {dist.get_rank()} began with step {first}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
