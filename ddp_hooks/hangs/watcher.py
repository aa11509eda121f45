"""Runs a thread beside training, which notices if this rank waits for others for too long, and answers for it."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import RanksAbsentError
from ..wording import describe_ranks
from .activity import ModuleActivity, activity
from .forks import LockOfProcess
from .report import Report
from .session import Session, print_to_stderr
from .stack import BACKWARD, read_error
from .status import SOME_COLLECTIVE, Wait
from .witness import Witness

# How long a rank waits before it asks who is missing, where nobody says otherwise. Seconds.
REPORT_AFTER_SECONDS = 10.0
VARIABLE = "DDP_HOOKS_REPORT_HANG_AFTER"
_POLL_SECONDS = 0.5
# While it is not known yet which process holds the store: it may be asked for soon.
_LEARNING_SECONDS = 0.1
_CLOSING_SECONDS = 1.0
# What gloo, torch's stores and NCCL say of a rank that does not come, and of one that goes.
_TIMED_OUT = re.compile(r"time[d]?[ -]?out", re.IGNORECASE)
_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe|pair closure|socket|closed by peer", re.IGNORECASE)
# In errors that name the missing ranks already.
NAMED = "did not arrive"


class Watcher:
    """Watches this process.

    Attributes:
        listeners: called at each look, until they are taken out again.
        session: in the default group that there is, if it has more than one rank.
        witness: what looks at the thread that trains in it.
    """

    def __init__(self) -> None:
        self.listeners: list[Callable[[], object]] = []
        self.session: Session | None = None
        self.witness: Witness | None = None
        self._attaching = threading.Lock()
        self._stopped = threading.Event()
        self._waited = 0.0
        # How long a wait that was asked about is let be, and how long after that. Seconds; 0 for one that was not.
        self._due = self._pause = 0.0
        self._thread = threading.Thread(target=self._run, name="ddp_hooks watcher", daemon=True)
        self._thread.start()

    def attach(self) -> None:
        """Watch in the current default group."""
        with self._attaching:
            group = _own_group()
            session = self.session
            if session is not None and not session.serves(group):
                self._detach()
            elif session is not None:
                session.learn_holder()
            if self.session is None and group is not None and dist.get_world_size() > 1:
                self.witness = Witness(activity, dist.get_rank(), dist.get_world_size())
                session = Session(group, self.witness, activity)
                # Not held while the store is waited for: whoever drops a group last waits for its workers.
                del group
                session.introduce()
                self.session = session

    def _detach(self) -> None:
        session, self.session, self.witness = self.session, None, None
        if session is not None:
            session.close()

    def stop(self) -> None:
        """End the threads; called at the end of the program."""
        self._stopped.set()
        session = self.session
        if session is not None:
            session.close(_CLOSING_SECONDS)
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        pause = _POLL_SECONDS
        while not self._stopped.wait(pause):
            slept, pause = pause, _POLL_SECONDS
            # Whatever goes wrong here is not training's business.
            with suppress(Exception):
                pause = self._wake_up(slept)

    def _wake_up(self, slept: float) -> float:
        """Look at this rank; return when to look again."""
        for listener in list(self.listeners):
            with suppress(Exception):
                listener()
        session, witness, patience = self.session, self.witness, report_after()
        if session is not None and (session.ended or not dist.is_initialized()):
            self._detach()
        elif session is None and dist.is_initialized():
            self.attach()
        if session is None or witness is None or session.ended or patience == 0:
            return _POLL_SECONDS
        most = _POLL_SECONDS if session.learn_holder() else _LEARNING_SECONDS
        witness.look(slept)
        wait = witness.find_wait()
        poll = min(most, patience / 5)
        waited, self._waited = self._waited, 0.0 if wait is None else wait.seconds
        if self._waited < waited:
            self._due = self._pause = 0.0  # another wait
        due = max(self._due, patience)
        if wait is not None and wait.seconds >= due:
            self._tell(session, witness, session.call(), wait)
        elif not witness.is_brisk(patience / 2) or self._waited > poll:
            poll = session.poll_seconds(poll)
            call = session.answer()
            if call and wait is not None:
                # Another rank may ask what this one has asked and told already.
                self._tell(session, witness, call, wait, is_asked=wait.seconds < self._due)
        return poll if wait is None else max(0.01, min(poll, due - wait.seconds))

    def _tell(self, session: Session, witness: Witness, call: int, wait: Wait, *, is_asked: bool = False) -> None:
        asked = time.monotonic()

        def still_waits() -> bool:
            witness.look(time.monotonic() - asked)
            now = witness.find_wait()
            # It has gone on if the wait that there is has begun since.
            return now is not None and now.place == wait.place and now.seconds >= wait.seconds

        is_missing = session.tell(
            call, wait, still_waits, witness.read_position(), patience_seconds=report_after(), prints=not is_asked
        )
        if is_asked:
            return
        if is_missing:
            self._pause = 2 * self._pause or report_after()
            self._due = wait.seconds + self._pause
        else:
            self._due = wait.seconds + report_after()


def report_after() -> float:
    """Return after how many seconds of waiting a rank asks which ranks are missing; 0 for never."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        with suppress(ValueError):
            seconds = float(text)
            if 0 <= seconds < float("inf"):
                return seconds
    return _setting


_setting = REPORT_AFTER_SECONDS
_watcher: Watcher | None = None
_lock = LockOfProcess()
# In a forked child: the default group of its parent. Whoever asked in its store would speak for the parent.
_group_of_the_parent: weakref.ref[dist.ProcessGroup] | None = None


def begin(seconds: float | None = None) -> Watcher | None:
    """Watch this process from now on. The thread that trains calls this often. It raises nothing.

    Args:
        seconds: after how long a rank that waits asks who is missing; 0 for never, None for what was said before.

    Returns:
        What watches; None if nothing does.
    """
    global _setting
    if seconds is not None:
        _setting = seconds
    if _watcher is None and report_after() == 0:
        return None
    # Training goes on where no thread can be started, or nothing be asked.
    with suppress(Exception):
        watcher = _start()
        if dist.is_initialized():
            watcher.attach()
    return _watcher


def end() -> None:
    """Stop watching this process, until :func:`begin` is called again."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.stop()


def listen(listener: Callable[[], object]) -> Callable[[], None]:
    """Call a function every half second in the watcher's thread; return a function that ends this."""
    watcher = _start()
    watcher.listeners.append(listener)

    def end() -> None:
        with suppress(ValueError):
            watcher.listeners.remove(listener)

    return end


def _start() -> Watcher:
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = Watcher()
        return _watcher


def watch_module(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Also watch a DDP module without a hook of this package; return a function that ends this."""
    return watch_forward(
        ddp, ModuleActivity(type(ddp.module).__name__, dist.get_process_group_ranks(ddp.process_group))
    )


def watch_forward(module: nn.Module, counts: ModuleActivity) -> Callable[[], None]:
    """Count the forward passes of a module; return a function that ends this."""
    # Before FSDP2's own hook, which may wait for other ranks.
    handle = module.register_forward_pre_hook(counts.forward_begins, prepend=True)
    activity.add(counts)
    finalizer = weakref.finalize(module, activity.remove, counts)
    finalizer.atexit = False
    begin()

    def end() -> None:
        handle.remove()
        finalizer()

    return end


def watch_construction(arguments: Mapping[str, Any]) -> Callable[[DistributedDataParallel | None], object]:
    """Watch a module from the beginning of its construction; `run --watch` calls this with the module's arguments."""
    begin()
    return lambda ddp: None if ddp is None else watch_module(ddp)


# --- what has failed


def waited_in_vain(error: BaseException) -> bool:
    """Return whether an error means that a rank did not come or a connection was lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and (_TIMED_OUT.search(str(error)) or _LOST.search(str(error))) is not None


def timed_out(said: str) -> bool:
    """Say whether an error of a wait that failed is a timeout, by what it says; otherwise a connection was lost."""
    return _TIMED_OUT.search(said) is not None


def explain(place: str, ranks: Sequence[int], seconds: float, said: str, step: int = 0) -> Report | None:
    """Find the ranks that were missing where this rank's wait has failed.

    Args:
        place: where that was.
        ranks: of the group, as ranks of the world.
        seconds: for how long it has waited.
        said: what the error says.
        step: in which step, if it was in one.

    Returns:
        The same lines on every rank that waited for the same ones; None if the store does not answer.
    """
    begin()
    wait = Wait(place, tuple(ranks), seconds, step, activity.calls(place, ranks), timed_out(said))
    activity.failed = wait
    with suppress(Exception), _session() as session:
        return None if session is None else session.explain(wait)
    return None


@contextmanager
def _session() -> Iterator[Session | None]:
    """Open a session, or lend the watcher's; where nobody watches, those that fail can still tell each other."""
    watcher = _watcher
    if watcher is not None and watcher.session is not None and not watcher.session.ended:
        yield watcher.session
        return
    group = _own_group()
    if group is None or dist.get_world_size() == 1:
        yield None
        return
    session = Session(group, Witness(activity, dist.get_rank(), dist.get_world_size()), activity)
    del group
    try:
        yield session
    finally:
        session.close()


def explain_backward(module: ModuleActivity, said: str) -> str:
    """Describe which ranks were missing in a backward pass that has failed in the hook; empty if that is unknown."""
    seconds = module.seconds_in_hook()
    report = explain(f"{BACKWARD} of {module.name}", module.ranks, seconds, said, module.steps)
    if report is None or not report.missing:
        return ""
    lines = "".join(f"\n  {line}" for line in report.lines)
    failed = "timed out" if timed_out(said) else "lost a connection"
    return (
        f"ddp_hooks: {BACKWARD} of {module.name}, step {module.steps:,}, {failed} after {seconds:.1f} s because "
        f"{describe_ranks(report.missing)} {NAMED}:{lines}"
    )


# --- the end of the program


@atexit.register
def _end() -> None:
    with suppress(Exception):
        # What nobody has caught; from Python 3.12 on under one name.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and report_after() > 0:
            _say_how_it_ended(error)
    end()


def _say_how_it_ended(error: BaseException) -> None:
    text, activity.ended_at = read_error(error)
    in_vain = waited_in_vain(error)
    is_watched = _watcher is not None and _watcher.session is not None and not _watcher.session.ended
    with _session() as session:
        if session is None:
            return
        if in_vain and not isinstance(error, RanksAbsentError) and NAMED not in str(error):
            report = explain(SOME_COLLECTIVE, range(session.ranks), 0.0, str(error))
            if report is not None and report.missing:
                lines = "".join(f"\n  {line}" for line in report.lines)
                print_to_stderr(f"ddp_hooks: rank {session.rank} failed because other ranks {NAMED}:{lines}\n")
        status = session.witness.make_status(0)
        failed = status.failed if in_vain else None
        # Where nobody watches, as on a rank that has called nothing of this package, perhaps nobody does anywhere.
        session.say_goodbye(replace(status, error=text, wait=None, failed=failed, inside=None), lingers=is_watched)


def _own_group() -> dist.ProcessGroup | None:
    group = dist.group.WORLD
    is_of_the_parent = _group_of_the_parent is not None and _group_of_the_parent() is group
    return None if is_of_the_parent else group


def _forget() -> None:
    # A child has neither the thread nor the role.
    global _watcher, _group_of_the_parent
    _watcher = None
    if dist.group.WORLD is not None:
        _group_of_the_parent = weakref.ref(dist.group.WORLD)
    activity.forget()


os.register_at_fork(after_in_child=_forget)
