"""Averages reduced gradients over hosts, without zeros, and in fewer bits where that is lossless.

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
from .reduction import DTYPES, Announcement, Exchange, Looks, Questions, Staging, digest_of

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
        self._exchange = Exchange(staging, len(names), _units(most, 8).code_bytes)
        self._names = names
        self.announced: list[Announcement] | None = None  # in the last average, if ranks exchanged codes

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
        exchange, questions, other = self._exchange, self._questions, 1 - self._own
        start = time.perf_counter()
        units = _units(shard.numel(), shard.element_size())
        message = exchange.new_codes(2)
        own_codes = exchange.codes_of(message)[other : other + 1]
        (size,), narrow_bytes, sent, narrow = units.choose(own_codes, shard, -1, questions.zeros, questions.narrow, [])
        exchange.count(hook_seconds=time.perf_counter() - start)
        codes, self.announced = exchange.announce(self._group, message, self._announcement(shard, size, participants))
        most = max(each.sent_bytes for each in self.announced)
        if not self._looks.observe(most, dense_bytes):
            return False
        codes = codes[other : other + 1]
        (received_size,) = received_sizes = units.packed_bytes(codes, -1, shard)
        received = torch.empty(0, dtype=torch.uint8, device="cpu")
        if most > 0:
            sizes = [(0, size), (size, 0)][self._own]
            expected = [(0, received_size), (received_size, 0)][self._own]
            received = exchange.send(self._group, sizes, expected, lambda to: units.pack(to, shard, own_codes, -1))
        start = time.perf_counter()
        theirs = self._staging.take("theirs", shard.nbytes).view(shard.dtype)
        units.unpack(theirs, received, codes, -1, received_sizes)
        # In the order of hosts, so that both get the same bits, including those of NaN.
        torch.add(*((shard, theirs) if other == 1 else (theirs, shard)), out=shard)
        exchange.count(
            hook_seconds=time.perf_counter() - start,
            narrow_bytes=narrow_bytes,
            units_agreed_on=len(units),
            units_sent=sent,
            units_narrow=narrow,
            buckets_packed=int(most > 0),
            buckets_skipped=int(most == 0),
        )
        return True

    def _sum_by_owner(self, shard: torch.Tensor, participants: Participants, dense_bytes: int) -> bool:
        exchange, questions, own = self._exchange, self._questions, self._own
        start = time.perf_counter()
        part = self._part_of(shard.numel())
        units = _units(part, shard.element_size())
        whole = shard
        if part * self._hosts != shard.numel():
            # Rounded up, so that all parts have the same size.
            whole = self._staging.take("whole", part * self._hosts * shard.element_size()).view(shard.dtype)
            whole[: shard.numel()] = shard
            whole[shard.numel() :] = 0
        message = exchange.new_codes(self._hosts)
        own_codes = exchange.codes_of(message)
        sizes, narrow_bytes, sent, narrow = units.choose(own_codes, whole, own, questions.zeros, questions.narrow, [])
        exchange.count(hook_seconds=time.perf_counter() - start)
        codes, self.announced = exchange.announce(
            self._group, message, self._announcement(shard, sum(sizes), participants)
        )
        # A sum is non-zero wherever a contribution is, so it takes at least as many bytes as the largest one.
        most = 2 * max(each.sent_bytes for each in self.announced)
        if not self._looks.observe(most, dense_bytes):
            return False
        received_sizes = units.packed_bytes(codes, own, shard)
        received = torch.empty(0, dtype=torch.uint8, device="cpu")
        if most > 0:
            received = exchange.send(
                self._group, sizes, received_sizes, lambda to: units.pack(to, whole, own_codes, own)
            )
        start = time.perf_counter()
        total = torch.empty(part, dtype=shard.dtype, device=shard.device)
        units.sum(total, whole, received, codes, own, received_sizes, range(self._hosts))
        whole[own * part : (own + 1) * part] = total
        exchange.count(
            hook_seconds=time.perf_counter() - start,
            narrow_bytes=narrow_bytes,
            units_agreed_on=len(units) * (self._hosts - 1),
            units_sent=sent,
            units_narrow=narrow,
            buckets_packed=int(most > 0),
            buckets_skipped=int(most == 0),
        )
        self._send_sums(units, whole, total)
        if whole is not shard:
            shard.copy_(whole[: shard.numel()])
        return True

    def _send_sums(self, units: Any, whole: torch.Tensor, total: torch.Tensor) -> None:
        """Send this rank's sum to all ranks, and write the sums of the others."""
        exchange, questions, own, hosts = self._exchange, self._questions, self._own, self._hosts
        message = exchange.new_codes(hosts)
        codes = exchange.codes_of(message)
        (size,), _, _, _ = units.choose(codes[:1], total, -1, questions.zeros, questions.narrow, [])
        message[1:] = message[0]
        received_codes, announced = exchange.announce(
            self._group, message, Announcement(0, size, frozenset(), frozenset())
        )
        sizes = [0 if host == own else size for host in range(hosts)]
        received_sizes = units.packed_bytes(received_codes, own, total)

        def pack(to: torch.Tensor) -> None:
            for begin in range(0, to.numel(), max(size, 1)):
                units.pack(to[begin : begin + size], total, codes[:1], -1)

        received = torch.empty(0, dtype=torch.uint8, device="cpu")
        if any(each.sent_bytes for each in announced):
            received = exchange.send(self._group, sizes, received_sizes, pack)
        units.unpack(whole, received, received_codes, own, received_sizes)


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
