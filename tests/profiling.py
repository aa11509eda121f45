"""torch.profiler's record of what this process does, complete before the profiler stops."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def profiled(record_shapes: bool = False) -> Iterator[torch.profiler.profile]:
    """Profile the CPU, until gloo's threads have noted the end of each collective too.

    gloo lets those who wait for a collective go on before it notes its end. Noted after the profiler has stopped, that
    is missing, and worse: torch writes it into memory that the profiler has freed.
    """
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=record_shapes) as profile:
        yield profile
        time.sleep(0.2)
