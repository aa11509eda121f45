"""The hook for every DDP module that is made from now on, whoever makes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .errors import RanksDisagreeError, RefusedError
from .hangs import watcher
from .hangs.forks import LockOfProcess
from .hooks import SkipUnusedState, register
from .policies import Policy, resolve
from .serving.absentees import ENABLE, Visit
from .serving.ddp_methods import Ending, give_way_to_other_hooks, watch_construction_from_its_beginning
from .serving.disabling import VARIABLE, is_disabled
from .wording import describe_ranks

# How long a module's first rank waits for the others to make theirs under `enable`, too, where DDP's `__init__` waits
# for nobody (`init_sync=False`).
PATIENCE_SECONDS = 60.0

_lock = LockOfProcess()
_open: list[Enabling] = []
_watch = ExitStack()


@dataclass(frozen=True, slots=True)
class MadeModule:
    """What became of a DDP module that was made.

    Attributes:
        name: its model's class.
        rank: this process's rank in the world.
        world_size: that group's size.
        state: what serves it; None where nothing does.
        problem: why nothing does; None where something does.
    """

    name: str
    rank: int
    world_size: int
    state: SkipUnusedState | None
    problem: str | None


class Enabling:
    """What :func:`enable` returns: as a context manager it ends with its block.

    Args:
        policy: what modules are served with.
        report: what to tell of each module that is made, or None.

    Attributes:
        policy: the same.
        states: of each module that was served, in the order in which they were made. A state keeps its statistics when
            its module goes, as it does when a trainer has finished.
    """

    def __init__(self, policy: Policy, report: Callable[[MadeModule], object] | None = None) -> None:
        self.policy = policy
        self.states: list[SkipUnusedState] = []
        self._report = report
        with _lock:
            if not _open:
                _watch.enter_context(watch_construction_from_its_beginning(_begin))
            _open.append(self)

    def end(self) -> None:
        """Leave modules that are made from now on to what was enabled before, if anything was; may be called again."""
        with _lock:
            if self in _open:
                _open.remove(self)
                if not _open:
                    _watch.close()

    def __enter__(self) -> Enabling:
        """Return this; it is in force already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""
        self.end()

    def __repr__(self) -> str:
        """Name the policy, and whether modules that are made now get the hook."""
        return f"<ddp_hooks.enable(policy={self.policy.name!r}): {'in force' if self in _open else 'ended'}>"

    def serve(self, ddp: DistributedDataParallel, visit: Visit | None, *, passed_together: bool) -> None:
        """Give a new module the hook, or say why it trains on as plain DDP; every rank that has enabled it calls it.

        Args:
            ddp: the module.
            visit: where the ranks meet that have enabled it, since the module's construction began; or None.
            passed_together: every rank has waited for every other one in that construction.
        """
        name = type(ddp.module).__name__ if hasattr(ddp, "module") else type(ddp).__name__
        if visit is not None and visit.group is not ddp.process_group:
            visit.take_back()
            visit = None
        if visit is None:
            visit, passed_together = Visit(ddp.process_group, ENABLE), False
        absent = visit.meet(PATIENCE_SECONDS, passed_together=passed_together)
        state, problem = (None, _describe(absent)) if absent else _try_to_register(ddp, self.policy)
        if state is not None:
            self.states.append(state)
            if is_disabled():
                state, problem = None, f"the environment variable {VARIABLE} is set"
            else:
                give_way_to_other_hooks(ddp)
        else:
            # From the caller of this, and of DDP's `__init__`.
            warnings.warn(f"ddp_hooks.enable: {name} trains as plain DistributedDataParallel. {problem}", stacklevel=4)
        if self._report is not None:
            group = ddp.process_group
            self._report(MadeModule(name, dist.get_rank(), dist.get_world_size(group), state, problem))


def enable(policy: Policy | str = "auto", **settings: Any) -> Enabling:
    """Give every DistributedDataParallel module that is made from now on the hook, whoever makes it.

    For programs in which a trainer makes the module: one line before it starts, on every rank, does what
    :func:`ddp_hooks.register` does for each module, at the end of the module's own ``__init__``. Modules that were made
    before are left alone, and so are copies. :func:`ddp_hooks.states` returns the states of modules that are there;
    what this returns has those of modules that a trainer has dropped, too.

    A module that cannot be served trains on as plain DDP, on every rank, and each rank warns and says why. That is
    also so where some rank has not called this: the others say which one it is. A hook that is registered with a module
    later (``ddp.register_comm_hook``) takes the place of this one, with a warning.

    Enabled again, the latest policy holds for what is made then; :func:`disable` ends all of them.

    Args:
        policy: a preset's name or a :class:`ddp_hooks.Policy`, as for :func:`ddp_hooks.register`.
        settings: fields of the policy to set differently, as in ``enable("skip_unused", rebuild_after=100)``.

    Returns:
        Its ``states``; and a context manager, with which it is in force in the block only. It need not be used as one.

    Raises:
        TypeError, ValueError: there is no such policy or setting. Nothing is enabled then.

    Example::

        enabled = ddp_hooks.enable()
        trainer.fit(model, loader)  # which wraps the model
        print(enabled.states[0].stats())

        with ddp_hooks.enable("skip_zeros"):
            trainer.fit(model, loader)
    """
    enabling = Enabling(resolve(policy, settings, "enable"))
    watcher.begin(enabling.policy.tuning.report_hang_after)
    return enabling


def disable() -> None:
    """Leave DDP modules that are made from now on as they are; those with a hook keep it.

    Everything that was enabled is ended. Called where nothing is, it does nothing.
    """
    with _lock:
        for enabling in list(_open):
            enabling.end()


def _begin(arguments: Mapping[str, Any]) -> Ending | None:
    with _lock:
        enabling = _open[-1] if _open else None
    if enabling is None:
        return None
    # Before any of the collectives in DDP's `__init__`: whoever has passed those knows who comes.
    group = _group_of(arguments)
    visit = None if group is None else Visit(group, ENABLE)

    def end(ddp: DistributedDataParallel | None) -> None:
        if ddp is not None:
            enabling.serve(ddp, visit, passed_together=bool(arguments.get("init_sync", True)))
        elif visit is not None:
            visit.take_back()

    return end


def _group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the group that a module will have; None where DDP will find something wrong, or nobody can tell."""
    group, mesh = arguments.get("process_group"), arguments.get("device_mesh")
    if "module" not in arguments or not dist.is_initialized() or (group is not None and mesh is not None):
        return None
    if group is None:
        group = dist.group.WORLD if mesh is None or mesh.ndim != 1 else mesh.get_group(mesh_dim=0)
    return group if isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0 else None


def _describe(absent: tuple[int, ...]) -> str:
    return (
        f"expected every rank to make it after ddp_hooks.enable(), but {describe_ranks(absent)} did not; call enable() "
        "on every rank before any module is made, or start every rank with `python -m ddp_hooks run`"
    )


def _try_to_register(ddp: DistributedDataParallel, policy: Policy) -> tuple[SkipUnusedState | None, str | None]:
    try:
        return register(ddp, policy), None
    except (RefusedError, RanksDisagreeError) as refusal:
        # Every rank knows of these. Of other errors only this one may, so they are no reason to go on.
        return None, str(refusal)
