"""A process group that takes its time: collectives begin late, in order, and complete later still, in random order.

It wraps gloo. What a collective works on is read after the caller has long gone on, so a buffer that is used again too
early shows; and works that were started one after the other complete in any order, in a thread that is not gloo's.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "slow_gloo"
LONGEST_DELAY_SECONDS = 0.004


class SlowWork(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.later: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        self.later.wait()
        return True

    def is_completed(self) -> bool:
        return self.later.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.later


class SlowGroup(dist.ProcessGroup):
    """What DDP and its hooks call of a process group."""

    def __init__(self, inner: Any, seed: int) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._random = random.Random(seed * 1000 + inner.rank())
        self._starts: queue.Queue[Any] = queue.Queue()
        self._completions: list[Any] = []
        self._lock = threading.Condition()
        self.started = 0
        self.overtaken = 0  # completions that came before one that was started earlier
        for target in (self._start, self._complete):
            threading.Thread(target=target, daemon=True).start()

    def getBackendName(self) -> str:
        return BACKEND

    def _later(self, begin: Callable[[], Any], result: Any) -> SlowWork:
        work = SlowWork()
        self._starts.put((begin, result, work))
        return work

    def _start(self) -> None:
        while True:
            begin, result, work = self._starts.get()
            time.sleep(self._random.random() * LONGEST_DELAY_SECONDS / 4)
            try:
                inner = begin()
            except RuntimeError as error:
                work.later.set_exception(error)
                continue
            due = time.monotonic() + self._random.random() * LONGEST_DELAY_SECONDS
            with self._lock:
                self._completions.append((due, self.started, inner, result, work))
                self.started += 1
                self._lock.notify()

    def _complete(self) -> None:
        while True:
            with self._lock:
                while not self._completions:
                    self._lock.wait()
                due, number, inner, result, work = min(self._completions, key=lambda entry: entry[0])
                if (left := due - time.monotonic()) > 0:
                    self._lock.wait(left)
                    continue
                self._completions.remove((due, number, inner, result, work))
                self.overtaken += any(other[1] < number for other in self._completions)
            try:
                inner.wait()
            except RuntimeError as error:
                work.later.set_exception(error)
            else:
                work.later.set_result(result)
            del inner, result, work

    def allreduce(self, tensors: Any, options: Any = None) -> SlowWork:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        options = dist.AllreduceOptions() if options is None else options
        return self._later(lambda: self._inner.allreduce(tensors, options), tensors)

    def broadcast(self, tensors: Any, options: Any) -> SlowWork:
        return self._later(lambda: self._inner.broadcast(tensors, options), tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> SlowWork:
        options = dist.AllgatherOptions() if options is None else options
        return self._later(lambda: self._inner.allgather(outputs, inputs, options), outputs)

    def barrier(self, options: Any = None) -> SlowWork:
        options = dist.BarrierOptions() if options is None else options
        return self._later(lambda: self._inner.barrier(options), [])


def new_slow_group(seed: int) -> Any:
    """Make one over all ranks, beside the default group; collective."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> SlowGroup:
        return SlowGroup(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), seed)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    return dist.new_group(backend=BACKEND)
