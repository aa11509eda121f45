"""Lets a hook that the user registers take the place of one that was put there for all modules.

DDP takes one hook. Where ours was asked for by name (:func:`ddp_hooks.register`), a second one is a mistake and DDP
says so. Where it came with every module (:func:`ddp_hooks.enable`), whoever registers a hook means that one.

DDP's methods are wrapped while there are such modules, and are then what they were.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .service import registered_service

_METHODS = ("register_comm_hook", "_register_builtin_comm_hook")

_lock = threading.RLock()
# The modules, by identity.
_modules: dict[int, weakref.ref[DistributedDataParallel]] = {}
# By name: DDP's own method, and what stands in its place.
_wrapped: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}


def give_way_to_other_hooks(ddp: DistributedDataParallel) -> None:
    """Take this package's hook off the module as soon as another one is registered with it.

    Args:
        ddp: a module with a hook of this package.
    """
    with _lock:
        _modules[id(ddp)] = weakref.ref(ddp, functools.partial(_forget, id(ddp)))
        if not _wrapped:
            for name in _METHODS:
                original = getattr(DistributedDataParallel, name)
                _wrapped[name] = original, _wrap(original)
                setattr(DistributedDataParallel, name, _wrapped[name][1])


def keep_place(ddp: DistributedDataParallel) -> None:
    """Undo :func:`give_way_to_other_hooks`; does nothing for other modules."""
    with _lock:
        reference = _modules.get(id(ddp))
        if reference is not None and reference() is ddp:
            _forget(id(ddp), reference)


def _forget(key: int, reference: weakref.ref[DistributedDataParallel]) -> None:
    with _lock:
        # The key may be another module's by now.
        if _modules.get(key) is not reference:
            return
        del _modules[key]
        if _modules:
            return
        for name, (original, wrapper) in _wrapped.items():
            # What somebody has put over ours calls it; it then does nothing of its own.
            if getattr(DistributedDataParallel, name) is wrapper:
                setattr(DistributedDataParallel, name, original)
        _wrapped.clear()


def _wrap(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def register(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        with _lock:
            reference = _modules.get(id(self))
        service = registered_service(self) if reference is not None and reference() is self else None
        if service is not None and reference is not None:
            hook = _hook_of(args, options)
            if original.__name__ == "register_comm_hook":
                # Raises what DDP is about to raise, while this one is still in its place.
                self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
            service.close("whose module was given another hook")
            _forget(id(self), reference)
            warnings.warn(
                f"ddp_hooks.enable: {type(self.module).__name__} is given another communication hook "
                f"({getattr(hook, '__qualname__', hook)}), which takes the place of ddp_hooks' on it",
                stacklevel=2,
            )
        original(self, *args, **options)

    return register


def _hook_of(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    # `register_comm_hook(state, hook)`, or the type of a built-in one alone.
    named = [options[name] for name in ("hook", "comm_hook_type") if name in options]
    return [*args, *named][-1] if args or named else None
