"""What ``auto`` sends once its detectors have settled: the same rules as the engine's, driven with what was watched.

The steps that were watched are repeated, over and over. Which units and which values are asked for follows from what
the ranks wrote down, as in csrc/detectors/units_detector.cpp and csrc/detectors/values_probe.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..policies import PRESETS, Policy
from .traffic import Traffic, UnionStep, UnitCost, World, mixed_traffic, unit_cost, units_traffic, who_matters

# So many units of a gradient are sampled, and on the CPU the beginnings of so many are looked at first.
_SAMPLED_UNITS, _GLANCED_UNITS = 64, 8
# Below this part of zero units nobody asks.
_LEAST_ZERO_UNITS = 1 / 8
# A GPU's host waits for answers, so more has to be gained (ddp_hooks/engine_settings.py).
_LEAST_ZEROS_ON_DEVICE = 0.25
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
class _Units:
    """What the engine knows of one parameter with several units."""

    next_step: int
    pause: int
    pays: bool = False
    objected: bool = True  # until the ranks have seen a gradient
    looked_at: bool = False  # on a device, since it was left alone


@dataclass(slots=True)
class _Probe:
    """When an adaptive policy reads whole gradients: csrc/detectors/values_probe.h."""

    policy: Policy
    least: float
    pause: int
    next_probe: int
    on_until: int = 0

    def wants_values(self, step: int) -> bool:
        return step < self.on_until or step >= self.next_probe

    def observe(self, step: int, used_bytes: int, zero_bytes: int) -> bool:
        """Take what a step found, and say whether it paid."""
        pays = zero_bytes > 0 and zero_bytes >= self.least * used_bytes
        if pays:
            self.on_until = step + 1 + self.policy.tuning.hold_steps
            self.pause = self.policy.tuning.first_pause_steps
        elif step >= self.on_until:
            self.pause = min(2 * self.pause, self.policy.tuning.longest_pause_steps)
        self.next_probe = max(self.on_until, step + 1) + self.pause
        return pays


@dataclass(slots=True)
class _Facts:
    """What is the same each time a step comes round."""

    step: UnionStep
    by_bucket: dict[int, list[int]]  # its parameters with several units, in the order of the bucket's slices
    costs: dict[int, UnitCost]
    objects: dict[int, bool]  # some rank's sample has too few zeros
    units: dict[tuple[int, ...], Traffic] = field(default_factory=dict)
    traffic: dict[tuple[frozenset[int], bool], list[Traffic]] = field(default_factory=dict)


class _Simulation:
    def __init__(self, steps: Sequence[UnionStep], world: World) -> None:
        self._policy = policy = PRESETS["auto"]
        self._world = world
        self._least = max(policy.tuning.min_zero_fraction, _LEAST_ZEROS_ON_DEVICE if world.is_on_device else 0.0)
        self._facts = [self._find_facts(step) for step in steps]
        self._units: dict[int, _Units] = {}
        self._probe = _Probe(policy, self._least, policy.tuning.first_pause_steps, policy.tuning.first_pause_steps)
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
        least = max(_LEAST_ZERO_UNITS, self._least)
        objects = {
            i: any(
                _objects(mask, step.slots[i].units, least, not self._world.is_on_device)
                for mask in step.units_by_rank(i)
            )
            for i in divisible
        }
        return _Facts(step, by_bucket, {i: unit_cost(step, i) for i in divisible}, objects)

    def _step(self, number: int, facts: _Facts) -> list[Traffic]:
        chosen = frozenset(i for i in facts.costs if self._is_chosen(i, number))
        values = self._probe.wants_values(number)
        traffic = self._traffic(facts, chosen, values)
        for bucket, parameters in facts.by_bucket.items():
            self._observe_units(number, facts, bucket, [i for i in parameters if i in chosen])
        if values:
            self._observe_values(number, facts.step, chosen)
        for index in facts.costs:
            self._look(number, self._units_of(index), index in chosen, facts.objects[index])
        return traffic

    def _look(self, number: int, units: _Units, is_chosen: bool, objects: bool) -> None:
        if is_chosen:
            units.looked_at = False
            return
        if self._world.is_on_device and units.looked_at and number >= units.next_step:
            self._leave_alone(number, units)
        units.looked_at = number + 1 >= units.next_step
        if units.looked_at:
            units.objected = objects

    def _leave_alone(self, number: int, units: _Units) -> None:
        units.next_step = number + 1 + units.pause
        units.pause = min(2 * units.pause, self._policy.tuning.longest_pause_steps)

    def _units_of(self, index: int) -> _Units:
        return self._units.setdefault(index, _Units(0, self._policy.tuning.first_pause_steps))

    def _is_chosen(self, index: int, number: int) -> bool:
        units = self._units_of(index)
        return units.pays or (number >= units.next_step and not units.objected)

    def _observe_units(self, number: int, facts: _Facts, bucket: int, chosen: Sequence[int]) -> None:
        who = who_matters(self._world, [facts.costs[i] for i in chosen], _element_bytes(facts.step, bucket))
        for index in chosen:
            cost, units = facts.costs[index], self._units_of(index)
            zeros = cost.length - cost.observed(who)
            units.pays = zeros > 0 and zeros >= self._least * cost.length
            if units.pays:
                units.pause = self._policy.tuning.first_pause_steps
                continue
            self._failed = True
            self._leave_alone(number, units)

    def _observe_values(self, number: int, step: UnionStep, chosen: frozenset[int]) -> None:
        used_bytes = zero_bytes = 0
        for index in step.used - chosen:
            slot = step.slots.get(index)
            if slot is None or slot.sparse:
                continue
            used_bytes += slot.length * slot.element_bytes
            zero_bytes += 0 if index in step.units else slot.length * slot.element_bytes
        if not self._probe.observe(number, used_bytes, zero_bytes) and number >= self._probe.on_until:
            self._failed = True

    def _traffic(self, facts: _Facts, chosen: frozenset[int], values: bool) -> list[Traffic]:
        found = facts.traffic.get((chosen, values))
        if found is None:
            units = [Traffic()] * len(facts.step.layout.buckets)
            for bucket, parameters in facts.by_bucket.items():
                some = tuple(i for i in parameters if i in chosen)
                if some and some not in facts.units:
                    facts.units[some] = units_traffic(facts.step, bucket, some, self._world)
                if some:
                    units[bucket] = facts.units[some]
            found = facts.traffic[chosen, values] = mixed_traffic(facts.step, chosen, values, units, self._world)
        return found


def _element_bytes(step: UnionStep, bucket: int) -> int:
    return int(step.layout.buckets[bucket].element_bytes)


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
