"""Who is missing: what a stack says, what is said of it, a store that is gone, and ranks that really stay away."""

from __future__ import annotations

import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import run_captured
from spawn import run_ranks
from torch import nn

import ddp_hooks
import slow_steps
from ddp_hooks.hangs import session as sessions
from ddp_hooks.hangs import watcher
from ddp_hooks.hangs.activity import Activity, ModuleActivity
from ddp_hooks.hangs.board import Board
from ddp_hooks.hangs.report import describe_left_out, find_missing, headline
from ddp_hooks.hangs.session import print_to_stderr
from ddp_hooks.hangs.stack import Progress, has_run, read_error, read_position, read_stand
from ddp_hooks.hangs.status import SOME_COLLECTIVE, Status, Wait
from ddp_hooks.hangs.witness import Witness

HERE = Path(__file__)
CULPRITS = HERE.parents[1] / "campaigns" / "culprits.py"

# --- what a stack says


class Stands:
    """A thread that has come to a place, until the block is left."""

    def __init__(self, function: Callable[[threading.Event], Any]) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=function, args=(self._end,))

    def __enter__(self) -> int:
        self._thread.start()
        time.sleep(0.2)
        return self._thread.ident or 0

    def go_on(self) -> None:
        self._end.set()
        self._thread.join()

    def __exit__(self, *error: object) -> None:
        self.go_on()


class Waits(nn.Module):
    end: threading.Event

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.end.wait(20)
        return batch


def test_a_loader_is_between_two_steps() -> None:
    def load(end: threading.Event) -> None:
        end.wait(20)

    with Stands(load) as thread:
        position, stand = read_position(thread), read_stand(thread)
    assert position is not None
    assert stand is not None
    assert (position.phase, stand.waits_in) == ("", None)
    assert position.mark == stand.mark
    # Of the user's code, not of Python's own, which is said apart.
    assert re.match(r"\S*test_hangs\.py:\d+ in load$", position.frames[0])
    assert position.inside is not None
    assert position.inside.startswith("threading.py:")


def test_no_frame_of_this_package_is_a_position() -> None:
    """Neither below the user's code, nor where nothing else is on the stack, as at the end of a program."""
    board = Board(dist.HashStore(), "test")
    end = threading.Event()

    def call(_: threading.Event) -> None:
        board.ask(lambda store: end.wait(20), seconds=20)

    with Stands(call) as thread:
        below, alone = read_position(thread), read_position(board._thread.ident or 0)
        end.set()
    assert below is not None
    assert alone is not None
    assert re.match(r"\S*test_hangs\.py:\d+ in call$", below.frames[0])
    assert below.inside is None
    assert (alone.frames, alone.inside) != ((), None)  # what was asked for is the user's
    board.ask(print)
    alone = read_position(board._thread.ident or 0)
    board.close(1.0)
    assert alone is not None
    assert (alone.frames, alone.inside) == ((), None)


def test_a_hook_within_backward_does_not_wait_for_other_ranks() -> None:
    def backward(end: threading.Event) -> None:
        loss = torch.ones(2, requires_grad=True).sum()
        loss.register_hook(lambda grad: end.wait(20) and None)
        loss.backward()

    with Stands(backward) as thread:
        position, stand = read_position(thread), read_stand(thread)
    assert position is not None
    assert stand is not None
    assert (position.phase, stand.waits_in) == ("backward", None)


def test_an_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)

    def step(end: threading.Event) -> None:
        optimizer.register_step_pre_hook(lambda *args: end.wait(20) and None)
        optimizer.step()

    with Stands(step) as thread:
        position = read_position(thread)
    assert position is not None
    assert position.phase == "optimizer"


def _forward(rank: int) -> Any:
    waits = Waits()
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Sequential(nn.Linear(2, 2), waits), nn.Linear(2, 2)))

    def forward(end: threading.Event) -> None:
        waits.end = end
        ddp(torch.ones(1, 2))

    with Stands(forward) as thread:
        position = read_position(thread)
        # A model that its thread changes at the same time has no names, and raises nothing.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", _changes)
            changing = read_position(thread)
    return [each and each.phase for each in (position, changing)]


def _changes(model: nn.Module) -> Any:
    raise RuntimeError("dictionary changed size during iteration")


def test_a_forward_pass_names_the_innermost_submodule() -> None:
    assert run_ranks(1, _forward) == [["forward of 0.1", "forward"]]


def test_a_look_takes_no_names_and_keeps_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes twice a second: a large model's names take long, and what is kept would end in another thread."""
    ended: list[int] = []

    class Notes:
        def __del__(self) -> None:
            ended.append(threading.get_ident())

    def run(end: threading.Event, notes: Any) -> None:
        end.wait(20)

    def start(end: threading.Event) -> None:
        run(end, Notes())

    stands = Stands(start)
    with stands as thread:

        def read_line(path: str, line: int) -> str:
            # Another thread may run while a file is read.
            stands.go_on()
            return ""

        monkeypatch.setattr("ddp_hooks.hangs.stack.linecache.getline", read_line)
        monkeypatch.setattr("ddp_hooks.hangs.stack._is_users", lambda path: True)
        monkeypatch.setattr(nn.Module, "named_modules", None)
        stand = read_stand(thread)
    assert stand is not None
    assert ended == [thread]


READS_WHAT_RUNS = """
import gc, random, threading, time
from ddp_hooks.hangs.stack import read_position, read_stand

def make_function(variables):
    body = "".join(f" v{i} = float({i})\\n" for i in range(variables))
    scope = {}
    exec(f"def call(following):\\n{body} return following[0](following[1:]) if following else 0\\n", scope)
    return scope["call"]

def run():
    while not ended.is_set():
        functions = [make_function(random.randrange(40)) for _ in range(20)]
        for _ in range(20):
            random.shuffle(functions)
            functions[0](functions[1:random.randrange(2, 20)])

def let_it_run(phase, info):
    if threading.get_ident() == reader:
        time.sleep(1e-5)

reader = threading.get_ident()
ended = threading.Event()
thread = threading.Thread(target=run, daemon=True)
thread.start()
gc.callbacks.append(let_it_run)
gc.set_threshold(1)
until = time.monotonic() + 3
while time.monotonic() < until:
    read_stand(thread.ident)
    read_position(thread.ident)
ended.set()
thread.join()
assert gc.isenabled()
"""


def test_a_thread_that_runs_is_read_as_a_whole() -> None:
    """It must not go on meanwhile, which a finalizer may let it, and then a call that it has left is read as memory."""
    done = run_captured([sys.executable, "-c", READS_WHAT_RUNS], timeout=300)
    assert done.returncode == 0, done.stderr


def _collectives(rank: int) -> list[Any]:
    """Rank 0 stands in each of these, waiting for rank 1, and reads its own stack."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    handles: list[Any] = []

    def wait_for_it() -> None:
        handles.append(dist.all_reduce(torch.ones(1), async_op=True))
        handles[-1].wait()

    found = []
    store = dist.distributed_c10d._get_default_store()
    for number, call in enumerate(
        (
            dist.barrier,
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_gather_object([None, None], 1),
            lambda: ddp(torch.ones(1, 2)).sum().backward(),
            wait_for_it,
        )
    ):
        if rank == 0:
            thread = threading.Thread(target=call)
            thread.start()
            time.sleep(0.4)
            deadline = time.monotonic() + 20  # a busy machine is slow to come there
            while (stand := read_stand(thread.ident or 0)) is None or stand.waits_in is None:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            position = read_position(thread.ident or 0)
            store.set(f"read {number}", "")
            found.append((position.phase, stand.waits_in) if position is not None and stand is not None else None)
            thread.join()
        else:
            store.wait([f"read {number}"])
            call()
        dist.barrier()
    return found


def test_collectives_are_recognised() -> None:
    assert run_ranks(2, _collectives)[0] == [
        ("", "barrier"),
        ("", "all_reduce"),
        ("", "all_gather_object"),
        ("backward", "backward"),
        ("", "handles[-1].wait()"),
    ]


def test_what_computes_is_told_from_what_stands() -> None:
    assert not has_run(Progress(1.0), Progress(1.00001))
    assert has_run(Progress(1.0), Progress(1.1))
    # If nobody counts the time.
    assert not has_run(Progress(None), Progress(1.0))
    assert has_run(Progress(None, ((1, None),)), Progress(1.0, ((2, None),)))


class Loss:
    """Whose `item` stands in C, as that of a tensor on a device does."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.item, self.go_on = lock.acquire, lock.release


@pytest.mark.parametrize("counted", ["steps", "passes without a step", "agreed steps"])
def test_waiting_for_a_device_step_by_step_is_no_hang(counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is seen in one and the same line for an hour, because nearly all of its time goes there."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("ddp_hooks.hangs.stack._uses_a_device", lambda: True)
    loss, hook = Loss(), Agrees()
    activity, module = Activity(), ModuleActivity("Net", (0, 1), hook if counted == "agreed steps" else None)
    thread = threading.Thread(target=wait_for, args=(loss,))
    thread.start()
    monkeypatch.setattr(activity, "thread", thread.ident)
    activity.modules.append(module)
    witness = Witness(activity, 0, 2)
    ddp = nn.Linear(2, 2)
    ddp.require_backward_grad_sync = counted == "steps"  # type: ignore[assignment]
    try:
        deadline = time.perf_counter() + 20
        while (stand := read_stand(thread.ident or 0)) is None or stand.waits_in != "loss.item()":
            assert time.perf_counter() < deadline
        longest = 0.0
        for look in range(7200):
            now[0] += 0.5
            if look % 3 == 0:
                hook.steps += 1
                if counted != "agreed steps":
                    module.forward_begins(ddp, ())
            witness.look(0.5)
            wait = witness.find_wait()
            longest = max(longest, 0.0 if wait is None else wait.seconds)
        assert longest < 2
        # When nothing goes on any more, it is one.
        for _ in range(20):
            now[0] += 0.5
            witness.look(0.5)
        wait = witness.find_wait()
        assert wait is not None
        assert wait.place == "loss.item()"
        assert 10 <= wait.seconds < 12
    finally:
        loss.go_on()
        thread.join()


def wait_for(loss: Loss) -> None:
    loss.item()


def test_a_thread_that_has_ended_is_not_asked_for_its_time() -> None:
    """C would read its memory, which may be gone: of many threads that end, not all leave it."""
    code = """
import threading, time, torch
from ddp_hooks.hangs.activity import Activity, ModuleActivity
from ddp_hooks.hangs.witness import Witness
threading.stack_size(64 << 20)  # more than what is kept of threads that have ended
activity = Activity()
assert activity.progress().cpu_seconds > 0
for _ in range(3):
    thread = threading.Thread(target=lambda: activity.add(ModuleActivity("Net", (0, 1))))
    thread.start()
    thread.join()
time.sleep(0.2)  # Python joins it a moment before it has gone
assert activity.progress().cpu_seconds is None
Witness(activity, 0, 2).look(0.5)
print("looked")
"""
    assert run_python(code) == "looked"


def test_an_error_is_told_with_its_line() -> None:
    def fail() -> None:
        raise ValueError("a first line\nand a second one")

    try:
        fail()
    except ValueError as error:
        text, frames = read_error(error)
    assert text == "ValueError: a first line"
    assert re.match(r"\S*test_hangs\.py:\d+ in fail$", frames[0])


# --- since when


def test_a_wait_does_not_grow_while_the_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity = Activity()
    witness = Witness(activity, 0, 2)
    with activity.waiting("register", (0, 1)):
        for _ in range(4):
            now[0] += 0.5
            witness.look(0.5)
            wait = witness.find_wait()
        assert wait is not None
        assert (wait.place, wait.call) == ("register", 1)
        assert wait.seconds == pytest.approx(2.0)
        now[0] += 3600  # SIGSTOP, or a machine that slept
        witness.look(0.5)
        wait = witness.find_wait()
        assert wait is not None
        assert wait.seconds == pytest.approx(2.5)
    # The next wait at the same place is another one.
    with activity.waiting("register", (0, 1)):
        now[0] += 0.5
        witness.look(0.5)
        wait = witness.find_wait()
        assert wait is not None
        assert wait.seconds == pytest.approx(0.5)


class Agrees:
    steps = 0

    def seconds_in_hook(self) -> float:
        return 0.0

    def agreed_steps(self) -> int:
        return self.steps


@pytest.mark.parametrize(
    ("ranks", "hook", "ever"), [((0, 1), Agrees(), True), ((0,), Agrees(), False), ((0, 1), None, False)]
)
def test_whoever_steps_fast_with_all_ranks_need_not_listen(
    ranks: tuple[int, ...], hook: Agrees | None, ever: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    activity, module = Activity(), ModuleActivity("Net", ranks, hook)
    activity.add(module)
    witness = Witness(activity, 0, 2)

    def look(steps: int, seconds: float) -> bool:
        module.steps += 3  # an evaluation's forward passes, which others need not have
        if hook is not None:
            hook.steps += steps
        for _ in range(int(seconds / 0.5)):
            now[0] += 0.5
            witness.look(0.5)
        return witness.is_brisk(5.0)

    assert not look(0, 0.5)
    assert look(3, 0.5) == ever
    assert look(1, 4.0) == ever
    assert not look(0, 5.0)
    # One step after a long time is not enough: others may have waited for it.
    assert not look(1, 0.5)
    assert look(1, 0.5) == ever


# --- what is said


def status(rank: int, **fields: Any) -> Status:
    told: dict[str, Any] = {"call": 1, "host": "a", "pid": 7, "steps": 3, "phase": "", "seconds": 11.0}
    return Status(rank=rank, **{**told, **fields})


def test_a_status_is_the_same_behind_the_store() -> None:
    rng = random.Random(0)
    for rank in range(50):
        wait = Wait("backward of Net", (0, rank), rng.random(), rng.randrange(5)) if rng.random() < 0.5 else None
        one = status(rank, wait=wait, failed=wait, frames=("a.py:1",), remarks=("x",), inside="b.py:2", error=None)
        assert Status.read(json.loads(json.dumps(one.to_dict()))) == one


WAIT = Wait("backward of Net", (0, 1, 2), 10.0, 4)


def test_whoever_waits_for_nobody_is_named_first() -> None:
    elsewhere = status(1, wait=Wait("barrier", (0, 1, 2), 9.0), frames=("train.py:9 in f",))
    loads = status(2, frames=("train.py:88 in load", "train.py:3"), inside="queue.py:7 in get", remarks=("a remark",))
    report = find_missing(WAIT, 0, {1: elsewhere, 2: loads}, {})
    assert report.missing == (1, 2)
    assert report.lines == (
        "rank 2 (process 7 on a) is between steps, after 3 steps, and has been at train.py:88 in load for 11 s",
        "  called from train.py:3",
        "  innermost: queue.py:7 in get",
        "  a remark",
        "rank 1 (process 7 on a) has been waiting in barrier at train.py:9 in f for 9.0 s, after 3 steps",
    )
    assert headline(WAIT, [0], report.missing, "train.py:5") == (
        "ddp_hooks: rank 0 has been waiting in backward of Net, step 4 (train.py:5) for 10 s. Missing: ranks 1, 2"
    )


def test_who_waits_as_well_is_not_named_where_it_is_not_known_which_collective_failed() -> None:
    """As gloo's errors, which name none: rank 0's came while rank 2 waited in the same one for the same rank."""
    wait = Wait(SOME_COLLECTIVE, (0, 1, 2), 0.0)
    ended = status(1, error="ValueError: x")
    waits = status(2, wait=Wait("forward of Net", (0, 1, 2), 0.3))
    explains = status(2, failed=WAIT)
    ended_in_vain = status(2, failed=wait, error="RuntimeError: Connection closed by peer")
    for other in (waits, explains, ended_in_vain):
        assert find_missing(wait, 0, {1: ended, 2: other}, {}, is_over=True).missing == (1,)
    # Nobody else is to blame.
    assert find_missing(wait, 0, {1: status(1, wait=WAIT), 2: waits}, {}, is_over=True).missing == (1, 2)
    # Where it is known, a rank that waits elsewhere is missing.
    assert find_missing(WAIT, 0, {1: ended, 2: waits}, {}, is_over=True).missing == (1, 2)


@pytest.mark.parametrize("error", [None, "RuntimeError: Connection reset by peer"])
def test_who_has_failed_somewhere_is_not_named_beside_the_rank_that_is_gone(error: str | None) -> None:
    """Rank 0's error came of an all-reduce of gradients, which names nothing, this one's of the mask exchange."""
    somewhere = status(2, failed=Wait(SOME_COLLECTIVE, (0, 1, 2), 0.0), error=error)
    assert find_missing(WAIT, 0, {2: somewhere}, {}, is_over=True).missing == (1,)
    # It is named where nobody else is to blame, and while this rank still waits.
    assert find_missing(WAIT, 0, {1: status(1, wait=WAIT), 2: somewhere}, {}, is_over=True).missing == (2,)
    assert find_missing(WAIT, 0, {2: somewhere}, {}).missing == (1, 2)


@pytest.mark.parametrize(
    ("place", "here"), [("backward of Net", True), ("backward", True), ("backward of Other", False), ("barrier", False)]
)
def test_who_is_there(place: str, here: bool) -> None:
    report = find_missing(WAIT, 0, {1: status(1, wait=Wait(place, (0, 1, 2), 1.0)), 2: status(2, wait=WAIT)}, {})
    assert report.missing == (() if here else (1,))


def test_every_sentence_ends() -> None:
    """Also if nothing is known of where a rank is: its program is ending, or all its frames are this package's."""
    wait = Wait("register", (0, 1), 0.0, call=1)
    failed = Wait("register", (0, 1), 3.0, call=1)
    somewhere = Wait(SOME_COLLECTIVE, (0, 1), 3.0)
    who = "rank 1 (process 7 on a) "
    for fields, expected in (
        ({"failed": somewhere}, "timed out in a collective"),
        ({"failed": Wait("barrier", (0, 1), 3.0, timed_out=False)}, "lost a connection in barrier"),
        ({"failed": somewhere, "frames": ("a.py:1",)}, "timed out in a collective, and is now at a.py:1"),
        (
            {"failed": somewhere, "frames": ("a.py:1",), "is_ending": True},
            "timed out in a collective at a.py:1, after 3 steps, and its program is ending",
        ),
        (
            {"failed": somewhere, "is_ending": True},
            "timed out in a collective, after 3 steps, and its program is ending",
        ),
        ({}, "is between steps, after 3 steps"),
        ({"seconds": 0.0, "frames": ("a.py:1",)}, "is between steps, after 3 steps, now at a.py:1"),
        ({"wait": somewhere}, "has been waiting in a collective for 3.0 s, after 3 steps"),
        ({"error": "ValueError: x"}, "ended after 3 steps with ValueError: x"),
        ({"error": "ValueError: x", "steps": 0}, "ended before its first step with ValueError: x"),
    ):
        assert find_missing(wait, 0, {1: status(1, **fields)}, {}, is_over=True).lines == (who + expected,)
    # What this rank has not called is another matter.
    for left_out in (status(1, wait=failed), status(1, failed=failed)):
        assert describe_left_out({1: left_out}, 0, lambda function, ranks: 1) == ()
        assert describe_left_out({1: left_out}, 0, lambda function, ranks: 0) == (
            "this process (rank 0) has not called register; every rank of the group (0, 1) must call it",
        )
    again = {1: status(1, wait=Wait("sync", (0, 1), 3.0, call=3)), 2: status(2, wait=Wait("sync", (1, 2), 3.0, call=3))}
    assert describe_left_out(again, 0, lambda function, ranks: 2) == (
        "this process (rank 0) has called sync 2 times instead of 3; every rank of the group (0, 1) must call it",
    )


def test_the_same_function_of_another_group_is_another_call() -> None:
    wait = Wait("average_parameters", (4, 5), 3.0)
    report = find_missing(wait, 4, {5: status(5, wait=Wait("average_parameters", (5, 6), 3.0))}, {})
    assert report.lines == ("rank 5 (process 7 on a) calls it for another group (ranks 5, 6)",)


def test_who_has_given_up_came_but_comes_no_more() -> None:
    gave_up = {1: status(1, failed=Wait("register", (0, 1), 5.0))}
    wait = Wait("register", (0, 1), 0.0)
    assert find_missing(wait, 0, gave_up, {}).missing == (1,)
    over = find_missing(wait, 0, gave_up, {}, is_over=True)
    assert (over.missing, over.waited) == ((), {1: 5.0})


def test_of_silent_ranks_the_process_is_known() -> None:
    host = sessions.this_host()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            report = find_missing(WAIT, 0, {}, {1: (host, child.pid), 2: ("elsewhere", 5)})
            ended_or_stopped = []
            os.kill(child.pid, 19)
            time.sleep(0.2)
            ended_or_stopped += find_missing(WAIT, 0, {}, {1: (host, child.pid)}).lines[:1]
        finally:
            child.kill()
            child.wait()
        ended_or_stopped += find_missing(WAIT, 0, {}, {1: (host, child.pid)}).lines[:1]
    assert report.lines[0].startswith(f"rank 1 (process {child.pid} on {host}) does not answer: it is running, but in")
    assert report.lines[1] == (
        "rank 2 (process 5 on elsewhere) does not answer: it has ended, is stopped, is in a call that holds the GIL, "
        "or has destroyed its process group; it took part in step 3"
    )
    assert "does not answer: it is stopped" in ended_or_stopped[0]
    assert "does not answer: it has ended" in ended_or_stopped[1]
    assert "has never reported" in find_missing(WAIT, 0, {}, {}).lines[0]


def test_thousands_of_ranks_fit_on_a_screen() -> None:
    wait = Wait("register", tuple(range(4096)), 3.0)
    report = find_missing(wait, 0, {}, {})
    assert len(report.missing) == 4095
    assert len(report.lines) == 9
    assert len(headline(wait, [0], report.missing, "")) < 300


# --- a store that is gone


def test_a_store_that_hangs_does_not() -> None:
    class Hangs:
        def clone(self) -> Any:
            return dist.HashStore()

    board = Board(Hangs(), "test")
    start = time.monotonic()
    assert board.ask(lambda store: threading.Event().wait(60), seconds=0.2) is None
    # Whoever asks next does not wait for what stands.
    assert board.count("calls") is None
    assert board.leave("key", 1) is False
    assert time.monotonic() - start < 3


def test_words_come_back() -> None:
    board = Board(dist.HashStore(), "test")
    assert (board.count("calls"), board.count("calls", 2)) == (0, 2)
    assert board.leave("key", {"a": [1, "b"]})
    assert board.read(["key", "other"]) == {"key": {"a": [1, "b"]}}
    assert board.ask(lambda store: 1 / 0) is None
    assert board.count("calls") == 2
    board.close(1.0)
    assert not any(thread.name == "ddp_hooks store" and thread.is_alive() for thread in [board._thread])


SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def client() -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        yield dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), server
    finally:
        server.kill()
        server.communicate()


def test_the_store_answers_while_another_thread_waits_for_a_key(client: Any) -> None:
    store, _ = client
    thread = threading.Thread(target=lambda: store.wait(["never"]), daemon=True)
    thread.start()
    time.sleep(0.2)
    board = Board(store, "test")
    start = time.monotonic()
    assert board.count("calls", 1) == 1
    assert time.monotonic() - start < 2
    store = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    store.set("never", "")  # lets the thread go
    thread.join(5)


def wait_for_state(pid: int, states: str) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in states:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_store_whose_process_went_hangs_nobody(client: Any, end: str) -> None:
    store, server = client
    board = Board(store, "test")
    assert board.count("calls") == 0
    os.kill(server.pid, 9 if end == "killed" else 19)
    # It may answer once more until the signal is there.
    wait_for_state(server.pid, "ZX" if end == "killed" else "T")
    start = time.monotonic()
    for _ in range(5):
        assert board.count("calls") is None
    assert time.monotonic() - start < 6


def test_the_store_stays_until_an_error_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that holds it ends with the error; a rank that waits may be slow to read it."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sessions.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(sessions, "_rank_0_holds", lambda store: True)

    class Sees:
        def make_status(self, call: int) -> Status:
            return status(0, call=call)

    session = sessions.Session(Stands(print), Sees(), Activity())  # type: ignore[arg-type]
    board, read = Board(store, "hangs"), []

    def wait_for_rank_0() -> None:
        while not board.count("calls"):
            time.sleep(0.02)
        session.answer()  # as the watcher of the rank that ends does, in its own thread
        board.leave("status/1", status(1, call=1, wait=WAIT).to_dict())
        time.sleep(1.5)
        read.append((board.read(["status/0"]) or {})["status/0"]["error"])
        board.leave("report", {"call": 1, "place": WAIT.place, "missing": [0], "lines": []})

    thread = threading.Thread(target=wait_for_rank_0)
    thread.start()
    session.say_goodbye(status(0, error="ValueError: x"))
    assert read == ["ValueError: x"]
    thread.join()


# --- a stream that is gone


class Raises(io.TextIOBase):
    def write(self, text: str) -> int:
        raise RuntimeError("somebody's stream")


def test_nothing_is_raised_by_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    broken = os.fdopen(writing, "w")
    with open(os.devnull, "w") as closed:
        pass
    for stream in (broken, closed, None, Raises()):
        monkeypatch.setattr(sys, "stderr", stream)
        print_to_stderr("Missing: rank 1\n")
    monkeypatch.undo()
    with pytest.raises(BrokenPipeError):
        broken.close()


# --- when there is something to watch


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("2.5", 2.5), ("-1", 10.0), ("nan", 10.0), ("soon", 10.0)])
def test_the_variable_goes_first(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "_setting", 10.0)
    monkeypatch.setenv(watcher.VARIABLE, text)
    assert watcher.report_after() == seconds


def run_python(code: str, **environment: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    # What somebody who looks for a crash of the tests has set is no reason to fail.
    variables.pop("PYTHONFAULTHANDLER", None)
    done = run_captured([sys.executable, "-c", code], timeout=300, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NAMES = """
import ddp_hooks, os, signal, faulthandler, sys, threading
def names():
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
print(names())
enabled = ddp_hooks.enable()
print(names())
print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
print(faulthandler.is_enabled(), sys.excepthook is sys.__excepthook__)
"""


@pytest.mark.parametrize("seconds", ["10", "0"])
def test_nothing_is_watched_before_something_is_called(seconds: str) -> None:
    """Importing does nothing, also in what a launcher has started."""
    then = ["ddp_hooks watcher"] if seconds != "0" else []
    said = run_python(NAMES, RANK="0", WORLD_SIZE="2", **{watcher.VARIABLE: seconds})
    assert said == f"[]\n{then}\nTrue\nFalse True"


@pytest.mark.parametrize("what", ["thread", "store"])
def test_training_goes_on_where_nobody_can_watch(what: str) -> None:
    assert run_ranks(2, _nobody_watches, what) == [True, True]


def _nobody_watches(rank: int, what: str) -> bool:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher, "_watcher", None)
        if what == "thread":
            patch.setattr(threading.Thread, "start", fail)
        else:
            patch.setattr(watcher, "Session", fail)
        ddp_hooks.register(ddp)
        ddp_hooks.sync.broadcast_parameters(ddp)
        ddp(torch.ones(1, 2)).sum().backward()
        if watcher._watcher is not None:
            watcher._watcher.stop()
    return ddp.module.weight.grad is not None


def test_a_listener_that_raises_ends_nothing() -> None:
    watching = watcher.Watcher()
    called: list[int] = []
    watching.listeners += [lambda: 1 / 0, lambda: called.append(1)]
    deadline = time.monotonic() + 5
    while not called and time.monotonic() < deadline:
        time.sleep(0.05)
    watching.stop()
    assert called


def _with_and_without(rank: int, seconds: float) -> list[bool]:
    def is_attached() -> bool:
        return watcher._watcher is not None and watcher._watcher.session is not None

    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(watcher.VARIABLE, str(seconds))
        before = watcher._watcher
        ddp_hooks.register(ddp)
        return [watcher._watcher is before or is_attached(), is_attached()]


def test_a_hook_is_watched_by_default() -> None:
    assert run_ranks(2, _with_and_without, 10.0) == [[True, True]] * 2


def _session_ends(rank: int) -> bool:
    """The default group goes, and with it what was asked in its store; the next one has its own."""
    watching = watcher.begin()
    assert watching is not None
    first = watching.session
    assert first is not None
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    deadline = time.monotonic() + 5
    while watching.session is first and time.monotonic() < deadline:
        time.sleep(0.05)
    ended = first.ended and watching.session is not first
    second = dist.PrefixStore("second", store)
    dist.init_process_group("gloo", store=second, rank=rank, world_size=2)
    watcher.begin()
    return ended and watching.session is not None and watching.session is not first


def test_a_group_that_is_destroyed_is_let_go() -> None:
    assert run_ranks(2, _session_ends) == [True, True]


# --- ranks that stay away, judged to the line


def judge(*arguments: str) -> str:
    command = [sys.executable, str(CULPRITS), "--verbose", *arguments]
    done = run_captured(command, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_soak_tells_true_alarms_from_false_ones() -> None:
    said = "ddp_hooks: rank 1 has been waiting in backward of Net, step {} (a.py:1) for 10 s. Missing: rank 0\n"
    late = [0.1, 10.2, 3.0]
    verdicts = [slow_steps.is_true(said.format(step), late, 10.0) for step in ("1", "2", "3", "4", "2,000")]
    assert verdicts == [False, True, False, False, False]
    assert not slow_steps.is_true("ddp_hooks: rank 1 has been waiting in barrier (a.py:1) for 10 s", late, 10.0)


@pytest.mark.thorough
def test_every_cause_is_named() -> None:
    """Each once, on two ranks or three."""
    assert "were named in 9 (1.000)" in judge("--rounds", "9", "--seed", "9", "--report-after", "1")


@pytest.mark.thorough
@pytest.mark.parametrize("cause", ["kill", "stop", "loader", "exception", "branch", "register", "lock", "gil", "sync"])
def test_a_cause_is_named_at_random_moments(cause: str) -> None:
    assert "were named in 3 (1.000)" in judge("--rounds", "3", "--seed", "100", "--cause", cause)


@pytest.mark.thorough
def test_a_rank_is_named_after_ten_seconds_by_default() -> None:
    text = judge("--rounds", "1", "--cause", "loader", "--default-share", "1")
    seconds = float(re.search(r"median +([\d.]+) s", text)[1])  # type: ignore[index]
    assert 9.5 < seconds < 15


SCRIPT = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=6))
ddp = DistributedDataParallel(nn.Linear(4, 4))
for step in range(4):
    if step == 3 and dist.get_rank() == 1:
        time.sleep(9)
    ddp(torch.ones(2, 4)).sum().backward()
"""


FORGETS = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ddp_hooks

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
ddp = DistributedDataParallel(nn.Linear(4, 4))
if sys.argv[1] != "register" or dist.get_rank() == 0:
    ddp_hooks.register(ddp, report_hang_after=1)
for step in range(3 - (sys.argv[1] == "steps") * dist.get_rank()):
    ddp(torch.ones(2, 4)).sum().backward()
dist.barrier()
"""


@pytest.mark.parametrize("forgotten", ["register", pytest.param("steps", marks=pytest.mark.thorough)])
def test_a_rank_that_forgets_is_named_and_told(tmp_path: Path, forgotten: str) -> None:
    """In its own output, too; and every sentence has an end."""
    (tmp_path / "train.py").write_text(FORGETS)
    store_port = str(_free_port())
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": store_port, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(ddp_hooks.__file__).parent.parent)
        command = [sys.executable, "train.py", forgotten]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=300)[1] for process in ranks]
    who = r"rank {} \(process \d+ on \S+\)"
    if forgotten == "register":
        assert "[rank0]: ddp_hooks.errors.RanksAbsentError: register: " in said[0]
        assert " s of waiting for rank 1, which did not call it. Every rank of the group (0, 1) must" in said[0]
        # Nobody watches rank 1; it may end at the same time, and then leaves word itself.
        at_its_end = (
            r"(timed out|lost a connection) in a collective at train.py:14, before its first step, and its program"
        )
        silent = "rank 1 does not answer, and has never reported"
        assert silent in said[0] or re.search(f"{who.format(1)} {at_its_end} is ending", said[0]), said[0]
        assert re.search(r"rank 1 failed because other ranks did not arrive:\n  " + who.format(0), said[1]), said[1]
        assert "this process (rank 1) has not called register; every rank of the group (0, 1) must call it" in said[1]
    else:
        assert re.search(f"{who.format(1)} has been waiting in barrier at train.py:15 .*, after 2 steps", said[0])
        assert re.search(rf"{who.format(0)} (has been waiting|timed out|lost a connection) in backward of Lin", said[1])
    for text in said:
        assert "ddp_hooks/hangs" not in text
        assert not re.search(r" (now|is|in|at)\n", text)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.thorough
@pytest.mark.parametrize("registered", ["by_run", "plain"])
def test_under_torchrun(tmp_path: Path, registered: str) -> None:
    """The line is printed once and again, and the error at the timeout says the same."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--set", "report_hang_after=2"] + (["--watch"] if registered == "plain" else [])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddp_hooks"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ddp_hooks.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = run_captured([*command, "run", *options, "train.py"], cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode != 0
    said = r"rank 1 \(process \d+ on .*\) is between steps, after 3 steps, and has been at train\.py:12 for"
    printed = re.findall(
        rf"^ddp_hooks: rank 0 has been waiting in backward of Linear, step 4 \(train\.py:13\) for .* Missing: rank 1\n"
        rf"  {said}",
        done.stderr,
        re.MULTILINE,
    )
    assert 1 <= len(printed) <= 3, done.stderr
    if registered == "plain":
        assert re.search(rf"rank 0 failed because other ranks did not arrive:\n  {said}", done.stderr), done.stderr
    else:
        assert re.search(rf"backward of Linear, step 4, .* because rank 1 did not arrive:\n.*{said}", done.stderr), (
            done.stderr
        )
