"""Records the steps of one rank while they run, with as little work as possible; everything else waits for the end.

It looks at gradients after they were accumulated and before DDP reduces them, with the scan that the hook uses, so it
finds what the hook would find.
"""

from __future__ import annotations

import sys
import time
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..policies import PRESETS
from ..serving.engine_settings import unit_settings
from ..serving.service import registered_service
from .gradient_watch import GradientWatch, Silence, Unreduced
from .naming import find_names_in_frames
from .standing import Standing, Unfinished, read_end, runs_backward
from .strangers import StrangerWatch
from .torch_calls import follow_broken_backward, follow_severed_checkpoints, modules_of

_C = _extension.load()

# What a rank keeps of its masks of rows at most.
MOST_MASK_BYTES = 64 << 20
# Masks of rows from here on are kept compressed. Bytes.
_SHORT_MASK_BYTES = 1024
# Of so many parameters it is noted whether they change after a pass under no_sync().
_VERSIONS_READ = 32
# In so many steps it is noted whether parameters change while backward runs.
_STEPS_CHECKED = 3
# So many elements are kept at the beginning of a pass; a prime that leads to other ones each time; and so many times.
_SAMPLED, _STRIDE, _MOST_SAMPLES = 8, 7919, 10_000
# What a gradient holds: not looked at or nothing, a non-zero in every unit, or in some.
NOTHING, EVERYTHING, SOMETHING = 0, 1, 2


@dataclass(slots=True)
class Step:
    """One synchronised step on one rank; a byte for each parameter where it says so.

    Attributes:
        received: 1 if a gradient was accumulated here.
        sent: 1 if `skip_unused` would call it used here.
        frozen: 1 if it requires no gradient now.
        values: NOTHING, EVERYTHING or SOMETHING.
        masks: of what holds SOMETHING, the mask of its units; long ones are compressed. See :func:`unpack`.
        inexact: of what has several units, and some that a narrow form holds to the bit: for each of its slot's forms
            the mask of the units that the form does not hold. Of all others no unit with a non-zero is held by any.
        layout: which of the rank's layouts.
        order: the parameters in the order in which gradients came, as 32-bit integers.
        ready: when each bucket was complete here, in seconds since the step before ended.
        copied: how much DDP had copied into its buckets by then; zeros, which it only writes, count half. Bytes.
        gradients_seconds: when all gradients were there, since the step before ended.
        seconds: when DDP had finalised, since the step before ended: what the step took.
        search_seconds: how long DDP took after the model's forward pass; it is then that it searches the graph.
        looked: whether the values were looked at; not any more when the memory for it is full.
        left_over: a gradient of an earlier pass was there of a parameter that this one leaves out, and would be sent
            along if another rank uses it.
    """

    received: bytes
    sent: bytes
    frozen: bytes
    values: bytes
    masks: dict[int, bytes]
    inexact: dict[int, tuple[bytes, ...]]
    layout: int
    order: bytes
    ready: list[float]
    copied: list[float]
    gradients_seconds: float
    seconds: float
    search_seconds: float
    looked: bool
    left_over: bool


def unpack(mask: bytes, units: int) -> int:
    """Return a mask of so many units as the bits of an integer."""
    raw = mask if (units + 63) // 64 * 8 < _SHORT_MASK_BYTES else zlib.decompress(mask)
    return int.from_bytes(raw, sys.byteorder)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter stands in a bucket, and how it falls apart; in real elements."""

    bucket: int
    length: int
    element_bytes: int
    unit_length: int
    units: int
    sparse: bool
    forms: tuple[Any, ...]  # the narrow ones that are tried for it, as ``_C.Width``

    def elements_of(self, units: int) -> int:
        """Return how many elements so many units have, given as the bits of an integer."""
        short = self.units * self.unit_length - self.length if units >> self.units - 1 & 1 else 0
        return units.bit_count() * self.unit_length - short


def slots_of(layout: Any) -> dict[int, Slot]:
    """Return by parameter where it stands in a layout (a ``_C.LayoutOfBuckets``), and its units under every preset."""
    settings = unit_settings(PRESETS["skip_zeros"])
    slots = {}
    for number, bucket in enumerate(layout.buckets):
        forms = tuple(form for form in bucket.narrow_forms() if form != _C.Width.FULL)
        for piece in bucket.slices:
            units = _C.units_of(piece, bucket.element_bytes, settings)
            slots[piece.parameter] = Slot(
                number, piece.length, bucket.element_bytes, units.length, len(units), bucket.sparse, forms
            )
    return slots


@dataclass(slots=True)
class _Pass:
    """What is known of the step that is under way."""

    values: bytearray
    masks: dict[int, bytes] = field(default_factory=dict)
    inexact: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    pending: list[tuple[int, Any]] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    begun: float = 0.0
    gradients: float = 0.0
    reduced: float = 0.0
    search: float = 0.0
    looked: bool = True
    held: tuple[int, ...] = ()  # what had a gradient when the pass began
    passes: int = 0
    twice: set[int] = field(default_factory=set)
    has_raised: bool = False
    versions: tuple[int, ...] = ()  # of the parameters when it began


class Recorder(Silence):
    """Writes down the steps of one module on this rank.

    A Reducer that is made anew counts its parameters anew, and has other buckets: what is written down ends there. The
    step at whose end it is made does not count, because what the old one knew of it is gone.

    Args:
        ddp: the module.
        most_mask_bytes: the most memory for masks of rows. Bytes.

    Attributes:
        watch: what it hears from.
        steps: what was written down.
        sizes: of the watched parameters. Bytes.
        find_unused_parameters: DDP's setting when recording began.
        missed: of all that have ended, counted from 0, the steps of others in which this rank had joined.
        finished: how many steps have ended, written down or not, this rank's or others' after it had joined.
        is_cut_short: the Reducer was made anew, and nothing is written down any more.
        layouts: the bucket layouts that steps refer to.
        most_mask_bytes: what masks of rows may take. Bytes.
        before_accumulating: of the first pass that DDP did not reduce, which part of the bytes that were looked at
            some narrow form holds; None if there was no such pass.
        unreduced: how many backward passes DDP did not reduce, by why not.
        unreduced_used: a byte for each parameter: 1 if it got a gradient in one of those.
        broken: after how many finished steps backward passes have raised that were noticed.
        stepped_early: the parameters that changed while backward ran.
        left_behind: how often parameters changed after passes under no_sync() and before DDP had averaged anything.
        samples: some elements of the parameters at the beginnings of passes, by the number of finished steps and of
            passes that were not reduced.
        last_progress: when a step ended last, or recording began, on the monotonic clock.
        called: what the module is called by its first caller, the most telling name first; None before that.
        strangers: looks for parameters that have come since the module was wrapped.
        on_step: called with the number of steps when one has ended, or None; what it raises, ``backward()`` raises.
            Where DDP averages nothing, called with the number of backward passes, or within a forward pass.
    """

    def __init__(self, ddp: DistributedDataParallel, most_mask_bytes: int = MOST_MASK_BYTES) -> None:
        self.steps: list[Step] = []
        self.missed: list[int] = []
        self.finished = 0
        self.is_cut_short = False
        self.layouts: list[Any] = []
        self.unreduced: Counter[Unreduced] = Counter()
        self.broken: list[int] = []
        self.stepped_early: set[int] = set()
        self.left_behind = 0
        self._kept: tuple[int, ...] = ()  # versions of parameters after a pass under no_sync()
        self.samples: dict[tuple[int, int], torch.Tensor] = {}
        self.before_accumulating: float | None = None
        self.last_progress = time.monotonic()
        self.on_step: Any = None
        self.called: list[str] | None = None
        self.strangers = StrangerWatch()
        self.most_mask_bytes = most_mask_bytes
        self._mask_bytes = 0
        self._layout_hash: int | None = None
        self._slots: dict[int, Slot] = {}
        self._full: dict[int, list[int]] = {}
        self._interned: dict[bytes, bytes] = {}
        self._unused_by: dict[tuple[bytes, frozenset[int]], frozenset[int]] = {}
        self._started: float | None = None  # when the step before ended
        self._model_done: float | None = None
        self._scans = _C.why_unserved(torch.device(ddp.device_type)) is None
        self._scans_widths = ddp.device_type == "cpu"
        self._single_pass: dict[int, tuple[int, int]] | None = None  # by parameter: bytes, and how many are narrow
        # DDP's reduction begins with the first gradient where it finds out what is unused.
        self.find_unused_parameters = bool(ddp.find_unused_parameters)
        self._searches = self.find_unused_parameters and not ddp.static_graph
        self._reducer = weakref.ref(ddp.reducer)  # a strong one would keep its buckets
        self._early_breaks = 0
        self._raised_with = ""
        self._severed: set[int] = set()
        self.watch = GradientWatch(ddp, self)
        self._ends = (
            follow_broken_backward(self.backward_raised),
            follow_severed_checkpoints(self.checkpoint_severed),
        )
        self.unreduced_used = bytearray(len(self.watch.used))
        self.sizes = tuple(parameter.numel() * parameter.element_size() for parameter in self.watch.parameters)
        self._pass = self._new_pass()
        self._read_layout(ddp)

    def close(self) -> None:
        """Stop listening; what was written down stays."""
        self.watch.close()
        self.strangers.close()
        for stop in self._ends:
            stop()

    def _new_pass(self) -> _Pass:
        looked = self._scans and self._mask_bytes <= self.most_mask_bytes and not self.is_cut_short
        return _Pass(bytearray(len(self.watch.used)), looked=looked)

    # --- what the watch tells

    def call_begins(self) -> None:
        """Look what the module is called by whoever calls it first, and for parameters that have come since."""
        ddp = self.watch.ddp
        if ddp is None:
            return
        if self.called is None:
            self.called = find_names_in_frames(ddp)
        self.strangers.call_begins(ddp)
        # What DDP does not hear of ends no step.
        if self.strangers.trained and not self._pass.times:
            self._notice_progress(self.finished + self.watch.forwards)

    def forward_begins(self) -> None:
        """Note when the first step begins; the others begin where the one before ended."""
        if self._started is None:
            self._started = time.perf_counter()

    def model_done(self) -> None:
        """Note when the model's forward pass was through."""
        self._model_done = time.perf_counter()

    def forward_done(self) -> None:
        """Note how long DDP took after the model."""
        if self._model_done is not None:
            self._pass.search += time.perf_counter() - self._model_done
            self._model_done = None

    def pass_begins(self, synchronises: bool) -> None:
        """Look at gradients of before that DDP would send along for parameters that this pass leaves out."""
        self._sample()
        self._notice_change()
        if synchronises:
            self._kept = ()
        else:
            self._note_single_pass()
            if self.before_accumulating is None and self._scans_widths and not self.is_cut_short:
                self._single_pass = {}
            return
        self._note_single_pass()
        self._notice_another_reducer()
        ddp = self.watch.ddp
        if ddp is not None and self._pass.times and _C.reducer_is_in_backward(ddp.reducer):
            self._pass.passes += 1  # of a step that takes several
            return
        search = self._pass.search
        self._pass = self._new_pass()
        self._pass.search, self._pass.passes = search, 1
        self._pass.begun = time.perf_counter()
        self._pass.held = tuple(i for i in self.watch.held if i < self.watch.reduced_count)
        if self.finished < _STEPS_CHECKED:
            self._pass.versions = tuple(parameter._version for parameter in self.watch.parameters)
        if self._pass.looked:
            self._look_at_old_gradients()

    def gradient_done(self, index: int, parameter: torch.Tensor, synchronises: bool) -> None:
        """Look at a gradient, and note the time."""
        if self._single_pass is not None:
            self._look_before_accumulating(index, parameter)
        if synchronises:
            if self._pass.looked:
                self._look(index, parameter)
            if index in self._pass.times:
                self._pass.twice.add(index)
            self._pass.times[index] = time.perf_counter()

    def gradients_done(self) -> None:
        """Note the time, and which parameters have changed meanwhile."""
        self._pass.gradients = time.perf_counter()
        versions, self._pass.versions = self._pass.versions, ()
        for index, (version, parameter) in enumerate(zip(versions, self.watch.parameters, strict=False)):
            if parameter._version != version:
                self.stepped_early.add(index)

    def pass_left(self, why: Unreduced) -> None:
        """Count a pass that DDP does not reduce; what is known of it is not a step's."""
        self.unreduced[why] += 1
        if why is Unreduced.NO_SYNC:
            self._kept = self._read_versions()
        for index, used in enumerate(self.watch.used):
            self.unreduced_used[index] |= used
        if why is not Unreduced.NO_SYNC:
            self._pass = self._new_pass()
            # They belong to no step. Those of no_sync() do, to the next one.
            self.watch.used[:] = bytes(len(self.watch.used))
        if not self.finished:
            # Where accumulating is over now and then, steps end.
            kept = self.unreduced[Unreduced.NO_SYNC]
            self._notice_progress(max(self.unreduced.total() - kept, self.left_behind))

    def pass_broke(self) -> None:
        """Note that a pass has raised."""
        self._pass.has_raised = True
        self.broken.append(self.finished)

    def backward_raised(self, error: Exception) -> None:
        """Note that a call of backward() has raised, of whichever module it was."""
        if self._pass.times or self.watch.forwards:
            self._early_breaks += not self._pass.times
            self._raised_with = read_end(error).error

    def checkpoint_severed(self, function: Any) -> None:
        """Note which parameters a checkpoint keeps from their gradients; of whichever module it is."""
        if self.watch.runs_forward and self.finished < _STEPS_CHECKED:
            self._severed.update(id(one) for module in modules_of(function) for one in module.parameters())

    def step_reduced(self) -> None:
        """Note the time."""
        self._pass.reduced = time.perf_counter()
        self._kept = ()

    def step_done(self) -> None:
        """Write the step down."""
        ddp = self.watch.ddp
        if ddp is None:
            return
        self._notice_another_reducer()
        done, self._pass = self._pass, self._new_pass()
        if not self.is_cut_short:
            self._write_down(ddp, done)
        # The next step begins where DDP ended, so that what is done here counts for it, as it does for the program.
        self._started = done.reduced
        self._count_step()

    def joined_step_done(self) -> None:
        """Note that the others had a step in which this rank had joined, so that all count the same steps."""
        ddp = self.watch.ddp
        if ddp is None:
            return
        self._notice_another_reducer()
        if not self.is_cut_short:
            self._read_layout(ddp)
            self.missed.append(self.finished)
        self._started = time.perf_counter()
        self._count_step()

    def _count_step(self) -> None:
        self.finished += 1
        self._notice_progress(self.finished)

    def _notice_progress(self, steps: int) -> None:
        self.last_progress = time.monotonic()
        if self.on_step is not None:
            self.on_step(steps)

    def _notice_another_reducer(self) -> None:
        ddp = self.watch.ddp
        if ddp is not None and self._reducer() is not ddp.reducer:
            self.is_cut_short = True
            self._pass.looked = False

    def _write_down(self, ddp: DistributedDataParallel, done: _Pass) -> None:
        for index, scan in done.pending:
            self._take(done, index, scan)
        self._mask_bytes += sum(map(len, done.masks.values()))
        # Equal ones are shared, but not where they are long.
        self._mask_bytes += sum(len(mask) for masks in done.inexact.values() for mask in masks)
        start = self._started if self._started is not None else done.begun
        received = bytes(self.watch.used)
        frozen = bytes(not parameter.requires_grad for parameter in self.watch.parameters)
        sent = self._find_sent(ddp, received, frozen, done.times.keys())
        self.steps.append(
            Step(
                self._intern(received),
                self._intern(sent),
                self._intern(frozen),
                self._intern(bytes(done.values)),
                done.masks,
                done.inexact,
                self._read_layout(ddp),
                self._intern(array("I", done.times).tobytes()),
                *self._bucket_times(done, start, bool(ddp.gradient_as_bucket_view)),
                done.gradients - start,
                done.reduced - start,
                done.search,
                done.looked,
                not all(sent[i] for i in done.held),
            )
        )

    @property
    def largest_bucket_bytes(self) -> int:
        """Of the layouts that were seen."""
        return max((bucket.numel * bucket.element_bytes for one in self.layouts for bucket in one.buckets), default=0)

    def is_unfinished(self) -> bool:
        """Say whether a synchronised pass has begun that DDP has not finalised."""
        return bool(self._pass.times)

    def stand(self) -> Standing:
        """Say what has become of the passes; by any thread."""
        ddp, watch, now = self.watch.ddp, self.watch, self._pass
        self._notice_change()
        names = watch.names
        missing: tuple[str, ...] = ()
        frozen: tuple[str, ...] = ()
        unfinished = Unfinished.NONE
        unreached: frozenset[int] = frozenset()
        if now.times:
            missing = tuple(self.missing())
            if ddp is not None and not self._searches and registered_service(ddp) is None:
                frozen = tuple(self.missing(frozen=True))
            if now.has_raised or (watch.runs_backward and not runs_backward()):
                unfinished = Unfinished.RAISED
            elif watch.runs_backward:
                unfinished = Unfinished.RUNS
            else:
                unfinished = Unfinished.SHORT if missing or frozen else Unfinished.WAITS
            if ddp is not None and (self._searches or ddp.static_graph):
                unreached = self._read_unused(ddp)
        return Standing(
            self.finished,
            unfinished,
            missing,
            frozen,
            tuple(names[i] for i in sorted(now.twice)),
            tuple(names[i] for i in sorted(unreached & now.times.keys())),
            len(unreached) == watch.reduced_count,
            now.passes,
            watch.forwards,
            watch.idle_forwards,
            watch.failed_forwards,
            tuple(sorted(watch.nested_in)),
            watch.inner_calls,
            tuple((why.value, count) for why, count in self.unreduced.items()),
            tuple(name for name, used in zip(names, self.unreduced_used, strict=True) if used),
            tuple(self.broken),
            self.left_behind,
            watch.runs_forward,
            tuple(names[i] for i in sorted(self.stepped_early)),
            self._early_breaks,
            self._raised_with,
            tuple(name for name, one in zip(names, watch.parameters, strict=False) if id(one) in self._severed),
            watch.resent,
        )

    def missing(self, frozen: bool = False) -> list[str]:
        """Name what has no gradient in the pass that is under way, or in the one that did not end.

        Args:
            frozen: name what is frozen, and else what is not.
        """
        ddp = self.watch.ddp
        # DDP does not hear of what was cast or moved.
        moved = {name for name, _ in self.watch.find_moved()}
        came = {index for index in self._pass.times if self.watch.names[index] not in moved}
        parameters = self.watch.parameters
        known = list(range(self.watch.reduced_count))
        searches = self._searches
        if ddp is not None and self._reducer() is not ddp.reducer:
            places = {id(parameter): i for i, parameter in enumerate(parameters)}
            known = [places.get(id(parameter), -1) for parameter in _C.reducer_parameters(ddp.reducer)]
            searches = bool(ddp.find_unused_parameters) and not ddp.static_graph
        unused = self._read_unused(ddp) if ddp is not None and searches else frozenset()
        return [
            self.watch.names[i]
            for number, i in enumerate(known)
            if i >= 0
            and i not in came
            and number not in unused
            and (i >= len(parameters) or parameters[i].requires_grad) != frozen
        ]

    # --- how

    def _intern(self, content: bytes) -> bytes:
        # Steps repeat; equal ones share their bytes.
        return self._interned.setdefault(content, content)

    def _read_layout(self, ddp: DistributedDataParallel) -> int:
        layout = _C.reducer_layout(ddp.reducer)
        found = layout.hash()
        if found != self._layout_hash:
            self._layout_hash = found
            self.layouts.append(layout)
            self._slots = slots_of(layout)
            self._full = {index: _full_words(slot.units) for index, slot in self._slots.items()}
        return len(self.layouts) - 1

    def _bucket_times(self, done: _Pass, start: float, views: bool) -> tuple[list[float], list[float]]:
        ready = [done.begun] * len(self.layouts[-1].buckets)
        copied = [0.0] * len(ready)
        # With the first gradient DDP writes zeros for what the graph leaves out.
        absent = self._slots.keys() - done.times.keys() if self._searches else ()
        zeros = sum(self._slots[i].length * self._slots[i].element_bytes for i in absent) / 2
        # Gradients that are views of a bucket and were there before are accumulated where they lie.
        in_place = (set(done.held) & done.times.keys()) if views else set()
        if in_place:
            in_place.add(next(iter(done.times)))  # it had come already when the pass was heard of
        so_far = 0.0
        for index, moment in done.times.items():
            slot = self._slots.get(index)
            if slot is None:
                continue
            if moment > ready[slot.bucket]:
                ready[slot.bucket], copied[slot.bucket] = moment, so_far
            so_far = max(so_far, zeros) + (0 if index in in_place else slot.length * slot.element_bytes)
        return [moment - start for moment in ready], copied

    def _find_sent(self, ddp: DistributedDataParallel, received: bytes, frozen: bytes, reached: Set[int]) -> bytes:
        """Say what `skip_unused` would call used here: what is in the graph, whether a gradient came or not."""
        reduced = self.watch.reduced_count
        if 0 not in received[:reduced]:
            sent = bytearray(received)
        elif self._searches or ddp.static_graph:
            # What the loss leaves out is in the graph, and so is sent.
            key = received, frozenset(reached)
            unused = self._unused_by.get(key)
            if unused is None:
                unused = self._unused_by[key] = self._read_unused(ddp)
            sent = bytearray(
                received[i] or (i not in unused and (self._searches or not frozen[i])) for i in range(reduced)
            )
        else:
            # Without a search DDP takes everything that is not frozen for used.
            sent = bytearray(received[i] or not frozen[i] for i in range(reduced))
        # Those that DDP does not know are averaged by the hook as soon as they are unfrozen.
        return bytes(sent[:reduced]) + bytes(not one for one in frozen[reduced:])

    def _read_unused(self, ddp: DistributedDataParallel) -> frozenset[int]:
        return frozenset(_C.reducer_unreached(ddp.reducer))

    def _look_at_old_gradients(self) -> None:
        ddp = self.watch.ddp
        if ddp is None or not (self._searches or ddp.static_graph):
            return
        held = set(self._pass.held)
        if not held:
            return
        parameters = self.watch.parameters
        for index in self._read_unused(ddp) & held:
            self._look(index, parameters[index])

    def _read_versions(self) -> tuple[int, ...]:
        """Return what changes when an optimizer steps; it need not step all parameters."""
        return tuple(
            parameter._version for parameter in self.watch.some_parameters(range(min(_VERSIONS_READ, len(self.sizes))))
        )

    def _notice_change(self) -> None:
        if self._kept and self._kept != self._read_versions():
            self.left_behind += 1
            self._kept = ()

    def _sample(self) -> None:
        """Keep some elements of the parameters, other ones each time, and the same on every rank."""
        key = self.finished, sum(self.unreduced.values())
        if key in self.samples or len(self.samples) >= _MOST_SAMPLES:
            return
        first, count = len(self.samples) * _SAMPLED, len(self.sizes)
        picked = self.watch.some_parameters((first + i) % count for i in range(min(_SAMPLED, count)))
        # Whatever parameters there are, training goes on.
        with suppress(Exception):
            self.samples[key] = torch.cat(
                [
                    one.detach().as_strided((1,), (1,), one.storage_offset() + self.finished * _STRIDE % one.numel())
                    for one in picked
                    if one.numel()
                ]
            )

    def _look(self, index: int, parameter: torch.Tensor) -> None:
        slot, gradient = self._slots.get(index), parameter.grad
        if slot is None or slot.sparse or gradient is None or slot.length == 0:
            return
        flat = _flatten(gradient, parameter)
        scan = _C.start_unit_scan(flat, 0, slot.length, slot.unit_length, widths=self._asks_width(slot))
        if flat.is_cpu:
            self._take(self._pass, index, scan)
        else:
            self._pass.pending.append((index, scan))

    def _asks_width(self, slot: Slot) -> bool:
        return self._scans_widths and slot.units > 1 and bool(slot.forms)

    def _look_before_accumulating(self, index: int, parameter: torch.Tensor) -> None:
        slot, gradient = self._slots.get(index), parameter.grad
        if slot is None or slot.sparse or gradient is None or slot.length == 0 or self._single_pass is None:
            return
        narrow = 0
        if self._asks_width(slot):
            flat = _flatten(gradient, parameter)
            scan = _C.start_unit_scan(flat, 0, slot.length, slot.unit_length, widths=True)
            used = _bits(scan.wait()[0])
            narrow = max(slot.elements_of(used & ~_bits(words)) for words in scan.inexact()[: len(slot.forms)])
        self._single_pass[index] = slot.length * slot.element_bytes, narrow * slot.element_bytes

    def _note_single_pass(self) -> None:
        if self._single_pass:
            sizes, narrow = (sum(column) for column in zip(*self._single_pass.values(), strict=True))
            self.before_accumulating = narrow / max(sizes, 1)
        self._single_pass = None

    def _take(self, into: _Pass, index: int, scan: Any) -> None:
        words = scan.wait()[0]
        into.masks.pop(index, None)
        into.inexact.pop(index, None)
        if self._asks_width(self._slots[index]):
            inexact = scan.inexact()[: len(self._slots[index].forms)]
            if any(one != words for one in inexact):
                into.inexact[index] = tuple(map(self._pack, inexact))
        if words == self._full[index]:
            into.values[index] = EVERYTHING
        elif any(words):
            into.values[index] = SOMETHING
            into.masks[index] = self._pack(words)
        else:
            into.values[index] = NOTHING

    def _pack(self, words: list[int]) -> bytes:
        mask = array("Q", words).tobytes()
        # A compressor costs more to set up than a short mask is long.
        return self._intern(mask) if len(mask) < _SHORT_MASK_BYTES else zlib.compress(mask, 1)


def _bits(words: list[int]) -> int:
    return int.from_bytes(array("Q", words).tobytes(), sys.byteorder)


def _full_words(bits: int) -> list[int]:
    words = [(1 << 64) - 1] * (bits // 64)
    return [*words, (1 << bits % 64) - 1] if bits % 64 else words


def _flatten(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient's elements in the order in which DDP has them in a bucket, flat and real."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.is_complex():
        # A bucket holds a complex gradient as its real view.
        gradient = torch.view_as_real(gradient.contiguous())
        return gradient.reshape(-1)
    if gradient.is_contiguous():
        return gradient.view(-1)
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    if gradient.is_contiguous():
        return gradient.view(-1)
    return torch.as_strided(gradient, (gradient.numel(),), (1,), gradient.storage_offset())
