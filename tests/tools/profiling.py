"""torch.profiler's record of what this process does, complete before the profiler stops."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def profiled(record_shapes: bool = False, all_threads: bool = False) -> Iterator[torch.profiler.profile]:
    """Profile the CPU, until gloo's threads have noted the end of each collective too.

    What runs in those threads is in the record with `all_threads` only.

    gloo lets those who wait for a collective go on before it notes its end. Noted after the profiler has stopped, that
    is missing, and worse: torch writes it into memory that the profiler has freed.
    """
    cpu = [torch.profiler.ProfilerActivity.CPU]
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with torch.profiler.profile(
        activities=cpu, record_shapes=record_shapes, experimental_config=threads if all_threads else None
    ) as profile:
        yield profile
        time.sleep(0.2)
