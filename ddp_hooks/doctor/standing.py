"""How a module stands on one rank: what has become of its backward passes, as DDP and its Reducer saw them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Unfinished(Enum):
    """What has become of a backward pass that DDP has not finished."""

    NONE = "none"  # there is no such pass
    RUNS = "runs"  # it runs
    WAITS = "waits"  # all gradients are there, and DDP waits for other ranks
    SHORT = "short"  # it has ended, and DDP waits for gradients that did not come
    RAISED = "raised"  # it has raised


@dataclass(frozen=True, slots=True)
class Standing:
    """Plain values, of one rank.

    Attributes:
        finished: how many synchronised backward passes DDP has finished.
        unfinished: what has become of the one after these, if it has begun.
        missing: the parameters whose gradients DDP waits for in it.
        twice: those that it reached more than once.
        unexpected: those that it reached and that the search of DDP's forward pass (with a static graph, the first
            step) had not.
        reaches_nothing: that search had not reached any parameter.
        passes: how many calls of ``backward()`` are part of it.
        forwards: how many synchronising forward passes have begun since the last finished backward pass.
        nested_in: the custom functions of autograd whose own backward passes have reached parameters, by name.
        inner_calls: how often the wrapped model was called in grad mode, but not by DDP.
        unreduced: how many backward passes DDP did not reduce, by the value of
            :class:`~ddp_hooks.doctor.gradient_watch.Unreduced`.
        unreduced_names: the parameters that got gradients in those.
        broken: after how many finished passes others have raised, each that was noticed.
        stepped_early: the parameters that changed while backward ran, before DDP had averaged their gradients.
    """

    finished: int = 0
    unfinished: Unfinished = Unfinished.NONE
    missing: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reaches_nothing: bool = False
    passes: int = 0
    forwards: int = 0
    nested_in: tuple[str, ...] = ()
    inner_calls: int = 0
    unreduced: tuple[tuple[str, int], ...] = ()
    unreduced_names: tuple[str, ...] = ()
    broken: tuple[int, ...] = ()
    stepped_early: tuple[str, ...] = ()
