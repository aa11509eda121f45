"""Selects parameters of a module by pattern, by module or one by one."""

from __future__ import annotations

import re
from bisect import bisect_left
from difflib import get_close_matches
from fnmatch import translate
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import nn

from ..wording import short, short_list

Selector: TypeAlias = "str | nn.Module | torch.Tensor"


def select(function: str, module: nn.Module, *what: Selector) -> dict[str, nn.Parameter]:
    """Return the selected parameters of ``module`` by name, in the module's order.

    Args:
        function: the function that the user called, for errors.
        module: the module, without its DDP wrapper, so that names do not begin with ``module.``.
        what: patterns of parameter names as in a shell (``"encoder.*"``; ``"encoder"`` alone means everything in it,
            including parameters that it shares with other modules), modules within ``module``, or its parameters.

    Raises:
        TypeError: a selector is something else.
        ValueError: a selector matches nothing in ``module``; the message names it.
    """
    return ParameterIndex(module).select(function, *what)


class ParameterIndex:
    """The named parameters of a module, for repeated lookups, because walking a large module is slow.

    Args:
        module: as for :func:`select`. Parameters that are added to it later are not found.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._named = dict(module.named_parameters())
        self._name_of = {id(parameter): name for name, parameter in self._named.items()}
        # All names of parameters, including those that modules share, with the first name of each.
        self._first_names = {
            name: self._name_of[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in self._name_of
        }
        self._ordered = sorted(self._first_names)

    def select(self, function: str, *what: Selector) -> dict[str, nn.Parameter]:
        """Return the selected parameters; arguments and errors as for :func:`select`."""
        # Only patterns with wildcards walk over all names, so that thousands of selectors do not take quadratic time.
        chosen: set[str] = set()
        for selector in what:
            if isinstance(selector, str):
                found = {self._first_names[name] for name in _matching(selector, self._ordered)}
            elif isinstance(selector, nn.Module):
                found = {
                    self._name_of[id(parameter)]
                    for parameter in selector.parameters()
                    if id(parameter) in self._name_of
                }
            elif isinstance(selector, torch.Tensor):
                found = {self._name_of[id(selector)]} if id(selector) in self._name_of else set()
            else:
                raise TypeError(
                    f"{function}: expected patterns, modules or parameters, received {short(selector)}; pass several "
                    "as separate arguments, as in (module, *patterns)"
                )
            if not found:
                raise ValueError(
                    f"{function}: expected something that names parameters of the wrapped module, received "
                    f"{short(selector)}, which matches none; {self._advise(selector)}"
                )
            chosen |= found
        return {name: parameter for name, parameter in self._named.items() if name in chosen}

    def _advise(self, selector: Selector) -> str:
        """Suggest what a selector that matches no parameter may have meant."""
        named = self._named
        if not named:
            return "the module has no parameters"
        if isinstance(selector, nn.Module):
            return "pass a module within the wrapped one that has parameters"
        if isinstance(selector, torch.Tensor):
            return "pass a parameter of the wrapped module itself, not a copy or a slice of one, nor a buffer"
        plain = selector.removeprefix("module.")
        if plain != selector and _matching(plain, self._ordered):
            return f"names do not start with 'module.': pass {short(plain)}"
        if any(name == plain for name, _ in self._module.named_buffers()):
            return f"{plain} is a buffer, which has no gradient"
        # Parts of names as well: "encodr" is close to "encoder", but far from "encoder.layers.0.weight".
        parts = {".".join(name.split(".")[:depth]): None for name in named for depth in range(1, name.count(".") + 2)}
        close = get_close_matches(plain, list(parts), n=1)
        did_you_mean = f"did you mean {close[0]!r}? " if close else ""
        return f"{did_you_mean}its parameters are {short_list(list(named))}"


class ParameterPlaces:
    """A record of a module's parameters and submodules, which shows in microseconds whether one was replaced or added.

    Args:
        module: the module. Its parameters and submodules are kept alive.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners: list[dict[str, Any]] = []
        for part in module.modules():
            # Read from torch's private dictionaries.
            self._owners += [vars(part)[kind] for kind in ("_parameters", "_modules")]
        self._lengths = [len(owner) for owner in self._owners]
        places = [(owner, name, held) for owner in self._owners for name, held in owner.items()]
        self._owner_of_each = [owner for owner, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._held = [held for _, _, held in places]

    def are_unchanged(self) -> bool:
        """Say whether nothing was replaced or added."""
        # Without a loop in Python, because this runs during training.
        if list(map(len, self._owners)) != self._lengths:
            return False
        return all(map(is_, map(dict.get, self._owner_of_each, self._names), self._held))


def _matching(pattern: str, ordered: list[str]) -> set[str]:
    """Return the names that match a pattern or are inside a match, given all names in order."""
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
