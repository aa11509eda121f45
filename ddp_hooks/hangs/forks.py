"""Keeps the threads of this package from holding foreign locks during a fork.

A forked child has one thread, and finds every lock in the state in which it was. A lock that another thread held, in
Python, in torch or in the C library, stays locked in the child forever. Threads of this package therefore pass a gate
before anything that may take locks of others: a request to the store, which may look up a host, or a line on standard
error. A fork waits until no thread is behind the gate, and no thread passes the gate during a fork. Apart from that,
these threads take only their own locks, which a child does not need.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# A store that does not answer may hold a thread behind the gate for minutes; a child that never asks a store does not
# mind.
_LONGEST_WAIT_SECONDS = 1.0


class _Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._forks = 0  # under way, or waiting
        self._inside: Counter[int] = Counter()  # by thread
        self._given_up: set[int] = set()  # threads inside that a fork has waited for long enough

    def enter(self) -> None:
        own = threading.get_ident()
        with self._changed:
            if own not in self._inside:
                self._changed.wait_for(lambda: self._forks == 0, _LONGEST_WAIT_SECONDS)
            self._inside[own] += 1

    def leave(self) -> None:
        own = threading.get_ident()
        with self._changed:
            self._inside[own] -= 1
            if self._inside[own] == 0:
                del self._inside[own]
                self._given_up.discard(own)
                self._changed.notify_all()

    def close(self) -> None:
        # Whoever forks may be inside itself, in a signal handler or a finalizer.
        excepted = {threading.get_ident()}
        with self._changed:
            self._forks += 1
            if not self._changed.wait_for(
                lambda: self._inside.keys() <= self._given_up | excepted, _LONGEST_WAIT_SECONDS
            ):
                self._given_up |= self._inside.keys() - excepted

    def open(self) -> None:
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()


class LockOfProcess:
    """A reentrant lock. In a forked child it is free, or held by the thread that forked."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_gate = _Gate()


@contextmanager
def apart_from_forks() -> Iterator[None]:
    """Delay forks until the block ends, but for at most a second."""
    gate = _gate
    gate.enter()
    try:
        yield
    finally:
        gate.leave()


def _begin_anew() -> None:
    # Nobody else is there to leave it, or to let go of its lock.
    global _gate
    _gate = _Gate()


os.register_at_fork(before=lambda: _gate.close(), after_in_parent=lambda: _gate.open(), after_in_child=_begin_anew)
