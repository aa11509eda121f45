"""Tells when something happens where a module's gradients are computed: on the host, or on a device's stream.

The host runs ahead of a device. Its clock would tell when work was launched, so a timed event on the current stream
marks each moment instead. The host reads the times later, and does not wait for them while a step runs.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch

Moment = float | torch.Event

# How long to wait for a moment that a device may never reach, because a collective before it hangs. Seconds.
_PATIENCE = 1.0
_PAUSE = 0.0005


def now(device: torch.device) -> Moment:
    """Return this moment on the device: on the host, the time in seconds."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Return how long it took; 0 if the device has failed, or hangs before the end."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.Event)
    assert isinstance(end, torch.Event)
    given_up = time.monotonic() + _PATIENCE
    # What has failed on the device is raised where the program notices it.
    with suppress(RuntimeError):
        while not end.query():
            if time.monotonic() > given_up:
                return 0.0
            time.sleep(_PAUSE)
        return float(start.elapsed_time(end)) * 1e-3
    return 0.0
