"""Runs a function on several ranks: brings tracebacks home, shows the stack of what hangs, and kills it.

The rank processes are started once for each world size (and environment) and reused, because importing torch takes
longer than most tests. Each call gets a process group of its own. A rank that fails or hangs costs the whole pool:
nothing a broken rank left behind reaches the next test.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEFAULT_TIMEOUT_SECONDS = 90.0
# A collective that a dead rank left behind must fail well before the test is killed.
COLLECTIVE_TIMEOUT_SECONDS = 30.0
# How long the other ranks may go on after one failed: their own error is worth having, their hang is not.
GRACE_SECONDS = 5.0
# How many processes stay, those of all pools together. With a sanitizer each takes more than a gigabyte.
RANKS_KEPT = int(os.environ.get("DDP_HOOKS_RANKS_KEPT", "24"))


class RankFailure(AssertionError):
    """One or more ranks failed or hung; the message holds every rank's traceback or stack."""


class RankDied(RankFailure):
    """A rank died of a signal, such as SIGSEGV."""


def _worker(rank: int, world_size: int, stack_file: str, environment: dict[str, str], pipe: Connection) -> None:
    # Before torch is imported: some of it is read only once.
    os.environ.update({"OMP_NUM_THREADS": "1", **environment})
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        faulthandler.enable(stacks)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if module := environment.get("DDP_HOOKS_IMPORT_FIRST"):
            importlib.import_module(module)
        while True:
            task = pipe.recv()
            if task is None:
                return
            function, args, store_file, backend, collective_timeout = task
            try:
                torch.manual_seed(1234)
                _leave_out_measurements()
                dist.init_process_group(
                    backend,
                    store=dist.FileStore(store_file, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=collective_timeout),
                )
                result = function(rank, *args)
                dist.barrier()
                dist.destroy_process_group()
                pipe.send(("ok", result))
            except BaseException:
                pipe.send(("error", traceback.format_exc()))
                return


def _leave_out_measurements() -> None:
    """Have no state measure its links, by which it would decide what to send: tests count bytes."""
    from ddp_hooks import service

    service.measure_collective_costs = lambda group, device: None


class RankPool:
    """`world_size` processes that run one function after another, each time in a fresh process group."""

    def __init__(self, world_size: int, environments: list[dict[str, str]]) -> None:
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="ddp_hooks_ranks_")
        self._runs = 0
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, str(self._stack_file(rank)), environments[rank], theirs)
            process = context.Process(target=_worker, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stack_file(self, rank: int) -> Path:
        return Path(self._directory.name) / f"stack{rank}"

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

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
        for pipe in self._pipes:
            pipe.send((function, args, store_file, backend, collective_timeout))
        outcomes: dict[int, tuple[str, Any]] = {}
        failure: type[RankFailure] = RankFailure
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.world_size:
            waiting = {self._pipes[r]: r for r in range(self.world_size) if r not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(1)
                    stacks = self._stack_file(rank).read_text()
                    code = self._processes[rank].exitcode
                    if code is not None and code < 0:
                        failure = RankDied
                    outcomes[rank] = ("error", f"died with exit code {code}\n{stacks}")
                if outcomes[rank][0] == "error":
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
        for rank in range(self.world_size):
            kind, value = outcomes.get(rank, ("hung", None))
            if kind == "hung":
                parts.append(f"--- rank {rank} hung; its stack:\n{self._stack(rank)}")
            elif kind == "error":
                parts.append(f"--- rank {rank} failed:\n{value}")
            else:
                parts.append(f"--- rank {rank} returned")
        return "\n" + "\n".join(parts)

    def _stack(self, rank: int) -> str:
        process = self._processes[rank]
        if not process.is_alive() or process.pid is None:
            return "(dead)"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._stack_file(rank).read_text() or "(no Python stack: it hangs in native code)"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)
        self._directory.cleanup()


_pools: dict[str, RankPool] = {}


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    environment: Callable[[int], dict[str, str]] = lambda rank: {},
    **options: Any,
) -> list[Any]:
    """Run ``function(rank, *args)`` on ``world_size`` ranks; see :meth:`RankPool.run`.

    ``function`` and ``args`` are pickled, so ``function`` stands at the top level of its module. ``environment(rank)``
    are variables that are set before the rank imports anything; ``DDP_HOOKS_IMPORT_FIRST`` names a module
    that is imported before there is a process group.
    """
    environments = [environment(rank) for rank in range(world_size)]
    key = repr(environments)
    pool = _pools.pop(key, None)
    if pool is not None and not pool.alive:
        pool.kill()
        pool = None
    if pool is None:
        _make_room(world_size)
        pool = RankPool(world_size, environments)
    _pools[key] = pool  # so that what was used longest ago comes first
    return pool.run(function, *args, **options)


def run_ranks_with_sparse_gradients(
    world_size: int, function: Callable[..., Any], *args: Any, **options: Any
) -> list[Any]:
    """Like :func:`run_ranks`, and once more if a rank dies of a signal.

    torch's all-reduce of sparse tensors over gloo corrupts the heap now and then, without this package as well:
    tests/sparse_all_reduce.py shows it with nothing but torch. A death by a signal therefore says nothing about what is
    tested, unless it comes again.
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
