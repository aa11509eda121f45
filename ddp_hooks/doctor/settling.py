"""Finds what ``auto`` sends once it has settled, by driving the engine's own detectors with the watched steps.

The watched steps are repeated many times. The ranks' records decide which units and which values are asked for, as in
csrc/engine/engine_buckets.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import _extension
from ..policies import PRESETS
from ..serving.engine_settings import adaptive_settings, unit_settings
from .traffic import Traffic, UnionStep, World, mixed_traffic, units_traffic

_C = _extension.load()

# csrc/kernels/unit_sample.cpp: so many units of a gradient are sampled, and on the CPU the beginnings of so many are
# looked at first.
_SAMPLED_UNITS, _GLANCED_UNITS = 64, 8
# So long the steps are repeated: pauses between probes in vain have grown beyond most recordings by then. And so long
# at least, even if nothing has changed for two cycles: that takes in the first probes of everything.
_MOST_STEPS = 640
_LEAST_STEPS = 256
_LEAST_CYCLES = 4


def settle(steps: Sequence[UnionStep], world: World) -> list[list[Traffic]]:
    """Return for each step what leaves with each bucket.

    It is a whole cycle of the steps in which nothing was asked in vain, the last one. Where something pays in some of
    them only, so that there is no such cycle, it is the one that comes closest to the mean.

    Args:
        steps: what was watched.
        world: who sends.
    """
    return _Simulation(steps, world).run()


class _Objections(NamedTuple):
    """Whether some rank's sample of a parameter has too few units that are zero, or narrow."""

    to_rows: bool
    to_widths: bool


class _Chosen(NamedTuple):
    """Which parameters are agreed on by units, and which of them are asked for the width of each unit."""

    parameters: frozenset[int]
    widths: frozenset[int]


@dataclass(slots=True)
class _Facts:
    """What is the same each time a step comes round."""

    step: UnionStep
    by_bucket: dict[int, list[int]]  # its parameters with several units, in the order of the bucket's slices
    used: Any  # the parameters with several units, a ``_C.UsageMask``
    objects: dict[int, _Objections]
    units: dict[tuple[tuple[int, ...], frozenset[int]], tuple[Traffic, dict[int, tuple[float, float]]]] = field(
        default_factory=dict
    )
    traffic: dict[tuple[_Chosen, bool], list[Traffic]] = field(default_factory=dict)


class _Simulation:
    def __init__(self, steps: Sequence[UnionStep], world: World) -> None:
        policy = PRESETS["auto"]
        adaptive = adaptive_settings(policy, is_on_device=world.is_on_device)
        self._world = world
        # As Engine::fitted: what is narrow does not go round a ring.
        self._asks_widths = world.is_direct and policy.tuning.direct and not world.is_on_device
        self._values = _C.AdaptiveRule(adaptive, looks_after_pay=adaptive.hold_steps, starts_paused=True)
        self._units = _C.UnitsDetector(
            skip_zero_rows=_C.When.ADAPTIVE,
            narrow=_C.When.ADAPTIVE if self._asks_widths else _C.When.OFF,
            units=unit_settings(policy),
            adaptive=adaptive,
        )
        self._facts = [self._find_facts(step) for step in steps]
        self._layout: Any = None
        # What some rank objects to of the detector's parameters, first to their rows and then to their widths; as on a
        # rank that has not seen a gradient yet.
        self._places: dict[int, int] = {}
        self._objections = _C.UsageMask(0)
        self._failed = False

    def run(self) -> list[list[Traffic]]:
        cycles = max(_LEAST_CYCLES, -(-_MOST_STEPS // len(self._facts)))
        seen: list[list[list[Traffic]]] = []
        best: list[list[Traffic]] | None = None
        for cycle in range(cycles):
            self._failed = False
            first = cycle * len(self._facts)
            sent = [self._step(first + place, facts) for place, facts in enumerate(self._facts)]
            seen.append(sent)
            if not self._failed:
                settled = best is not None and all(a is b for a, b in zip(best, sent, strict=True))
                best = sent
                if settled and cycle + 1 >= _LEAST_CYCLES and first >= _LEAST_STEPS:
                    break
        if best is not None:
            return best
        late = seen[len(seen) // 2 :]
        totals = [sum(one.payload_bytes for step in cycle for one in step) for cycle in late]
        mean = sum(totals) / len(totals)
        return min(zip(totals, late, strict=True), key=lambda pair: abs(pair[0] - mean))[1]

    def _find_facts(self, step: UnionStep) -> _Facts:
        divisible = step.divisible
        by_bucket: dict[int, list[int]] = {}
        for number, bucket in enumerate(step.layout.buckets):
            found = [piece.parameter for piece in bucket.slices if piece.parameter in divisible]
            if found:
                by_bucket[number] = found
        used = _C.UsageMask(step.layout.parameter_count)
        for index in divisible:
            used.set(index)
        return _Facts(step, by_bucket, used, {i: self._find_objections(step, i) for i in divisible})

    def _find_objections(self, step: UnionStep, index: int) -> _Objections:
        units = step.slots[index].units
        objections = _Objections(False, False)
        for used, inexact in zip(step.units_by_rank(index), step.inexact_by_rank(index), strict=True):
            # Of each form, the units that it holds and that are not zero.
            narrow = [used & ~mask for mask in inexact] if self._asks_widths else []
            # At a glance, on the CPU, a rank sees the beginnings of a few units; here the whole ones count.
            if not self._world.is_on_device and not any(
                _sampled(mask, units, _GLANCED_UNITS) for mask in (~used, *narrow)
            ):
                return _Objections(True, True)
            zero_fraction = _sampled(~used, units, _SAMPLED_UNITS)
            narrow_fraction = max((_sampled(mask, units, _SAMPLED_UNITS) for mask in narrow), default=0.0)
            objections = _Objections(
                objections.to_rows or zero_fraction < self._units.least_zero_fraction(),
                # A rank without a gradient has nothing against it.
                objections.to_widths or (used != 0 and narrow_fraction < self._units.least_narrow_fraction()),
            )
        return objections

    def _use_layout(self, step: UnionStep) -> None:
        if self._layout is step.layout:
            return
        self._layout = step.layout
        self._units.use_layout(step.layout)
        divisible = sorted(i for i, slot in step.slots.items() if slot.units > 1 and not slot.sparse)
        if list(self._places) != divisible:
            self._places = {index: place for place, index in enumerate(divisible)}
            self._objections = _C.UsageMask(len(divisible) * (2 if self._asks_widths else 1), used=True)

    def _step(self, number: int, facts: _Facts) -> list[Traffic]:
        self._use_layout(facts.step)
        chosen = _Chosen(
            *(frozenset(mask.indices()) for mask in self._units.choose(facts.used, self._objections, number))
        )
        values = self._values.is_due(number)
        traffic = self._traffic(facts, chosen, values)
        for bucket in facts.by_bucket:
            self._observe_units(number, facts, bucket, chosen)
        if values:
            self._observe_values(number, facts.step, chosen.parameters)
        for index in facts.objects.keys() - chosen.parameters:
            if self._units.is_due(index, number + 1):
                self._object(self._places[index], facts.objects[index])
        return traffic

    def _object(self, place: int, objections: _Objections) -> None:
        for bit, objects in zip(range(place, len(self._objections), len(self._places)), objections, strict=False):
            (self._objections.set if objects else self._objections.clear)(bit)

    def _observe_units(self, number: int, facts: _Facts, bucket: int, chosen: _Chosen) -> None:
        _, sent = self._units_traffic(facts, bucket, chosen)
        for index in sent:
            if not self._units.observe(index, number, facts.step.slots[index].length, *sent[index]):
                self._failed = True

    def _units_traffic(
        self, facts: _Facts, bucket: int, chosen: _Chosen
    ) -> tuple[Traffic, dict[int, tuple[float, float]]]:
        of_bucket = tuple(i for i in facts.by_bucket[bucket] if i in chosen.parameters)
        key = of_bucket, chosen.widths.intersection(of_bucket)
        if key not in facts.units:
            facts.units[key] = units_traffic(facts.step, bucket, *key, self._world) if of_bucket else (Traffic(), {})
        return facts.units[key]

    def _observe_values(self, number: int, step: UnionStep, chosen: frozenset[int]) -> None:
        used_bytes = zero_bytes = 0
        for index in step.used - chosen:
            slot = step.slots.get(index)
            if slot is None or slot.sparse:
                continue
            used_bytes += slot.length * slot.element_bytes
            zero_bytes += 0 if index in step.units else slot.length * slot.element_bytes
        was_on = self._values.is_on()
        if not self._values.observe(number, zero_bytes, used_bytes) and not was_on:
            self._failed = True

    def _traffic(self, facts: _Facts, chosen: _Chosen, values: bool) -> list[Traffic]:
        found = facts.traffic.get((chosen, values))
        if found is None:
            units = [Traffic()] * len(facts.step.layout.buckets)
            for bucket in facts.by_bucket:
                units[bucket], _ = self._units_traffic(facts, bucket, chosen)
            found = facts.traffic[chosen, values] = mixed_traffic(
                facts.step, chosen.parameters, values, units, self._world
            )
        return found


def _sampled(mask: int, units: int, count: int) -> float:
    """Return which part of a sample of units has its bit in the mask; bits above the units do not count."""
    taken = min(count, units)
    return sum(mask >> (i * units // taken) & 1 for i in range(taken)) / max(taken, 1)
