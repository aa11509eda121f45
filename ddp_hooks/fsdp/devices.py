"""Reduces gradients on a device: bfloat16 numbers in 16 bits, within hosts first, and without zeros if that pays.

With ``param_dtype=torch.bfloat16`` and ``reduce_dtype=torch.float32``, autograd's gradients are bfloat16. FSDP2 then
copies them into memory of that type, each rank sends each owner its part, and the owner adds up in 32 bits. This reads
no gradient to find out, and takes one launch more than torch's reduce-scatter. Torch reduces gradients that have more
bits, such as those that were accumulated over several passes.

Ranks may differ in whether they have accumulated gradients, for example if they left out different parameters in a pass
without reduction. But all of them have to start the same collectives, so they agree on the host first.

In some steps, ranks look for zeros, as on the CPU; on several hosts, in the sums of a host. Masks travel over the host,
which waits for them, and before that for the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from ..policies import Policy
from ..serving.control_groups import SmallGroup
from .exchange import DTYPES, LayoutsDiffer, Questions, Staging
from .param_groups import ParamGroup, Participants
from .reduction import ReduceScatter
from .routes import Route

NARROW, WIDE = torch.bfloat16, torch.float32


class DeviceReduceScatter(ReduceScatter):
    """The reduce-scatters of one group of parameters on a device."""

    def __init__(self, group: ParamGroup, route: Route, policy: Policy, staging: Staging) -> None:
        super().__init__(group.columns(), group.names, policy, Questions.on_device(policy), staging, None)
        self._group, self._route = group, route
        self._wide = route.wide if group.widens else None
        # The ranks that look for zeros together, in the order of their group, by their places in FSDP2's.
        self._members: list[int] = []
        if (everyone := group.process_group) is not None:
            together = everyone if route.hosts is None else route.hosts.between
            ranks = dist.get_process_group_ranks(together)
            self._members = [dist.get_group_rank(everyone, rank) for rank in ranks]
        self._begun: Participants | None = None

    def dtype_of_memory(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the memory that FSDP2 asks for: in each reduction an input's, then an output's."""
        participants = self._group.participants
        if participants is None or participants is self._begun:
            return dtype
        self._begun = participants
        if self._wide is None or dtype != WIDE or self._group.divides_by_itself:
            return dtype
        return WIDE if self._wide.anywhere(self._group, participants.wide) else NARROW

    def __call__(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        participants: Participants,
    ) -> bool:
        """Reduce what is narrow, what adds up in hosts, and what is sent without zeros.

        Everything is put on the current stream, FSDP2's own for reduce-scatters, to which all memory belongs that is
        allocated here.

        Returns:
            False on every rank if torch should reduce.

        Raises:
            LayoutsDiffer: on every rank that looks with this one, if they hold gradients of different parameters.
        """
        # A divisor that a user sets may differ between ranks, and so may the operation.
        adds_up = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and not self._group.divides_by_itself
        hosts = self._route.hosts if adds_up else None
        if hosts is not None:
            parts = flat.view(group.size(), -1).index_select(0, hosts.by_position)
            flat = output.new_empty(hosts.between.size() * output.numel())
            _reduce_scatter(flat, parts.view(-1), hosts.within, op)
            group = hosts.between
            # Ranks of a host do not tell each other what they used.
            participants = replace(participants, used=frozenset(participants.included))
        if self._sum_without_zeros(output, flat, group, participants, adds_up):
            if op == dist.ReduceOp.AVG:
                output.div_(group.size())
            return True
        sent_bytes = flat.nbytes - flat.nbytes // group.size()
        self.exchange.count(buckets_whole=1, messages=1, payload_bytes=sent_bytes, sent_bytes=sent_bytes)
        if hosts is None and flat.dtype == output.dtype:
            return False
        _reduce_scatter(output, flat, group, op)
        return True

    def _sum_without_zeros(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        participants: Participants,
        adds_up: bool,
    ) -> bool:
        small = self._route.small
        looks = adds_up and small is not None and self.questions.zeros and output.dtype in DTYPES
        ranks = _Ranks(group, small)
        try:
            return self.sum_units(
                self.exchange, ranks, output, flat, participants, range(group.size()), is_served=looks
            )
        except LayoutsDiffer as difference:
            raise LayoutsDiffer(difference.announced, self._members) from None


class _Ranks:
    """The ranks that exchange units: their gradients travel on the current stream, and masks over the host."""

    def __init__(self, group: dist.ProcessGroup, small: SmallGroup | None) -> None:
        self._group, self._small = group, small
        self.size, self.rank = group.size, group.rank

    def all_to_all_single(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> None:
        """Exchange gradients of these sizes, or masks."""
        if not received.is_cpu:
            dist.all_to_all_single(received, sent, received_sizes, sent_sizes, self._group)
            return
        assert self._small is not None
        with record_function("ddp_hooks::wait_for_ranks"):
            self._small.backend.alltoall_base(received, sent, received_sizes, sent_sizes).wait()


def _reduce_scatter(output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce as torch does, but send narrow numbers as they are, and add them up in the dtype of the output."""
    if flat.dtype == output.dtype:
        dist.reduce_scatter_single(output, flat, op, group)
        return
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    add_up = torch.mean if op == dist.ReduceOp.AVG else torch.sum
    add_up(received.view(group.size(), -1), 0, dtype=output.dtype, out=output)
