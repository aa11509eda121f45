"""Ranks that share one GPU.

gloo does not mind. NCCL takes two ranks for one if they sit on the same GPU of the same host, so each is told that it
is a host of its own, and they talk through the loopback interface.
"""

from __future__ import annotations

import torch


def environment(rank: int) -> dict[str, str]:
    """Return what a rank's process needs to be told before it imports torch."""
    return {
        # Results have to be the same in two runs; cuBLAS is with a workspace of its own for each stream.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_HOSTID": f"ddp_hooks_{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def prepare() -> None:
    """Have this process compute the same in two runs, on the GPU that all ranks share."""
    torch.cuda.set_device(0)
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
