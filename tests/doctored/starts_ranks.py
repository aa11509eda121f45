"""Starts its two ranks itself, in one of the ways in which scripts do."""

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


class Net(nn.Module):
    """One layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x)  # type: ignore[no-any-return]


def train(rank: int, port: int, steps: int, how: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model: nn.Module = Net()
    if how == "fsdp2":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
        if how == "raises" and step == 2:
            raise ValueError("on purpose")
    dist.destroy_process_group()


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("steps", type=int)
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    port = args.port or find_port()
    arguments = (port, args.steps, args.how)
    if args.how == "fork":
        processes = [
            multiprocessing.get_context("fork").Process(target=train, args=(r, *arguments)) for r in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    elif args.how == "again":
        # As Lightning does.
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        if rank == 0:
            command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:], "--port", str(port)]
            subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": "1"})
        train(rank, *arguments)
    elif args.how == "program":
        subprocess.run(["true"], check=True)
    elif args.how != "nothing":
        mp.spawn(train, args=arguments, nprocs=RANKS)
    print("came to its end")


if __name__ == "__main__":
    main()
