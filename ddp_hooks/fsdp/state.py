"""What a user calls and holds: registering for a module that FSDP2 manages, statistics, usage, the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._version import __version__
from ..absentees import naming_absent_ranks
from ..agreement import exchange_proposals, settle
from ..collective_costs import measure_collective_costs
from ..policies import Policy, resolve
from ..statistics import ParameterUsage, Statistics
from . import param_groups
from .param_groups import ParamGroup, Participants
from .reduction import Announcement, LayoutsDiffer, Questions, ReduceScatter, Staging

_FUNCTION = "ddp_hooks.fsdp.register"


class ShardState:
    """What :func:`ddp_hooks.fsdp.register` returns: statistics and usage of a module with ``fully_shard``."""

    def __init__(self, policy: Policy, groups: Sequence[ParamGroup], costs: Mapping[str, Any]) -> None:
        self._policy = policy
        self._staging = Staging()
        self._served = [_ServedGroup(self, group, policy, costs, self._staging) for group in groups]
        self._earlier = Statistics()
        self._is_open = True

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self._policy

    def stats(self) -> Statistics:
        """Return the counters since registration, or since :meth:`reset_stats`. They are this rank's own.

        Returns:
            Bytes are what this rank sends in reduce-scatters: ``dense_bytes`` what plain FSDP2 would send,
            ``payload_bytes`` what was sent. A bucket is one reduce-scatter. All-gathers of parameters are not counted.
        """
        return self._total() - self._earlier

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._earlier = self._total()

    def usage(self) -> dict[str, ParameterUsage]:
        """Return how each parameter took part in its last reduction on this rank, by name.

        Returns:
            ``ranks`` are those with a gradient, as far as ranks told each other in that step; where they did not, it is
            None, and ``used_anywhere`` is True for what was sent. Empty before the first step.
        """
        return {usage.name: usage for served in self._served for usage in served.usage()}

    def close(self) -> None:
        """Take everything off; the module trains on as plain FSDP2. Every rank calls it, between the same steps."""
        if self._is_open:
            for served in self._served:
                served.group.remove()
        self._is_open = False

    def _total(self) -> Statistics:
        total = Statistics()
        for served in self._served:
            total += served.reduce_scatter.statistics
        # What counts in reductions would count a step once for each group.
        steps = max((served.reduce_scatter.statistics.steps for served in self._served), default=0)
        return replace(total, steps=steps)

    def __repr__(self) -> str:
        """Name the policy, and whether the state serves a module."""
        return f"ShardState(policy={self._policy.name!r}, {'attached' if self._is_open else 'closed'})"


class _ServedGroup:
    """A group of parameters, what reduces it, and how its parameters took part."""

    def __init__(
        self, owner: ShardState, group: ParamGroup, policy: Policy, costs: Mapping[str, Any], staging: Staging
    ) -> None:
        self.group = group
        process_group = group.process_group
        ranks = 1 if process_group is None else dist.get_world_size(process_group)
        measured = costs.get(_name_of(process_group))
        questions = Questions.of(policy, narrow_pays=measured is None or measured.narrow_pays(ranks))
        self.reduce_scatter = ReduceScatter(group.columns(), policy, questions, staging)
        self._last: tuple[Participants, list[Announcement] | None] | None = None
        self._rank = 0 if process_group is None else dist.get_rank(process_group)
        self._announced: list[Announcement] | None = None
        group.install(self._reduce, owner, self._finish)

    def _reduce(self, output: torch.Tensor, flat: torch.Tensor, process_group: dist.ProcessGroup, op: Any) -> bool:
        participants = self.group.take_participants()
        if participants is None:  # called by something else than the group's own backward
            return False
        try:
            return self.reduce_scatter(output, flat, process_group, op, participants)
        except LayoutsDiffer as error:
            raise RuntimeError(self._describe(error.announced)) from None
        finally:
            self._announced = self.reduce_scatter.announced

    def _finish(self, participants: Participants) -> None:
        self._last = participants, self._announced
        self._announced = None

    def _describe(self, announced: Sequence[Announcement]) -> str:
        anywhere = frozenset().union(*(each.included for each in announced))
        lines = []
        for rank, each in enumerate(announced):
            missing = sorted(anywhere - each.included)
            if missing:
                names = ", ".join(self.group.names[i] for i in missing[:5]) + (", ..." if len(missing) > 5 else "")
                lines.append(f"rank {rank} has no gradient of {names}")
        return (
            f"ddp_hooks.fsdp: the ranks hold gradients of different parameters: {'; '.join(lines) or 'shapes differ'}. "
            "Plain FSDP2 would mix them up or hang; call set_reduce_scatter_unused_params(True) on the module, which "
            "with ddp_hooks sends nothing for them"
        )

    def usage(self) -> Iterator[ParameterUsage]:
        if self._last is None:
            return
        participants, announced = self._last
        for i, name in enumerate(self.group.names):
            used_here = i in participants.used
            ranks = None
            used_anywhere = i in participants.included
            if announced is not None:
                ranks = tuple(rank for rank, each in enumerate(announced) if i in each.used)
                used_anywhere = bool(ranks)
            yield ParameterUsage(
                name, self.group.numel(i), used_here, used_anywhere, self.group.is_frozen(i), None, ranks
            )


def register(module: nn.Module, policy: Policy | str = "auto", **settings: Any) -> ShardState:
    """Have FSDP2's reduce-scatters leave out zeros and send narrow what is narrow. Every rank calls it, between steps.

    Gradients are those of plain FSDP2, to the bit. Call it once, after the last ``fully_shard``. Calling it again with
    the same policy returns the state that the module has.

    Args:
        module: the root module with ``torch.distributed.fsdp.fully_shard`` applied, or what ``torch.compile`` returned
            for it. On the CPU, with gloo.
        policy: what to look for. ``"auto"`` decides by what was saved in the steps before, the same on every rank.
            ``"skip_unused"`` leaves out parameters without a gradient, and reads none; ``"skip_zeros"`` what is zero;
            ``"allreduce"`` only counts. Every rank must pass the same.
        settings: fields of :class:`ddp_hooks.Policy` or of :class:`ddp_hooks.Tuning` to set differently.

    Returns:
        The state: statistics, usage by name, and :meth:`ShardState.close`.

    Raises:
        TypeError: the module is none of FSDP2; the message says what it is.
        ValueError: a setting is out of range, or means nothing here.
        RefusedError: a rank's module cannot be served, or ranks differ. On every rank.
        RuntimeError: this torch has another FSDP2; or the module is registered with another policy.
    """
    groups = param_groups.find(module)
    known = next((owner for group in groups if isinstance(owner := group.owner, ShardState)), None)
    chosen, error = _resolve(policy, settings)
    if known is not None and error is None and all(group.owner is known for group in groups):
        if known.policy != chosen:
            raise RuntimeError(
                f"{_FUNCTION}: the module is registered with {known.policy!r}, received {chosen!r}; close() that state "
                "first"
            )
        return known
    problem = f"{type(error).__name__}: {error}" if error else _why_unsupported(groups)
    over = _process_groups(groups)
    may_measure = chosen.tuning.calibrate and chosen.narrow == "adaptive"
    costs = {}
    for process_group in over:
        offers = exchange_proposals(process_group, _FUNCTION, _describe(chosen, groups), problem, may_measure)
        settle(_FUNCTION, offers, error)
    for process_group in over if may_measure else ():
        if dist.get_world_size(process_group) > 1:
            with naming_absent_ranks(process_group, _FUNCTION):
                costs[_name_of(process_group)] = measure_collective_costs(process_group, groups[0].device)
    return ShardState(chosen, groups, costs)


def _resolve(policy: Policy | str, settings: Mapping[str, Any]) -> tuple[Policy, Exception | None]:
    try:
        chosen = resolve(policy, settings)
        if chosen.average != "world":
            raise ValueError(
                f"{_FUNCTION}: expected average='world', received {chosen.average!r}: FSDP2 divides itself"
            )
        if chosen.rebuild_after:
            raise ValueError(
                f"{_FUNCTION}: expected rebuild_after=0, received {chosen.rebuild_after}: there is nothing to rebuild"
            )
    except (TypeError, ValueError) as error:
        return resolve("auto"), error
    return chosen, None


def _why_unsupported(groups: Sequence[ParamGroup]) -> str | None:
    for group in groups:
        problem = group.why_unsupported()
        if problem is None and group.process_group is None:
            problem = (
                "replicate() all-reduces by itself, which no hook of torch's replaces; apply it over a mesh dimension "
                "of one rank, and"
            )
        if problem:
            return problem
    return None


def _process_groups(groups: Sequence[ParamGroup]) -> list[dist.ProcessGroup]:
    """Return those over which something is reduced, each once, in the same order on every rank."""
    found: dict[str, dist.ProcessGroup] = {}
    for group in groups:
        process_group = group.process_group
        if process_group is not None:
            found.setdefault(_name_of(process_group), process_group)
    return list(found.values()) or [dist.distributed_c10d._get_default_group()]


def _name_of(process_group: dist.ProcessGroup | None) -> str:
    return "" if process_group is None else process_group.group_name


def _describe(policy: Policy, groups: Sequence[ParamGroup]) -> dict[str, str]:
    columns = [column for group in groups for column in group.columns()]
    return {
        "ddp_hooks": __version__,
        "torch": torch.__version__,
        "policy": repr(policy),
        "parameters": f"{len(columns)} in {len(groups)} groups, of {sum(column.length for column in columns)} elements "
        "a rank",
    }
