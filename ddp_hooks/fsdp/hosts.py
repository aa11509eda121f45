"""Averages reduced gradients over hosts: on the CPU without zeros, coded.

Each rank of a host holds a shard. With two hosts, the two ranks with the same shard swap their gradients, and both add
them up. With more hosts, the ranks with the same shard divide it: each owns a part, receives that part from the others,
adds the contributions in the order of hosts, and sends the sum to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from ..statistics import Statistics
from .exchange import DTYPES, Announcement, Exchange, Questions, Staging, digest_of
from .param_groups import Participants

_C = _extension.load()

# A shard's parts do not end where parameters end, so their units are not rows. Bytes.
_UNIT_BYTES = 1024


class AverageOverHosts:
    """The averages of one group of parameters.

    Args:
        group: a process group with one rank of each host.
        names: the names of the parameters.
        numel: the number of elements of the largest shard.
        policy: the policy.
        questions: what the policy asks of gradients.
        staging: memory for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Sequence[str],
        numel: int,
        policy: Policy,
        questions: Questions,
        staging: Staging,
    ) -> None:
        self._group, self._names, self._staging = group, names, staging
        self._hosts = group.size()
        most = _units(numel if self._hosts == 2 else self._part_of(numel), 8).mask_bytes
        self._exchange = Exchange(len(names), most, policy, questions, staging)

    @property
    def statistics(self) -> Statistics:
        """The bytes that this rank sent to other hosts, and those that an all-reduce would have sent."""
        return self._exchange.statistics

    @property
    def announced(self) -> list[Announcement] | None:
        """The announcements of the last average, if ranks exchanged masks."""
        return self._exchange.announced

    def __call__(
        self, shard: torch.Tensor, participants: Participants, local_ranks: int | None, sums_alone: bool
    ) -> None:
        """Average a shard in place.

        Args:
            shard: the reduced gradients of this host, flat.
            participants: the parameters in the shard. Those that some rank of this host uses count as used, as far as
                that is known.
            local_ranks: the ranks of a host, over which FSDP2 averages; None if FSDP2 divides by another number.
            sums_alone: collectives have to add up, and not average.

        Raises:
            LayoutsDiffer: on every rank, if hosts hold gradients of different parameters.
        """
        if shard.numel() == 0:
            return
        # The bytes of a ring all-reduce.
        dense_bytes = 2 * (self._hosts - 1) * self._part_of(shard.numel()) * shard.element_size()
        before = 1.0 if local_ranks is None else divisor_before_hosts(shard.dtype, local_ranks, self._hosts)
        if before != 1:
            shard.div_(before)
        if not shard.is_cpu:
            # It belongs to the stream of reduce-scatters, on which FSDP2 may let go of it while this stream uses it.
            shard.record_stream(torch.accelerator.current_stream())
        divisor = 1.0 if local_ranks is None else self._hosts / before
        is_served = shard.is_cpu and shard.dtype in DTYPES
        if not (self._exchange.begin(dense_bytes, is_served) and self._sum(shard, participants, dense_bytes)):
            op = dist.ReduceOp.SUM
            # As FSDP2 does: NCCL divides before it adds up, and then narrower numbers would lose their last bits.
            if divisor == self._hosts and shard.dtype in (torch.float32, torch.bfloat16) and not sums_alone:
                op, divisor = dist.ReduceOp.AVG, 1.0
            dist.all_reduce(shard, op, self._group)
            self._exchange.count(buckets_whole=1, messages=1, payload_bytes=dense_bytes, sent_bytes=dense_bytes)
        if divisor != 1:
            shard.div_(divisor)

    def _part_of(self, numel: int) -> int:
        return -(-numel // self._hosts)

    def _sum(self, shard: torch.Tensor, participants: Participants, dense_bytes: int) -> bool:
        included = [self._names[i] for i in participants.included]
        digest = digest_of(f"{shard.dtype} {shard.numel()} {included}")
        own = Announcement(digest, participants.used, frozenset(participants.included))
        exchange, group, order, numel = self._exchange, self._group, range(self._hosts), shard.numel()
        if self._hosts == 2:
            return exchange.sum(group, shard, shard, _units(numel, shard.element_size()), own, order, dense_bytes)
        part = self._part_of(numel)
        units = _units(part, shard.element_size())
        whole = shard
        if part * self._hosts != numel:
            # Rounded up, so that all parts have the same size.
            whole = self._staging.take("whole", part * self._hosts * shard.element_size()).view(shard.dtype)
            whole[:numel] = shard
            whole[numel:] = 0
        total = torch.empty(part, dtype=shard.dtype, device=shard.device)
        # A sum is non-zero wherever a contribution is, so it takes at least as many bytes as the largest one.
        if not exchange.sum(group, total, whole, units, own, order, dense_bytes, times=2):
            return False
        exchange.gather(group, whole, total, units, own)
        if whole is not shard:
            shard.copy_(whole[:numel])
        return True


def divisor_before_hosts(dtype: torch.dtype, local_ranks: int, hosts: int) -> float:
    """Return the divisor of a shard before it is summed over hosts; the rest of the division follows afterwards.

    In float16, a sum may overflow, and a gradient that is divided too early may underflow. So FSDP2 divides by about
    the square root of the number of ranks before the sum, and by the rest afterwards. It has done so for the ranks of a
    host.
    """
    if dtype in (torch.float32, torch.bfloat16):
        return 1.0
    return _power_below_root(local_ranks * hosts) / _power_below_root(local_ranks)


def _power_below_root(ranks: int) -> int:
    """Return the power of two by which FSDP2 first divides the gradients of a number of ranks."""
    power = 1
    while ranks % power == 0 and power * power < ranks:
        power *= 2
    return power


def _units(numel: int, element_bytes: int) -> Any:
    return _C.ShardUnits([(max(numel, 1), _UNIT_BYTES // element_bytes)])
