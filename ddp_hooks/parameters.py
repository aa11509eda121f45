"""Naming some of a module's parameters: by pattern, by module, or one by one."""

from __future__ import annotations

from fnmatch import fnmatchcase
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
            raise TypeError(f"expected patterns, modules or parameters, received {selector!r}")
        if not found:
            shown = repr(selector) if isinstance(selector, str) else f"a {type(selector).__name__}"
            raise ValueError(
                f"expected something that names parameters of the wrapped module, received {shown}, which matches "
                f"none; its parameters are {', '.join(list(named)[:6])}{', ...' if len(named) > 6 else ''}"
            )
        chosen |= found
    return {name: parameter for name, parameter in named.items() if name in chosen}
