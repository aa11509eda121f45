"""Reports calls of torch's functions for which there is no hook: ``backward()`` that raises, severed checkpoints.

A function is wrapped only as long as there is a listener; afterwards the original function is back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint

from ..serving.ddp_methods import WrappedFunction

# Given a function and a listener, returns the replacement of the function.
_Wrap = Callable[[Callable[..., Any], Callable[[Any], None]], Callable[..., Any]]


class _Followed:
    """A function in one of torch's modules, and its listeners."""

    def __init__(self, owner: Any, name: str, wrap: _Wrap) -> None:
        self._function = WrappedFunction(owner, name, lambda original: wrap(original, self._tell))
        self._listeners: list[Callable[[Any], object]] = []

    def follow(self, listener: Callable[[Any], object]) -> Callable[[], None]:
        """Listen; return a function that ends this and may be called again."""
        self._function.put_in_place()
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners:
                self._function.take_away()

        return stop

    def _tell(self, what: Any) -> None:
        for listener in list(self._listeners):
            listener(what)


def _wrap_backward(original: Callable[..., Any], tell: Callable[[Any], None]) -> Callable[..., Any]:
    # A compiler stops here, as it does at the original function.
    @functools.wraps(original)
    def backward(*args: Any, **options: Any) -> None:
        try:
            original(*args, **options)
        except Exception as error:
            tell(error)
            raise

    return backward


def _wrap_check(original: Callable[..., Any], tell: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_backward_validity(inputs: Any) -> None:
        if not any(one.requires_grad for one in inputs if isinstance(one, torch.Tensor)):
            tell(sys._getframe(1).f_locals.get("run_function"))
        original(inputs)

    return check_backward_validity


_backward = _Followed(torch.autograd, "backward", _wrap_backward)
_check = _Followed(checkpoint, "check_backward_validity", _wrap_check)


def follow_broken_backward(listener: Callable[[Exception], object]) -> Callable[[], None]:
    """Call ``listener`` with each error that leaves ``torch.autograd.backward``; return what ends that.

    Args:
        listener: called in the thread that has called ``backward()``; of calls within another one, for each.
    """
    return _backward.follow(listener)


def follow_severed_checkpoints(listener: Callable[[Any], object]) -> Callable[[], None]:
    """Call ``listener`` with what each reentrant checkpoint runs no input of which requires a gradient.

    Nothing within such a checkpoint gets a gradient.

    Args:
        listener: called before the function runs; with None if that was not found.

    Returns:
        What ends it.
    """
    return _check.follow(listener)


def modules_of(function: Any) -> list[torch.nn.Module]:
    """Return the modules that a function is, belongs to or refers to, as far as that is seen."""
    found: list[Any] = [function, getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        found += [*function.args, *function.keywords.values(), function.func, getattr(function.func, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        if cell is not None:
            try:
                found.append(cell.cell_contents)
            except ValueError:
                continue  # it holds nothing yet
    return [one for one in found if isinstance(one, torch.nn.Module)]
