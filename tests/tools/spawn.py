"""Runs a function on several ranks: brings tracebacks home, shows the stack of what hangs, and kills it.

Importing torch takes longer than most tests, so one process for even and one for odd rank numbers does that once, and
forks itself into rank processes. Those stay and run one test after another; each call gets a process group of its own.
A rank that fails or hangs costs the ranks that it ran with: nothing a broken rank left behind reaches the next test.
"""

from __future__ import annotations

import ast
import atexit
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What is right may take long on a busy machine.
DEFAULT_TIMEOUT_SECONDS = 240.0
# A collective that a dead rank left behind must fail well before the test is killed.
COLLECTIVE_TIMEOUT_SECONDS = 60.0
# How long the other ranks may go on after one failed: their own error is worth having, their hang is not. Where it is
# what a test is about, collectives have to time out before.
GRACE_SECONDS = 30.0
# ThreadSanitizer hangs in what was forked. Without forks each rank imports torch itself.
FORKS = os.environ.get("DDP_HOOKS_RANKS_FORK", "1") == "1"
# More than any message to or from a process that forks ranks.
ORDER_BYTES = 4096
# How many processes stay, those of all pools together. With a sanitizer each takes more than a gigabyte.
RANKS_KEPT = int(os.environ.get("DDP_HOOKS_RANKS_KEPT", "24"))


class RankFailure(AssertionError):
    """One or more ranks failed or hung; the message holds every rank's traceback or stack."""


class RankDied(RankFailure):
    """A rank died of a signal, such as SIGSEGV."""


def _fork_ranks(environment: dict[str, str], orders: socket.socket) -> None:
    """Import torch, and fork a process for each order; each runs what comes through the pipe that came with it.

    An order is the environment of the rank and the file for its stack; or the process id of one to wait for.
    """
    # Before torch is imported: some of it is read only once.
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    import torch
    import torch._dynamo  # optimizers import it when they are made
    import torch.distributed

    torch.set_num_threads(1)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES, 1)
        if not order:
            return
        answer: int | None
        if descriptors:
            pipe = Connection(descriptors[0])
            answer = os.fork() if FORKS else 0  # nothing has made a thread yet
            if answer == 0:
                if not FORKS:
                    orders.sendall(repr(os.getpid()).encode())
                orders.close()
                environment, stack_file = ast.literal_eval(order.decode())
                os.environ.update(environment)
                return _run_tasks(stack_file, pipe)
            pipe.close()
        else:
            answer = _wait_for(int(order))
        orders.sendall(repr(answer).encode())


def _wait_for(child: int) -> int | None:
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def _run_tasks(stack_file: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks)
        if module := os.environ.get("DDP_HOOKS_IMPORT_FIRST"):
            importlib.import_module(module)
        groups: list[dist.ProcessGroup] = []
        while True:
            task = pipe.recv()
            if task is None:
                return
            function, args, store_file, backend, collective_timeout, rank, world_size = task
            try:
                torch.manual_seed(1234)
                # As if each rank were on a host of its own, so that bytes decide what leaves the all-reduces.
                os.environ["DDP_HOOKS_HOST"] = str(rank)
                os.environ.pop("DDP_HOOKS_LINK_MBITS", None)  # which the task before may have set
                dist.init_process_group(
                    backend,
                    store=dist.FileStore(store_file, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=collective_timeout),
                )
                result = function(rank, *args)
                dist.barrier()
                # Held until the end of the next task, which drops the ones before. A DDP module without our hook would
                # drop its group with the GIL, while a worker of the group may need that for the barrier: torch hangs.
                groups[:] = dist.distributed_c10d._world.pg_map
                dist.destroy_process_group()
                if "torch.distributed.tensor" in sys.modules:
                    # It would find an equal mesh again, whose process groups have gone with the task.
                    importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
                pipe.send(("ok", result))
            except BaseException:
                pipe.send(("error", traceback.format_exc()))
                return


class Parent:
    """A process that has imported torch, and forks ranks."""

    def __init__(self, environment: dict[str, str]) -> None:
        # Each order and each answer is a message, however many are on their way.
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_fork_ranks, args=(environment, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def order_fork(self, environment: dict[str, str], stack_file: Path) -> Connection:
        """Have it fork once it has imported torch; :meth:`answer` is the process id."""
        ours, theirs = multiprocessing.Pipe()
        order = repr((environment, str(stack_file))).encode()
        if len(order) > ORDER_BYTES:
            raise ValueError(f"expected an environment of at most {ORDER_BYTES} bytes, received {environment}")
        socket.send_fds(self._orders, [order], [theirs.fileno()])
        theirs.close()
        return ours

    def answer(self) -> int | None:
        answer = self._orders.recv(ORDER_BYTES)
        if not answer:
            raise RuntimeError("the process that forks ranks has died; its error is on stderr")
        return ast.literal_eval(answer.decode())  # type: ignore[no-any-return]

    def exit_code(self, pid: int) -> int | None:
        """Return a process's exit code, which can be asked for once; None if it has not ended."""
        if not FORKS:
            self._process.join(GRACE_SECONDS)
            return self._process.exitcode
        self._orders.sendall(str(pid).encode())
        return self.answer()


# One for even and one for odd rank numbers, because hashes of strings, by which sets are ordered, and addresses differ
# between ranks. Two suffice to show whatever depends on them, and each takes seconds to import torch.
_parents: dict[str, Parent] = {}


class Rank:
    """A process that runs one task after another."""

    def __init__(self, number: int, environment: dict[str, str], stack_file: Path, before_import: bool) -> None:
        self.stack_file = stack_file
        of_parent = environment if before_import or not FORKS else {}
        key = repr((number % 2, of_parent))
        if key not in _parents or not FORKS:
            _parents[key] = Parent(of_parent)
        self._parent = _parents[key]
        self.pipe = self._parent.order_fork(environment, stack_file)
        self._pid: int | None = None
        self._exit_code: int | None = None

    def await_start(self) -> None:
        self._pid = self._parent.answer()

    @property
    def is_alive(self) -> bool:
        """Only for one that has no task: a process that has ended closes its pipe."""
        return not self.pipe.closed and not self.pipe.poll()

    def exit_code(self) -> int | None:
        if self._exit_code is None and self._pid is not None:
            self._exit_code = self._parent.exit_code(self._pid)
        return self._exit_code

    def signal(self, number: int) -> None:
        if self._exit_code is None and self._pid is not None:
            os.kill(self._pid, number)

    def stack(self) -> str:
        if self._exit_code is not None:
            return "(dead)"
        self.signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self.stack_file.read_text() or "(no Python stack: it hangs in native code)"


class RankPool:
    """`world_size` processes that run one function after another, each time in a fresh process group."""

    def __init__(self, world_size: int, environments: list[dict[str, str]], before_import: bool = False) -> None:
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="ddp_hooks_ranks_")
        self._runs = 0
        folder = Path(self._directory.name)
        self._ranks = [
            Rank(rank, environments[rank], folder / f"stack{rank}", before_import) for rank in range(world_size)
        ]
        for rank in self._ranks:
            rank.await_start()

    @property
    def alive(self) -> bool:
        return all(rank.is_alive for rank in self._ranks)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        backend: str = "gloo",
        collective_timeout: float = COLLECTIVE_TIMEOUT_SECONDS,
    ) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank; return what each returned, in rank order.

        Raises:
            RankDied: a rank died of a signal.
            RankFailure: a rank raised, exited, or did not return within ``timeout`` seconds.
        """
        self._runs += 1
        store_file = str(Path(self._directory.name) / f"store{self._runs}")
        for number, rank in enumerate(self._ranks):
            rank.pipe.send((function, args, store_file, backend, collective_timeout, number, self.world_size))
        outcomes: dict[int, tuple[str, Any]] = {}
        failure: type[RankFailure] = RankFailure
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.world_size:
            waiting = {rank.pipe: number for number, rank in enumerate(self._ranks) if number not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                number = waiting[pipe]  # type: ignore[index]
                try:
                    outcomes[number] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    code = self._ranks[number].exit_code()
                    stacks = self._ranks[number].stack_file.read_text()
                    if code is not None and code < 0:
                        failure = RankDied
                    outcomes[number] = ("error", f"died with exit code {code}\n{stacks}")
                if outcomes[number][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready:
                break
        if len(outcomes) == self.world_size and all(kind == "ok" for kind, _ in outcomes.values()):
            return [outcomes[rank][1] for rank in range(self.world_size)]
        message = self._describe(outcomes)
        self.kill()
        raise failure(message)

    def _describe(self, outcomes: dict[int, tuple[str, Any]]) -> str:
        parts = []
        for number, rank in enumerate(self._ranks):
            kind, value = outcomes.get(number, ("hung", None))
            if kind == "hung":
                parts.append(f"--- rank {number} hung; its stack:\n{rank.stack()}")
            elif kind == "error":
                parts.append(f"--- rank {number} failed:\n{value}")
            else:
                parts.append(f"--- rank {number} returned")
        return "\n" + "\n".join(parts)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.exit_code()
            rank.pipe.close()
        self._directory.cleanup()


_pools: dict[str, RankPool] = {}


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    environment: Callable[[int], dict[str, str]] = lambda rank: {},
    before_import: bool = False,
    **options: Any,
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` ranks; see :meth:`RankPool.run`.

    ``function`` and ``args`` are pickled, so ``function`` stands at the top level of its module. ``environment(rank)``
    are variables of processes that run no tests of another environment. They are set before these import anything but
    torch, or with ``before_import`` anything at all, which takes seconds. ``DDP_HOOKS_IMPORT_FIRST`` names a module
    that is imported before there is a process group.
    """
    environments = [environment(rank) for rank in range(world_size)]
    key = repr((environments, before_import))
    pool = _pools.pop(key, None)
    if pool is not None and not pool.alive:
        pool.kill()
        pool = None
    if pool is None:
        _make_room(world_size)
        pool = RankPool(world_size, environments, before_import)
    _pools[key] = pool  # so that what was used longest ago comes first
    return pool.run(function, *args, **options)


def on_ranks(
    world_size: int | None = None, *, run: Callable[..., Any] = run_ranks, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of a function, which ranks call with their rank and the test's parameters.

    Without ``world_size``, the test has a parameter of that name, which the function does not get. ``run`` and
    ``options`` are as :func:`run_ranks` and its options.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def test(*args: Any, **parameters: Any) -> Any:
            if args:  # on a rank, which finds this under the function's name
                return function(*args)
            ranks = world_size or parameters.pop("world_size")
            run(ranks, test, *parameters.values(), **options)

        _, *others = inspect.signature(function).parameters.values()
        if world_size is None:
            others.append(inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate


def run_ranks_with_sparse_gradients(
    world_size: int, function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """Like :func:`run_ranks`, and once more if a rank dies of a signal.

    torch's all-reduce of sparse tensors over gloo corrupts the heap now and then, without this package as well:
    tests/campaigns/sparse_all_reduce.py shows it with nothing but torch. A death by a signal therefore says nothing
    about what is tested, unless it comes again.
    """
    try:
        return run_ranks(world_size, function, *args, **options)
    except RankDied as death:
        print(f"A rank died of a signal while sparse gradients were reduced; once more.{death}", file=sys.stderr)
        return run_ranks(world_size, function, *args, **options)


def _make_room(ranks: int) -> None:
    while _pools and sum(pool.world_size for pool in _pools.values()) + ranks > RANKS_KEPT:
        _pools.pop(next(iter(_pools))).kill()


@atexit.register
def _kill_pools() -> None:
    for pool in _pools.values():
        pool.kill()


if __name__ == "__main__":
    sys.exit("This is a library for the tests; run them with `make test`.")
