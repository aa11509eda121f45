"""Tells when a DistributedDataParallel module is made, whoever makes it: a trainer, a library, the user."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

Callback = Callable[[DistributedDataParallel], object]


class _Watcher:
    """A callback that was asked to be called; of its own identity, because the same one may be added twice."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback


_lock = threading.RLock()
_watchers: list[_Watcher] = []
# DDP's own `__init__`, while it is wrapped by ours.
_original: Callable[..., None] | None = None
_wrapper: Callable[..., None] | None = None
_under_construction = threading.local()


@contextmanager
def watch_construction(callback: Callback) -> Iterator[None]:
    """Call ``callback(ddp)`` for each DDP module that is made while this block is open, in any thread.

    It is called when DDP's own ``__init__`` is done, by the thread that called it; what a subclass does after
    ``super().__init__()`` comes later. Blocks may nest and overlap: callbacks are called in the order in which their
    blocks began. When the last block ends, ``DistributedDataParallel.__init__`` is what it was before the first.

    A module that is copied or unpickled is not made anew, and not reported.

    Args:
        callback: what it raises is raised by the module's construction.
    """
    watcher = _Watcher(callback)
    with _lock:
        _watchers.append(watcher)
        _install()
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
            if not _watchers:
                _uninstall()


def _install() -> None:
    global _original, _wrapper
    if _wrapper is not None and DistributedDataParallel.__init__ is _wrapper:
        return
    # Also where somebody else has replaced what we had put there.
    _original = DistributedDataParallel.__init__
    _wrapper = _wrap(_original)
    DistributedDataParallel.__init__ = _wrapper  # type: ignore[method-assign]


def _uninstall() -> None:
    global _original, _wrapper
    # What somebody has put over ours calls it; it then does nothing of its own.
    if _original is not None and DistributedDataParallel.__init__ is _wrapper:
        DistributedDataParallel.__init__ = _original  # type: ignore[method-assign]
    _original = _wrapper = None


def _wrap(original: Callable[..., None]) -> Callable[..., None]:
    # Signatures are read by libraries, which find the original's.
    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        modules: set[int] = _under_construction.__dict__.setdefault("modules", set())
        if id(self) in modules:
            # Ours lies twice over DDP's, with somebody else's between.
            original(self, *args, **options)
            return
        modules.add(id(self))
        try:
            original(self, *args, **options)
        finally:
            modules.discard(id(self))
        with _lock:
            watchers = list(_watchers)
        for watcher in watchers:
            watcher.callback(self)

    return __init__
