"""What this process does, as far as that is known without reading its stack: plain fields that training writes.

Writing a field takes no lock, so the watcher may read a value that is a moment old.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .stack import Progress
from .status import Wait


class HookActivity(Protocol):
    """What a hook can tell without a lock."""

    def seconds_in_hook(self) -> float:
        """Return for how many seconds the hook has been waiting for masks; 0 if it is not waiting."""

    def agreed_steps(self) -> int:
        """Return the number of steps in which every rank of the group has taken part."""


class ModuleActivity:
    """One module.

    Args:
        name: the class of its model.
        ranks: the ranks of its process group, as ranks of the world.
        hook: the hook's counters; None without a hook.

    Attributes:
        steps: the number of forward passes of synchronised steps that have begun.
        passes: the number of forward passes that have begun, including those under ``no_sync`` and in evaluations.
    """

    steps = 0
    passes = 0

    def __init__(self, name: str, ranks: Sequence[int], hook: HookActivity | None = None) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.hook = hook

    def seconds_in_hook(self) -> float:
        """Return for how many seconds the hook, if there is one, has been waiting for masks; 0 if it is not waiting."""
        return 0.0 if self.hook is None else self.hook.seconds_in_hook()

    def agreed_steps(self) -> int | None:
        """Return the number of steps in which every rank has taken part; None if nothing counts them."""
        return None if self.hook is None else self.hook.agreed_steps()

    def forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        """Count a forward pass: the forward pre-hook of a DDP or fully_shard module without a hook of this package."""
        if torch.compiler.is_compiling():
            return
        self.passes += 1
        if torch.is_grad_enabled() and getattr(module, "require_backward_grad_sync", True):
            self.steps += 1

    def __getstate__(self) -> dict[str, Any]:
        """Drop everything: a copied module keeps its hooks, but its counts belong to no training."""
        return {}


@dataclass(slots=True)
class _FunctionWait:
    function: str
    ranks: tuple[int, ...]
    since: float
    number: int


@dataclass(slots=True)
class Activity:
    """What a process does.

    Attributes:
        modules: the modules that train.
        failed: this rank's last wait that failed; None after the next call.
        forked_by_trainer: in a forked child, whether the thread that trains forked it.
        ended_at: if an error ends the program, the user's lines that it came through, innermost first; else None.
        remarks: functions that return more lines about this rank.
        thread: the thread that trains.
        clock: that thread's clock of processor time; None if the system has none.
    """

    modules: list[ModuleActivity] = field(default_factory=list)
    failed: Wait | None = None
    ended_at: tuple[str, ...] | None = None
    forked_by_trainer: bool = False
    remarks: list[Callable[[], list[str]]] = field(default_factory=list)
    thread: int = field(default_factory=lambda: threading.main_thread().ident or 0)
    clock: int | None = field(default_factory=lambda: _clock_of(threading.main_thread().ident or 0))
    _of_the_parent: list[Callable[[], list[str]]] = field(default_factory=list)
    _waits: list[_FunctionWait] = field(default_factory=list)
    _calls: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    _steps_of_removed: int = 0

    def add(self, module: ModuleActivity) -> None:
        """Let a module count."""
        self.modules.append(module)
        self._trains_here()

    def remark(self, remark: Callable[[], list[str]]) -> Callable[[], None]:
        """Let somebody say more of this rank; return what ends that."""
        self.remarks.append(remark)

        def end() -> None:
            if remark in self.remarks:
                self.remarks.remove(remark)

        return end

    def remove(self, module: ModuleActivity) -> None:
        """Let it count no more; may be called again."""
        self._steps_of_removed = max(self._steps_of_removed, module.steps)
        self.modules[:] = [other for other in self.modules if other is not module]

    @contextmanager
    def waiting(self, function: str, ranks: Sequence[int]) -> Iterator[None]:
        """Say that this rank waits in a function for other ranks while the block is open."""
        self._calls[function, tuple(ranks)] += 1
        wait = _FunctionWait(function, tuple(ranks), time.monotonic(), self._calls[function, tuple(ranks)])
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def calls(self, function: str, ranks: Sequence[int]) -> int:
        """Return how often this rank has called a function that those ranks have to call."""
        return self._calls[function, tuple(ranks)]

    def known_wait(self) -> Wait | None:
        """Return where this rank waits, as far as it is known for sure: in a function, or in the hook."""
        waits = self._waits[:1]
        if waits:
            (wait,) = waits
            return Wait(wait.function, wait.ranks, time.monotonic() - wait.since, call=wait.number)
        for module in list(self.modules):
            seconds = module.seconds_in_hook()
            if seconds > 0:
                return Wait(f"backward of {module.name}", module.ranks, seconds, step=module.steps)
        return None

    def _trains_here(self) -> None:
        # Asked for while the thread lives: of one that has ended, C reads memory that may be gone.
        self.thread = threading.get_ident()
        self.clock = _clock_of(self.thread)

    def progress(self) -> Progress:
        """Return how far this process has come."""
        passes = tuple((module.passes, module.agreed_steps()) for module in list(self.modules))
        try:
            return Progress(None if self.clock is None else time.clock_gettime(self.clock), passes)
        except OSError:  # the thread has ended
            return Progress(None, passes)

    def forget(self) -> None:
        """Begin anew, in a process that was forked."""
        self.forked_by_trainer = threading.get_ident() == self.thread
        self._trains_here()
        self.modules.clear()
        # Not dropped: they may be the last to hold a module of the parent's, whose group would join threads not here.
        self._of_the_parent += self.remarks
        self.remarks.clear()
        self._waits.clear()
        self._calls.clear()
        self._steps_of_removed = 0
        self.failed = self.ended_at = None

    def steps(self) -> int:
        """Return the steps of the module that has had the most; those that are gone count."""
        return max([self._steps_of_removed, *(module.steps for module in list(self.modules))])


def _clock_of(thread: int) -> int | None:
    try:
        return time.pthread_getcpuclockid(thread)
    except (AttributeError, OSError, OverflowError):
        return None


# This process's own.
activity = Activity()
