"""Finds the script's names for its modules: the variables and attributes that hold them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType, ModuleType

from torch import nn

# What has more elements is not looked into, and nothing is looked into twice.
_MOST_ELEMENTS = 64
_LIBRARIES = {"torch", "ddp_hooks", "runpy"}


def class_name(module: nn.Module) -> str:
    """Return the class of a module, without its package."""
    return type(module).__qualname__.rsplit("<locals>.", 1)[-1]


def find_names_in_frames(module: nn.Module) -> list[str]:
    """Return the names that the callers of this function have for a module, the outermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in _LIBRARIES:
            found[:0] = _find_names(module, frame.f_locals)
        frame = frame.f_back
    return found


def find_names(module: nn.Module) -> list[str]:
    """Return the main program's names for a module, including attributes of objects."""
    main = sys.modules.get("__main__")
    found = list(_find_names(module, vars(main))) if main is not None else []
    for holder in gc.get_referrers(module):
        if isinstance(holder, dict):
            found += [key for key, value in list(holder.items()) if value is module and isinstance(key, str)]
    return found


def choose_names(candidates: Sequence[Sequence[str]]) -> list[str | None]:
    """Choose for each module the first of its names that no other module has."""
    chosen: list[str | None] = []
    for number, names in enumerate(candidates):
        others = {name for other, some in enumerate(candidates) if other != number for name in some}
        chosen.append(next((name for name in names if name not in others), None))
    return chosen


def _find_names(module: nn.Module, scope: Mapping[str, object]) -> Iterator[str]:
    variables = list(scope.items())
    yield from (name for name, value in variables if value is module)
    for name, value in variables:
        # Whatever objects there are, training goes on.
        with suppress(Exception):
            for part, element in _parts(value):
                if element is module:
                    yield part.removeprefix(".") if name == "self" else f"{name}{part}"


def _parts(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", element) for key, element in _few(value)]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", element) for index, element in enumerate(value)] if len(value) <= _MOST_ELEMENTS else []
    if isinstance(value, (type, ModuleType)):
        return []
    # Attributes that are computed are not asked for.
    held = _few(getattr(value, "__dict__", None)) + (_few(value._modules) if isinstance(value, nn.Module) else [])
    return [(f".{key}", element) for key, element in held]


def _few(attributes: object) -> list[tuple[object, object]]:
    return list(attributes.items()) if isinstance(attributes, dict) and len(attributes) <= _MOST_ELEMENTS else []
