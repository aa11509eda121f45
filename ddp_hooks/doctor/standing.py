"""Describes the state of a module on one rank: how its backward passes went, as DDP and its Reducer saw them."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from types import FrameType

import torch
from torch.nn.parallel import DistributedDataParallel

from ..hangs.stack import read_position, read_stand, shorten
from ..hangs.watcher import waited_in_vain

# Another one may be in its place later, which calls it.
_RUN_BACKWARD = torch.autograd.backward.__code__


class Unfinished(Enum):
    """The state of a backward pass that DDP has not finished."""

    NONE = "none"  # there is no such pass
    RUNS = "runs"  # it runs
    WAITS = "waits"  # all gradients are there, and DDP waits for other ranks
    SHORT = "short"  # it has ended, and DDP waits for gradients that did not come
    RAISED = "raised"  # it has raised


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of the backward passes on one rank: plain values.

    Attributes:
        finished: the number of synchronised backward passes that DDP has finished.
        unfinished: the state of the pass after these, if it has begun.
        missing: the parameters whose gradients DDP waits for in that pass.
        frozen: the parameters that DDP waits for although they are frozen, if it does not search the graph.
        twice: the parameters that the pass reached more than once.
        unexpected: the parameters that the pass reached, but the search in DDP's forward pass (with a static graph, the
            first step) did not.
        reaches_nothing: whether that search reached no parameter.
        passes: the number of calls of ``backward()`` that are part of the pass.
        forwards: the number of synchronising forward passes since the last finished backward pass.
        idle_forwards: the number of earlier synchronising forward passes without a backward pass of their own.
        failed_forwards: the number of forward passes that have raised.
        nested_in: the names of custom autograd functions whose own backward passes have reached parameters.
        inner_calls: how often something other than DDP called the wrapped model in grad mode.
        unreduced: the number of backward passes that DDP did not reduce, by the value of
            :class:`~ddp_hooks.doctor.gradient_watch.Unreduced`.
        unreduced_names: the parameters that got gradients in those passes.
        broken: for each other pass that has raised, the number of passes that had finished.
        left_behind: how often parameters changed after passes under no_sync() and before DDP had averaged anything.
        in_forward: whether DDP's forward pass runs.
        stepped_early: the parameters that changed while backward ran, before DDP had averaged their gradients.
        early_breaks: the number of backward passes that raised, after a forward pass, before they reached a parameter.
        raised_with: the type and message of the last error that a backward pass raised, in one line; or empty.
        severed: the parameters within reentrant checkpoints none of whose inputs requires a gradient, as far as seen.
        resent: the number of passes that added to averaged gradients which nobody had used yet.
    """

    finished: int = 0
    unfinished: Unfinished = Unfinished.NONE
    missing: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reaches_nothing: bool = False
    passes: int = 0
    forwards: int = 0
    idle_forwards: int = 0
    failed_forwards: int = 0
    nested_in: tuple[str, ...] = ()
    inner_calls: int = 0
    unreduced: tuple[tuple[str, int], ...] = ()
    unreduced_names: tuple[str, ...] = ()
    broken: tuple[int, ...] = ()
    left_behind: int = 0
    in_forward: bool = False
    stepped_early: tuple[str, ...] = ()
    early_breaks: int = 0
    raised_with: str = ""
    severed: tuple[str, ...] = ()
    resent: int = 0


class Way(Enum):
    """How a rank reached the point at which it was asked."""

    GOES_ON = "goes on"  # its script runs
    FINISHED = "finished"  # its script, or the block, has come to its end
    STOPPED = "stopped"  # the doctor has seen enough, and has ended the script
    RAISED = "raised"  # an error has left the script, or the block


@dataclass(frozen=True, slots=True)
class End:
    """How the watched run has ended on a rank.

    Attributes:
        way: how.
        error: its type and what it says, in a line; for ``sys.exit()``, that and the code.
        left: what of torch's the error has come out of: "backward", "forward" or nothing.
        lost: the error is that of a rank that waited for others in vain, or lost the connection to them.
        waits_in: while the script goes on: the function in which it waits for other ranks, as the script calls it; or
            nothing.
        place: the line of the script at which that was.
        has_asked: this rank has asked every other one for word.
    """

    way: Way = Way.FINISHED
    error: str = ""
    left: str = ""
    lost: bool = False
    waits_in: str = ""
    place: str = ""
    has_asked: bool = False


def runs_backward() -> bool:
    """Return whether some thread is within a backward pass."""
    for frame in sys._current_frames().values():
        here: FrameType | None = frame
        while here is not None:
            if here.f_code is _RUN_BACKWARD:
                return True
            here = here.f_back
    return False


_LONGEST_ERROR = 100
_CODES = {_RUN_BACKWARD: "backward", DistributedDataParallel.forward.__code__: "forward"}


def read_place(thread: int) -> End:
    """Return where a running script is, in a thread of this process."""
    stand, position = read_stand(thread), read_position(thread)
    place = "" if position is None else next(iter(position.frames), "")
    return End(Way.GOES_ON, waits_in="" if stand is None else stand.waits_in or "", place=place)


def read_end(error: BaseException) -> End:
    """Return how a script has ended that raised an error."""
    if isinstance(error, SystemExit):
        exits = f"sys.exit({error.code!r})"[:_LONGEST_ERROR]
        if isinstance(error.__context__, Exception):
            # torch.multiprocessing.spawn, and many a script, catches an error, prints it and leaves.
            caught = read_end(error.__context__)
            return End(Way.RAISED, f"{caught.error}, and then {exits}", caught.left, caught.lost)
        return End(Way.RAISED, exits)
    said = [line.split(". ")[0] for line in str(error).strip().splitlines()[:1]]
    text = ": ".join([type(error).__name__, *said]) if said else f"{type(error).__name__}{_raised_at(error)}"
    if len(text) > _LONGEST_ERROR:
        text = f"{text[: _LONGEST_ERROR - 3]}..."
    left = ""
    trace = error.__traceback__
    while trace is not None:
        # The innermost one, as where a backward pass runs within a forward pass.
        left = _CODES.get(trace.tb_frame.f_code, left)
        trace = trace.tb_next
    return End(Way.RAISED, text, left, waited_in_vain(error))


def _raised_at(error: BaseException) -> str:
    """Say where an error was raised that says nothing itself."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return f" at {shorten(frames[-1][0].f_code.co_filename)}:{frames[-1][1]}" if frames else ""
