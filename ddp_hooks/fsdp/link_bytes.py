"""Counts the bytes of gradients that leave a host in a step, for each way in which FSDP2 can reduce them on a device.

Torch's reductions are those of a ring that enters and leaves each host once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

import torch
import torch.distributed as dist

from .param_groups import ParamGroup


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """The bytes of gradients that this rank's host sends to others in a step.

    Attributes:
        plain: sent by FSDP2.
        served: sent with ``ddp_hooks.fsdp.register``.
        rounded: sent by FSDP2 with ``reduce_dtype=torch.bfloat16``.
        served_rounded: sent with both.
    """

    plain: int = 0
    served: int = 0
    rounded: int = 0
    served_rounded: int = 0

    def __add__(self, other: LinkBytes) -> LinkBytes:
        """Return the sums."""
        return LinkBytes(*map(add, astuple(self), astuple(other)))


def count_link_bytes(groups: Sequence[ParamGroup], hosts: Sequence[Sequence[int]]) -> LinkBytes:
    """Count for all gradients that are not frozen.

    Args:
        groups: the groups of parameters.
        hosts: the ranks of each host, in the default process group.
    """
    total = LinkBytes()
    for group in groups:
        part = sum(column.length for i, column in enumerate(group.columns()) if not group.is_frozen(i))
        element_bytes = group.reduced_dtype.itemsize
        rounded_bytes = min(element_bytes, torch.bfloat16.itemsize)
        if (shards := group.process_group) is not None:
            spread = _Spread.of(shards, hosts)
            if group.divides_by_itself:
                total += _count_torchs(spread.ring(part), element_bytes, rounded_bytes)
            else:
                total += _count_reduce_scatter(spread, part, element_bytes, rounded_bytes, group.widens)
        if (replicas := group.replicas) is not None:
            spread = _Spread.of(replicas, hosts)
            # Twice what a reduce-scatter sends, of the whole shard.
            total += _count_torchs(2 * spread.ring(part / spread.ranks), element_bytes, rounded_bytes)
    return total


@dataclass(frozen=True, slots=True)
class _Spread:
    """How the ranks of a process group are spread over hosts.

    Attributes:
        ranks: the ranks of the group.
        hosts: the hosts that they are on.
        ranks_of_host: the ranks on each of these hosts; None if these numbers differ.
        groups_of_host: how many such groups this host has.
    """

    ranks: int
    hosts: int
    ranks_of_host: int | None
    groups_of_host: float

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, hosts: Sequence[Sequence[int]]) -> _Spread:
        members = dist.get_process_group_ranks(process_group)
        shared = [len(some) for host in hosts if (some := {*members} & {*host})]
        own_host = next(host for host in hosts if dist.get_rank() in host)
        groups_of_host = len(own_host) / len({*members} & {*own_host})
        return cls(len(members), len(shared), shared[0] if len({*shared}) == 1 else None, groups_of_host)

    def ring(self, part: float) -> float:
        """Return the elements that leave a host if a ring reduces a part for each rank."""
        return self.groups_of_host * (self.ranks - 1) * part if self.hosts > 1 else 0.0


def _count_torchs(sent: float, element_bytes: int, rounded_bytes: int) -> LinkBytes:
    """Count what torch reduces, also with ``register``."""
    plain, rounded = round(sent * element_bytes), round(sent * rounded_bytes)
    return LinkBytes(plain, plain, rounded, rounded)


def _count_reduce_scatter(
    spread: _Spread, part: int, element_bytes: int, rounded_bytes: int, widens: bool
) -> LinkBytes:
    plain = spread.ring(part)
    served, served_bytes = plain, element_bytes
    if spread.ranks_of_host == 1 and widens:
        served_bytes = torch.bfloat16.itemsize
    elif spread.ranks_of_host is not None and spread.ranks_of_host > 1:
        served = spread.groups_of_host * spread.ranks_of_host * (spread.hosts - 1) * part
    return LinkBytes(
        round(plain * element_bytes),
        round(served * served_bytes),
        round(plain * rounded_bytes),
        round(served * rounded_bytes),
    )
