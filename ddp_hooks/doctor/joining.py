"""Reports steps of other ranks in which this rank has joined (``ddp.join()``).

Such a rank has run out of batches, and runs no forward or backward any more: at the end of its join block, DDP takes
part in the passes of the other ranks. Code that counts passes, or answers the others at the end of each, listens here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel

from ..serving.ddp_methods import WrappedFunction


class Follower(Protocol):
    """A listener, which is held weakly."""

    def joined_step_done(self) -> None:
        """Note that other ranks have ended a synchronised pass, and that this rank has joined."""

    def join_block_ends(self) -> None:
        """Note that this rank has reached the end of a join block, where DDP waits for the others."""


# The followers of each module.
_followers: weakref.WeakKeyDictionary[DistributedDataParallel, list[weakref.ref[Follower]]] = (
    weakref.WeakKeyDictionary()
)
# An object for the join block that a module is in.
_blocks: weakref.WeakKeyDictionary[DistributedDataParallel, object] = weakref.WeakKeyDictionary()


def follow_join_blocks(ddp: DistributedDataParallel, follower: Follower) -> Callable[[], None]:
    """Tell ``follower`` of the module's join blocks that begin from now on.

    Both are held weakly. What a follower raises ends the join block on this rank.

    Returns:
        A function that ends this. It may be called again.
    """
    reference = weakref.ref(follower)
    if ddp not in _followers:
        _followers[ddp] = []
        finalizer = weakref.finalize(ddp, _uninstall_if_unneeded)
        finalizer.atexit = False
    _followers[ddp].append(reference)
    for method in _join_hook, _join_exit:
        method.put_in_place()
    module = weakref.ref(ddp)

    def stop() -> None:
        followed = module()
        references = [] if followed is None else _followers.get(followed, [])
        if reference in references:
            references.remove(reference)
            if not references and followed is not None:
                del _followers[followed]
        _uninstall_if_unneeded()

    return stop


def join_block_of(ddp: DistributedDataParallel) -> object | None:
    """Return an object for the join block that the module is in, if that is known; None outside of one."""
    return _blocks.get(ddp) if ddp._join_config.enable else None


def _living_followers(ddp: DistributedDataParallel) -> list[Follower]:
    return [follower for reference in _followers.get(ddp, ()) if (follower := reference()) is not None]


class _Following(JoinHook):
    """DDP's part of a join block, after which followers are told."""

    def __init__(self, hook: JoinHook, ddp: DistributedDataParallel) -> None:
        self._hook = hook
        self._ddp = ddp

    def main_hook(self) -> None:
        self._hook.main_hook()
        # DDP records here whether the pass is reduced.
        if self._ddp.require_forward_param_sync:
            for follower in _living_followers(self._ddp):
                follower.joined_step_done()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)


def _wrap_join_hook(original: Callable[..., JoinHook]) -> Callable[..., JoinHook]:
    @functools.wraps(original)
    def join_hook(self: DistributedDataParallel, **options: Any) -> JoinHook:
        hook = original(self, **options)
        if _join_hook.wrapper is not join_hook or self not in _followers:
            return hook
        _blocks[self] = object()
        return _Following(hook, self)

    return join_hook


def _wrap_exit(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __exit__(self: Join, kind: Any, error: Any, traceback: Any) -> None:
        modules = [each for each in self._joinables if isinstance(each, DistributedDataParallel)]
        blocks = [module for module in modules if module in _blocks] if _join_exit.wrapper is __exit__ else []
        try:
            for module in blocks if error is None else ():
                for follower in _living_followers(module):
                    follower.join_block_ends()
            original(self, kind, error, traceback)
        finally:
            # Also after an error, because DDP then still says that it is in a block.
            for module in blocks:
                _blocks.pop(module, None)

    return __exit__


_join_hook = WrappedFunction(DistributedDataParallel, "join_hook", _wrap_join_hook)
_join_exit = WrappedFunction(Join, "__exit__", _wrap_exit)


def _uninstall_if_unneeded() -> None:
    # Iterating leaves out modules that are gone.
    if any(True for _ in _followers):
        return
    for method in _join_hook, _join_exit:
        method.take_away()
    _blocks.clear()
