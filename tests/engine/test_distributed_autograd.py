"""Backward passes of distributed autograd (RPC), which keeps gradients in a context, between ordinary passes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from spawn import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks


class OneOrBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.head(self.first(x) + self.second(x) if both else self.first(x))


def gradients(rank: int, hooked: bool) -> list[list[torch.Tensor | None]]:
    """Steps that leave `second` out, and between them steps in a context that use it."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(OneOrBoth(), find_unused_parameters=True)
    if hooked:
        ddp_hooks.register(ddp, "skip_unused")
    steps = []
    for step in range(6):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(5, 4)
        ddp.zero_grad()
        if step % 2 == 0:
            ddp(x, False).square().mean().backward()
            steps.append([None if p.grad is None else p.grad.clone() for p in ddp.parameters()])
            continue
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [ddp(x, True).square().mean()])
            received = dist_autograd.get_gradients(context)
            steps.append([received[p].clone() for p in ddp.parameters()])
            assert all(p.grad is None for p in ddp.parameters())
    return steps


def contexts_between_ordinary_steps(rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"rank_{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    try:
        for expected, received in zip(gradients(rank, False), gradients(rank, True), strict=True):
            for plain, ours in zip(expected, received, strict=True):
                assert (plain is None) == (ours is None)
                if plain is not None and ours is not None:
                    assert torch.equal(plain, ours)
    finally:
        rpc.shutdown()


def on_loopback(rank: int) -> dict[str, str]:
    return {"TP_SOCKET_IFNAME": "lo"}


def test_contexts_between_ordinary_steps(tmp_path: os.PathLike[str]) -> None:
    # An environment of its own gives it processes of its own, which RPC does not leave as they were.
    run_ranks(2, contexts_between_ordinary_steps, f"{os.fspath(tmp_path)}/rpc", environment=on_loopback)
