"""Who contributes to what: the workloads multitask and layerdrop on any number of ranks, without a process or a weight.

Models are built on the meta device, so that hundreds of heads take no memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from scaling import transports

# What DistributedDataParallel cuts buckets at: what comes first in the module, and the rest.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
ELEMENT_BYTES = 4
HEAD_PARAMETERS = 4  # two linear layers


@dataclass(frozen=True, slots=True)
class Case:
    """One step: what lies in DDP's buckets, in the order in which they leave, and who contributes to each parameter."""

    sizes: tuple[int, ...]  # bytes, by parameter
    contributors: tuple[int, ...]

    @property
    def buckets(self) -> list[list[tuple[int, int]]]:
        return fill_buckets(list(enumerate(self.sizes)))

    @property
    def buckets_of_used(self) -> list[list[tuple[int, int]]]:
        """The oracle's, which holds nothing else."""
        return fill_buckets([(i, size) for i, size in enumerate(self.sizes) if self.contributors[i]])


def fill_buckets(parameters: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut (parameter, bytes), in the module's order, into buckets as DDP does for one dtype; the last leaves first."""
    buckets: list[list[tuple[int, int]]] = [[]]
    limit = FIRST_BUCKET_BYTES
    for parameter, size in parameters:
        buckets[-1].append((parameter, size))
        if sum(size for _, size in buckets[-1]) >= limit:
            buckets.append([])
            limit = BUCKET_BYTES
    return [bucket for bucket in reversed(buckets) if bucket]


def multitask(ranks: int, pattern: int, heads: int | None = None, size: str = "default") -> Case:
    """The workload's step with so many heads; rank r trains head 3 pattern + r, so several ranks share few heads."""
    names, sizes = _parameters("multitask", size)
    trunk = [bytes_ for name, bytes_ in zip(names, sizes, strict=True) if name.startswith("trunk")]
    head = [bytes_ for name, bytes_ in zip(names, sizes, strict=True) if name.startswith("heads.0.")]
    heads = heads or _task_heads(size)
    who = [0] * heads
    for rank in range(ranks):
        who[(3 * pattern + rank) % heads] |= 1 << rank
    everybody = (1 << ranks) - 1
    contributors = (*[everybody] * len(trunk), *(who[i] for i in range(heads) for _ in head))
    return Case((*trunk, *head * heads), contributors)


def layerdrop(ranks: int, pattern: int, size: str = "default") -> Case:
    """The workload's step: each rank leaves out each block with probability one half, from the workload's seeds."""
    from tools import workloads

    names, sizes = _parameters("layerdrop", size)
    layers = workloads.SIZES[size].layers
    used = [(1 << ranks) - 1] * layers
    for rank in range(ranks):
        choice = random.Random(97 * pattern + rank)
        for layer in range(layers):
            if choice.random() < workloads.LayerDrop.drop_probability:
                used[layer] &= ~(1 << rank)
    everybody = (1 << ranks) - 1
    blocks = [int(name.split(".")[1]) if name.startswith("blocks.") else None for name in names]
    return Case(tuple(sizes), tuple(everybody if block is None else used[block] for block in blocks))


def small_heads(ranks: int, pattern: int, size: str = "default") -> Case:
    """A head a rank, and all heads together as large as the workload's eight: the more ranks, the smaller each."""
    case = multitask(ranks, pattern, ranks, size)
    trunk = len(case.sizes) - HEAD_PARAMETERS * ranks
    elements = (bytes_ * _task_heads(size) // ranks // ELEMENT_BYTES for bytes_ in case.sizes[trunk:])
    return replace(case, sizes=(*case.sizes[:trunk], *(max(1, n) * ELEMENT_BYTES for n in elements)))


CASES: dict[str, Callable[[int, int], Case]] = {
    "multitask": multitask,
    "multitask, a head a rank": lambda ranks, pattern: multitask(ranks, pattern, max(ranks, _task_heads("default"))),
    "multitask, small heads": small_heads,
    "layerdrop": layerdrop,
}


def settings_of(policy: str, segment_bytes: int | None = None) -> transports.Settings:
    """How a preset of ddp_hooks sends."""
    import ddp_hooks

    preset = ddp_hooks.policies.PRESETS[policy].tuning
    return transports.Settings(
        preset.in_place_bytes,
        preset.pack_bytes,
        segment_bytes or preset.segment_bytes,
        preset.min_direct_bytes,
        owners=preset.owners,
        min_owner_saving=preset.min_owner_saving,
    )


@cache
def _parameters(workload: str, size: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    import torch

    from tools import workloads

    with torch.device("meta"):
        named = list(workloads.make(workload, size).build().named_parameters())
    return tuple(name for name, _ in named), tuple(p.numel() * p.element_size() for _, p in named)


def _task_heads(size: str) -> int:
    from tools import workloads

    return workloads.SIZES[size].task_heads
