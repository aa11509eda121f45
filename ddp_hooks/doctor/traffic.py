"""Computes what the hook hands over in a step, with its own plans, from the records of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from .. import _extension
from ..policies import PRESETS
from ..serving.engine_settings import plan_settings
from .recorder import EVERYTHING, SOMETHING, Slot, Step, unpack

_C = _extension.load()


@dataclass(frozen=True, slots=True)
class World:
    """What decides how gradients travel, apart from their content.

    Attributes:
        ranks: how many there are in the module's group.
        is_direct: what one rank alone contributes may leave the all-reduces: a group of gloo or NCCL, and a host for
            each rank.
        is_on_device: gradients lie on a device, where the host waits for what is asked of them.
    """

    ranks: int
    is_direct: bool = True
    is_on_device: bool = False

    @property
    def ring(self) -> float:
        """How many times the bytes of an all-reduce a rank sends, and receives."""
        return 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is sent with a bucket, or in a step.

    Attributes:
        payload_bytes: the gradients that travel, however they do. Bytes.
        broadcast_bytes: so many of them those ranks that have them send to the others. Bytes.
        narrow_bytes: so many of them travel in a narrow form. Bytes.
        sent_bytes: what each rank sends, as ``state.stats().sent_bytes`` counts. Bytes.
        ring_bytes: an all-reduce of so many would keep the busiest link as long. Bytes.
        messages: how many.
    """

    payload_bytes: int = 0
    broadcast_bytes: int = 0
    sent_bytes: tuple[int, ...] = ()
    ring_bytes: float = 0.0
    messages: int = 0
    narrow_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Return both together."""
        if not (self.sent_bytes and other.sent_bytes):
            sent = self.sent_bytes or other.sent_bytes
        else:
            sent = tuple(a + b for a, b in zip(self.sent_bytes, other.sent_bytes, strict=True))
        return Traffic(
            self.payload_bytes + other.payload_bytes,
            self.broadcast_bytes + other.broadcast_bytes,
            sent,
            self.ring_bytes + other.ring_bytes,
            self.messages + other.messages,
            self.narrow_bytes + other.narrow_bytes,
        )


@dataclass(frozen=True, slots=True)
class UnionStep:
    """One step, as all ranks together saw it.

    Attributes:
        used: the parameters that some rank used, as `skip_unused` counts.
        units: of those that hold a non-zero on some rank, which of their units do, as the bits of an integer.
        layout: the bucket layout (a ``_C.LayoutOfBuckets``).
        slots: where the parameters stand in it.
        looked: whether every rank looked at values.
        ranks: what each rank wrote down.
    """

    used: frozenset[int]
    units: dict[int, int]
    layout: Any
    slots: dict[int, Slot]
    looked: bool
    ranks: tuple[Step, ...]

    @property
    def divisible(self) -> frozenset[int]:
        """The used parameters that have more than one unit."""
        return frozenset(
            i for i in self.used if i in self.slots and self.slots[i].units > 1 and not self.slots[i].sparse
        )

    def inexact_by_rank(self, index: int) -> list[tuple[int, ...]]:
        """Return which units each of the slot's narrow forms does not hold, on each rank, as the bits of integers."""
        slot = self.slots[index]
        return [
            tuple(unpack(mask, slot.units) for mask in step.inexact[index])
            if index in step.inexact
            else (units_of_rank(step, index, slot),) * len(slot.forms)
            for step in self.ranks
        ]

    def narrow_elements(self, index: int) -> int:
        """Return how many elements that travel by units some narrow form holds on every rank."""
        slot = self.slots[index]
        if not any(index in step.inexact for step in self.ranks):
            return 0
        wide = self.units.get(index, 0)
        for ruled_out in zip(*self.inexact_by_rank(index), strict=True):
            by_any = 0
            for mask in ruled_out:
                by_any |= mask
            wide &= by_any
        return slot.elements_of(self.units.get(index, 0) & ~wide)

    @property
    def is_alike(self) -> bool:
        """Whether every rank announced the same parameters, so that nobody waits for the last bucket to ask more."""
        first = self.ranks[0]
        return all((step.sent, step.left_over) == (first.sent, first.left_over) for step in self.ranks)

    def units_by_rank(self, index: int) -> list[int]:
        """Return which units of a parameter hold a non-zero on each rank, as the bits of integers."""
        return [units_of_rank(step, index, self.slots[index]) for step in self.ranks]


def unite(steps: Sequence[Step], layout: Any, slots: dict[int, Slot]) -> UnionStep:
    """Put together the ranks' records of one step.

    Args:
        steps: each rank's.
        layout: the bucket layout of the step.
        slots: where the parameters stand in it.
    """
    used = frozenset(i for i in range(len(steps[0].sent)) if any(step.sent[i] for step in steps))
    units: dict[int, int] = {}
    for index, slot in slots.items():
        found = 0
        for step in steps:
            if step.values[index] == EVERYTHING:
                found = (1 << slot.units) - 1
                break
            found |= units_of_rank(step, index, slot)
        if found:
            units[index] = found
    return UnionStep(used, units, layout, slots, all(step.looked for step in steps), tuple(steps))


def units_of_rank(step: Step, index: int, slot: Slot) -> int:
    """Return which units of a parameter held a non-zero on one rank, as the bits of an integer."""
    if step.values[index] == EVERYTHING:
        return (1 << slot.units) - 1
    return unpack(step.masks[index], slot.units) if step.values[index] == SOMETHING else 0


def zero_units(step: UnionStep, index: int) -> float:
    """Return which part of a parameter's units is zero on every rank in a step."""
    slot = step.slots[index]
    return 1 - step.units.get(index, 0).bit_count() / max(slot.units, 1)


# --- units


def units_traffic(
    step: UnionStep, bucket: int, chosen: Sequence[int], widths: Set[int], world: World
) -> tuple[Traffic, dict[int, tuple[float, float]]]:
    """Return what is sent of the units of some parameters of one bucket.

    Args:
        step: the step.
        bucket: which.
        chosen: the parameters, in the order of the bucket's slices.
        widths: which of them are asked for the width of each unit.
        world: who sends.

    Returns:
        The traffic; and for each parameter how many of its elements are sent, counted at what their transports take of
        a ring's transfers, and how many these would be at full width, as the adaptive detector counts them.
    """
    element_bytes = step.layout.buckets[bucket].element_bytes
    settings = _plan_settings("skip_zeros", world)
    knows = world.is_direct and PRESETS["skip_zeros"].tuning.direct
    used: list[int] = []
    by_rank: list[list[int]] = [[] for _ in range(world.ranks if knows else 0)]

    def add(masks: Sequence[int], units: int) -> int:
        first_bit = 64 * len(used)
        union = 0
        for mask in masks:
            union |= mask
        used.extend(_words(union, units))
        for theirs, mask in zip(by_rank, masks, strict=False):
            theirs += _words(mask, units)
        return first_bit

    slots = [step.slots[index] for index in chosen]
    # As csrc/detectors/units_of_step.cpp puts masks together: what is used of all, then what is not exact.
    first_bits = [add(step.units_by_rank(index), slot.units) for index, slot in zip(chosen, slots, strict=True)]
    gradients: list[Any] = []
    for index, slot, first_bit in zip(chosen, slots, first_bits, strict=True):
        forms, first_inexact_bits = [_C.Width.FULL] * 2, [0, 0]
        if index in widths:
            for number, (form, masks) in enumerate(
                zip(slot.forms, zip(*step.inexact_by_rank(index), strict=True), strict=True)
            ):
                forms[number], first_inexact_bits[number] = form, add(masks, slot.units)
        gradients.append(_C.Units(slot.unit_length, slot.length, first_bit, forms, first_inexact_bits))
    everyone = [_C.UsageMask(64 * len(words), words) for words in by_rank]
    anyone = _C.UsageMask(64 * len(used), used)
    reduced, direct, sent = _C.make_unit_plan(gradients, anyone, element_bytes, settings, everyone)
    traffic = [_all_reduce(one.numel * element_bytes, world) for one in reduced]
    traffic += [_direct(one, element_bytes, world) for one in direct]
    return _sum(traffic), dict(zip(chosen, sent, strict=True))


# --- whole parameters


def graph_traffic(step: UnionStep, world: World) -> list[Traffic]:
    """Return what leaves with each bucket when whole parameters travel that somebody used."""
    return _planned(step, step.used, frozenset(), "skip_unused", world)


def mixed_traffic(
    step: UnionStep, divided: frozenset[int], values: bool, units: Sequence[Traffic], world: World
) -> list[Traffic]:
    """Return what leaves with each bucket when some parameters travel by units.

    Args:
        step: the step.
        divided: those parameters.
        values: whether of the others only those travel that hold a non-zero.
        units: what is sent of each bucket's units.
        world: who sends.
    """
    if values:
        rest = frozenset(i for i in step.used - divided if i in step.units)
        sizes = _moved(_planned_by_bucket(step, rest, divided, world), step)
    else:
        sizes = _planned(step, step.used - divided, divided, "skip_zeros", world)
    return [a + b for a, b in zip(sizes, _moved(units, step), strict=True)]


def _moved(sizes: Sequence[Traffic], step: UnionStep) -> list[Traffic]:
    # What needs an answer about a bucket's values leaves with the first buckets at once, then when the next bucket is
    # ready, and where ranks use different parameters when all are.
    last = len(step.layout.buckets) - 1
    moved = [Traffic()] * (last + 1)
    for number, size in enumerate(sizes):
        delay = 0 if number < step.layout.buckets_on_idle_link() else 1
        place = min(number + delay, last) if step.is_alike else last
        moved[place] = moved[place] + size
    return moved


def _planned(
    step: UnionStep, chosen: frozenset[int], divided: frozenset[int], policy: str, world: World
) -> list[Traffic]:
    # A rank that sends what its mask does not say would not be heard, so then all is all-reduced.
    said = world.is_direct and not any(one.left_over for one in step.ranks)
    by_rank = [_mask(step, {i for i in chosen if one.sent[i]}) for one in step.ranks] if said else []
    settings = _plan_settings(policy, world)
    plans = _C.make_reduction_plan(step.layout, _mask(step, chosen), settings, _mask(step, divided), by_rank)
    return [_traffic_of(step, plan, world) for plan in plans]


def _planned_by_bucket(step: UnionStep, chosen: frozenset[int], divided: frozenset[int], world: World) -> list[Traffic]:
    settings = _plan_settings("skip_zeros", world)
    plans = _C.plan_bucket_by_bucket(step.layout, _mask(step, chosen), settings, _mask(step, divided))
    return [_traffic_of(step, plan, world) for plan in plans]


def _traffic_of(step: UnionStep, plan: Any, world: World) -> Traffic:
    buckets = step.layout.buckets
    found = [
        _all_reduce(message.numel * buckets[message.stretches[0].place].element_bytes, world)
        for message in plan.launches
    ]
    for message in plan.direct:
        found.append(_direct(message, buckets[message.groups[0].parts[0].place].element_bytes, world))
    return _sum(found)


# --- messages


def _all_reduce(size: int, world: World) -> Traffic:
    return Traffic(size, 0, (2 * (world.ranks - 1) * size // world.ranks,) * world.ranks, size, 1)


def _direct(message: Any, element_bytes: int, world: World) -> Traffic:
    payload, narrow = message.bytes(element_bytes)
    # Of an all-gather every rank takes as much of each rank as of the one with the most.
    owned = message.for_all_bytes
    if message.is_gathered:
        owned = [max(owned)] * world.ranks
    sent = [(world.ranks - 1) * own for own in owned]
    received = [sum(owned) - own for own in owned]
    if message.is_summed:
        for rank in range(world.ranks):
            for group, size in zip(message.groups, message.contribution_bytes(rank, element_bytes), strict=True):
                if rank != group.owner:
                    sent[rank] += size
                    received[group.owner] += size
    # A link carries both directions at once.
    busiest = max(*sent, *received)
    broadcast, messages = (0, 2) if message.is_summed else (payload, 1)
    return Traffic(payload, broadcast, tuple(sent), busiest / world.ring, messages, narrow)


def _sum(parts: Iterable[Traffic]) -> Traffic:
    total = Traffic()
    for part in parts:
        total = total + part
    return total


# --- masks


@cache
def _plan_settings(name: str, world: World) -> Any:
    """Return a preset's settings for plans, as the engine of a module of that world has them."""
    return plan_settings(PRESETS[name], world.is_direct, world.ranks)


def _mask(step: UnionStep, chosen: Iterable[int]) -> Any:
    mask = _C.UsageMask(step.layout.parameter_count)
    for index in chosen:
        if index < step.layout.parameter_count:
            mask.set(index)
    return mask


def _words(mask: int, bits: int) -> list[int]:
    count = math.ceil(bits / 64)
    raw = mask.to_bytes(8 * count, "little")
    return [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(count)]
