"""Forks processes from ranks that train, at any moment, and sees whether parent and child go on.

    python tests/campaigns/forks.py --forks 10000
    python tests/campaigns/forks.py --forks 200 --seed 7

Two ranks train with the hook. Now and then one lets the other wait, with hang reports after a twentieth of a second, so
that this package's threads ask the store, answer and print nearly all the time. Meanwhile each rank forks: children
that do at once what takes locks (standard error, logging, looking up a host, imports, errors of C++, threads, a
collection, the state), and workers of DataLoaders, persistent and not. A child that has not ended after some seconds
hangs, and its stack is printed; so is a rank's that does not go on.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import gc
import importlib
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from forked import Rank, fork_rank, prepare_parent, wait

REPORT_SECONDS = 0.05
CHILD_SECONDS = 30.0
# Of what a rank does in a round.
SHARE_OF_LOADERS = 0.1
LONGEST_PAUSE_SECONDS = 0.2


class Batches:
    """What workers of a DataLoader fetch."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        import torch

        socket.getaddrinfo("localhost", 1)
        return torch.full((8,), float(index))


def raise_in_cpp() -> None:
    import torch

    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError:
        return
    raise AssertionError("expected an error")


def start_a_thread() -> None:
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def import_anew() -> None:
    importlib.reload(importlib.import_module("colorsys"))


class Trainer:
    """One rank."""

    def __init__(self, rank: int, seed: int) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import ddp_hooks

        torch.manual_seed(0)
        self.rank, self.random = rank, random.Random(f"{seed} {rank}")
        self.ddp: Any = DistributedDataParallel(torch.nn.Linear(8, 8), find_unused_parameters=True)
        self.state: Any = ddp_hooks.register(self.ddp)
        self.forks = 0

    def actions(self) -> list[Callable[[], object]]:
        from ddp_hooks.hangs import watcher

        return [
            lambda: print("a child", file=sys.stderr, flush=True),
            lambda: logging.getLogger("child").warning("a child"),
            lambda: socket.getaddrinfo("localhost", 1),
            raise_in_cpp,
            start_a_thread,
            import_anew,
            gc.collect,
            self.state.stats,
            watcher.begin,
            self.let_go,
            self.state.close,
        ]

    def let_go(self) -> None:
        self.ddp = None
        gc.collect()

    def step(self) -> None:
        import torch

        self.ddp(torch.ones(2, 8)).sum().backward()

    def fork(self) -> None:
        actions = self.random.sample(self.actions(), 4)
        runs_exit_functions = self.random.random() < 0.1
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(CHILD_SECONDS, exit=True)
            for action in actions:
                action()
            if runs_exit_functions:
                atexit._run_exitfuncs()
            os._exit(0)
        self.forks += 1
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == 0, f"a child ended with {code} in {actions}"

    def load(self) -> None:
        from torch.utils.data import DataLoader

        workers, persistent = self.random.choice((1, 2)), self.random.random() < 0.5
        loader: Any = DataLoader(
            Batches(),  # type: ignore[arg-type]
            batch_size=2,
            num_workers=workers,
            persistent_workers=persistent,
            timeout=CHILD_SECONDS,
        )
        for _ in range(2):
            self.forks += 0 if persistent and loader._iterator is not None else workers
            for batch in loader:
                assert batch.shape == (2, 8)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < SHARE_OF_LOADERS:
                self.load()
            else:
                # At any moment of what the other threads do.
                time.sleep(self.random.random() ** 4 * LONGEST_PAUSE_SECONDS)
                self.fork()
            self.step()


def run_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    import torch.distributed as dist

    os.environ["DDP_HOOKS_REPORT_HANG_AFTER"] = str(REPORT_SECONDS)
    # A store over the network, as programs have; both ranks learn its port from a file.
    port = Path(store)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(server.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        server = dist.TCPStore("127.0.0.1", int(port.read_text()), 2, False, wait_for_workers=False)
    dist.init_process_group("gloo", store=server, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    trainer = Trainer(rank, options.seed)
    trainer.run(options.forks // 2)
    dist.barrier()
    print(f"{trainer.forks} forks", flush=True)
    dist.destroy_process_group()


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forks", type=int, default=200, help="at least so many, of both ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which a rank hangs")
    options = parser.parse_args()
    prepare_parent()
    directory = Path(tempfile.mkdtemp(prefix="ddp_hooks_forks_"))
    ranks: list[Rank] = []
    for number in range(2):
        rank = fork_rank(number, directory)
        if rank is None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            run_rank(number, options, str(directory / "port"))
            return None
        ranks.append(rank)
    started = time.monotonic()
    wait(ranks, options.limit, native_stacks=True)
    forks = 0
    for rank in ranks:
        lines = rank.output().splitlines()
        done = [line for line in lines if line.endswith(" forks")]
        forks += int(done[-1].split()[0]) if done else 0
        if rank.code != 0:
            print(f"--- rank {rank.rank}: {'hung' if rank.hung else f'exit code {rank.code}'}")
            print("\n".join(lines[-60:]), rank.stacks, sep="\n")
    reports = sum(rank.output().count("Missing: ") for rank in ranks)
    print(f"{forks} forks, {reports} hang reports, {time.monotonic() - started:.0f} s")
    shutil.rmtree(directory, ignore_errors=True)
    return 0 if all(rank.code == 0 for rank in ranks) else 1


if __name__ == "__main__":
    code = main()
    if code is not None:
        sys.exit(code)
