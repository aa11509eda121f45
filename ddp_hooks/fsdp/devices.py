"""Reduces gradients on a device: in 16 bits instead of 32 if all are bfloat16 numbers, and within hosts first.

With ``param_dtype=torch.bfloat16`` and ``reduce_dtype=torch.float32``, autograd's gradients are bfloat16. FSDP2 then
copies them into memory of that type, each rank sends each owner its part, and the owner adds up in 32 bits. This reads
no gradient to find out, and takes one launch more than torch's reduce-scatter. Torch reduces gradients that have more
bits, such as those that were accumulated over several passes.

Ranks may differ in whether they have accumulated gradients, for example if they left out different parameters in a pass
without reduction. But all of them have to start the same collectives, so they agree on the host first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..statistics import Statistics
from .param_groups import ParamGroup, Participants
from .routes import Route

NARROW, WIDE = torch.bfloat16, torch.float32


class DeviceReduceScatter:
    """The reduce-scatters of one group of parameters on a device.

    Args:
        group: the group.
        route: how its ranks reduce.
    """

    announced = None  # ranks exchange no masks

    def __init__(self, group: ParamGroup, route: Route) -> None:
        self.statistics = Statistics()
        self._group = group
        self._wide, self._hosts = route.wide if group.widens else None, route.hosts
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
        """Reduce what is narrow, and what adds up in hosts; return False on every rank if torch should reduce.

        Everything is put on the current stream, FSDP2's own for reduce-scatters, to which all memory belongs that is
        allocated here.
        """
        ranks = group.size()
        # A divisor that a user sets may differ between ranks, and so may the operation.
        adds_up = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and not self._group.divides_by_itself
        hosts = self._hosts if adds_up else None
        dense_bytes = (ranks - 1) * output.nbytes
        sent_bytes = flat.nbytes - flat.nbytes // ranks
        if hosts is not None:
            dense_bytes = sent_bytes = (hosts.between.size() - 1) * output.nbytes
        self.statistics += Statistics(
            steps=1,
            buckets_whole=1,
            messages=1,
            dense_bytes=dense_bytes,
            payload_bytes=sent_bytes,
            sent_bytes=sent_bytes,
        )
        if hosts is not None:
            parts = flat.view(ranks, -1).index_select(0, hosts.by_position)
            sums = output.new_empty(hosts.between.size() * output.numel())
            _reduce_scatter(sums, parts.view(-1), hosts.within, op)
            dist.reduce_scatter_single(output, sums, op, hosts.between)
            return True
        if flat.dtype == output.dtype:
            return False
        _reduce_scatter(output, flat, group, op)
        return True


def _reduce_scatter(output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce as torch does, but send narrow numbers as they are, and add them up in the dtype of the output."""
    if flat.dtype == output.dtype:
        dist.reduce_scatter_single(output, flat, op, group)
        return
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    add_up = torch.mean if op == dist.ReduceOp.AVG else torch.sum
    add_up(received.view(group.size(), -1), 0, dtype=output.dtype, out=output)
