"""Naming some of a module's parameters: by pattern, by module, or one by one."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import nn

from .wording import short, short_list

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
    named = dict(module.named_parameters())
    chosen: set[str] = set()
    for selector in what:
        if isinstance(selector, str):
            found = {name for name in named if fnmatchcase(name, selector) or fnmatchcase(name, f"{selector}.*")}
        elif isinstance(selector, nn.Module):
            inside = {id(parameter) for parameter in selector.parameters()}
            found = {name for name, parameter in named.items() if id(parameter) in inside}
        elif isinstance(selector, torch.Tensor):
            found = {name for name, parameter in named.items() if parameter is selector}
        else:
            raise TypeError(
                f"expected patterns, modules or parameters, received {short(selector)}; pass several one by one, as in "
                "(module, *patterns)"
            )
        if not found:
            raise ValueError(
                f"expected something that names parameters of the wrapped module, received {short(selector)}, which "
                f"matches none; {_advise(module, named, selector)}"
            )
        chosen |= found
    return {name: parameter for name, parameter in named.items() if name in chosen}


def _advise(module: nn.Module, named: dict[str, nn.Parameter], selector: Selector) -> str:
    """Say what may have been meant by something that matches no parameter."""
    if not named:
        return "the module has no parameters"
    if isinstance(selector, nn.Module):
        return "pass a module within the wrapped one that has parameters"
    if isinstance(selector, torch.Tensor):
        return "pass a parameter of the wrapped module itself, no copy of it, no part, and no buffer"
    plain = selector.removeprefix("module.")
    if plain != selector and any(fnmatchcase(name, plain) or fnmatchcase(name, f"{plain}.*") for name in named):
        return f"names have no 'module.' in front: pass {short(plain)}"
    if any(name == plain for name, _ in module.named_buffers()):
        return f"{plain} is a buffer, which has no gradient"
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in named and (fnmatchcase(name, selector) or fnmatchcase(name, f"{selector}.*")):
            first = next(first for first, other in named.items() if other is parameter)
            return f"{name} is the same parameter as {first}: pass that name"
    # Parts of names, too: "encodr" is close to "encoder", and far from "encoder.layers.0.weight".
    parts = {".".join(name.split(".")[:depth]): None for name in named for depth in range(1, name.count(".") + 2)}
    close = get_close_matches(plain, list(parts), n=1)
    did_you_mean = f"did you mean {close[0]!r}? " if close else ""
    return f"{did_you_mean}its parameters are {short_list(list(named))}"
