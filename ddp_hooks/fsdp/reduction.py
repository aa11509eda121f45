"""The reduce-scatters of FSDP2's groups of parameters, whose parts are divided into rows.

Each rank sends each owner its part. If ranks share hosts, they add up first. The parts of ranks at the same position on
all hosts go to the rank at that position of the own host, which sums them; then the ranks at the same position exchange
these sums, a part for each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from ..serving.control_groups import GroupsOfHosts
from ..serving.engine_settings import unit_settings
from ..statistics import Statistics
from .exchange import (
    DIFFERS_IN_HOST,
    DTYPES,
    Announcement,
    Exchange,
    LayoutsDiffer,
    Questions,
    Recent,
    Staging,
    digest_of,
    fill_as_different,
)
from .param_groups import Column, Participants

_C = _extension.load()


class Layout:
    """The units of a part of the input, or of several such parts together, for a set of included parameters."""

    def __init__(
        self,
        columns: Sequence[Column],
        names: Sequence[str],
        included: Sequence[int],
        element_bytes: int,
        policy: Policy,
        divides: bool,
        parts: int = 1,
    ) -> None:
        settings = unit_settings(policy)
        self.parameters = [i for i in included if columns[i].length > 0] * parts
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
        questions: what the policy asks of gradients; of the sums of a host, if there are groups of hosts.
        staging: memory for messages.
        groups: the groups of hosts, if ranks add up in them.

    Attributes:
        questions: what the policy asks of gradients.
        exchange: sums and counts what ranks exchange; between hosts, if there are groups of hosts.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        names: Sequence[str],
        policy: Policy,
        questions: Questions,
        staging: Staging,
        groups: GroupsOfHosts | None,
    ) -> None:
        self._columns, self._names, self._policy, self.questions = columns, names, policy, questions
        self._staging, self._groups = staging, groups
        self._layouts: Recent[tuple[tuple[int, ...], int, int], Layout] = Recent()
        self.exchange = self._new_exchange(questions, 1)
        # Nothing is coded within a host.
        self._within = self._by_position = None
        if groups is not None:
            self._within = self._new_exchange(replace(questions, coded=None), len(groups.hosts))
            self._by_position = torch.tensor(ranks_by_position(groups.hosts), device="cpu")

    def _new_exchange(self, questions: Questions, parts: int) -> Exchange:
        # The layout of all parameters has the most units.
        everything = tuple(range(len(self._columns)))
        most = max(self._layout(everything, element_bytes, parts).units.mask_bytes for element_bytes in (2, 4, 8))
        return Exchange(len(self._columns), most, self._policy, questions, self._staging)

    @property
    def statistics(self) -> Statistics:
        """The bytes that this rank sent, and those that it would have sent in full.

        If ranks add up in hosts, bytes within a host do not count.
        """
        counted = self.exchange.statistics
        if self._within is None:
            return counted
        within = self._within.statistics
        return replace(
            counted,
            hook_seconds=counted.hook_seconds + within.hook_seconds,
            exchange_wait_seconds=counted.exchange_wait_seconds + within.exchange_wait_seconds,
        )

    @property
    def announced(self) -> list[Announcement] | None:
        """The announcements of the last reduction, if ranks exchanged masks; of hosts, if ranks add up in them."""
        return self.exchange.announced

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
        if not self.questions.any or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or output.dtype not in DTYPES:
            full_bytes = (ranks - 1) * output.nbytes
            self.exchange.begin(full_bytes, False)
            self.exchange.count(buckets_whole=1, messages=1, payload_bytes=full_bytes, sent_bytes=full_bytes)
            return False
        if self._groups is None:
            self._sum(self.exchange, group, output, flat, participants, order_of_ring(group.rank(), ranks))
        else:
            self._sum_by_host(self._groups, output, flat, participants)
        if op == dist.ReduceOp.AVG:
            output.div_(ranks)
        return True

    def _sum_by_host(
        self, groups: GroupsOfHosts, output: torch.Tensor, flat: torch.Tensor, participants: Participants
    ) -> None:
        assert self._within is not None
        assert self._by_position is not None
        hosts, position = len(groups.hosts), groups.within.rank()
        parts = self._staging.take("by position", flat.nbytes).view(flat.dtype)
        rows = len(self._by_position), output.numel()
        torch.index_select(flat.view(rows), 0, self._by_position, out=parts.view(rows))
        sums = self._staging.take("sums of host", hosts * output.nbytes).view(flat.dtype)
        error = None
        try:
            self._sum(self._within, groups.within, sums, parts, participants, range(len(groups.hosts[0])), hosts)
        except LayoutsDiffer as difference:
            # Raised after the other hosts have heard of it.
            error = LayoutsDiffer(difference.announced, groups.hosts[groups.between.rank()])
            # If hosts exchange no masks now, the others hear of it in this way.
            fill_as_different(sums)
        of_host = participants_of_host(participants, self._within.announced)
        try:
            self._sum(self.exchange, groups.between, output, sums, of_host, range(hosts), is_wrong=error is not None)
        except LayoutsDiffer as difference:
            raise error or LayoutsDiffer(difference.announced, [ranks[position] for ranks in groups.hosts]) from None
        if error is not None:
            raise error

    def _sum(
        self,
        exchange: Exchange,
        group: Any,
        output: torch.Tensor,
        flat: torch.Tensor,
        participants: Participants,
        order: Sequence[int],
        parts: int = 1,
        is_wrong: bool = False,
    ) -> None:
        """Sum a part for each rank of a group, or several parts together."""
        if not self.sum_units(exchange, group, output, flat, participants, order, parts=parts, is_wrong=is_wrong):
            exchange.sum_in_full(group, output, flat, order)

    def sum_units(
        self,
        exchange: Exchange,
        group: Any,
        output: torch.Tensor,
        flat: torch.Tensor,
        participants: Participants,
        order: Sequence[int],
        *,
        is_served: bool = True,
        parts: int = 1,
        is_wrong: bool = False,
    ) -> bool:
        """Sum without zeros, if this step looks at gradients and that pays.

        Args:
            exchange: the exchange.
            group: the ranks that take part.
            output: receives the sum of this rank's part, or of several parts together.
            flat: the parts for all ranks.
            participants: the parameters in a part.
            order: the order in which contributions are added up.
            is_served: whether ranks may look at gradients in this step.
            parts: the number of parts that ``output`` holds.
            is_wrong: whether ranks of this host hold gradients of different parameters.

        Returns:
            Whether it is summed. If not, nothing was sent.

        Raises:
            LayoutsDiffer: on every rank.
        """
        if not exchange.begin((group.size() - 1) * output.nbytes, is_served):
            return False
        layout = self._layout(participants.included, flat.element_size(), parts)
        if layout.units.numel != output.numel():
            raise RuntimeError(
                f"ddp_hooks.fsdp: expected {layout.units.numel} elements to be reduced for each rank, received "
                f"{output.numel()}: this version of FSDP2 lays out gradients differently"
            )
        digest = DIFFERS_IN_HOST if is_wrong else layout.digest
        own = Announcement(digest, participants.used, frozenset(participants.included))
        known_zero = [self.questions.skip_unused and i not in participants.used for i in layout.parameters]
        full_bytes = flat.nbytes - flat.nbytes // group.size()
        if not exchange.sum(group, output, flat, layout.units, own, order, full_bytes, known_zero=known_zero):
            return False
        exchange.count(
            skip_zeros_steps=int(self._policy.skip_zeros != "off"),
            skip_zero_rows_steps=int(self._policy.skip_zero_rows != "off"),
        )
        return True

    def _layout(self, included: tuple[int, ...], element_bytes: int, parts: int) -> Layout:
        divides = self.questions.divides
        return self._layouts.get(
            (included, element_bytes, parts),
            lambda: Layout(self._columns, self._names, included, element_bytes, self._policy, divides, parts),
        )


def ranks_by_position(hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks at the first position on each host, then those at the second one, and so on."""
    return [rank for ranks in zip(*hosts, strict=True) for rank in ranks]


def order_of_ring(own: int, ranks: int) -> list[int]:
    """Return the order in which the part of rank ``own`` is added up: down from the rank before it, itself last.

    This is gloo's order, except for a few numbers where parts meet, because the segments of its ring begin slightly
    later.
    """
    return [(own - 1 - i) % ranks for i in range(ranks)]


def participants_of_host(participants: Participants, announced: Sequence[Announcement] | None) -> Participants:
    """Return what a host takes part with, given what its ranks announced; None if they announced nothing.

    Then every parameter counts as used, because this rank does not know what the others of its host use.
    """
    known = [frozenset(participants.included)] if announced is None else [each.used for each in announced]
    return replace(participants, used=frozenset().union(*known))
