"""Gives every DDP module the hook when it is made, for programs in which a trainer makes the module."""

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

# How long the first rank waits for the others to make the module under `enable`, if DDP's `__init__` does not
# synchronise (`init_sync=False`).
PATIENCE_SECONDS = 60.0

_lock = LockOfProcess()
_open: list[Enabling] = []
_watch = ExitStack()


@dataclass(frozen=True, slots=True)
class MadeModule:
    """A DDP module that was made while :func:`enable` was in force.

    Attributes:
        name: the class of the model.
        rank: this process's rank in the default group.
        world_size: the size of the module's process group.
        state: the state that serves it; None if it trains as plain DDP.
        problem: why it trains as plain DDP; None if a state serves it.
    """

    name: str
    rank: int
    world_size: int
    state: SkipUnusedState | None
    problem: str | None


class Enabling:
    """The result of :func:`enable`. As a context manager, it ends with its block.

    Args:
        policy: the policy for the modules.
        report: called with a :class:`MadeModule` for each module that is made, or None.

    Attributes:
        policy: the policy for the modules.
        states: the states of the modules, in the order in which they were made. A state keeps its statistics when its
            module goes, as it does when a trainer has finished.
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
        """End it; modules made later get the policy that was enabled before, if any. May be called again."""
        with _lock:
            if self in _open:
                _open.remove(self)
                if not _open:
                    _watch.close()

    def __enter__(self) -> Enabling:
        """Return this object, which is in force already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""
        self.end()

    def __repr__(self) -> str:
        """Show the policy, and whether it is in force."""
        return f"<ddp_hooks.enable(policy={self.policy.name!r}): {'in force' if self in _open else 'ended'}>"

    def serve(self, ddp: DistributedDataParallel, visit: Visit | None, *, passed_together: bool) -> None:
        """Give a new module the hook, or say why it trains as plain DDP. Every rank with :func:`enable` calls it.

        Args:
            ddp: the module.
            visit: the meeting of ranks that called :func:`enable`, begun before the module was constructed; or None.
            passed_together: whether the construction made every rank wait for every other rank.
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
    """Register the hook with every DistributedDataParallel module that is made from now on.

    Use it if a trainer makes the module: call it on every rank before the trainer starts. It does what
    :func:`ddp_hooks.register` does, at the end of each module's ``__init__``. Existing modules and copies are left
    alone. The returned object keeps the states of all modules, while :func:`ddp_hooks.states` returns only those whose
    modules still exist.

    A module that cannot be served trains as plain DDP on every rank, and each rank warns and says why. The same happens
    if some rank did not call this function; the warning names that rank. If another hook is registered with a module
    later (``ddp.register_comm_hook``), it replaces this one, with a warning.

    If called again, the latest policy applies to modules made after that. :func:`disable` ends all of them.

    Args:
        policy: a preset's name or a :class:`ddp_hooks.Policy`, as for :func:`ddp_hooks.register`.
        settings: fields of the policy to set differently, for example ``enable("skip_unused", rebuild_after=100)``.

    Returns:
        An object with the ``states`` of the modules. Used as a context manager, it ends with its block.

    Raises:
        TypeError, ValueError: the policy or a setting does not exist. Nothing is enabled then.

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
    """Undo every :func:`enable`. Modules made from now on get no hook; existing modules keep theirs.

    If nothing is enabled, it does nothing.
    """
    with _lock:
        for enabling in list(_open):
            enabling.end()


def _begin(arguments: Mapping[str, Any]) -> Ending | None:
    with _lock:
        enabling = _open[-1] if _open else None
    if enabling is None:
        return None
    # Before the collectives in DDP's `__init__`: a rank that has passed those knows which ranks take part.
    group = _group_of(arguments)
    visit = None if group is None else Visit(group, ENABLE)

    def end(ddp: DistributedDataParallel | None) -> None:
        if ddp is not None:
            enabling.serve(ddp, visit, passed_together=bool(arguments.get("init_sync", True)))
        elif visit is not None:
            visit.take_back()

    return end


def _group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup | None:
    """Return the process group that a module will have; None if that is unknown, or DDP is going to raise."""
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
        # Every rank raises these together. Another error may concern this rank alone, so training must not go on.
        return None, str(refusal)
