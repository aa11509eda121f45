"""The records that ranks exchange for a diagnosis: plain values."""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from .optimizers import Outsiders
from .other_hooks import OtherHook
from .replicas import Drift, Replica, find_drift
from .standing import End, Standing
from .steps import Step, Units
from .strangers import Strangers
from .timing import Division, Trial
from .verdicts import ModuleVerdict, ParameterVerdict

# A store takes what is longer, but not quickly: what is known of values is left out then. Bytes.
_MOST_STORED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The record of one rank: plain values.

    Attributes:
        names: the names of its parameters; those that DDP reduces come first.
        sizes: their sizes in bytes.
        ignored: the parameters that the user has told DDP to ignore.
        order: all names in the model's order.
        steps: the steps that it recorded.
        units: the units of each parameter that DDP reduces.
        find_unused_parameters: DDP's setting when recording began.
        static_graph: DDP's setting.
        has_hook: whether a hook of this package is registered.
        ranks: the number of ranks in the module's group.
        missed: of the ranks' steps, counted from 0, those in which it had joined (``ddp.join()``).
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
        trials: the policies that were tried.
        plain_steps: the number of steps before the first trial; None if there was none.
        why_not_tried: why policies were not tried, or not all of them; empty if there is no reason.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ignored: tuple[str, ...]
    order: tuple[str, ...]
    steps: tuple[Step, ...]
    units: tuple[Units, ...]
    find_unused_parameters: bool
    static_graph: bool
    has_hook: bool
    ranks: int
    missed: tuple[int, ...] = ()
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
    trials: tuple[Trial, ...] = ()
    plain_steps: int | None = None
    why_not_tried: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that the answers follow from.

    Attributes:
        ranks: how many.
        steps: how many were watched.
        find_unused_parameters: DDP's setting.
        static_graph: DDP's setting, too.
        has_hook: a hook of this package is registered.
        parameters: what became of each.
        modules: the same by module.
        same_parameters: each rank used the same ones in every step.
        same_order: and their gradients came in the same order.
        division: how a step divides, or None.
        records: what each rank wrote down that was heard of, by rank.
        absent: the ranks that were not.
        finished: how many steps the rank has finished that has finished most.
        left_out: what some step reached with no gradient, because the loss leaves out an output: the parameters' names.
        can_join: ranks may run different numbers of steps within a join block.
    """

    can_join: ClassVar[bool] = True
    ranks: int
    steps: int
    find_unused_parameters: bool
    static_graph: bool
    has_hook: bool
    parameters: tuple[ParameterVerdict, ...]
    modules: tuple[ModuleVerdict, ...]
    same_parameters: bool
    same_order: bool
    division: Division | None
    records: tuple[RankRecord, ...]
    absent: tuple[int, ...]
    finished: int
    left_out: frozenset[str]

    @property
    def needless_fraction(self) -> float:
        """The fraction of plain DDP's bytes that held unused parameters, or rows of zeros, on every rank."""
        sizes = sum(one.dense_bytes for one in self.parameters) * self.steps
        needed = sum(one.dense_bytes * one.steps_used * (1 - (one.zero_rows or 0.0)) for one in self.parameters)
        return 1 - needed / sizes if sizes else 0.0

    def find_drift(self) -> Drift | None:
        """Return how the ranks' parameters differ; None if they do not, or if they cannot be compared."""
        replicas = [record.replica for record in self.records if record.replica is not None]
        # A rank that has joined is behind until the block ends; after an error ranks have ended at different points.
        if self.absent or any(record.missed for record in self.records) or not len(self.records) == len(replicas) > 1:
            return None
        return find_drift(self.records[0].names, replicas)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """The record of one rank under FSDP2: plain values.

    Attributes:
        rank: the rank in the default process group.
        order: the names of all parameters.
        steps: for each synchronised backward pass that has ended, a text with one character per parameter, as in a
            pattern.
        standing: the state of its backward passes.
        end: how the watched run has ended on this rank.
        place: where it is, for example "forward of blocks.3"; empty between two steps.
        layers: the modules with parameters of their own that the forward pass has run, in this order.
        reached: the parameters with a gradient in the backward pass that has not ended, for each group of parameters
            whose reduction has begun, by its number.
    """

    rank: int
    order: tuple[str, ...]
    steps: tuple[str, ...]
    standing: Standing
    end: End
    place: str = ""
    layers: tuple[str, ...] = ()
    reached: tuple[tuple[int, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The facts that problems with FSDP2 follow from."""

    can_join: ClassVar[bool] = False
    records: tuple[ShardRecord, ...]
    absent: tuple[int, ...]
    modules: tuple[ModuleVerdict, ...]
    sends_unused: bool


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
            steps = tuple(replace(step, masks={}, looked=False) for step in record.steps)
            packed = pack(replace(record, steps=steps))
        word[module] = base64.b64encode(packed).decode()
    return word


def read_word(word: Mapping[str, str]) -> dict[str, Any]:
    """Return the records by module."""
    return {module: unpack(base64.b64decode(text)) for module, text in word.items()}
