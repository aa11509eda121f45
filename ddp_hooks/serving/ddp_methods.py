"""Wraps methods of DistributedDataParallel itself, to tell when a module is made and when it is given a hook.

Whoever makes the module: a trainer, a library, the user. A method is wrapped while somebody asks for it, and is then
what it was before. Others may do the same with the same methods, before or after this: what somebody has put over ours
stays, calls ours, and finds that it does nothing any more.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..hangs.forks import LockOfProcess
from .service import registered_service

Callback = Callable[[DistributedDataParallel], object]
# What is called with the module when it is made, or with None if it could not be made.
Ending = Callable[[DistributedDataParallel | None], object]
# What is called with the arguments by name when one begins to be made.
Beginning = Callable[[Mapping[str, Any]], Ending | None]

_lock = LockOfProcess()


class _WrappedMethod:
    """A method of DDP's class, with another in its place from time to time; the caller locks.

    Args:
        name: of the method.
        wrap: makes of the method what takes its place.
    """

    def __init__(self, name: str, wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self._name = name
        self._wrap = wrap
        self._original: Callable[..., None] | None = None
        self._wrapper: Callable[..., None] | None = None

    def put_in_place(self) -> None:
        current = getattr(DistributedDataParallel, self._name)
        if current is self._wrapper:
            return
        # Also where somebody else has replaced what we had put there.
        self._original, self._wrapper = current, self._wrap(current)
        setattr(DistributedDataParallel, self._name, self._wrapper)

    def take_away(self) -> None:
        if self._wrapper is not None and getattr(DistributedDataParallel, self._name) is self._wrapper:
            setattr(DistributedDataParallel, self._name, self._original)
        self._original = self._wrapper = None


# --- when a module is made


class _Watcher:
    """What was asked to be called; of its own identity, because the same may be added twice."""

    def __init__(self, begin: Beginning) -> None:
        self.begin = begin


# What somebody puts in its place need not say what it takes.
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)

_watchers: list[_Watcher] = []
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
        _init.put_in_place()
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
            if not _watchers:
                _init.take_away()


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
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


_init = _WrappedMethod("__init__", _wrap_init)


# --- when it is given a hook

# The modules whose hook gives way, by identity.
_giving_way: dict[int, weakref.ref[DistributedDataParallel]] = {}


def give_way_to_other_hooks(ddp: DistributedDataParallel) -> None:
    """Take this package's hook off the module as soon as another one is registered with it.

    DDP takes one hook. Where ours was asked for by name (:func:`ddp_hooks.register`), a second one is a mistake and DDP
    says so. Where it came with every module (:func:`ddp_hooks.enable`), whoever registers a hook means that one.

    Args:
        ddp: a module with a hook of this package.
    """
    with _lock:
        _giving_way[id(ddp)] = weakref.ref(ddp, functools.partial(_forget, id(ddp)))
        for method in _registrations:
            method.put_in_place()


def keep_place(ddp: DistributedDataParallel) -> None:
    """Undo :func:`give_way_to_other_hooks`; does nothing for other modules."""
    with _lock:
        reference = _giving_way.get(id(ddp))
        if reference is not None and reference() is ddp:
            _forget(id(ddp), reference)


def _forget(key: int, reference: weakref.ref[DistributedDataParallel]) -> None:
    with _lock:
        # The key may be another module's by now.
        if _giving_way.get(key) is not reference:
            return
        del _giving_way[key]
        if not _giving_way:
            for method in _registrations:
                method.take_away()


def _wrap_registration(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def register(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        with _lock:
            reference = _giving_way.get(id(self))
        service = registered_service(self) if reference is not None and reference() is self else None
        if service is not None and reference is not None:
            hook = _hook_of(args, options)
            if original.__name__ == "register_comm_hook":
                # Raises what DDP is about to raise, while this one is still in its place.
                self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
            service.close("whose module was given another hook")
            _forget(id(self), reference)
            warnings.warn(
                f"ddp_hooks.enable: another communication hook ({getattr(hook, '__qualname__', hook)}) is being "
                f"registered with {type(self.module).__name__}; it replaces the hook of ddp_hooks",
                stacklevel=2,
            )
        original(self, *args, **options)

    return register


def _hook_of(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    # `register_comm_hook(state, hook)`, or the type of a built-in one alone.
    named = [options[name] for name in ("hook", "comm_hook_type") if name in options]
    return [*args, *named][-1] if args or named else None


_registrations = [
    _WrappedMethod(name, _wrap_registration) for name in ("register_comm_hook", "_register_builtin_comm_hook")
]
