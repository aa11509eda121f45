"""The gloo groups over which the ranks of a module agree on what was used."""

from __future__ import annotations

import atexit
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _extension
from .agreement import settle
from .errors import RefusedError
from .groups import store_of
from .hangs.watcher import waited_in_vain
from .registration import propose

_C = _extension.load()

# A gather's hops come one after the other, and each axis takes a group of its own. With axes of 4 an exchange that
# nothing hides took about 0.8 of one gather's time on 8 ranks and 0.6 on 16; axes of 2 took a tenth less for twice the
# groups (benchmarks/results/micro_exchange_many.json).
LARGEST_AXIS = 4
# How often the ranks try to open groups. gloo gives a group up when it loses one connection while it makes the others,
# and does not try again.
ATTEMPTS = 3
# gloo waits for a connection five times as long as for a message. All ranks begin at the same moment, so that less than
# the groups' timeout is enough, but for machines that are busy; and all attempts together are to take no longer. Who
# lost a connection asks the others meanwhile, on the data group, and with a timeout under 50 seconds may give up.
_WAITS_FOR_A_CONNECTION = 5
_LEAST_TO_CONNECT = timedelta(seconds=10)
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
    costs: Any = None
    """What collectives take on the group that gradients travel on, a ``_C.CollectiveCosts``; None if not measured."""


@dataclass(frozen=True, slots=True)
class SmallGroup:
    """One gloo group of a module's ranks, for small messages on the host; like the control groups nobody else's."""

    backend: Any
    """Its collectives; None with one rank only."""
    keeper: Any
    """A ``_C.ControlGroups``, which closes it. It has to be let go of last."""


def open_small_group(ddp: DistributedDataParallel, function: str, problem: str | None = None) -> SmallGroup:
    """Open a group for what is no mask exchange; collective over the module's process group.

    Args:
        ddp: the module.
        function: what every rank calls.
        problem: what keeps this rank from it, or None.

    Raises:
        RuntimeError: some rank has a problem, or could not open it; the same on every rank.
    """
    name = settle(function, propose(ddp, function, {}, problem, new_name()))[0]
    ranks = dist.get_world_size(ddp.process_group)

    def open_one(attempt: int) -> Any:
        if ranks == 1:
            return None
        return _open_group(ddp, f"{name}/{attempt}/small", dist.get_rank(ddp.process_group), ranks)

    backend = _open_on_every_rank(ddp, function, "a group for small messages", open_one)
    return SmallGroup(backend, _C.ControlGroups(world_size=ranks, all=backend, axes=[]))


def new_name() -> str:
    """Make a name for control groups; the ranks use rank 0's."""
    return f"ddp_hooks/{uuid.uuid4().hex}"


def open_control_groups(ddp: DistributedDataParallel, function: str, name: str) -> ControlGroups:
    """Open the groups for the mask exchange; collective over the module's process group.

    Args:
        ddp: the module.
        function: what every rank calls.
        name: the same on every rank, and new. The ranks find each other under it, in the store of the module's group.

    Raises:
        RuntimeError: some rank could not open them; the same on every rank.
    """

    def open_all(attempt: int) -> Any:
        return _open_groups(ddp, f"{name}/{attempt}")

    return ControlGroups(name, _open_on_every_rank(ddp, function, "the groups for the mask exchange", open_all))


def _open_on_every_rank(
    ddp: DistributedDataParallel, function: str, what: str, open_groups: Callable[[int], Any]
) -> Any:
    """Open groups, on all ranks again where some rank has lost a connection; collective over the module's group.

    Args:
        ddp: the module.
        function: what every rank calls.
        what: what is opened, in words.
        open_groups: given the number of the attempt, opens groups under a name of that attempt.

    Returns:
        What ``open_groups`` returned.

    Raises:
        RefusedError: some rank could not open them; the same on every rank.
    """
    attempt = 0
    while True:
        attempt += 1
        # What this rank has opened in vain is closed before the next attempt.
        opened, error = None, None
        try:
            opened = open_groups(attempt)
        except RuntimeError as caught:
            error = caught
        tries = "" if attempt == 1 else f" in {attempt} attempts"
        problem = None if error is None else f"could not open {what}{tries}: {error}"
        # Also so that nobody leaves, or closes them, before the last rank has connected. A rank that has gone does not
        # answer, which ends this on the others: only where every rank is there was it a connection that was lost.
        proposals = propose(ddp, function, {}, problem, error is None or waited_in_vain(error))
        lost = any(each.problem is not None for each in proposals) and all(each.own for each in proposals)
        if lost and attempt < ATTEMPTS:
            continue
        try:
            settle(function, proposals)
        except RefusedError as refusal:
            # Not the rank's own error: who goes on as plain DDP after a refusal does so on every rank.
            raise refusal from error
        return opened


def _open_groups(ddp: DistributedDataParallel, name: str) -> Any:
    group = ddp.process_group
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return _C.ControlGroups(world_size=1, all=None, axes=[])
    everyone = _open_group(ddp, f"{name}/all", here, ranks)
    axes = []
    lengths = grid(ranks, LARGEST_AXIS)
    stride = 1
    for number, length in enumerate(lengths if len(lengths) > 1 else []):
        position = here // stride % length
        # Those that differ from this rank along the axis only; the first of them names their group.
        first = here - position * stride
        axes.append(_open_group(ddp, f"{name}/axis{number}/{first}", position, length))
        stride *= length
    sums = None
    if _C.needs_group_for_sums(group, ddp.device):
        sums = _open_group(ddp, f"{name}/sums", here, ranks)
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


def _open_group(ddp: DistributedDataParallel, name: str, rank: int, ranks: int) -> Any:
    global _has_opened_groups
    _has_opened_groups = True
    store = dist.PrefixStore(name, store_of(ddp.process_group))  # type: ignore[attr-defined]
    timeout = _timeout_of(ddp)
    to_connect = max(timeout / (_WAITS_FOR_A_CONNECTION * ATTEMPTS), min(timeout / 2, _LEAST_TO_CONNECT))
    group = dist.ProcessGroupGloo(store, rank, ranks, timeout=to_connect)
    group._set_default_timeout(timeout)
    # What torch's own groups are told, for its flight recorder.
    group.options.group_name = name  # type: ignore[assignment]
    return group


def _timeout_of(ddp: DistributedDataParallel) -> timedelta:
    """Return the data group's timeout, so that a lost rank is noticed as soon here as there."""
    try:
        options = getattr(ddp.process_group._get_backend(ddp.device), "options", None)
    except RuntimeError:
        options = None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.constants.default_pg_timeout
