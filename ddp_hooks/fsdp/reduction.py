"""Reduces gradients so that each rank sends each owner only the units that are not zero, coded.

There are two collectives. The first one sends *masks*, which say which units of each owner's part follow, and in how
many bytes; the second one sends those units. The sender alone chooses, so ranks need to agree on two things only: the
units, which follow from the layout, whose digest travels with the masks; and whether the second collective takes place,
which follows from every rank's total, which travels as well.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from ..serving.engine_settings import adaptive_settings, unit_settings
from ..statistics import Statistics
from .param_groups import Column, Participants

_C = _extension.load()

# The dtypes that can be scanned and added.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The bits of a word that describe a set of parameters: all but the sign.
_BITS_OF_WORD = 62
_WORD_BYTES = 8
# Numbers of more bytes are not coded.
_MOST_CODED_ELEMENT_BYTES = 4
# The number of cached layouts: each step may have gradients of other parameters.
_KEPT = 32
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions that a policy asks of gradients.

    Attributes:
        skip_unused: leave out parameters that have no gradient.
        zeros: read gradients, and leave out zeros.
        coded: code what is sent if this saves at least this fraction of the bytes; None if nothing is coded.
        divides: decide for each row instead of each parameter.
        always: ask in every step, however little it saves.
    """

    skip_unused: bool
    zeros: bool
    coded: float | None
    divides: bool
    always: bool

    @classmethod
    def of(cls, policy: Policy, least_coded_saving: float | None) -> Questions:
        """Read a policy; with ``coded="auto"``, coding has to save this fraction, or is left out if this is None."""
        asked = (policy.skip_zeros, policy.skip_zero_rows, policy.coded)
        return cls(
            skip_unused=policy.skip_unused,
            zeros=policy.skip_zeros != "off" or policy.skip_zero_rows != "off",
            coded={"off": None, "on": 0.0, "auto": least_coded_saving}[policy.coded],
            divides=policy.skip_zero_rows != "off",
            always="on" in asked or (policy.skip_unused and not {"adaptive", "auto"} & {*asked}),
        )

    @property
    def any(self) -> bool:
        """Whether there is any question."""
        return self.skip_unused or self.zeros or self.coded is not None


class Looks:
    """Decides in which steps gradients are examined; the same on every rank, because totals are the same."""

    def __init__(self, policy: Policy, always: bool) -> None:
        settings = adaptive_settings(policy, is_on_device=False)
        self._rule = _C.AdaptiveRule(settings, looks_after_pay=settings.hold_steps, starts_paused=False)
        self._always = always
        self._step = 0

    def begin_step(self) -> bool:
        """Count a step; return whether gradients are examined in it."""
        self._step += 1
        return self._always or self._rule.is_due(self._step)

    def observe(self, sent_bytes: int, dense_bytes: int) -> bool:
        """Return whether sending only the announced units saves enough to do so."""
        saved = dense_bytes - sent_bytes
        return saved > 0 if self._always else self._rule.observe(self._step, saved, dense_bytes)


class Coding:
    """Decides in which steps a rank codes what it sends. Ranks may differ: sizes tell the receiver.

    Args:
        policy: the policy.
        least_saving: the fraction of the bytes that coding has to save; None if nothing is coded.
    """

    def __init__(self, policy: Policy, least_saving: float | None) -> None:
        settings = adaptive_settings(policy, is_on_device=False, least_saving=least_saving or 0.0)
        self._rule = _C.AdaptiveRule(settings, looks_after_pay=settings.hold_steps, starts_paused=False)
        self._least_saving = least_saving
        self._step = 0

    def codes(self) -> bool:
        """Count a message; return whether it is coded."""
        self._step += 1
        return self._least_saving == 0 or (self._least_saving is not None and self._rule.is_due(self._step))

    def observe(self, coded_bytes: int, uncoded_bytes: int) -> None:
        """Learn from the size of a coded message."""
        self._rule.observe(self._step, uncoded_bytes - coded_bytes, uncoded_bytes)


@dataclass(slots=True)
class Staging:
    """Memory for messages, which the reductions of a module share one after another."""

    _buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, size: int) -> torch.Tensor:
        """Return memory of a size; memory taken earlier under the same name becomes invalid."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffer[:size]

    def clear(self) -> None:
        """Free all memory."""
        self._buffers.clear()


class Recent(Generic[K, V]):
    """A cache of the 32 most recently used values.

    functools.lru_cache on a method would make a reference cycle, and delay the release of memory.
    """

    def __init__(self) -> None:
        self._made: dict[K, V] = {}

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, and make it if it is missing."""
        made = self._made.pop(key, None)
        if made is None:
            made = make()
            if len(self._made) == _KEPT:
                del self._made[next(iter(self._made))]
        self._made[key] = made
        return made

    def __len__(self) -> int:
        """Return the number of cached values."""
        return len(self._made)


class Layout:
    """The units of a part of the input, for a set of included parameters."""

    def __init__(
        self,
        columns: Sequence[Column],
        names: Sequence[str],
        included: Sequence[int],
        element_bytes: int,
        policy: Policy,
        divides: bool,
    ) -> None:
        settings = unit_settings(policy)
        self.parameters = [i for i in included if columns[i].length > 0]
        stretches = []
        for i in self.parameters:
            length, row_length = columns[i].length, columns[i].row_length
            whole = _C.ParameterSlice(i, 0, length, row_length)
            stretches.append((length, _C.units_of(whole, element_bytes, settings).length if divides else length))
        self.units = _C.ShardUnits(stretches)
        # With names, because ranks may reduce different blocks of the same shape.
        self.digest = digest_of(f"{element_bytes} {[names[i] for i in included]} {stretches}")


def digest_of(text: str) -> int:
    """Return a digest of 56 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@dataclass(frozen=True, slots=True)
class Announcement:
    """The information that a rank sends with its masks."""

    digest: int
    sent_bytes: int
    used: frozenset[int]
    included: frozenset[int]


@dataclass(frozen=True, slots=True)
class Parcels:
    """What a rank sends to each rank.

    Attributes:
        content: the messages, one after the other, as bytes.
        sizes: their sizes in bytes.
        uncoded_bytes: their size together before they were coded; 0 if nothing was.
    """

    content: torch.Tensor
    sizes: list[int]
    uncoded_bytes: int = 0


class LayoutsDiffer(Exception):
    """The ranks hold gradients of different parameters."""

    def __init__(self, announced: Sequence[Announcement]) -> None:
        super().__init__()
        self.announced = announced


class Exchange:
    """Exchanges masks and units between all ranks of a process group, and counts bytes and time.

    Args:
        staging: memory for messages.
        parameter_count: the number of parameters in the group.
        most_mask_bytes: the largest size of a layout's masks, so that ranks with different layouts send equal sizes.
        coding: decides which messages are coded.
    """

    def __init__(self, staging: Staging, parameter_count: int, most_mask_bytes: int, coding: Coding) -> None:
        self._staging, self._coding = staging, coding
        self._set_words = -(-parameter_count // _BITS_OF_WORD)
        self._words = 3 + 2 * self._set_words
        self._row_bytes = -(-(self._words * _WORD_BYTES + most_mask_bytes) // _WORD_BYTES) * _WORD_BYTES
        self.statistics = Statistics()

    def new_masks(self, ranks: int) -> torch.Tensor:
        """Return a message with a row for each rank, in which `masks_of` must be filled in."""
        return torch.zeros(ranks, self._row_bytes, dtype=torch.uint8, device="cpu")

    def masks_of(self, message: torch.Tensor) -> torch.Tensor:
        """Return the masks in a message, a row for each rank."""
        return message[:, self._words * _WORD_BYTES :]

    def pack(self, units: Any, flat: torch.Tensor, masks: torch.Tensor, own: int) -> Parcels:
        """Put together what the masks say, of all parts but that of ``own``."""
        counts = units.sent_elements(masks)
        packed = self._staging.take("packed", sum(counts) * flat.element_size()).view(flat.dtype)
        units.pack(packed, flat, masks, own)
        if packed.nbytes == 0 or flat.element_size() > _MOST_CODED_ELEMENT_BYTES or not self._coding.codes():
            return Parcels(packed.view(torch.uint8), [count * flat.element_size() for count in counts])
        room = self._staging.take("coded", sum(_C.most_coded_bytes(count, flat) for count in counts))
        sizes = _C.encode_messages(room, packed, counts)
        self._coding.observe(sum(sizes), packed.nbytes)
        return Parcels(room[: sum(sizes)], sizes, packed.nbytes)

    def announce(
        self, group: dist.ProcessGroup, message: torch.Tensor, own: Announcement, sizes: Sequence[int]
    ) -> tuple[torch.Tensor, list[Announcement], list[int]]:
        """Send each rank its row, with the size of its message.

        Returns:
            The received masks, the announcements, and the sizes of the messages that follow.

        Raises:
            LayoutsDiffer: on every rank.
        """
        words = [own.digest, own.sent_bytes, 0, *self._to_words(own.used), *self._to_words(own.included)]
        head = message.view(torch.int64)[:, : self._words]
        head[:] = torch.tensor(words, dtype=torch.int64, device="cpu")
        head[:, 2] = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        received = torch.empty_like(message)
        start = time.perf_counter()
        dist.all_to_all_single(received, message, group=group)
        self.count(
            exchange_wait_seconds=time.perf_counter() - start,
            exchanges=1,
            mask_bytes=self._row_bytes * (message.shape[0] - 1),
        )
        rows = received.view(torch.int64)[:, : self._words].tolist()
        announced = [self._read(words) for words in rows]
        if any(each.digest != own.digest for each in announced):
            raise LayoutsDiffer(announced)
        return self.masks_of(received), announced, [words[2] for words in rows]

    def send(
        self,
        group: dist.ProcessGroup,
        parcels: Parcels,
        received_sizes: Sequence[int],
        received_counts: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Send the parcels, and return the received elements in the order of ranks."""
        received = self._staging.take("received", sum(received_sizes))
        dist.all_to_all_single(received, parcels.content, list(received_sizes), parcels.sizes, group=group)
        sent_bytes = sum(parcels.sizes)
        self.count(messages=1, payload_bytes=sent_bytes, sent_bytes=sent_bytes)
        if parcels.uncoded_bytes:
            self.count(coded_steps=1, coded_bytes=sent_bytes, uncoded_bytes=parcels.uncoded_bytes)
        if list(received_sizes) == [count * dtype.itemsize for count in received_counts]:
            return received.view(dtype)
        start = time.perf_counter()
        elements = self._staging.take("elements", sum(received_counts) * dtype.itemsize).view(dtype)
        _C.decode_messages(elements, received, received_sizes, received_counts)
        self.count(hook_seconds=time.perf_counter() - start)
        return elements

    def receive_all(self, group: dist.ProcessGroup, flat: torch.Tensor) -> torch.Tensor:
        """Send each rank its part unchanged; return the elements of all ranks, including this one."""
        received = self._staging.take("received", flat.nbytes).view(flat.dtype)
        dist.all_to_all_single(received, flat, group=group)
        sent_bytes = flat.nbytes - flat.nbytes // dist.get_world_size(group)
        self.count(messages=1, payload_bytes=sent_bytes, sent_bytes=sent_bytes)
        return received

    def count(self, **counters: float) -> None:
        """Add to the statistics."""
        now = {name: getattr(self.statistics, name) + more for name, more in counters.items()}
        self.statistics = replace(self.statistics, **now)

    def _to_words(self, indices: frozenset[int]) -> list[int]:
        mask = sum(1 << i for i in indices)
        return [mask >> _BITS_OF_WORD * i & (1 << _BITS_OF_WORD) - 1 for i in range(self._set_words)]

    def _read(self, words: Sequence[int]) -> Announcement:
        def indices(masks: Sequence[int]) -> frozenset[int]:
            mask = sum(each << _BITS_OF_WORD * i for i, each in enumerate(masks))
            return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)

        sets = words[3:]
        return Announcement(words[0], words[1], indices(sets[: self._set_words]), indices(sets[self._set_words :]))


class ReduceScatter:
    """The reduce-scatters of one group of parameters.

    Args:
        columns: the space of each parameter in a part.
        names: the names of the parameters.
        policy: the policy.
        questions: what the policy asks of gradients.
        staging: memory for messages.
    """

    def __init__(
        self, columns: Sequence[Column], names: Sequence[str], policy: Policy, questions: Questions, staging: Staging
    ) -> None:
        self._columns, self._names, self._policy, self._questions = columns, names, policy, questions
        self._looks = Looks(policy, questions.always)
        self._layouts: Recent[tuple[tuple[int, ...], int], Layout] = Recent()
        # The layout of all parameters has the most units.
        most = max(
            Layout(columns, names, range(len(columns)), element_bytes, policy, questions.divides).units.mask_bytes
            for element_bytes in (2, 4, 8)
        )
        self._exchange = Exchange(staging, len(columns), most, Coding(policy, questions.coded))
        # Units of parts that travel unchanged, by number of elements.
        self._wholes: Recent[int, Any] = Recent()
        self.announced: list[Announcement] | None = None  # in the last reduction, if ranks exchanged masks

    @property
    def statistics(self) -> Statistics:
        """The bytes that this rank sent, and those that torch's reduce-scatter would have sent."""
        return self._exchange.statistics

    def __call__(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        participants: Participants,
    ) -> bool:
        """Reduce as torch would; return False on every rank if torch should do it.

        Raises:
            LayoutsDiffer: on every rank.
        """
        ranks, own, exchange = dist.get_world_size(group), dist.get_rank(group), self._exchange
        dense_bytes = (ranks - 1) * output.numel() * output.element_size()
        self.announced = None
        exchange.count(steps=1, dense_bytes=dense_bytes)
        can_be_ours = self._questions.any and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and output.dtype in DTYPES
        done = can_be_ours and (
            (self._looks.begin_step() and self._reduce(output, flat, group, participants, own, ranks, dense_bytes))
            or self._reduce_in_full(output, flat, group, own, ranks)
        )
        if not done:
            exchange.count(buckets_whole=1, messages=1, payload_bytes=dense_bytes, sent_bytes=dense_bytes)
        elif op == dist.ReduceOp.AVG:
            output.div_(ranks)
        return done

    def _reduce(
        self,
        output: torch.Tensor,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        participants: Participants,
        own: int,
        ranks: int,
        dense_bytes: int,
    ) -> bool:
        exchange, questions = self._exchange, self._questions
        start = time.perf_counter()
        layout = self._layout(participants.included, output.element_size())
        units = layout.units
        if units.numel != output.numel():
            raise RuntimeError(
                f"ddp_hooks.fsdp: expected {units.numel} elements to be reduced for each rank, received "
                f"{output.numel()}: this version of FSDP2 lays out gradients differently"
            )
        message = exchange.new_masks(ranks)
        own_masks = exchange.masks_of(message)
        known_zero = [questions.skip_unused and i not in participants.used for i in layout.parameters]
        units_sent = units.choose(own_masks, flat, own, questions.zeros, known_zero)
        parcels = exchange.pack(units, flat, own_masks, own)
        exchange.count(hook_seconds=time.perf_counter() - start)
        masks, self.announced, sizes = exchange.announce(
            group,
            message,
            Announcement(layout.digest, sum(parcels.sizes), participants.used, frozenset(participants.included)),
            parcels.sizes,
        )
        most = max(each.sent_bytes for each in self.announced)
        if not self._looks.observe(most, dense_bytes):
            return False
        received = torch.empty(0, dtype=output.dtype, device="cpu")
        if most > 0:
            received = exchange.send(group, parcels, sizes, units.sent_elements(masks), output.dtype)
        start = time.perf_counter()
        units.sum(output, flat, received, masks, own, order_of_ring(own, ranks))
        exchange.count(
            hook_seconds=time.perf_counter() - start,
            units_agreed_on=len(units) * (ranks - 1),
            units_sent=units_sent,
            skip_zeros_steps=int(self._policy.skip_zeros != "off"),
            skip_zero_rows_steps=int(self._policy.skip_zero_rows != "off"),
            buckets_packed=int(most > 0),
            buckets_skipped=int(most == 0),
        )
        return True

    def _reduce_in_full(
        self, output: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup, own: int, ranks: int
    ) -> bool:
        """Send full parts, if the group is gloo's, whose own reduce-scatter is an all-reduce of twice as many bytes."""
        if dist.get_backend(group) != "gloo":
            return False
        received = self._exchange.receive_all(group, flat)
        start = time.perf_counter()
        numel = output.numel()
        units = self._wholes.get(numel, lambda: _C.ShardUnits([(numel, numel)]))
        masks = torch.full((ranks, units.mask_bytes), 255, dtype=torch.uint8, device="cpu")
        units.sum(output, flat, received, masks, own, order_of_ring(own, ranks))
        self._exchange.count(hook_seconds=time.perf_counter() - start, buckets_whole=1)
        return True

    def _layout(self, included: tuple[int, ...], element_bytes: int) -> Layout:
        return self._layouts.get(
            (included, element_bytes),
            lambda: Layout(self._columns, self._names, included, element_bytes, self._policy, self._questions.divides),
        )


def order_of_ring(own: int, ranks: int) -> list[int]:
    """Return the order in which the part of rank ``own`` is added up: down from the rank before it, itself last.

    This is gloo's order, except for a few numbers where parts meet, because the segments of its ring begin slightly
    later.
    """
    return [(own - 1 - i) % ranks for i in range(ranks)]
