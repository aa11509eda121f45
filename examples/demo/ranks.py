"""Runs a function on several ranks of this machine, brings tracebacks home and kills what hangs."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

Record = TypeVar("Record")

# How long a rank may take to write its stack down before it is killed, and to end after it was asked to.
GRACE_SECONDS = 5.0


class RankFailure(RuntimeError):
    """A rank failed, died or hung; the message holds the tracebacks or stacks."""


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    world_size: int,
    threads: int,
    timeout_seconds: float,
    directory: str,
    progress: Any,
) -> None:
    home = Path(directory)
    torch.set_num_threads(threads)
    with open(home / f"stack{rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        try:
            # A file as the meeting point: no port to be taken, no host name to be resolved.
            dist.init_process_group(
                "gloo",
                init_method=f"file://{home / 'store'}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
            record = function(rank, progress.put if rank == 0 else _ignore, *arguments)
            dist.barrier()
            dist.destroy_process_group()
            (home / f"record{rank}").write_bytes(pickle.dumps(record))
        except BaseException:
            (home / f"traceback{rank}").write_text(traceback.format_exc())
            raise


def _ignore(message: str) -> None:
    del message


def count_threads(world_size: int) -> int:
    """Return how many threads each of ``world_size`` ranks gets: OMP_NUM_THREADS, or its share of the cores."""
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def run_ranks(
    function: Callable[..., Record],
    arguments: tuple[Any, ...],
    *,
    world_size: int,
    timeout_seconds: float,
    show_progress: Callable[[str], None],
) -> list[Record]:
    """Run ``function(rank, report_progress, *arguments)`` on every rank of a gloo process group on this machine.

    Args:
        function: stands at the top level of its module, since it is pickled; what it returns is pickled too. It may
            call ``report_progress`` with a message, which rank 0 sends home.
        arguments: what ``function`` takes after the first two.
        world_size: number of ranks.
        timeout_seconds: how long it may take from one message to the next before everything is killed.
        show_progress: called here with each of rank 0's messages.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailure: a rank raised, died, or nothing was heard for ``timeout_seconds``.
    """
    threads = count_threads(world_size)
    # Read when a rank starts. What the user chose wins.
    environment = {
        "OMP_NUM_THREADS": str(threads),
        # DDP warns when a step uses every parameter, which is what the first phase is for.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="ddp_hooks_demo_") as directory:
        progress = mp.get_context("spawn").SimpleQueue()
        saved = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            context = spawn(
                _run_rank,
                args=(function, arguments, world_size, threads, timeout_seconds, directory, progress),
                nprocs=world_size,
                join=False,
                daemon=True,
            )
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        try:
            _follow(context, progress, timeout_seconds, Path(directory), show_progress)
        finally:
            _kill(context.processes)
        return [pickle.loads((Path(directory) / f"record{rank}").read_bytes()) for rank in range(world_size)]


def _follow(
    context: Any, progress: Any, timeout_seconds: float, directory: Path, show_progress: Callable[[str], None]
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            finished = context.join(timeout=0.2, grace_period=GRACE_SECONDS)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise RankFailure(_describe_failure(directory, len(context.processes), error)) from None
        while not progress.empty():
            show_progress(progress.get())
            deadline = time.monotonic() + timeout_seconds
        if finished:
            return
        if time.monotonic() > deadline:
            raise RankFailure(_describe_hang(directory, context.processes, timeout_seconds))


def _describe_failure(directory: Path, world_size: int, error: Exception) -> str:
    # What failed first is the reason; the others mostly report that they lost a neighbour.
    files = [directory / f"traceback{rank}" for rank in range(world_size)]
    written = sorted((path for path in files if path.exists()), key=lambda path: path.stat().st_mtime_ns)
    parts = [f"--- rank {path.name.removeprefix('traceback')} failed:\n{path.read_text()}" for path in written]
    # A rank that was killed leaves nothing behind, and the others' tracebacks do not say so.
    if isinstance(error, ProcessExitedException) or not parts:
        parts.insert(0, f"--- rank {getattr(error, 'error_index', '?')} died: {error}\n")
    return "\n".join(parts)


def _describe_hang(directory: Path, processes: list[BaseProcess], timeout_seconds: float) -> str:
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    parts = [f"No step finished within {timeout_seconds:g} seconds, so the ranks were killed (see --timeout)."]
    for rank in range(len(processes)):
        path = directory / f"stack{rank}"
        stack = path.read_text() if path.exists() else ""
        parts.append(f"--- rank {rank} hung here:\n{stack or '(no Python stack: it had not started or had ended)'}")
    return "\n".join(parts)


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(GRACE_SECONDS)
