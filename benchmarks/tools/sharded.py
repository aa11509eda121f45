"""Models with FSDP2 on the pretended device, on 2 hosts of 4 ranks: how they are sharded, and what leaves a host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

HOSTS, RANKS_OF_A_HOST = 2, 4
# FSDP2, with one dimension over all ranks, and HSDP; with and without ddp_hooks.fsdp.
VARIANTS = ("fully_shard", "fully_shard+register", "hsdp", "hsdp+register", "hsdp+register(mesh)")


def plain_of(variant: str) -> str:
    """Return the same variant without ddp_hooks."""
    return variant.partition("+")[0]


def shard(model: Any, variant: str, mixed: Any) -> None:
    """Shard each layer of a model and the rest, and register; a rank.

    Args:
        model: an ``nn.Sequential`` on the pretended device.
        variant: one of ``VARIANTS``.
        mixed: the ``MixedPrecisionPolicy``.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import ddp_hooks.fsdp

    os.environ["DDP_HOOKS_HOST"] = f"host {dist.get_rank() // RANKS_OF_A_HOST}"
    sharding, _, call = variant.partition("+")
    shape = (HOSTS, RANKS_OF_A_HOST) if sharding == "hsdp" else (HOSTS * RANKS_OF_A_HOST,)
    mesh = init_device_mesh("pretend", shape, mesh_dim_names=("hosts", "local")[-len(shape) :])
    over = mesh["local"] if call == "register(mesh)" else mesh
    for module in (*model, model):
        fully_shard(module, mesh=over, mp_policy=mixed)
    if call:
        ddp_hooks.fsdp.register(model, mesh=mesh if over is not mesh else None)


def sent_in_ring(operation: str, ranks: int) -> float:
    """Return the bytes that a rank sends in a collective, as a multiple of those that it hands over."""
    of_rank = (ranks - 1) / ranks
    return {
        "ALLREDUCE": 2 * of_rank,
        "_REDUCE_SCATTER_BASE": of_rank,
        "_ALLGATHER_BASE": ranks - 1,
        "ALLTOALL_BASE": of_rank,
    }[operation]


def leaves_host(given: Mapping[tuple[str, int], float]) -> Counter[str]:
    """Return the bytes that leave a host, given those that a rank hands to collectives, by operation and ranks.

    Torch's collectives are rings that enter and leave each host once.
    """
    sent: Counter[str] = Counter()
    for (operation, ranks), size in given.items():
        if ranks == RANKS_OF_A_HOST:
            continue
        rings = RANKS_OF_A_HOST if ranks == HOSTS else 1
        share = rings * sent_in_ring(operation, ranks)
        if operation == "ALLTOALL_BASE" and rings == 1:  # every rank sends to every other host
            share = RANKS_OF_A_HOST * (HOSTS - 1) / HOSTS
        sent[operation] += size * share  # type: ignore[assignment]
    return sent
