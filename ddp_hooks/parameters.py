"""Naming some of a module's parameters: by pattern, by module, or one by one."""

from __future__ import annotations

import re
from bisect import bisect_left
from fnmatch import translate
from typing import TypeAlias

import torch
from torch import nn

Selector: TypeAlias = "str | nn.Module | torch.Tensor"


def select(module: nn.Module, *what: Selector) -> dict[str, nn.Parameter]:
    """Return the named parameters of ``module`` that are meant, in the module's order.

    Args:
        module: whose parameters; not the DDP wrapper, so that names have no ``module.`` in front.
        what: patterns of parameter names as in a shell (``"encoder.*"``; ``"encoder"`` alone means everything in it),
            modules within ``module``, or parameters of it.

    Raises:
        TypeError: something else.
        ValueError: a pattern, module or parameter that matches nothing in ``module``; says which.
    """
    return ParameterIndex(module).select(*what)


class ParameterIndex:
    """The named parameters of a module, to be asked more than once: walking a large module takes most of the time.

    Args:
        module: as for :func:`select`; what is added to it later is not seen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._named = dict(module.named_parameters())
        self._ordered = sorted(self._named)
        self._name_of = {id(parameter): name for name, parameter in self._named.items()}

    def select(self, *what: Selector) -> dict[str, nn.Parameter]:
        """Return the parameters that are meant; arguments and errors as for :func:`select`."""
        # Each selector is looked up; only patterns with wildcards walk over all names, so that thousands of selectors
        # do not take quadratic time.
        chosen: set[str] = set()
        for selector in what:
            if isinstance(selector, str):
                found = _matching(selector, self._ordered)
            elif isinstance(selector, nn.Module):
                found = {
                    self._name_of[id(parameter)]
                    for parameter in selector.parameters()
                    if id(parameter) in self._name_of
                }
            elif isinstance(selector, torch.Tensor):
                found = {self._name_of[id(selector)]} if id(selector) in self._name_of else set()
            else:
                raise TypeError(f"expected patterns, modules or parameters, received {selector!r}")
            if not found:
                shown = repr(selector) if isinstance(selector, str) else f"a {type(selector).__name__}"
                names = list(self._named)
                raise ValueError(
                    f"expected something that names parameters of the wrapped module, received {shown}, which matches "
                    f"none; its parameters are {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
                )
            chosen |= found
        return {name: parameter for name, parameter in self._named.items() if name in chosen}


def _matching(pattern: str, ordered: list[str]) -> set[str]:
    """Return the names that match, or that lie in something that matches; `ordered` are all names, sorted."""
    if any(character in pattern for character in "*?["):
        matches = re.compile(f"(?:{translate(pattern)})|(?:{translate(pattern + '.*')})").match
        return {name for name in ordered if matches(name)}
    inside = f"{pattern}."
    first = bisect_left(ordered, inside)
    end = bisect_left(ordered, f"{pattern}/")  # "/" comes right after "."
    found = set(ordered[first:end])
    place = bisect_left(ordered, pattern)
    if place < len(ordered) and ordered[place] == pattern:
        found.add(pattern)
    return found
