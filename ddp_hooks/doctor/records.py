"""The records that ranks exchange for a diagnosis: plain values."""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .optimizers import Outsiders
from .other_hooks import OtherHook
from .recorder import Step
from .replicas import Replica
from .standing import End, Standing
from .strangers import Strangers
from .traffic import World

# A store takes what is longer, but not quickly: what is known of values is left out then. Bytes.
_MOST_STORED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The record of one rank: plain values.

    Attributes:
        names: the names of its parameters; those that DDP reduces come first.
        sizes: their sizes in bytes.
        reduced_count: the number of parameters that DDP reduces.
        ignored: the parameters that the user has told DDP to ignore.
        order: all names in the model's order.
        steps: the steps that it recorded.
        layouts: a hash of each of its bucket layouts.
        find_unused_parameters: DDP's setting when recording began.
        static_graph: DDP's setting.
        has_hook: whether a hook of this package is registered.
        world: what decides how gradients travel.
        copy_seconds_per_byte: the time of a copy in memory.
        missed: of the ranks' steps, counted from 0, those in which it had joined (``ddp.join()``).
        before_accumulating: of the first pass that DDP did not reduce, which part of the bytes a narrow form holds to
            the bit; None if there was none.
        rank: which it is, in the module's group.
        standing: what has become of its backward passes.
        end: how what was watched has ended here.
        replica: what tells whether its parameters are the other ranks'; None if nobody looked.
        strangers: the parameters that have come since it was wrapped, and those that have gone.
        other_hook: the communication hook that is registered, if it is not this package's.
        model: the class of what is wrapped.
        called: what the script calls the module, as far as that was found; the most telling name first.
        moved: the parameters whose type or device is not what it was when watching began, and how it has changed.
        wrapped_parts: the parts of the model that are DDP modules with parameters of this one.
        outsiders: what optimizers step beside DDP modules, told with one module of a run.
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
    rank: int = 0
    standing: Standing = field(default_factory=Standing)
    end: End = field(default_factory=End)
    replica: Replica | None = None
    strangers: Strangers = field(default_factory=Strangers)
    other_hook: OtherHook | None = None
    model: str = ""
    called: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    wrapped_parts: tuple[str, ...] = ()
    outsiders: Outsiders = field(default_factory=Outsiders)


def pack(record: object) -> bytes:
    """Return a record as bytes, for the ranks of the same program."""
    return zlib.compress(pickle.dumps(record), 1)


def unpack(packed: bytes) -> Any:
    """Return the record."""
    return pickle.loads(zlib.decompress(packed))


def write_word(records: Mapping[str, Any]) -> dict[str, str]:
    """Return records by module as text, for a store, where they have to be short."""
    word = {}
    for module, record in records.items():
        packed = pack(record)
        if len(packed) > _MOST_STORED_BYTES and isinstance(record, RankRecord):
            steps = tuple(replace(step, masks={}, inexact={}, looked=False) for step in record.steps)
            packed = pack(replace(record, steps=steps))
        word[module] = base64.b64encode(packed).decode()
    return word


def read_word(word: Mapping[str, str]) -> dict[str, Any]:
    """Return the records by module."""
    return {module: unpack(base64.b64decode(text)) for module, text in word.items()}
