"""Wraps methods of DistributedDataParallel, to notice when a module is made and when another hook is registered.

This works whether a trainer, a library or the user makes the module. A method is wrapped only as long as needed, and
then restored. Other code may wrap the same methods before or after us: a wrapper around ours stays in place and calls
ours, which then does nothing.
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
# Called with the module when it is made, or with None if its construction failed.
Ending = Callable[[DistributedDataParallel | None], object]
# Called with the arguments by name before the construction.
Beginning = Callable[[Mapping[str, Any]], Ending | None]

_lock = LockOfProcess()


class WrappedFunction:
    """A function of torch's that can be replaced and restored, by one thread at a time.

    Args:
        owner: the class or module that has it. It is replaced there, because attributes of an object would be copied.
        name: its name.
        wrap: given the function, returns its replacement.

    Attributes:
        wrapper: the replacement; None while it is not needed.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner, self._name, self._wrap = owner, name, wrap
        self._original: Callable[..., Any] | None = None
        self.wrapper: Callable[..., Any] | None = None

    def put_in_place(self) -> None:
        """Replace the function, unless the replacement is there."""
        current = getattr(self._owner, self._name)
        # Also if somebody else has replaced our wrapper.
        if current is not self.wrapper:
            self._original, self.wrapper = current, self._wrap(current)
            setattr(self._owner, self._name, self.wrapper)

    def take_away(self) -> None:
        """Restore the function. If another wrapper calls ours, that one stays."""
        if self.wrapper is not None and getattr(self._owner, self._name) is self.wrapper:
            setattr(self._owner, self._name, self._original)
        self._original = self.wrapper = None


# --- when a module is made


class _Watcher:
    """A callback; compared by identity, because the same one may be added twice."""

    def __init__(self, begin: Beginning) -> None:
        self.begin = begin


# A replacement of `__init__` may have another signature.
_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)

_watchers: list[_Watcher] = []
_under_construction = threading.local()


@contextmanager
def watch_construction(callback: Callback) -> Iterator[None]:
    """Call ``callback(ddp)`` for each DDP module that is made while this block is open, in any thread.

    The callback runs when DDP's own ``__init__`` is done, on the same thread; a subclass may do more after its
    ``super().__init__()``. Blocks may nest and overlap: callbacks run in the order in which their blocks began. When
    the last block ends, ``DistributedDataParallel.__init__`` is restored.

    Copying or unpickling a module does not call it.

    Args:
        callback: the callback. The module's construction raises its exceptions.
    """

    def end(ddp: DistributedDataParallel | None) -> None:
        if ddp is not None:
            callback(ddp)

    with watch_construction_from_its_beginning(lambda arguments: end):
        yield


@contextmanager
def watch_construction_from_its_beginning(begin: Beginning) -> Iterator[None]:
    """Like :func:`watch_construction`, but also call a function before DDP's ``__init__``.

    Args:
        begin: called with the given arguments of ``__init__`` by name, or with none if they cannot be bound. The
            function that it returns is called with the module after the construction, or with None if that failed.
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
    # Libraries read signatures; they see the original's.
    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        modules: set[int] = _under_construction.__dict__.setdefault("modules", set())
        if id(self) in modules:
            # Our wrapper is there twice, with another one in between.
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
        return {}  # another `__init__` takes other arguments


_init = WrappedFunction(DistributedDataParallel, "__init__", _wrap_init)


# --- when another hook is registered

# Modules whose hook gives way to another one, by identity.
_giving_way: dict[int, weakref.ref[DistributedDataParallel]] = {}


def give_way_to_other_hooks(ddp: DistributedDataParallel) -> None:
    """Remove this package's hook from the module when another one is registered.

    DDP takes one hook. After :func:`ddp_hooks.register`, a second hook is a mistake, and DDP raises. But
    :func:`ddp_hooks.enable` registers the hook with every module, so a hook that is registered explicitly takes
    precedence.
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
        # The key may belong to another module by now.
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
                # Raises the error that DDP would raise, while our hook is still registered.
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
    # The arguments are `(state, hook)`, or the type of a built-in hook.
    named = [options[name] for name in ("hook", "comm_hook_type") if name in options]
    return [*args, *named][-1] if args or named else None


_registrations = [
    WrappedFunction(DistributedDataParallel, name, _wrap_registration)
    for name in ("register_comm_hook", "_register_builtin_comm_hook")
]
