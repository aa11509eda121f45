"""Records the steps of one rank while they run, with as little work as possible.

It scans gradients after they were accumulated and before DDP reduces them. Everything else happens at the end.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..serving.service import registered_service
from .clock import Moment, now, seconds_between
from .gradient_watch import GradientWatch, Silence, Unreduced
from .naming import find_names_in_frames
from .standing import Standing, Unfinished, read_end, runs_backward
from .steps import EVERYTHING, NOTHING, SOMETHING, Step, divide_into_units
from .strangers import StrangerWatch
from .torch_calls import follow_broken_backward, follow_severed_checkpoints, modules_of

_C = _extension.load()

# The most memory for masks of units on one rank. Bytes.
MOST_MASK_BYTES = 64 << 20
# The number of parameters whose changes are noticed after a pass under no_sync().
_VERSIONS_READ = 32
# The number of steps in which changes of parameters during backward are noticed.
_STEPS_CHECKED = 3
# The number of elements that are sampled when a pass begins, a prime that selects other elements each time, and the
# number of passes that are sampled.
_SAMPLED, _STRIDE, _MOST_SAMPLES = 8, 7919, 10_000


@dataclass(slots=True)
class _Pass:
    """The step that is under way."""

    values: bytearray
    masks: dict[int, bytes] = field(default_factory=dict)
    pending: list[tuple[int, Any]] = field(default_factory=list)
    received: dict[int, None] = field(default_factory=dict)  # the parameters, in the order in which gradients came
    begun: Moment = 0.0
    gradients: Moment = 0.0
    reduced: Moment = 0.0
    search: float = 0.0
    looked: bool = True
    passes: int = 0
    twice: set[int] = field(default_factory=set)
    has_raised: bool = False
    versions: tuple[int, ...] = ()  # of the parameters when it began


class Recorder(Silence):
    """Records the steps of one module on this rank.

    Recording ends when DDP's Reducer is made anew, because a new Reducer numbers its parameters anew. The step at whose
    end this happens does not count.

    Attributes:
        watch: tells the recorder what happens.
        sizes: the size of each watched parameter. Bytes.
        units: the units of each parameter that DDP reduces.
        find_unused_parameters: DDP's setting when recording began.
        missed: the numbers, from 0, of the other ranks' steps in which this rank had joined.
        finished: the number of steps that have ended, recorded or not, those of other ranks after this rank has joined
            included.
        is_cut_short: whether recording has ended because the Reducer was made anew.
        most_mask_bytes: the most memory for masks of units. Bytes.
        unreduced: the number of backward passes that DDP did not reduce, by reason.
        unreduced_used: a byte for each parameter: 1 if it got a gradient in one of those passes.
        broken: for each backward pass that has raised, the number of steps that had finished.
        stepped_early: the parameters that changed while backward ran.
        left_behind: how often parameters changed after passes under no_sync() and before DDP had averaged anything.
        samples: some elements of the parameters at the beginnings of passes, by the number of finished steps and of
            passes that were not reduced.
        last_progress: when the last step ended, or recording began, on the monotonic clock. Seconds.
        called: the names by which the module's first caller calls it, the most telling one first; None before that.
        strangers: looks for parameters that were added since the module was wrapped.
        on_finished: called with the number of synchronised steps that have ended at the end of each, or None.
        on_step: called like ``on_finished``; what it raises, ``backward()`` raises. If DDP averages nothing, it is
            called with the number of backward passes instead, or within a forward pass.
    """

    def __init__(self, ddp: DistributedDataParallel, most_mask_bytes: int = MOST_MASK_BYTES) -> None:
        self._device: torch.device = ddp.device
        self._steps: list[Step] = []
        # Steps whose times are not read yet: when each began, its first and its last gradient came, and it ended.
        self._untimed: list[tuple[Step, Moment, Moment, Moment, Moment]] = []
        self.missed: list[int] = []
        self.finished = 0
        self.is_cut_short = False
        self.unreduced: Counter[Unreduced] = Counter()
        self.broken: list[int] = []
        self.stepped_early: set[int] = set()
        self.left_behind = 0
        self._kept: tuple[int, ...] = ()  # versions of parameters after a pass under no_sync()
        self.samples: dict[tuple[int, int], torch.Tensor] = {}
        self.last_progress = time.monotonic()
        self.on_finished: Callable[[int], None] | None = None
        self.on_step: Callable[[int], None] | None = None
        self.called: list[str] | None = None
        self.strangers = StrangerWatch()
        self.most_mask_bytes = most_mask_bytes
        self._mask_bytes = 0
        self._interned: dict[bytes, bytes] = {}
        self._started: Moment | None = None  # when the step before ended
        self._model_done: float | None = None
        self._scans = _C.why_unserved(torch.device(ddp.device_type)) is None
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
        parameters = self.watch.parameters
        self.sizes = tuple(parameter.numel() * parameter.element_size() for parameter in parameters)
        self.units = tuple(map(divide_into_units, parameters[: self.watch.reduced_count]))
        self._full = [_full_words(one.count) for one in self.units]
        self._pass = self._new_pass()

    def close(self) -> None:
        """Stop recording. The recorded steps stay."""
        self.watch.close()
        self.strangers.close()
        for stop in self._ends:
            stop()

    def _new_pass(self) -> _Pass:
        looked = self._scans and self._mask_bytes <= self.most_mask_bytes and not self.is_cut_short
        return _Pass(bytearray(len(self.watch.used)), looked=looked)

    # --- what the watch tells

    def call_begins(self) -> None:
        """Look for the names of the module in its first caller, and for parameters that were added."""
        ddp = self.watch.ddp
        if ddp is None:
            return
        if self.called is None:
            self.called = find_names_in_frames(ddp)
        self.strangers.call_begins(ddp)
        # Training of parameters that DDP does not know ends no step.
        if self.strangers.trained and not self._pass.received:
            self._notice_progress(self.finished + self.watch.forwards)

    def forward_begins(self) -> None:
        """Note when the first step begins. Other steps begin when the one before ends."""
        if self._started is None:
            self._started = now(self._device)

    def model_done(self) -> None:
        """Note when the model's forward pass has ended."""
        self._model_done = time.perf_counter()

    def forward_done(self) -> None:
        """Note how long DDP took after the model."""
        if self._model_done is not None:
            self._pass.search += time.perf_counter() - self._model_done
            self._model_done = None

    def pass_begins(self, synchronises: bool) -> None:
        """Note the beginning of a step, and what has changed since the last one."""
        self._sample()
        self._notice_change()
        if not synchronises:
            return
        self._kept = ()
        self._notice_another_reducer()
        ddp = self.watch.ddp
        if ddp is not None and self._pass.received and _C.reducer_is_in_backward(ddp.reducer):
            self._pass.passes += 1  # of a step that takes several
            return
        search = self._pass.search
        self._pass = self._new_pass()
        self._pass.search, self._pass.passes = search, 1
        self._pass.begun = now(self._device)
        if self.finished < _STEPS_CHECKED:
            self._pass.versions = tuple(parameter._version for parameter in self.watch.parameters)

    def gradient_done(self, index: int, parameter: torch.Tensor, synchronises: bool) -> None:
        """Scan a gradient, and note that it is there."""
        if synchronises:
            if self._pass.looked:
                self._look(index, parameter)
            if index in self._pass.received:
                self._pass.twice.add(index)
            self._pass.received[index] = None

    def gradients_done(self) -> None:
        """Note the time, and the parameters that have changed since the pass began."""
        self._pass.gradients = now(self._device)
        versions, self._pass.versions = self._pass.versions, ()
        for index, (version, parameter) in enumerate(zip(versions, self.watch.parameters, strict=False)):
            if parameter._version != version:
                self.stepped_early.add(index)

    def pass_left(self, why: Unreduced) -> None:
        """Count a pass that DDP does not reduce, and forget what was recorded of it."""
        self.unreduced[why] += 1
        if why is Unreduced.NO_SYNC:
            self._kept = self._read_versions()
        for index, used in enumerate(self.watch.used):
            self.unreduced_used[index] |= used
        if why is not Unreduced.NO_SYNC:
            self._pass = self._new_pass()
            # Gradients of no_sync() belong to the next step, but these belong to none.
            self.watch.used[:] = bytes(len(self.watch.used))
        if not self.finished:
            # Under no_sync(), only a step of the optimizer is progress.
            kept = self.unreduced[Unreduced.NO_SYNC]
            self._notice_progress(max(self.unreduced.total() - kept, self.left_behind))

    def pass_broke(self) -> None:
        """Note that a pass has raised."""
        self._pass.has_raised = True
        self.broken.append(self.finished)

    def backward_raised(self, error: Exception) -> None:
        """Note that a call of backward() has raised, for any module."""
        if self._pass.received or self.watch.forwards:
            self._early_breaks += not self._pass.received
            self._raised_with = read_end(error).error

    def checkpoint_severed(self, function: Any) -> None:
        """Note which parameters get no gradient because of a checkpoint, for any module."""
        if self.watch.runs_forward and self.finished < _STEPS_CHECKED:
            self._severed.update(id(one) for module in modules_of(function) for one in module.parameters())

    def step_reduced(self) -> None:
        """Note the time."""
        self._pass.reduced = now(self._device)
        self._kept = ()

    def step_done(self) -> None:
        """Record the step."""
        ddp = self.watch.ddp
        if ddp is None:
            return
        self._notice_another_reducer()
        done, self._pass = self._pass, self._new_pass()
        if not self.is_cut_short:
            self._write_down(done)
        # The next step begins when DDP ended, so recording counts for it, as it does for the program.
        self._started = done.reduced
        self._count_step()

    def joined_step_done(self) -> None:
        """Count a step of other ranks in which this rank had joined, so that all ranks count the same steps."""
        ddp = self.watch.ddp
        if ddp is None:
            return
        self._notice_another_reducer()
        if not self.is_cut_short:
            self.missed.append(self.finished)
        self._started = now(self._device)
        self._count_step()

    def _count_step(self) -> None:
        self.finished += 1
        if self.on_finished is not None:
            self.on_finished(self.finished)
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

    def _write_down(self, done: _Pass) -> None:
        for index, scan in done.pending:
            self._take(done, index, scan)
        self._mask_bytes += sum(map(len, done.masks.values()))
        step = Step(
            self._intern(bytes(self.watch.used)),
            self._intern(bytes(not parameter.requires_grad for parameter in self.watch.parameters)),
            self._intern(bytes(done.values)),
            done.masks,
            self._intern(array("I", done.received).tobytes()),
            0.0,
            0.0,
            0.0,
            done.search,
            done.looked,
        )
        # A device has reached the end of the step before by now, or its host would wait for it soon.
        self._read_times()
        start = self._started if self._started is not None else done.begun
        self._untimed.append((step, start, done.begun, done.gradients, done.reduced))
        self._steps.append(step)

    @property
    def steps(self) -> list[Step]:
        """The recorded steps. Any thread may ask for them; it waits until a device has reached their end."""
        self._read_times()
        return self._steps

    def _read_times(self) -> None:
        untimed, self._untimed = self._untimed, []
        for step, start, begun, gradients, reduced in untimed:
            step.seconds = seconds_between(start, reduced)  # waits; the others were earlier
            step.begun_seconds = seconds_between(start, begun)
            step.gradients_seconds = seconds_between(start, gradients)

    def is_unfinished(self) -> bool:
        """Return whether a synchronised pass has begun that DDP has not finalised."""
        return bool(self._pass.received)

    def stand(self) -> Standing:
        """Return the state of the passes. Any thread may call this."""
        ddp, watch, under_way = self.watch.ddp, self.watch, self._pass
        self._notice_change()
        names = watch.names
        missing: tuple[str, ...] = ()
        frozen: tuple[str, ...] = ()
        unfinished = Unfinished.NONE
        unreached: frozenset[int] = frozenset()
        if under_way.received:
            missing = tuple(self.missing())
            if ddp is not None and not self._searches and registered_service(ddp) is None:
                frozen = tuple(self.missing(frozen=True))
            if under_way.has_raised or (watch.runs_backward and not runs_backward()):
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
            tuple(names[i] for i in sorted(under_way.twice)),
            tuple(names[i] for i in sorted(unreached & under_way.received.keys())),
            len(unreached) == watch.reduced_count,
            under_way.passes,
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
        """Return the names of parameters without a gradient in the pass that is under way or has not ended.

        Args:
            frozen: whether to name parameters that are frozen, or those that are not.
        """
        ddp = self.watch.ddp
        # DDP is not told of gradients of parameters that were cast or moved.
        moved = {name for name, _ in self.watch.find_moved()}
        came = {index for index in self._pass.received if self.watch.names[index] not in moved}
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
        # Steps repeat, so equal bytes are shared.
        return self._interned.setdefault(content, content)

    def _read_unused(self, ddp: DistributedDataParallel) -> frozenset[int]:
        return frozenset(_C.reducer_unreached(ddp.reducer))

    def _read_versions(self) -> tuple[int, ...]:
        """Return the versions of some parameters, which an optimizer's step changes."""
        return tuple(
            parameter._version for parameter in self.watch.some_parameters(range(min(_VERSIONS_READ, len(self.sizes))))
        )

    def _notice_change(self) -> None:
        if self._kept and self._kept != self._read_versions():
            self.left_behind += 1
            self._kept = ()

    def _sample(self) -> None:
        """Sample elements of the parameters, other ones in each pass, and the same on every rank."""
        key = self.finished, sum(self.unreduced.values())
        if key in self.samples or len(self.samples) >= _MOST_SAMPLES:
            return
        first, count = len(self.samples) * _SAMPLED, len(self.sizes)
        picked = self.watch.some_parameters((first + i) % count for i in range(min(_SAMPLED, count)))
        # Training continues with any kind of parameter.
        with suppress(Exception):
            self.samples[key] = torch.cat(
                [
                    one.detach().as_strided((1,), (1,), one.storage_offset() + self.finished * _STRIDE % one.numel())
                    for one in picked
                    if one.numel()
                ]
            )

    def _look(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if index >= len(self.units) or gradient is None:
            return
        if gradient.is_sparse or not gradient.numel():
            self._pass.values[index] = EVERYTHING  # nothing to scan
            return
        flat, units = _flatten(gradient, parameter), self.units[index]
        scan = _C.start_unit_scan(flat, 0, units.gradient_length, units.length)
        if flat.is_cpu:
            self._take(self._pass, index, scan)
        else:
            self._pass.pending.append((index, scan))

    def _take(self, into: _Pass, index: int, scan: Any) -> None:
        words = scan.wait()[0]
        into.masks.pop(index, None)
        if words == self._full[index]:
            into.values[index] = EVERYTHING
        elif any(words):
            into.values[index] = SOMETHING
            into.masks[index] = self._intern(array("Q", words).tobytes())

        else:
            into.values[index] = NOTHING


def _full_words(bits: int) -> list[int]:
    words = [(1 << 64) - 1] * (bits // 64)
    return [*words, (1 << bits % 64) - 1] if bits % 64 else words


def _flatten(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient as DDP has it in a bucket: flat, and in real numbers."""
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
