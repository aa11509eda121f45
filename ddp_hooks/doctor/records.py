"""What a rank brings to the others when a diagnosis is made: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from .recorder import Step
from .traffic import World


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a rank brings to the others: plain values.

    Attributes:
        names: of its parameters, those that DDP reduces first.
        sizes: their bytes.
        reduced_count: how many DDP reduces.
        ignored: the parameters that DDP ignores at the user's wish.
        order: all names in the model's order.
        steps: what it wrote down.
        layouts: a hash of each of its bucket layouts.
        find_unused_parameters: DDP's setting when recording began.
        static_graph: DDP's setting.
        has_hook: a hook of this package is registered.
        world: what decides how gradients travel.
        copy_seconds_per_byte: how fast it copies in memory.
        missed: of the ranks' steps, counted from 0, those in which it had joined (``ddp.join()``).
        before_accumulating: of the first pass that DDP did not reduce, which part of the bytes a narrow form holds to
            the bit; None if there was none.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    reduced_count: int
    ignored: tuple[str, ...]
    order: tuple[str, ...]
    steps: tuple[Step, ...]
    layouts: tuple[int, ...]
    find_unused_parameters: bool
    static_graph: bool
    has_hook: bool
    world: World
    copy_seconds_per_byte: float
    missed: tuple[int, ...] = ()
    before_accumulating: float | None = None
