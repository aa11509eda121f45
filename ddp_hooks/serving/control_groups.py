"""Opens the gloo groups over which the ranks of a module exchange masks."""

from __future__ import annotations

import atexit
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import _extension
from ..errors import RefusedError
from ..hangs.watcher import waited_in_vain
from .agreement import Distributed, propose, settle
from .endpoints import Endpoint, Listener, advise, choose_listener, find_endpoint, group_by_host
from .groups import control_device, host_groups, store_of
from .topology import Topology, topology_of

_C = _extension.load()

# A gather takes one hop after the other, and each axis of the grid needs its own group. With axes of 4, an exchange
# that nothing hides is faster than one gather. Axes of 2 would be slightly faster still, for twice as many groups.
LARGEST_AXIS = 4
# How often the ranks try to open groups. gloo gives up if one connection is lost while it makes the others.
ATTEMPTS = 3
# gloo waits for a connection five times as long as for a message.
_WAITS_FOR_A_CONNECTION = 5
# All ranks begin to connect at the same time, so half of the data group's timeout is enough, unless it is so short that
# a busy machine may need more. A rank that lost a connection waits for the others on the data group.
_ENOUGH_TO_CONNECT, _MOST_TO_CONNECT = timedelta(seconds=10), timedelta(seconds=60)
# How long the interpreter's exit waits for late workers of gloo groups.
_LATE_WORKERS_SECONDS = 0.05

_has_opened_groups = False


@atexit.register
def _end_groups() -> None:
    # Groups that close during interpreter shutdown would wait for threads that can no longer end.
    _C.keep_groups_from_now_on()
    _C.wait_until_groups_are_gone(2.0)
    if _has_opened_groups or dist.is_initialized():
        # A worker first wakes the thread that waits for a collective, then drops its tensors, for which it needs the
        # GIL. After the program's last collective, the interpreter may be shutting down by then. Python up to 3.13
        # unwinds a thread that takes the GIL during shutdown, which ends the process with SIGABRT. There is no way to
        # ask a group whether its workers are done.
        time.sleep(_LATE_WORKERS_SECONDS)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The small gloo groups for masks, beside the group on which gradients travel.

    torch.distributed does not list them, so the names of its groups do not depend on them, and their names do not
    depend on how many groups a rank is in. They close when the last service that uses them is closed.
    """

    name: str
    """The same on every rank of the module, and given only once."""
    groups: Any
    """A ``_C.ControlGroups``, which closes them."""
    topology: Topology
    has_one_axis: bool
    """Whether masks travel in one gather, which ranks start in the order of their backward passes. Along further axes,
    completions start the gathers, and two services that share the groups would do so in any order."""
    on_streams: Any = None
    """A ``_C.HostsOnStreams`` for gradients on a device; None if no policy has asked for it."""


@dataclass(frozen=True, slots=True)
class SmallGroup:
    """One gloo group of a module's ranks for small host messages, private like the control groups."""

    backend: Any
    """Its collectives; None with one rank only."""
    keeper: Any
    """A ``_C.ControlGroups``, which closes it. It has to be let go of last."""
    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host."""


def open_small_group(
    ddp: Distributed, function: str, problem: str | None = None, topology: Topology | None = None
) -> SmallGroup:
    """Open a group for messages other than masks. Collective over the module's process group.

    Args:
        ddp: the module, or anything else with a process group and a device.
        function: the function that every rank calls.
        problem: why this rank cannot take part, or None.
        topology: if its ranks add up in hosts, ranks at different positions on their hosts get groups of their own.

    Raises:
        RuntimeError: on every rank, if some rank has a problem or could not open the group.
    """
    own = (new_name(), tuple(find_endpoint(ddp.process_group)))
    offers = settle(function, propose(ddp, function, {}, problem, own))
    name, endpoints = offers[0][0], [Endpoint(*endpoint) for _, endpoint in offers]
    here, ranks = dist.get_rank(ddp.process_group), len(endpoints)
    members = range(ranks) if topology is None else _ranks_between_hosts(topology, ranks, here)

    def open_one(attempt: int, listener: Listener) -> Any:
        if len(members) == 1:
            return None
        own_name = f"{name}/{attempt}/small/{members[0]}"
        return _open_group(ddp, own_name, members.index(here), len(members), listener.make_devices())

    backend = _open_on_every_rank(ddp, function, "a group for small messages", endpoints, open_one)
    keeper = _C.ControlGroups(hosts=_one_rank_each(len(members)), all=backend, axes=[])
    return SmallGroup(backend, keeper, group_by_host([endpoint.host for endpoint in endpoints]))


class GroupsOfHosts:
    """Two gloo groups for gradients, private like the control groups, of a topology whose ranks add up in hosts.

    Args:
        within: the group of this host's ranks.
        between: the group of the ranks at the same position on all hosts.
        topology: the hosts.
    """

    def __init__(self, within: Any, between: Any, topology: Topology) -> None:
        self.within, self.between, self.hosts = within, between, topology.hosts
        # Closes them, and has to be let go of last.
        self._keeper = _C.ControlGroups(hosts=topology.hosts, all=None, axes=[within, between])

    def close(self) -> None:
        """Close both groups. Sends nothing."""
        self.within = self.between = self._keeper = None


def open_groups_of_hosts(
    ddp: Distributed, function: str, name: str, topology: Topology, endpoints: Sequence[Endpoint]
) -> GroupsOfHosts:
    """Open groups over which ranks add up in hosts and then between them. Collective over the process group.

    Args:
        ddp: anything with a process group and a device.
        function: the function that every rank calls.
        name: a new name, the same on every rank.
        topology: the hosts, with ``adds_up_in_hosts``.
        endpoints: the endpoints of all ranks.

    Raises:
        RuntimeError: on every rank, if some rank could not open them.
    """
    here = dist.get_rank(ddp.process_group)
    own_host = next(host for host in topology.hosts if here in host)
    members = {"within": own_host, "between": _ranks_between_hosts(topology, len(endpoints), here)}

    def open_both(attempt: int, listener: Listener) -> list[Any]:
        return [
            _open_group(
                ddp, f"{name}/{attempt}/{ranks[0]}/{kind}", ranks.index(here), len(ranks), listener.make_devices()
            )
            for kind, ranks in members.items()
        ]

    within, between = _open_on_every_rank(ddp, function, "the groups of hosts", endpoints, open_both)
    return GroupsOfHosts(within, between, topology)


def open_host_group(ddp: Distributed, function: str) -> None:
    """Open a group for the small messages of a group without the CPU, which then do not wait for its device.

    Raises:
        RuntimeError: on every rank, if some rank could not open it.
    """
    group = ddp.process_group
    if group not in host_groups and dist.get_world_size(group) > 1 and control_device(group).type != "cpu":
        host_groups[group] = open_small_group(ddp, function)


def new_name() -> str:
    """Make a name for control groups. All ranks use the one that rank 0 made."""
    return f"ddp_hooks/{uuid.uuid4().hex}"


def open_control_groups(ddp: Distributed, function: str, name: str, endpoints: Sequence[Endpoint]) -> ControlGroups:
    """Open the groups for the mask exchange. Collective over the module's process group.

    Args:
        ddp: the module.
        function: the function that every rank calls.
        name: a new name, the same on every rank, under which they find each other in the store of the module's group.
        endpoints: the endpoints of all ranks.

    Raises:
        RuntimeError: on every rank, if some rank could not open them.
    """
    topology = topology_of(ddp.process_group, ddp.device, endpoints)

    def open_all(attempt: int, listener: Listener) -> Any:
        return _open_groups(ddp, f"{name}/{attempt}", listener, topology)

    what = "the groups for the mask exchange"
    groups = _open_on_every_rank(ddp, function, what, endpoints, open_all)
    ranks, here = dist.get_world_size(ddp.process_group), dist.get_rank(ddp.process_group)
    return ControlGroups(name, groups, topology, len(_axes_of_masks(topology, ranks, here)) == 1)


def _open_on_every_rank(
    ddp: Distributed,
    function: str,
    what: str,
    endpoints: Sequence[Endpoint],
    open_groups: Callable[[int, Listener], Any],
) -> Any:
    """Open groups, and try again on all ranks if some rank lost a connection. Collective over the module's group.

    Args:
        ddp: the module.
        function: the function that every rank calls.
        what: the groups, in words.
        endpoints: the endpoints of all ranks.
        open_groups: opens groups, given the number of the attempt, which must be part of their names, and a listener.

    Returns:
        The result of ``open_groups``.

    Raises:
        RefusedError: on every rank, if some rank could not open them.
    """
    listener = choose_listener(ddp.process_group, endpoints)
    attempt = 0
    while True:
        attempt += 1
        # Groups of a failed attempt close before the next one.
        opened, error = None, None
        try:
            opened = open_groups(attempt, listener)
        except RuntimeError as caught:
            error = caught
        tries = "" if attempt == 1 else f" after {attempt} attempts"
        problem = None if error is None else f"could not open {what}{tries}: {error}. {advise(listener)}"
        # This also keeps every rank here until the last one has connected. If a rank is gone, the exchange fails on the
        # others.
        proposals = propose(ddp, function, {}, problem, _outcome(error))
        outcomes = {each.own for each in proposals}
        # A lost connection may last the next time. A connection that could not be made would fail again.
        if _LOST in outcomes and outcomes <= {_OPENED, _LOST, _NOT_MADE} and attempt < ATTEMPTS:
            continue
        try:
            settle(function, proposals)
        except RefusedError as refusal:
            # Not the rank's own error: every rank must see a refusal, after which `enable` continues with plain DDP.
            raise refusal from error
        return opened


# Outcomes of an attempt to open groups on a rank.
_OPENED, _LOST, _NOT_MADE, _FAILED = "opened", "connection lost", "connection not made", "failed"
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)


def _outcome(error: RuntimeError | None) -> str:
    if error is None:
        return _OPENED
    if not waited_in_vain(error):
        return _FAILED
    return _NOT_MADE if _TIMED_OUT.search(str(error)) else _LOST


def _one_rank_each(ranks: int) -> list[list[int]]:
    return [[rank] for rank in range(ranks)]


def _open_groups(ddp: Distributed, name: str, listener: Listener, topology: Topology) -> Any:
    group = ddp.process_group
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return _C.ControlGroups(hosts=[[0]], all=None, axes=[])
    devices = listener.make_devices()
    everyone = _open_group(ddp, f"{name}/all", here, ranks, devices)
    hosts = topology.hosts
    adds_up = topology.adds_up_in_hosts
    own_host = next(host for host in hosts if here in host)
    between = _ranks_between_hosts(topology, ranks, here)
    axes = _axes_of_masks(topology, ranks, here)
    # The first rank of an axis names its group.
    opened = [
        _open_group(ddp, f"{name}/axis{number}/{axis[0]}", axis.index(here), len(axis), devices)
        for number, axis in enumerate(axes if len(axes) > 1 else [])
    ]
    # Gradients travel on these groups, and masks must not wait for them.

    def open_data_group(kind: str, members: Sequence[int]) -> Any:
        own_name = f"{name}/{members[0]}/{kind}"
        return _open_group(ddp, own_name, members.index(here), len(members), listener.make_devices())

    kinds: dict[str, Sequence[int]] = {}
    if _C.needs_group_for_sums(group, ddp.device, len(between)):
        kinds["sums"] = between
    # Nothing is coded within a host.
    if adds_up or (topology.has_one_rank_each and _C.can_code(group, ddp.device, ranks)):
        kinds["contributions"] = between
    if adds_up:
        kinds |= {"sizes": between, "shares": own_host, "results": own_host}
    data = {kind: open_data_group(kind, members) for kind, members in kinds.items()}
    return _C.ControlGroups(hosts=hosts if adds_up else _one_rank_each(ranks), all=everyone, axes=opened, **data)


def _ranks_between_hosts(topology: Topology, ranks: int, here: int) -> Sequence[int]:
    """Return the ranks at the same position on all hosts; with a rank for each host, all of them."""
    if not topology.adds_up_in_hosts:
        return range(ranks)
    position = next(host for host in topology.hosts if here in host).index(here)
    return [host[position] for host in topology.hosts]


def _axes_of_masks(topology: Topology, ranks: int, here: int) -> list[Sequence[int]]:
    # Masks cross between hosts once those of a host are one.
    own_host = [host for host in topology.hosts if here in host] if topology.adds_up_in_hosts else []
    return [*own_host, *axes_of(_ranks_between_hosts(topology, ranks, here), here, LARGEST_AXIS)]


def axes_of(ranks: Sequence[int], here: int, largest_axis: int) -> list[Sequence[int]]:
    """Return, for each axis of a grid of some ranks, those that differ from one of them along this axis only."""
    axes = []
    stride = 1
    for length in grid(len(ranks), largest_axis):
        own = ranks.index(here)
        first = own - own // stride % length * stride
        axes.append(ranks[first : first + stride * length : stride])
        stride *= length
    return axes


def grid(ranks: int, largest_axis: int) -> list[int]:
    """Arrange ranks in a grid, so that gathers along its axes replace one over all ranks.

    Args:
        ranks: the number of ranks, at least 1.
        largest_axis: the greatest length of an axis, if the number of ranks has a suitable divisor. Otherwise an axis
            is as long as the smallest divisor.

    Returns:
        The lengths of the axes; their product is the number of ranks.
    """
    if ranks <= largest_axis:
        return [ranks]
    divisors = [*range(largest_axis, 1, -1), *range(largest_axis + 1, ranks + 1)]
    divisor = next(length for length in divisors if ranks % length == 0)
    return [divisor] if divisor == ranks else [divisor, *grid(ranks // divisor, largest_axis)]


def _open_group(ddp: Distributed, name: str, rank: int, ranks: int, devices: list[Any]) -> Any:
    global _has_opened_groups
    _has_opened_groups = True
    store = dist.PrefixStore(name, store_of(ddp.process_group))  # type: ignore[attr-defined]
    timeout = timeout_of(ddp)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = devices, 2 * len(devices)  # as many as torch takes
    to_connect = min(max(timeout / 2, min(0.9 * timeout, _ENOUGH_TO_CONNECT)), _MOST_TO_CONNECT)
    options._timeout = to_connect / _WAITS_FOR_A_CONNECTION
    # For torch's flight recorder.
    options.group_name = name
    group = dist.ProcessGroupGloo(store, rank, ranks, options)
    group._set_default_timeout(timeout)
    return group


def timeout_of(ddp: Distributed) -> timedelta:
    """Return the data group's timeout, so that control groups notice a lost rank as soon as it does."""
    try:
        options = getattr(ddp.process_group._get_backend(ddp.device), "options", None)
    except RuntimeError:
        options = None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.constants.default_pg_timeout
