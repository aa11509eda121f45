"""Tells when a DistributedDataParallel module is made, whoever makes it: a trainer, a library, the user."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

Callback = Callable[[DistributedDataParallel], object]
# What is called with the module when it is made, or with None if it could not be made.
Ending = Callable[[DistributedDataParallel | None], object]
# What is called with the arguments by name when one begins to be made.
Beginning = Callable[[Mapping[str, Any]], Ending | None]


class _Watcher:
    """What was asked to be called; of its own identity, because the same may be added twice."""

    def __init__(self, begin: Beginning) -> None:
        self.begin = begin


# What somebody puts in its place need not say what it takes.
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)

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

    def end(ddp: DistributedDataParallel | None) -> None:
        if ddp is not None:
            callback(ddp)

    with watch_construction_from_its_beginning(lambda arguments: end):
        yield


@contextmanager
def watch_construction_from_its_beginning(begin: Beginning) -> Iterator[None]:
    """As :func:`watch_construction`, for who has something to do before DDP's ``__init__``, too.

    Args:
        begin: called with the arguments of ``__init__`` by name, as far as they were given and can be told apart. What
            it returns is called with the module when that is made, and with None when making it failed.
    """
    watcher = _Watcher(begin)
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
        endings: list[Ending] = []
        try:
            with _lock:
                watchers = list(_watchers)
            arguments = _name_arguments(self, args, options) if watchers else {}
            for watcher in watchers:
                ending = watcher.begin(arguments)
                if ending is not None:
                    endings.append(ending)
            original(self, *args, **options)
        except BaseException:
            for ending in endings:
                ending(None)
            raise
        finally:
            modules.discard(id(self))
        for ending in endings:
            ending(self)

    return __init__


def _name_arguments(ddp: DistributedDataParallel, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _SIGNATURE.bind(ddp, *args, **options).arguments
    except TypeError:
        return {}  # somebody's `__init__` takes others
