"""What ``auto`` sends once its detectors have settled: the engine's own detectors, driven with what was watched.

The steps that were watched are repeated, over and over. Which units and which values are asked for follows from what
the ranks wrote down, as in csrc/engine/engine.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _extension
from ..engine_settings import probe_settings, unit_settings
from ..policies import PRESETS
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


@dataclass(slots=True)
class _Facts:
    """What is the same each time a step comes round."""

    step: UnionStep
    by_bucket: dict[int, list[int]]  # its parameters with several units, in the order of the bucket's slices
    used: Any  # the parameters with several units, a ``_C.UsageMask``
    objects: dict[int, bool]  # some rank's sample has too few zeros
    units: dict[tuple[int, ...], tuple[Traffic, dict[int, tuple[float, float]]]] = field(default_factory=dict)
    traffic: dict[tuple[frozenset[int], bool], list[Traffic]] = field(default_factory=dict)


class _Simulation:
    def __init__(self, steps: Sequence[UnionStep], world: World) -> None:
        policy = PRESETS["auto"]
        probe = probe_settings(policy, is_on_device=world.is_on_device)
        self._world = world
        self._values = _C.ValuesProbe(probe)
        self._units = _C.UnitsDetector(
            rows=_C.ValuesDetector.ADAPTIVE,
            widths=_C.ValuesDetector.OFF,
            units=unit_settings(policy),
            probe=probe,
        )
        self._facts = [self._find_facts(step) for step in steps]
        self._layout: Any = None
        # Which of the detector's parameters some rank objects to; as on a rank that has not seen a gradient yet.
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
        least = self._units.least_zero_fraction()
        objects = {
            i: any(
                _objects(mask, step.slots[i].units, least, not self._world.is_on_device)
                for mask in step.units_by_rank(i)
            )
            for i in divisible
        }
        return _Facts(step, by_bucket, used, objects)

    def _use_layout(self, step: UnionStep) -> None:
        if self._layout is step.layout:
            return
        self._layout = step.layout
        self._units.use_layout(step.layout)
        divisible = sorted(i for i, slot in step.slots.items() if slot.units > 1 and not slot.sparse)
        if list(self._places) != divisible:
            self._places = {index: place for place, index in enumerate(divisible)}
            self._objections = _C.UsageMask(len(divisible), used=True)

    def _step(self, number: int, facts: _Facts) -> list[Traffic]:
        self._use_layout(facts.step)
        chosen = frozenset(self._units.choose(facts.used, self._objections, number)[0].indices())
        values = self._values.wants_values(number)
        traffic = self._traffic(facts, chosen, values)
        for bucket, parameters in facts.by_bucket.items():
            self._observe_units(number, facts, bucket, [i for i in parameters if i in chosen])
        if values:
            self._observe_values(number, facts.step, chosen)
        for index in facts.objects.keys() - chosen:
            if self._units.is_due(index, number + 1):
                self._object(index, facts.objects[index])
        return traffic

    def _object(self, index: int, objects: bool) -> None:
        (self._objections.set if objects else self._objections.clear)(self._places[index])

    def _observe_units(self, number: int, facts: _Facts, bucket: int, chosen: Sequence[int]) -> None:
        _, sent = self._units_traffic(facts, bucket, chosen)
        for index in chosen:
            if not self._units.observe(index, number, facts.step.slots[index].length, *sent[index]):
                self._failed = True

    def _units_traffic(
        self, facts: _Facts, bucket: int, chosen: Sequence[int]
    ) -> tuple[Traffic, dict[int, tuple[float, float]]]:
        key = tuple(chosen)
        if key not in facts.units:
            facts.units[key] = units_traffic(facts.step, bucket, key, self._world)
        return facts.units[key]

    def _observe_values(self, number: int, step: UnionStep, chosen: frozenset[int]) -> None:
        used_bytes = zero_bytes = 0
        for index in step.used - chosen:
            slot = step.slots.get(index)
            if slot is None or slot.sparse:
                continue
            used_bytes += slot.length * slot.element_bytes
            zero_bytes += 0 if index in step.units else slot.length * slot.element_bytes
        if not self._values.observe(number, used_bytes, zero_bytes):
            self._failed = True

    def _traffic(self, facts: _Facts, chosen: frozenset[int], values: bool) -> list[Traffic]:
        found = facts.traffic.get((chosen, values))
        if found is None:
            units = [Traffic()] * len(facts.step.layout.buckets)
            for bucket, parameters in facts.by_bucket.items():
                some = [i for i in parameters if i in chosen]
                if some:
                    units[bucket], _ = self._units_traffic(facts, bucket, some)
            found = facts.traffic[chosen, values] = mixed_traffic(facts.step, chosen, values, units, self._world)
        return found


def _objects(mask: int, units: int, least: float, glances: bool) -> bool:
    """Say whether a rank's sample of a gradient has too few zeros.

    At a glance, on the CPU, it sees the beginnings of a few units; here these count as zero where the whole unit is.
    """
    if glances and _zero_fraction(mask, units, _GLANCED_UNITS) == 0:
        return True
    return _zero_fraction(mask, units, _SAMPLED_UNITS) < least


def _zero_fraction(mask: int, units: int, count: int) -> float:
    taken = min(count, units)
    return sum(not mask >> (i * units // taken) & 1 for i in range(taken)) / max(taken, 1)
