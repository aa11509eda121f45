"""What a thread of this process does, read from its stack by another one, at need: training itself notes nothing.

Which phase of a step it is in, whether it stands in something that waits for other ranks, and the innermost lines of
the user's own code. The frames of a thread that runs change while they are read, which the GIL makes harmless: what is
read is then of a moment ago.
"""

from __future__ import annotations

import linecache
import os
import re
import site
import sys
import sysconfig
import time
from dataclasses import dataclass
from types import FrameType

import torch

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
class Position:
    """Where a thread is.

    Attributes:
        phase: in words, as in "forward of vision.blocks.3"; empty between two steps.
        waits_in: what waits for other ranks, as the user calls it: ``backward``, or a function's name; or None.
        frames: the innermost lines of the user's code, the innermost first, as "train.py:88 in load".
        inside: the innermost line of all, if that is somebody else's.
        mark: changes when the thread has gone on to another line of any of its functions.
    """

    phase: str
    waits_in: str | None
    frames: tuple[str, ...]
    inside: str | None
    mark: int


def read_position(thread: int) -> Position | None:
    """Read where a thread of this process is; None if it has ended."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return None
    frames = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    mark = hash(tuple((id(each.f_code), each.f_lasti) for each in frames))
    own = [each for each in frames if _is_users(each)] or [each for each in frames if _is_of_a_library(each)]
    inside = None if not own or own[0] is innermost else _describe(innermost)
    return Position(_find_phase(frames), _find_wait(frames), tuple(map(_describe, own[:_MOST_FRAMES])), inside, mark)


def read_error(error: BaseException) -> tuple[str, tuple[str, ...]]:
    """Return an error in a line, and the lines of the user's code that it came through, the innermost first."""
    said = str(error).strip().splitlines()[:1]
    text = ": ".join([type(error).__name__, *said])[:_LONGEST_ERROR]
    places = []
    trace = error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame):
            name = trace.tb_frame.f_code.co_name
            places.append(_describe_place(trace.tb_frame.f_code.co_filename, trace.tb_lineno, name))
        trace = trace.tb_next
    return text, tuple(reversed(places[-_MOST_FRAMES:]))


def cpu_seconds(thread: int) -> float | None:
    """Return how long a thread has run; None where nobody counts that."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError, OverflowError):
        return None


def has_run(before: float | None, now: float | None) -> bool:
    """Say whether a thread has run between two values of :func:`cpu_seconds`, but for being woken up."""
    # What waits for a device may spin.
    if before is None or now is None or _uses_a_device():
        return False
    return now - before > _WOKEN_UP_SECONDS


def _uses_a_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


# --- what a step consists of


def _find_phase(frames: list[FrameType]) -> str:
    for place, frame in enumerate(frames):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path == _AUTOGRAD and name == "_engine_run_backward":
            return BACKWARD
        if path == _OPTIMIZER and name == "wrapper":
            return "optimizer"
        if path == _DDP and name in ("forward", "_pre_forward", "_run_ddp_forward"):
            inner = _name_submodule(frames[:place])
            return f"forward of {inner}" if inner else "forward"
        if path == _DDP and name == "__init__":
            return "the construction of DistributedDataParallel"
    return ""


def _name_submodule(frames: list[FrameType]) -> str:
    """Name the innermost module that is called in these frames as the outermost one does, which is the model."""
    called = [
        frame.f_locals.get("self")
        for frame in frames
        if frame.f_code.co_filename == _MODULE and frame.f_code.co_name == "_call_impl"
    ]
    modules = [module for module in called if isinstance(module, torch.nn.Module)]
    if len(modules) < 2:
        return ""
    names = {id(module): name for name, module in modules[-1].named_modules()}
    return next((names[id(module)] for module in modules if names.get(id(module))), "")


def _find_wait(frames: list[FrameType]) -> str | None:
    innermost = frames[0]
    path, name = innermost.f_code.co_filename, innermost.f_code.co_name
    if path == _AUTOGRAD and name == "_engine_run_backward":
        return BACKWARD
    if path.startswith(_CUDA) and name in ("synchronize", "wait"):
        return "torch.cuda.synchronize"
    if path == _DDP or (path.startswith(_DISTRIBUTED) and not path.startswith(_ELASTIC)):
        return _name_collective(frames)
    if _is_users(innermost) or _is_of_a_library(innermost):
        line = linecache.getline(path, innermost.f_lineno)
        if _WAITS.search(line) or (_uses_a_device() and _WAITS_FOR_A_DEVICE.search(line)):
            return line.strip()[:60]
    return None


def _name_collective(frames: list[FrameType]) -> str:
    """Name what the user called of torch.distributed: the outermost function that leads to where the thread is."""
    name = ""
    for frame in frames:
        path = frame.f_code.co_filename
        if path == _DDP:
            if frame.f_code.co_name == "__init__":
                return "DistributedDataParallel()"
            if frame.f_code.co_name in ("forward", "_pre_forward"):
                return "forward"
        elif path == _WRAPPERS:
            continue
        elif not path.startswith(_DISTRIBUTED) and path != _MODULE:
            break
        name = name if path == _MODULE else frame.f_code.co_name
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


def _is_users(frame: FrameType) -> bool:
    return _owner(frame.f_code.co_filename) == "user"


def _is_of_a_library(frame: FrameType) -> bool:
    return _owner(frame.f_code.co_filename) == "library"


def _describe(frame: FrameType) -> str:
    return _describe_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


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
