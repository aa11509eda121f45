"""What the steps of a workload use, of parameters and of their rows: counted the slow way, from the gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from tools.workload import Workload


@dataclass(frozen=True, slots=True)
class Usage:
    """What one step pattern uses on all ranks together."""

    # The parameters that receive a non-zero gradient on some rank; and whether they do on all ranks alike.
    used: frozenset[str]
    is_alike: bool
    # Of each used parameter the bytes of the rows in which some rank has a non-zero; a vector is one row.
    row_bytes: Mapping[str, int]
    # The least that could cross between hosts of those rows, without masks and headers; bytes of a host, in the mean.
    # What m of n hosts contribute takes m - 1 transfers to be added up, and n - 1 for everybody to know the sum.
    least_bytes: float


def find_usage(workload: Workload, master: nn.Module, world_size: int, ranks_per_host: int = 1) -> list[Usage]:
    """By pattern, what is used; neighbouring ranks share a host.

    Ranks are simulated one after another here, so that every rank finds the same without exchanging anything.
    """
    model = copy.deepcopy(master)
    workload.after_wrapping(model)
    found = []
    for pattern in range(workload.patterns):
        by_rank = []
        rows: dict[str, Tensor] = {}  # by how many hosts each is used
        on_host: dict[str, Tensor] = {}  # used on this host
        for rank in range(world_size):
            model.zero_grad(set_to_none=True)
            workload.backward(model, pattern, rank)
            mine = {name: rows_with_nonzero(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            mine = {name: mask for name, mask in mine.items() if bool(mask.any())}
            by_rank.append(frozenset(mine))
            for name, mask in mine.items():
                on_host[name] = on_host[name] | mask if name in on_host else mask
            if (rank + 1) % ranks_per_host == 0:
                for name, mask in on_host.items():
                    rows[name] = rows[name] + mask if name in rows else mask.long()
                on_host.clear()
        sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
        row_bytes = {name: sizes[name] // counts.numel() * int((counts > 0).sum()) for name, counts in rows.items()}
        hosts = world_size // ranks_per_host
        transfers = {name: (counts[counts > 0] + (hosts - 2)).sum() for name, counts in rows.items()}
        least = sum(sizes[name] // counts.numel() * int(transfers[name]) for name, counts in rows.items()) / hosts
        found.append(Usage(frozenset(rows), len(set(by_rank)) == 1, row_bytes, least))
    return found


def rows_with_nonzero(gradient: Tensor) -> Tensor:
    """Which slices along the first dimension hold anything but zeros, NaN included; a vector is one row."""
    rows = gradient.flatten(1) if gradient.dim() > 1 else gradient.reshape(1, -1)
    return rows.ne(0).any(1)
