"""The gloo groups over which the ranks of a module agree on what was used."""

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
from .groups import store_of

_C = _extension.load()

# A gather's hops come one after the other, and each axis takes a group of its own. With axes of 4, an
# exchange that nothing hides is faster than one gather; axes of 2 would be a little faster still, for twice the groups.
LARGEST_AXIS = 4
# How often the ranks try to open groups. gloo gives a group up when it loses one connection while it makes the others,
# and does not try again.
ATTEMPTS = 3
# gloo waits for a connection five times as long as for a message.
_WAITS_FOR_A_CONNECTION = 5
# All ranks begin to connect at the same moment, so half of the data group's timeout is enough, unless that is so short
# that a busy machine may need more of it. A rank that lost a connection waits for the others on the data group.
_ENOUGH_TO_CONNECT, _MOST_TO_CONNECT = timedelta(seconds=10), timedelta(seconds=60)
# How long the interpreter's exit waits for workers of gloo groups that are late.
_LATE_WORKERS_SECONDS = 0.05

_has_opened_groups = False


@atexit.register
def _end_groups() -> None:
    # Groups that close while the interpreter is being taken down would wait for threads that cannot end any more.
    _C.keep_groups_from_now_on()
    _C.wait_until_groups_are_gone(2.0)
    if _has_opened_groups or dist.is_initialized():
        # A worker first wakes up whoever waits for a collective, then lets go of its tensors, for which it needs the
        # GIL. If that was the program's last collective, the interpreter may be on its way out by then, and Python (up
        # to 3.13) unwinds a thread that comes for the GIL, which ends the process with SIGABRT. A group cannot be
        # asked whether its workers are done.
        time.sleep(_LATE_WORKERS_SECONDS)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The small gloo groups that masks are exchanged over, beside whatever group gradients travel on.

    They are nobody else's: torch.distributed does not list them, so the names of other groups do not depend on them,
    nor theirs on how many groups a rank is in. They close when the last service over them lets go.
    """

    name: str
    """The same on every rank of the module, and given only once."""
    groups: Any
    """A ``_C.ControlGroups``, which closes them."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host."""
    costs: Any = None
    """What collectives take on the group that gradients travel on, a ``_C.CollectiveCosts``; None if not measured."""


@dataclass(frozen=True, slots=True)
class SmallGroup:
    """One gloo group of a module's ranks, for small messages on the host; like the control groups nobody else's."""

    backend: Any
    """Its collectives; None with one rank only."""
    keeper: Any
    """A ``_C.ControlGroups``, which closes it. It has to be let go of last."""
    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host."""


def open_small_group(ddp: Distributed, function: str, problem: str | None = None) -> SmallGroup:
    """Open a group for messages that are no masks; collective over the module's process group.

    Args:
        ddp: the module, or anything else with a process group and a device.
        function: what every rank calls.
        problem: what keeps this rank from it, or None.

    Raises:
        RuntimeError: some rank has a problem, or could not open it; the same on every rank.
    """
    own = (new_name(), tuple(find_endpoint(ddp.process_group)))
    offers = settle(function, propose(ddp, function, {}, problem, own))
    name, endpoints = offers[0][0], [Endpoint(*endpoint) for _, endpoint in offers]
    ranks = dist.get_world_size(ddp.process_group)

    def open_one(attempt: int, listener: Listener) -> Any:
        if ranks == 1:
            return None
        devices = listener.make_devices()
        return _open_group(ddp, f"{name}/{attempt}/small", dist.get_rank(ddp.process_group), ranks, devices)

    backend = _open_on_every_rank(ddp, function, "a group for small messages", endpoints, open_one)
    keeper = _C.ControlGroups(world_size=ranks, all=backend, axes=[])
    return SmallGroup(backend, keeper, group_by_host([endpoint.host for endpoint in endpoints]))


def new_name() -> str:
    """Make a name for control groups; the ranks use rank 0's."""
    return f"ddp_hooks/{uuid.uuid4().hex}"


def open_control_groups(ddp: Distributed, function: str, name: str, endpoints: Sequence[Endpoint]) -> ControlGroups:
    """Open the groups for the mask exchange; collective over the module's process group.

    Args:
        ddp: the module.
        function: what every rank calls.
        name: the same on every rank, and new. The ranks find each other under it, in the store of the module's group.
        endpoints: every rank's.

    Raises:
        RuntimeError: some rank could not open them; the same on every rank.
    """

    def open_all(attempt: int, listener: Listener) -> Any:
        return _open_groups(ddp, f"{name}/{attempt}", listener)

    return ControlGroups(
        name, _open_on_every_rank(ddp, function, "the groups for the mask exchange", endpoints, open_all)
    )


def _open_on_every_rank(
    ddp: Distributed,
    function: str,
    what: str,
    endpoints: Sequence[Endpoint],
    open_groups: Callable[[int, Listener], Any],
) -> Any:
    """Open groups, on all ranks again if some rank lost a connection; collective over the module's group.

    Args:
        ddp: the module.
        function: what every rank calls.
        what: what is opened, in words.
        endpoints: every rank's.
        open_groups: given the number of the attempt and where to listen, opens groups under a name of that attempt.

    Returns:
        What ``open_groups`` returned.

    Raises:
        RefusedError: some rank could not open them; the same on every rank.
    """
    listener = choose_listener(ddp.process_group, endpoints)
    attempt = 0
    while True:
        attempt += 1
        # What this rank has opened in vain is closed before the next attempt.
        opened, error = None, None
        try:
            opened = open_groups(attempt, listener)
        except RuntimeError as caught:
            error = caught
        tries = "" if attempt == 1 else f" after {attempt} attempts"
        problem = None if error is None else f"could not open {what}{tries}: {error}. {advise(listener)}"
        # Also so that nobody leaves, or closes them, before the last rank has connected. A rank that has gone does not
        # answer, which ends this on the others.
        proposals = propose(ddp, function, {}, problem, _outcome(error))
        outcomes = {each.own for each in proposals}
        # A connection that was lost may last the next time. One that could not be made cannot be made then either.
        if _LOST in outcomes and outcomes <= {_OPENED, _LOST, _NOT_MADE} and attempt < ATTEMPTS:
            continue
        try:
            settle(function, proposals)
        except RefusedError as refusal:
            # Not the rank's own error: who goes on as plain DDP after a refusal does so on every rank.
            raise refusal from error
        return opened


# How an attempt to open groups ended on a rank.
_OPENED, _LOST, _NOT_MADE, _FAILED = "opened", "connection lost", "connection not made", "failed"
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)


def _outcome(error: RuntimeError | None) -> str:
    if error is None:
        return _OPENED
    if not waited_in_vain(error):
        return _FAILED
    return _NOT_MADE if _TIMED_OUT.search(str(error)) else _LOST


def _open_groups(ddp: Distributed, name: str, listener: Listener) -> Any:
    group = ddp.process_group
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return _C.ControlGroups(world_size=1, all=None, axes=[])
    devices = listener.make_devices()
    everyone = _open_group(ddp, f"{name}/all", here, ranks, devices)
    axes = []
    lengths = grid(ranks, LARGEST_AXIS)
    stride = 1
    for number, length in enumerate(lengths if len(lengths) > 1 else []):
        position = here // stride % length
        # Those that differ from this rank along the axis only; the first of them names their group.
        first = here - position * stride
        axes.append(_open_group(ddp, f"{name}/axis{number}/{first}", position, length, devices))
        stride *= length
    sums = None
    if _C.needs_group_for_sums(group, ddp.device):
        # Gradients travel there, which masks must not wait for.
        sums = _open_group(ddp, f"{name}/sums", here, ranks, listener.make_devices())
    return _C.ControlGroups(world_size=ranks, all=everyone, axes=axes, sums=sums)


def grid(ranks: int, largest_axis: int) -> list[int]:
    """Arrange ranks in a grid, for gathers along its axes in place of one over all ranks.

    Args:
        ranks: how many, at least 1.
        largest_axis: how long an axis may be, where the number of ranks has a divisor that allows it. Otherwise an axis
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
    # What torch's own groups are told, for its flight recorder.
    options.group_name = name
    group = dist.ProcessGroupGloo(store, rank, ranks, options)
    group._set_default_timeout(timeout)
    return group


def timeout_of(ddp: Distributed) -> timedelta:
    """Return the data group's timeout, so that a lost rank is noticed as soon here as there."""
    try:
        options = getattr(ddp.process_group._get_backend(ddp.device), "options", None)
    except RuntimeError:
        options = None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.constants.default_pg_timeout
