"""Makes a failing program small: takes away operations, layers and options while it goes on failing in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict

from .campaign import Verdict, judge
from .execute import Register
from .program import Options, Program


def shrink(
    program: Program, verdict: Verdict, *, seconds: float, register: Register | None = None
) -> tuple[Program, Verdict]:
    """Return the smallest program that was found to fail in the same way, and its verdict."""
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.monotonic() >= deadline:
                return program, verdict
            found = judge(candidate, register)
            if found.kind == verdict.kind:
                program, verdict = candidate, found
                smaller = True
                break
    return program, verdict


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a part taken away, large parts first."""
    count = len(program.operations)
    length = count // 2
    while length >= 1:
        for first in reversed(range(0, count, length)):
            candidate = program.copy()
            del candidate.operations[first : first + length]
            if any(operation["do"] == "pass" for operation in candidate.operations):
                yield candidate
        length //= 2
    for index in reversed(range(len(program.layers))):
        candidate = program.copy()
        del candidate.layers[index]
        yield candidate
    defaults = asdict(Options())
    for name, value in asdict(program.options).items():
        if value != defaults[name]:
            candidate = program.copy()
            setattr(candidate.options, name, defaults[name])
            yield candidate
    for index, operation in enumerate(program.operations):
        for name, value in operation.items():
            if name in _SIMPLER and value != _SIMPLER[name]:
                candidate = program.copy()
                candidate.operations[index][name] = _SIMPLER[name]
                yield candidate
        if len({str(part) for part in operation.get("used", [])}) > 1:
            candidate = program.copy()
            candidate.operations[index]["used"] = [operation["used"][0]] * program.ranks
            yield candidate
    for index, layer in enumerate(program.layers):
        for name, value in _SIMPLER_IN_A_LAYER.items():
            if name in layer and layer[name] != value:
                candidate = program.copy()
                candidate.layers[index][name] = value
                yield candidate


_SIMPLER_IN_A_LAYER = {
    "dtype": "float32",
    "width": 1,
    "shape": [],
    "use": "once",
    "gathers": False,
    "padding": False,
    "by_frequency": False,
    "checkpointed": False,
    "relu": False,
    "prunes": False,
    "used": 1,
    "tokens": "shared",
}
_SIMPLER = {
    "declare": None,
    "declare_used": False,
    "factors": {},
    "autocast": None,
    "odd": [],
    "idle": False,
    "penalty": False,
    "forwards": 1,
    "clip": None,
    "zero": "none",
    "skip": False,
    "keep": False,
    "how": "flag",
}
