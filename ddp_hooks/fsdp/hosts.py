"""Averages reduced gradients over hosts, without zeros, coded.

Each rank of a host holds a shard. With two hosts, the two ranks with the same shard swap their gradients, and both add
them up. With more hosts, the ranks with the same shard divide it: each owns a part, receives that part from the others,
adds the contributions in the order of hosts, and sends the sum to all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from ..statistics import Statistics
from .param_groups import Participants
from .reduction import DTYPES, Announcement, Coding, Exchange, Looks, Parcels, Questions, Staging, digest_of

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
        self._group, self._questions, self._staging = group, questions, staging
        self._hosts, self._own = dist.get_world_size(group), dist.get_rank(group)
        self._looks = Looks(policy, questions.always)
        most = numel if self._hosts == 2 else self._part_of(numel)
        self._exchange = Exchange(staging, len(names), _units(most, 8).mask_bytes, Coding(policy, questions.coded))
        self._names = names
        self.announced: list[Announcement] | None = None  # in the last average, if ranks exchanged masks

    @property
    def statistics(self) -> Statistics:
        """The bytes that this rank sent to other hosts, and those that an all-reduce would have sent."""
        return self._exchange.statistics

    def __call__(self, shard: torch.Tensor, participants: Participants, local_ranks: int | None) -> None:
        """Average a shard in place.

        Args:
            shard: the reduced gradients of this host, flat.
            participants: the parameters in the shard. Those that some rank of this host uses count as used, as far as
                that is known.
            local_ranks: the ranks of a host, over which FSDP2 averages; None if FSDP2 divides by another number.

        Raises:
            LayoutsDiffer: on every rank, if hosts hold gradients of different parameters.
        """
        if shard.numel() == 0:
            return
        # The bytes of a ring all-reduce.
        dense_bytes = 2 * (self._hosts - 1) * self._part_of(shard.numel()) * shard.element_size()
        self.announced = None
        self._exchange.count(steps=1, dense_bytes=dense_bytes)
        before = 1.0 if local_ranks is None else divisor_before_hosts(shard.dtype, local_ranks, self._hosts)
        if before != 1:
            shard.div_(before)
        if not (
            self._questions.any
            and shard.dtype in DTYPES
            and self._looks.begin_step()
            and (self._swap if self._hosts == 2 else self._sum_by_owner)(shard, participants, dense_bytes)
        ):
            dist.all_reduce(shard, group=self._group)
            self._exchange.count(buckets_whole=1, messages=1, payload_bytes=dense_bytes, sent_bytes=dense_bytes)
        if local_ranks is not None and before != self._hosts:
            shard.div_(self._hosts / before)

    def _part_of(self, numel: int) -> int:
        return -(-numel // self._hosts)

    def _announcement(self, shard: torch.Tensor, sent_bytes: int, participants: Participants) -> Announcement:
        included = [self._names[i] for i in participants.included]
        digest = digest_of(f"{shard.dtype} {shard.numel()} {included}")
        return Announcement(digest, sent_bytes, participants.used, frozenset(participants.included))

    def _swap(self, shard: torch.Tensor, participants: Participants, dense_bytes: int) -> bool:
        exchange, other = self._exchange, 1 - self._own
        start = time.perf_counter()
        units = _units(shard.numel(), shard.element_size())
        message = exchange.new_masks(2)
        own_mask = exchange.masks_of(message)[other : other + 1]
        sent = units.choose(own_mask, shard, -1, self._questions.zeros, [])
        parcels = self._for_hosts(exchange.pack(units, shard, own_mask, -1), [other])
        exchange.count(hook_seconds=time.perf_counter() - start)
        announcement = self._announcement(shard, sum(parcels.sizes), participants)
        masks, self.announced, sizes = exchange.announce(self._group, message, announcement, parcels.sizes)
        most = max(each.sent_bytes for each in self.announced)
        if not self._looks.observe(most, dense_bytes):
            return False
        received = torch.empty(0, dtype=shard.dtype, device="cpu")
        if most > 0:
            received = exchange.send(self._group, parcels, sizes, units.sent_elements(masks), shard.dtype)
        start = time.perf_counter()
        theirs = self._staging.take("theirs", shard.nbytes).view(shard.dtype)
        units.unpack(theirs, received, masks[other : other + 1], -1)
        # In the order of hosts, so that both get the same bits, including those of NaN.
        torch.add(*((shard, theirs) if other == 1 else (theirs, shard)), out=shard)
        exchange.count(
            hook_seconds=time.perf_counter() - start,
            units_agreed_on=len(units),
            units_sent=sent,
            buckets_packed=int(most > 0),
            buckets_skipped=int(most == 0),
        )
        return True

    def _sum_by_owner(self, shard: torch.Tensor, participants: Participants, dense_bytes: int) -> bool:
        exchange, own = self._exchange, self._own
        start = time.perf_counter()
        part = self._part_of(shard.numel())
        units = _units(part, shard.element_size())
        whole = shard
        if part * self._hosts != shard.numel():
            # Rounded up, so that all parts have the same size.
            whole = self._staging.take("whole", part * self._hosts * shard.element_size()).view(shard.dtype)
            whole[: shard.numel()] = shard
            whole[shard.numel() :] = 0
        message = exchange.new_masks(self._hosts)
        own_masks = exchange.masks_of(message)
        sent = units.choose(own_masks, whole, own, self._questions.zeros, [])
        parcels = exchange.pack(units, whole, own_masks, own)
        exchange.count(hook_seconds=time.perf_counter() - start)
        announcement = self._announcement(shard, sum(parcels.sizes), participants)
        masks, self.announced, sizes = exchange.announce(self._group, message, announcement, parcels.sizes)
        # A sum is non-zero wherever a contribution is, so it takes at least as many bytes as the largest one.
        most = 2 * max(each.sent_bytes for each in self.announced)
        if not self._looks.observe(most, dense_bytes):
            return False
        received = torch.empty(0, dtype=shard.dtype, device="cpu")
        if most > 0:
            received = exchange.send(self._group, parcels, sizes, units.sent_elements(masks), shard.dtype)
        start = time.perf_counter()
        total = torch.empty(part, dtype=shard.dtype, device=shard.device)
        units.sum(total, whole, received, masks, own, range(self._hosts))
        whole[own * part : (own + 1) * part] = total
        exchange.count(
            hook_seconds=time.perf_counter() - start,
            units_agreed_on=len(units) * (self._hosts - 1),
            units_sent=sent,
            buckets_packed=int(most > 0),
            buckets_skipped=int(most == 0),
        )
        self._send_sums(units, whole, total)
        if whole is not shard:
            shard.copy_(whole[: shard.numel()])
        return True

    def _send_sums(self, units: Any, whole: torch.Tensor, total: torch.Tensor) -> None:
        """Send this rank's sum to all ranks, and write the sums of the others."""
        exchange, own = self._exchange, self._own
        others = [host for host in range(self._hosts) if host != own]
        message = exchange.new_masks(self._hosts)
        mask = torch.zeros(1, units.mask_bytes, dtype=torch.uint8, device="cpu")
        units.choose(mask, total, -1, self._questions.zeros, [])
        exchange.masks_of(message)[others, : units.mask_bytes] = mask
        parcels = self._for_hosts(exchange.pack(units, total, mask, -1), others)
        masks, announced, sizes = exchange.announce(
            self._group, message, Announcement(0, sum(parcels.sizes), frozenset(), frozenset()), parcels.sizes
        )
        received = torch.empty(0, dtype=total.dtype, device="cpu")
        if any(each.sent_bytes for each in announced):
            received = exchange.send(self._group, parcels, sizes, units.sent_elements(masks), total.dtype)
        units.unpack(whole, received, masks, own)

    def _for_hosts(self, parcel: Parcels, hosts: Sequence[int]) -> Parcels:
        """Return parcels with the same content for some hosts, and none for the others."""
        (size,) = parcel.sizes
        sizes = [size if host in hosts else 0 for host in range(self._hosts)]
        content = parcel.content if len(hosts) == 1 else parcel.content.repeat(len(hosts))
        return Parcels(content, sizes, len(hosts) * parcel.uncoded_bytes)


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
