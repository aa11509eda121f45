"""Asks which ranks come to a place that some may not know of, before any of them waits in a collective.

A rank that never comes says nothing, and a collective without it lasts until the group's timeout, or mixes with
whatever that rank sends next. So the ranks meet in the store of their process group: each leaves word that it is there,
and one of them, the last to come or the first to lose patience, writes down how it ended. That is read by all, so they
agree, those that come later included.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from .control_groups import store_of

# How often the store is asked: soon at first, since the others are nearly there, then seldom.
_FIRST_POLL_SECONDS = 0.002
_LONGEST_POLL_SECONDS = 0.2


def call_roll(group: dist.ProcessGroup, place: str, patience_seconds: float) -> tuple[int, ...]:
    """Wait until every rank of a group has called this for the same place as many times as this one.

    Args:
        group: the process group.
        place: what the ranks come to; a part of names in the store.
        patience_seconds: how long to wait for the others.

    Returns:
        The ranks (of the group) that did not come in time; the same on every rank that comes, also on one that comes
        too late. Empty if all have come.
    """
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1:
        return ()
    places = dist.PrefixStore(f"ddp_hooks/{place}", store_of(group))  # type: ignore[attr-defined]
    # Counted in the store, because another group may have had this one's name before.
    number = places.add(f"visits/{rank}", 1)
    store = dist.PrefixStore(str(number), places)  # type: ignore[attr-defined]
    store.set(f"here/{rank}", "")
    if store.add("here", 1) == world_size:
        _end(store, [])
    deadline, pause = time.monotonic() + patience_seconds, _FIRST_POLL_SECONDS
    while not store.check(["absent"]):
        if time.monotonic() >= deadline:
            _end(store, [other for other in range(world_size) if not store.check([f"here/{other}"])])
            break
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    return tuple(int(other) for other in store.get("absent").decode().split())


def _end(store: Any, absent: list[int]) -> None:
    # Two may find so at the same time; the others wait for what the first one writes.
    if store.add("ended", 1) == 1:
        store.set("absent", " ".join(map(str, absent)))
