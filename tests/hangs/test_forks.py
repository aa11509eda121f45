"""Forks: no lock that this package's threads hold is held in a child, and what is the parent's is left alone there."""

from __future__ import annotations

import faulthandler
import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks.hangs import forks, watcher
from ddp_hooks.hangs.activity import activity
from ddp_hooks.hangs.board import Board
from ddp_hooks.hangs.forks import LockOfProcess, apart_from_forks
from ddp_hooks.hangs.session import print_to_stderr

CHILD_SECONDS = 20
# While a lock is held almost always, so that one fork shows it as good as certainly.
FORKS = 15


def in_child(function: Callable[[], bool]) -> bool:
    """Say whether a function returns true in a forked child, before long."""
    pid = os.fork()
    if pid == 0:
        faulthandler.dump_traceback_later(CHILD_SECONDS / 2, file=2)
        try:
            os._exit(0 if function() else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    deadline = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if os.WIFSIGNALED(status):
                print(f"the child died of signal {os.WTERMSIG(status)}", file=sys.stderr)
            return status == 0
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


class Repeats:
    """A thread that calls a function again and again while the block is open."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(function,))

    def _run(self, function: Callable[[], object]) -> None:
        while not self._end.is_set():
            function()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def hold(lock: threading.Lock) -> None:
    """Take a lock as a function of the C library does, which a child finds as it was."""
    with lock:
        time.sleep(0.01)


def test_no_request_to_the_store_is_under_way() -> None:
    lock = threading.Lock()
    board = Board(dist.HashStore(), "test")
    with Repeats(lambda: board.ask(lambda store: hold(lock))):
        assert all(in_child(lambda: lock.acquire(blocking=False)) for _ in range(FORKS))
    board.close(1.0)


def test_nothing_is_being_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    class Stream:
        def write(self, text: str) -> None:
            hold(lock)

        def flush(self) -> None:
            hold(lock)

    monkeypatch.setattr(sys, "stderr", Stream())
    with Repeats(lambda: print_to_stderr("a line\n")):
        assert all(in_child(lambda: lock.acquire(blocking=False)) for _ in range(FORKS))


def test_no_thread_passes_while_a_fork_is_under_way() -> None:
    passed = []

    def go_on() -> None:
        with apart_from_forks():
            passed.append(time.monotonic())

    forks._gate.close()
    thread = threading.Thread(target=go_on)
    thread.start()
    time.sleep(0.1)
    assert passed == []
    forks._gate.open()
    thread.join()
    assert len(passed) == 1


def test_a_store_that_does_not_answer_holds_forks_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_LONGEST_WAIT_SECONDS", 4.0)
    end = threading.Event()
    board = Board(dist.HashStore(), "test")
    board.ask(lambda store: end.wait(60), seconds=0.1)
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        assert in_child(lambda: True)
        seconds.append(time.monotonic() - start)
    end.set()
    board.close(5.0)
    assert seconds[0] > 3.9
    assert seconds[1] + seconds[2] < 3.9


def test_whoever_is_behind_the_gate_may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_LONGEST_WAIT_SECONDS", 4.0)
    start = time.monotonic()
    with apart_from_forks(), apart_from_forks():
        assert in_child(lambda: True)
    assert time.monotonic() - start < 3.9
    assert in_child(lambda: True)


def test_a_lock_of_another_thread_is_free_in_a_child() -> None:
    lock, taken, end = LockOfProcess(), threading.Event(), threading.Event()

    def hold_it() -> None:
        with lock:
            taken.set()
            end.wait(20)

    def take() -> bool:
        with lock:
            return True

    thread = threading.Thread(target=hold_it)
    thread.start()
    taken.wait()
    assert in_child(take)
    end.set()
    thread.join()
    with lock:
        assert in_child(take)  # its own


def test_what_remarks_hold_is_not_destroyed_in_a_child() -> None:
    class Held:
        def tell(self) -> list[str]:
            return []

    reference = weakref.ref(held := Held())
    end = activity.remark(held.tell)

    def in_it() -> bool:
        nonlocal held, end
        del held, end
        gc.collect()
        return reference() is not None and activity.remarks == []

    assert in_child(in_it)
    end()


def _within_a_hook(rank: int) -> list[bool]:
    """Rank 0 stands in the hook, with the engine locked, and another thread forks."""
    ddp = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    state = ddp_hooks.register(ddp)
    batch = torch.ones(1, 2)
    ddp(batch).sum().backward()
    steps = state.stats().steps
    results: list[bool] = []

    def in_it() -> bool:
        nonlocal ddp, state
        assert state.stats().steps in (0, steps)
        assert ddp_hooks.states() == []
        with pytest.raises(RuntimeError, match="of the process that this one was forked from"):
            state.usage()
        state.close()
        # Nobody asks the parent's store.
        watching = watcher.begin()
        assert watching is not None
        assert watching.session is None
        ddp = state = None  # type: ignore[assignment]
        gc.collect()
        return True

    def fork() -> None:
        # On its way there the thread may leave torch's objects half changed, and a child that destroys them dies.
        while not any(module.seconds_in_hook() > 0.1 for module in activity.modules):
            time.sleep(0.01)
        results.append(in_child(in_it))
        dist.distributed_c10d._get_default_store().set("forked", "")

    if rank == 0:
        thread = threading.Thread(target=fork)
        thread.start()
        ddp(batch).sum().backward()
        thread.join()
        results.append(in_child(lambda: state.stats().steps == steps + 1))
    else:
        dist.distributed_c10d._get_default_store().wait(["forked"])
        ddp(batch).sum().backward()
    # The parent goes on.
    ddp(batch).sum().backward()
    assert state.stats().steps == steps + 2
    return results


def test_a_child_leaves_what_serves_a_module_to_its_parent() -> None:
    # In processes of its own: other tests may leave groups, and a child that destroys one waits for threads that only
    # its parent has.
    own = {"DDP_HOOKS_RANKS_OF": "test_forks"}
    assert run_ranks(2, _within_a_hook, environment=lambda rank: own) == [[True, True], []]


def run_campaign(*arguments: str) -> str:
    command = [sys.executable, str(Path(__file__).parents[1] / "campaigns" / "forks.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(ddp_hooks.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_parents_and_children_go_on() -> None:
    """The campaign is for thousands; this is a short one."""
    assert " forks, " in run_campaign("--forks", "8", "--limit", "300")


@pytest.mark.thorough
def test_hundreds_of_parents_and_children_go_on() -> None:
    assert " forks, " in run_campaign("--forks", "600", "--seed", "1", "--limit", "450")
