"""What torch puts around a module, and how to look through it."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

T = TypeVar("T")


def uncompiled(module: T) -> T | nn.Module:
    """Return the module in what ``torch.compile(module)`` returns; any other, and what is no module, as it is."""
    inner = getattr(module, "_orig_mod", None) if isinstance(module, nn.Module) else None
    return inner if isinstance(inner, nn.Module) else module
