"""Opens what ranks need to reduce gradients on a device: groups of hosts, and what they agree on over the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _current_graph_task_id
from torch.autograd.profiler import record_function

from ..serving.agreement import exchange_proposals, settle
from ..serving.control_groups import SmallGroup, open_small_group, timeout_of
from ..serving.topology import Topology
from .param_groups import ParamGroup
from .reduction import ranks_by_position


class WideGradients:
    """Agrees on the groups of parameters of which some rank has gradients that are not in bfloat16.

    One message of a backward pass describes all groups, and each reduction takes the answer for its own. The first
    reduction without an answer sends the next message. All ranks reduce in the same order, so they agree on when that
    is. An answer does not outlive its pass, because a group that one pass leaves out may be the first one of the next.

    Args:
        small: a group on the host, of the ranks that reduce.
        groups: the groups of parameters; the same on every rank.
    """

    def __init__(self, small: SmallGroup, groups: Sequence[ParamGroup]) -> None:
        self._small: SmallGroup | None = small
        self._groups = list(groups)
        self._answers: dict[int, bool] = {}
        self._pass = -1  # autograd's number for the pass that they belong to

    def anywhere(self, group: ParamGroup, here: bool) -> bool:
        """Return whether some rank has such gradients of a group that is about to be reduced."""
        assert self._small is not None
        index = self._groups.index(group)
        now = _current_graph_task_id()
        # Pipelines reduce outside of autograd, without a number.
        if now == -1 or now != self._pass or index not in self._answers:
            self._pass = now
            has = [here if each is group else each.has_wide for each in self._groups]
            flags = torch.tensor(has, dtype=torch.uint8, device="cpu")
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            with record_function("ddp_hooks::wait_for_ranks"):
                self._small.backend.allreduce([flags], options).wait()
            self._answers = dict(enumerate(map(bool, flags.tolist())))
        answer = self._answers.pop(index)
        if here and not answer:
            raise RuntimeError(
                f"ddp_hooks.fsdp: expected gradients of {group.names[0]} in bfloat16, received some in another type, "
                "or some that were accumulated after ranks had agreed on how to send them, because other modules were "
                "reduced in between; call set_requires_gradient_sync on the root module, or register with coded='off'"
            )
        return answer

    def close(self) -> None:
        """Close the group on the host. Sends nothing."""
        self._small = None


class HostsOnDevice:
    """Two process groups over which the ranks of a process group reduce within hosts, and then between them.

    Torch knows them, so they exist until :meth:`close`, or until torch destroys all groups.

    Args:
        within: the group of this host's ranks.
        between: the group of the ranks at the same position on all hosts.
        hosts: the ranks of each host.
        device: the device of the gradients.
    """

    def __init__(
        self,
        within: dist.ProcessGroup,
        between: dist.ProcessGroup,
        hosts: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self.within, self.between = within, between
        self.by_position = torch.tensor(ranks_by_position(hosts), device=device)

    def close(self) -> None:
        """Destroy both groups, which with NCCL waits for what is under way in them. Sends nothing."""
        for group in (self.within, self.between):
            with suppress(ValueError):  # torch has destroyed it
                dist.destroy_process_group(group)


@dataclass(slots=True)
class Route:
    """How the ranks of a process group reduce on a device.

    Attributes:
        wide: what they agree on; None if no gradient is in bfloat16.
        hosts: the groups of hosts; None if every rank has a host of its own, or all share one.
        small: a group on the host for masks, of the ranks that look for zeros together, in the same order; None if no
            rank looks.
    """

    wide: WideGradients | None = None
    hosts: HostsOnDevice | None = None
    small: SmallGroup | None = None

    def close(self) -> None:
        """Close all groups. Sends nothing."""
        self.small = None
        for opened in (self.wide, self.hosts):
            if opened is not None:
                opened.close()


def open_routes(
    world: dist.ProcessGroup,
    function: str,
    process_groups: Mapping[str, dist.ProcessGroup],
    topologies: Mapping[str, Topology],
    groups: Mapping[str, Sequence[ParamGroup]],
    looks: bool,
    device: torch.device,
    keep: Callable[[Exception], None],
) -> dict[str, Route]:
    """Open the routes of process groups, by name. Collective over the default process group.

    Args:
        world: the default process group.
        function: the function that every rank calls.
        process_groups: this rank's process groups that are served, by name, in the same order on every rank of each.
        topologies: their topologies, by name.
        groups: their groups of parameters with gradients in bfloat16, by name.
        looks: whether ranks look for zeros.
        device: the device of the gradients.
        keep: called with what this rank could not open. Until every rank knows, its routes may lack that.
    """
    wanted = {
        name: _ranks_of_hosts(process_group, topologies[name].hosts)
        for name, process_group in process_groups.items()
        if topologies[name].adds_up_in_hosts
    }
    like = {
        ranks: (group._get_backend(device).name(), timeout_of(_place(group, device)))
        for name, group in process_groups.items()
        for ranks in wanted.get(name, ())
        if dist.get_rank() in ranks
    }
    offers = settle(function, exchange_proposals(world, function, {}, own=like))
    # Torch requires every rank to make every group, in the same order. Timeouts are those of a group's last rank.
    everywhere = {ranks: how for own in offers for ranks, how in own.items()}
    made = {}
    with _kept(keep):
        for ranks, (backend, timeout) in sorted(everywhere.items()):
            made[ranks] = dist.new_group(list(ranks), timeout, backend, group_desc="ddp_hooks.fsdp", sort_ranks=False)
    routes = {}
    for name, topology in ((name, topologies[name]) for name in process_groups):
        own = [made[ranks] for ranks in wanted.get(name, ()) if dist.get_rank() in ranks and ranks in made]
        hosts = wide = small = None
        with _kept(keep):
            if len(own) > 1:
                hosts = HostsOnDevice(own[0], own[1], topology.hosts, device)
        # On hosts with different numbers of ranks, direct messages would send more than the sums of a ring.
        if groups[name] and (topology.counts_bytes or len(topology.hosts) == 1):
            with _kept(keep):
                wide = WideGradients(open_small_group(groups[name][0], function), groups[name])
        if looks and topology.counts_bytes:
            # Ranks at another position have other sums, and may look in other steps.
            with _kept(keep):
                small = open_small_group(_place(process_groups[name], device), function, topology=topology)
        routes[name] = Route(wide, hosts, small)
    return routes


@contextmanager
def _kept(keep: Callable[[Exception], None]) -> Iterator[None]:
    """Keep an error until every rank knows, because others wait for what this rank does next."""
    try:
        yield
    except Exception as error:
        keep(error)


def _ranks_of_hosts(process_group: dist.ProcessGroup, hosts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the ranks of each host, then those at each position on all hosts, as ranks of the default group."""
    ranks = dist.get_process_group_ranks(process_group)
    return [tuple(ranks[rank] for rank in members) for members in (*hosts, *zip(*hosts, strict=True))]


def _place(process_group: dist.ProcessGroup, device: torch.device) -> Any:
    return SimpleNamespace(process_group=process_group, device=device, device_type=device.type)
