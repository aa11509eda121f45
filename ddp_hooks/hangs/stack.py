"""Reads from the stack of a thread what it does, from another thread. Training itself records nothing.

A cheap look, repeated often, finds out whether the thread stands in a function that waits for other ranks. If a rank
asks, a full look also reads the phase of the step and the innermost lines of the user's code. The frames of a running
thread change, so they are read without letting it run (`csrc/bindings/threads.cpp`); the result is a moment old.
"""

from __future__ import annotations

import linecache
import os
import re
import site
import sys
import sysconfig
import weakref
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType

import torch

from .. import _C

BACKWARD = "backward"
_MOST_FRAMES = 3
_LONGEST_ERROR = 200
_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_DDP = os.path.join(_TORCH, "nn", "parallel", "distributed.py")
_MODULE = os.path.join(_TORCH, "nn", "modules", "module.py")
_AUTOGRAD = os.path.join(_TORCH, "autograd", "graph.py")
_OPTIMIZER = os.path.join(_TORCH, "optim", "optimizer.py")
_CUDA = os.path.join(_TORCH, "cuda")
_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
# What logs the calls of collectives, and what waits for no rank of the group.
_WRAPPERS = os.path.join(_DISTRIBUTED, "c10d_logger.py")
_ELASTIC = os.path.join(_DISTRIBUTED, "elastic") + os.sep
# Calls into C that wait for a collective, and those that wait for a device, on which one may be under way.
_WAITS = re.compile(r"\.wait\(")
_WAITS_FOR_A_DEVICE = re.compile(r"\.(item|cpu|tolist|synchronize)\(")
# What a thread may run between two looks and have stood all the same: it is woken up now and then. Seconds.
_WOKEN_UP_SECONDS = 30e-6


@dataclass(frozen=True, slots=True)
class Stand:
    """Whether a thread stands, and in which function.

    Attributes:
        waits_in: what waits for other ranks, as the user calls it: ``backward``, or a function's name; or None.
        mark: changes when the thread has gone on to another line of any of its functions.
    """

    waits_in: str | None
    mark: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a thread is.

    Attributes:
        phase: in words, as in "forward of vision.blocks.3"; empty between two steps.
        frames: the innermost lines of the user's code, the innermost first, as "train.py:88 in load".
        inside: the innermost line of all, if that is somebody else's, and not below a function of this package.
        mark: as in :class:`Stand`.
    """

    phase: str
    frames: tuple[str, ...]
    inside: str | None
    mark: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters that grow while a process makes progress.

    Attributes:
        cpu_seconds: how long its training thread has run; None if nobody counts that.
        passes: of each module, how many forward passes have begun, and how many steps every rank has agreed on.
    """

    cpu_seconds: float | None
    passes: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class _Call:
    """A frame without its objects; for the call of a module, with the module."""

    code: CodeType
    instruction: int
    line: int
    module: weakref.ref[torch.nn.Module] | None

    @property
    def path(self) -> str:
        return self.code.co_filename

    @property
    def name(self) -> str:
        return self.code.co_name


def read_stand(thread: int) -> Stand | None:
    """Look at a thread of this process, cheaply; None if it has ended."""
    calls = _read_calls(thread)
    return Stand(_find_wait(calls), _mark_of(calls)) if calls else None


def read_position(thread: int) -> Position | None:
    """Read where a thread of this process is; None if it has ended."""
    calls = _read_calls(thread)
    if not calls:
        return None
    own = [call for call in calls if _is_users(call.path)] or [call for call in calls if _is_of_a_library(call.path)]
    # Whoever calls this package is told what it waits for in there, and not where.
    inner = calls[: calls.index(own[0])] if own else calls
    is_shown = own and inner and not any(call.path.startswith(_OURS + os.sep) for call in inner)
    inside = _describe(calls[0]) if is_shown else None
    return Position(_find_phase(calls), tuple(map(_describe, own[:_MOST_FRAMES])), inside, _mark_of(calls))


def _read_calls(thread: int) -> list[_Call]:
    """Read a thread's calls, the innermost first; none if it has ended."""
    return [_Call(*call) for call in _C.read_calls(thread, torch.nn.Module._call_impl.__code__)]


def _mark_of(calls: list[_Call]) -> int:
    return hash(tuple((id(call.code), call.instruction) for call in calls))


def read_error(error: BaseException) -> tuple[str, tuple[str, ...]]:
    """Return an error in a line, and the lines of the user's code that it came through, the innermost first."""
    said = str(error).strip().splitlines()[:1]
    text = ": ".join([type(error).__name__, *said])[:_LONGEST_ERROR]
    places = []
    trace = error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            name = trace.tb_frame.f_code.co_name
            places.append(_describe_place(trace.tb_frame.f_code.co_filename, trace.tb_lineno, name))
        trace = trace.tb_next
    return text, tuple(reversed(places[-_MOST_FRAMES:]))


def has_run(before: Progress, now: Progress) -> bool:
    """Return whether a thread has moved between two looks, apart from short wake-ups."""
    if before.cpu_seconds is None or now.cpu_seconds is None or _uses_a_device():
        # What waits for a device may spin, so its processor time says nothing.
        return now.passes != before.passes
    return now.cpu_seconds - before.cpu_seconds > _WOKEN_UP_SECONDS


def _uses_a_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# --- what a step consists of


def _find_phase(calls: list[_Call]) -> str:
    modules: list[weakref.ref[torch.nn.Module]] = []
    for call in calls:
        path, name = call.path, call.name
        if call.module is not None:
            modules.append(call.module)
        if path == _AUTOGRAD and name == "_engine_run_backward":
            return BACKWARD
        if path == _OPTIMIZER and name == "wrapper":
            return "optimizer"
        if path == _DDP and name in ("forward", "_pre_forward", "_run_ddp_forward"):
            inner = _name_submodule(modules)
            return f"forward of {inner}" if inner else "forward"
        if path == _DDP and name == "__init__":
            return "the construction of DistributedDataParallel"
    if any((module := reference()) is not None and _is_sharded(module) for reference in modules):
        inner = _name_submodule(modules)
        return f"forward of {inner}" if inner else "forward"
    return ""


def _is_sharded(module: torch.nn.Module) -> bool:
    # Only a program that has imported FSDP2 has such modules.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _name_submodule(called: list[weakref.ref[torch.nn.Module]]) -> str:
    """Return the name of the innermost called module within the outermost one, which is the model."""
    modules = [module for reference in called if (module := reference()) is not None]
    # Whoever trains may change the model meanwhile.
    with suppress(RuntimeError):
        if len(modules) > 1:
            names = {id(module): name for name, module in modules[-1].named_modules()}
            return next((names[id(module)] for module in modules if names.get(id(module))), "")
    return ""


def _find_wait(calls: list[_Call]) -> str | None:
    if not calls:
        return None
    path, name = calls[0].path, calls[0].name
    if path == _AUTOGRAD and name == "_engine_run_backward":
        return BACKWARD
    if path.startswith(_CUDA) and name in ("synchronize", "wait"):
        return "torch.cuda.synchronize"
    if path == _DDP or (path.startswith(_DISTRIBUTED) and not path.startswith(_ELASTIC)):
        return _name_collective(calls)
    if _is_users(path) or _is_of_a_library(path):
        line = linecache.getline(path, calls[0].line)
        if _WAITS.search(line) or (_uses_a_device() and _WAITS_FOR_A_DEVICE.search(line)):
            return line.strip()[:60]
    return None


def _name_collective(calls: list[_Call]) -> str:
    """Return the function of torch.distributed that the user called: the outermost one on the stack."""
    name = ""
    for call in calls:
        path = call.path
        if path == _DDP:
            if call.name == "__init__":
                return "DistributedDataParallel()"
            if call.name in ("forward", "_pre_forward"):
                return "forward"
        elif path == _WRAPPERS:
            continue
        elif not path.startswith(_DISTRIBUTED) and path != _MODULE:
            break
        name = name if path == _MODULE else call.name
    return name


# --- whose code it is


_STANDARD = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple(
    {path + os.sep for path in [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_paths()["purelib"]]}
)
_whose: dict[str, str] = {}


def _owner(path: str) -> str:
    owner = _whose.get(path)
    if owner is None:
        if path.startswith((_TORCH + os.sep, _OURS + os.sep, "<frozen")):
            owner = "ours"
        elif path.startswith(_PACKAGES):
            owner = "library"
        else:
            owner = "ours" if path.startswith(_STANDARD) else "user"
        _whose[path] = owner
    return owner


def _is_users(path: str) -> bool:
    return _owner(path) == "user"


def _is_of_a_library(path: str) -> bool:
    return _owner(path) == "library"


def _describe(call: _Call) -> str:
    return _describe_place(call.path, call.line, call.name)


def _describe_place(path: str, line: int, name: str) -> str:
    place = f"{shorten(path)}:{line}"
    return place if name == "<module>" else f"{place} in {name}"


def shorten(path: str) -> str:
    """Return a file's path from the folder in which Python's packages lie, or from the current one."""
    try:
        folders = [*_PACKAGES, *_STANDARD, os.getcwd() + os.sep]
    except OSError:
        folders = [*_PACKAGES, *_STANDARD]
    inside = [path[len(folder) :] for folder in folders if path.startswith(folder)]
    return min(inside, key=len, default=path)
