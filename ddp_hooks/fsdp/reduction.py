"""The reduce-scatters of FSDP2's groups of parameters, whose parts are divided into rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from ..serving.engine_settings import unit_settings
from ..statistics import Statistics
from .exchange import DTYPES, Announcement, Exchange, Questions, Recent, Staging, digest_of
from .param_groups import Column, Participants

_C = _extension.load()


class Layout:
    """The units of a part of the input, for a set of included parameters."""

    def __init__(
        self,
        columns: Sequence[Column],
        names: Sequence[str],
        included: Sequence[int],
        element_bytes: int,
        policy: Policy,
        divides: bool,
    ) -> None:
        settings = unit_settings(policy)
        self.parameters = [i for i in included if columns[i].length > 0]
        stretches = []
        for i in self.parameters:
            length, row_length = columns[i].length, columns[i].row_length
            whole = _C.ParameterSlice(i, 0, length, row_length)
            stretches.append((length, _C.units_of(whole, element_bytes, settings).length if divides else length))
        self.units = _C.ShardUnits(stretches)
        # With names, because ranks may reduce different blocks of the same shape.
        self.digest = digest_of(f"{element_bytes} {[names[i] for i in included]} {stretches}")


class ReduceScatter:
    """The reduce-scatters of one group of parameters.

    Args:
        columns: the space of each parameter in a part.
        names: the names of the parameters.
        policy: the policy.
        questions: what the policy asks of gradients.
        staging: memory for messages.
    """

    def __init__(
        self, columns: Sequence[Column], names: Sequence[str], policy: Policy, questions: Questions, staging: Staging
    ) -> None:
        self._columns, self._names, self._policy, self._questions = columns, names, policy, questions
        self._layouts: Recent[tuple[tuple[int, ...], int], Layout] = Recent()
        # The layout of all parameters has the most units.
        most = max(
            Layout(columns, names, range(len(columns)), element_bytes, policy, questions.divides).units.mask_bytes
            for element_bytes in (2, 4, 8)
        )
        self._exchange = Exchange(len(columns), most, policy, questions, staging)

    @property
    def statistics(self) -> Statistics:
        """The bytes that this rank sent, and those that torch's reduce-scatter would have sent."""
        return self._exchange.statistics

    @property
    def announced(self) -> list[Announcement] | None:
        """The announcements of the last reduction, if ranks exchanged masks."""
        return self._exchange.announced

    def __call__(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        participants: Participants,
    ) -> bool:
        """Reduce as torch would; return False on every rank if torch should do it.

        Raises:
            LayoutsDiffer: on every rank.
        """
        ranks = group.size()
        dense_bytes = (ranks - 1) * output.numel() * output.element_size()
        is_served = self._questions.any and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and output.dtype in DTYPES
        order = order_of_ring(group.rank(), ranks)
        if not (
            self._exchange.begin(dense_bytes, is_served)
            and self._sum_units(group, output, flat, participants, order, dense_bytes)
        ):
            # Gloo's own reduce-scatter is an all-reduce of twice as many bytes.
            if not is_served or dist.get_backend(group) != "gloo":
                self._exchange.count(buckets_whole=1, messages=1, payload_bytes=dense_bytes, sent_bytes=dense_bytes)
                return False
            self._exchange.sum_in_full(group, output, flat, order)
        if op == dist.ReduceOp.AVG:
            output.div_(ranks)
        return True

    def _sum_units(
        self,
        group: dist.ProcessGroup,
        output: torch.Tensor,
        flat: torch.Tensor,
        participants: Participants,
        order: Sequence[int],
        full_bytes: int,
    ) -> bool:
        layout = self._layout(participants.included, output.element_size())
        if layout.units.numel != output.numel():
            raise RuntimeError(
                f"ddp_hooks.fsdp: expected {layout.units.numel} elements to be reduced for each rank, received "
                f"{output.numel()}: this version of FSDP2 lays out gradients differently"
            )
        own = Announcement(layout.digest, participants.used, frozenset(participants.included))
        known_zero = [self._questions.skip_unused and i not in participants.used for i in layout.parameters]
        if not self._exchange.sum(group, output, flat, layout.units, own, order, full_bytes, known_zero=known_zero):
            return False
        self._exchange.count(
            skip_zeros_steps=int(self._policy.skip_zeros != "off"),
            skip_zero_rows_steps=int(self._policy.skip_zero_rows != "off"),
        )
        return True

    def _layout(self, included: tuple[int, ...], element_bytes: int) -> Layout:
        return self._layouts.get(
            (included, element_bytes),
            lambda: Layout(self._columns, self._names, included, element_bytes, self._policy, self._questions.divides),
        )


def order_of_ring(own: int, ranks: int) -> list[int]:
    """Return the order in which the part of rank ``own`` is added up: down from the rank before it, itself last.

    This is gloo's order, except for a few numbers where parts meet, because the segments of its ring begin slightly
    later.
    """
    return [(own - 1 - i) % ranks for i in range(ranks)]
