"""Plays what the pretended device was asked for (tests/pretend/trace.h) on several hosts, in virtual time.

Every host runs the same trace and may begin at another time. A host's time is what its launches take and what it waits
for. A piece of work begins when what it waits for has ended, and not before the host has launched it. A collective
begins when the last host's has begun, and an exchange of masks ends so many seconds after the last host has started it.
Collectives on the same link take turns, in the order in which hosts launch them, as those of one NCCL communicator do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Played:
    """What a step took, in seconds.

    Args:
        step: from the first host's begin to the end of all work.
        host_waits: of the host that waited longest, for masks or its device.
        device_idles: of the device that idled longest, without a kernel of the model or the hook.
        links: that collectives took, by link.
    """

    step: float
    host_waits: float
    device_idles: float
    links: dict[str, float]


def play(
    trace: Sequence[Any],
    begins: Sequence[float],
    exchange_seconds: float,
    seconds_of: Callable[[Any], float] = lambda moment: moment.seconds,
    link_of: Callable[[Any], str] = lambda moment: "link",
) -> Played:
    """Play a trace.

    Args:
        trace: moments, as ``_pretend.end_trace`` returns them.
        begins: when each host begins, in seconds.
        exchange_seconds: how long an exchange of masks takes after the last host has started it.
        seconds_of: what a piece of work takes; by default, what it took on the pretended device and its link.
        link_of: the link that a collective uses.
    """
    hosts = range(len(begins))
    host = list(begins)
    streams: list[dict[int, float]] = [defaultdict(float) for _ in hosts]
    ends: list[dict[int, float]] = [defaultdict(float) for _ in hosts]  # of moments; those before the trace are over
    busy = [0.0 for _ in hosts]
    links: dict[str, float] = defaultdict(float)
    links_are_free: dict[str, float] = defaultdict(float)  # from then on
    waited = [0.0 for _ in hosts]
    exchanges: deque[float] = deque()

    def wait(one: int, until: float) -> None:
        waited[one] += max(0.0, until - host[one])
        host[one] = max(host[one], until)

    for moment in trace:
        if moment.what == "masks start":
            exchanges.append(max(host) + exchange_seconds)
            continue
        if moment.what == "masks wait":
            done = exchanges.popleft()
            for one in hosts:
                wait(one, done)
            continue
        seconds, is_collective = seconds_of(moment), bool(moment.collective)
        starts = []
        for one in hosts:
            host[one] += moment.host_seconds
            starts.append(max(host[one], streams[one][moment.stream]))
        if is_collective:
            link = link_of(moment)
            start = max(*starts, links_are_free[link])
            starts = [start] * len(starts)
            links_are_free[link] = start + seconds
            links[link] += seconds
        for one in hosts:
            if moment.what == "host waits":
                wait(one, ends[one][moment.after])
            elif moment.what == "wait":
                streams[one][moment.stream] = max(streams[one][moment.stream], ends[one][moment.after])
            else:
                streams[one][moment.stream] = starts[one] + seconds
                busy[one] += 0.0 if is_collective else seconds
            ends[one][moment.number] = streams[one][moment.stream]
    end = max(max(host), *(max(times.values(), default=0.0) for times in streams))
    idles = max(end - begin - one for begin, one in zip(begins, busy, strict=True))
    return Played(end - min(begins), max(waited), idles, dict(links))
