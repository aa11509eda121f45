"""What the hook would have sent in the steps that were watched: a function of what all ranks wrote down.

For ``skip_unused`` and ``skip_zeros`` it is exact: the same plans, made of the same masks. ``auto`` has detectors that
turn themselves on and off; for it, what it comes to rest at is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _extension
from ..policies import PRESETS
from .recorder import EVERYTHING, SOMETHING, Slot, Step, unpack

_C = _extension.load()

# Of a gradient of which this much is used all is sent (csrc/layout/units.cpp).
_WHOLE = (15, 16)
# Below this part of zero units the adaptive detector does not ask (csrc/values/units_detector.cpp).
_LEAST_ZERO_UNITS = 1 / 8


@dataclass(frozen=True, slots=True)
class UnionStep:
    """One step as all ranks together saw it.

    Attributes:
        used: the parameters that some rank used, as the graph detector counts.
        units: of those that hold a non-zero on some rank, which of their units do, as the bits of an integer.
        layout: the bucket layout (a ``_C.LayoutOfBuckets``).
        slots: where the parameters stand in it.
        looked: whether every rank looked at values.
    """

    used: frozenset[int]
    units: dict[int, int]
    layout: Any
    slots: dict[int, Slot]
    looked: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a policy would have handed to collectives.

    Attributes:
        policy: its name.
        payload_bytes: over the steps. Bytes.
        exact: whether the hook sends exactly that.
        by_step: for each step the bytes that leave with each bucket.
    """

    policy: str
    payload_bytes: int
    exact: bool
    by_step: tuple[tuple[int, ...], ...]


def unite(steps: Sequence[Step], layout: Any, slots: dict[int, Slot]) -> UnionStep:
    """Put together what the ranks wrote down of one step.

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
            if step.values[index] == SOMETHING:
                found |= unpack(step.masks[index], slot.units)
        if found:
            units[index] = found
    return UnionStep(used, units, layout, slots, all(step.looked for step in steps))


def dense_bytes(layout: Any) -> tuple[int, ...]:
    """Return what plain DDP hands over with each bucket. Bytes."""
    return tuple(bucket.numel * bucket.element_bytes for bucket in layout.buckets)


def predict(steps: Sequence[UnionStep], late_bytes: dict[int, int], ranks: int) -> dict[str, Prediction]:
    """Say what each policy would have sent.

    Args:
        steps: the steps.
        late_bytes: of the parameters that DDP does not know, the bytes by index. The hook averages those that are
            thawed.
        ranks: the world size of the module's group; one rank has nobody to send to.

    Returns:
        By the policy's name. Without a look at values there is ``skip_unused`` only.
    """
    by_policy = {"skip_unused": [_graph_bytes(step) for step in steps]}
    if all(step.looked for step in steps):
        by_policy["skip_zeros"] = [_values_bytes(step, _divided(step), True) for step in steps]
        by_policy["auto"] = _settled_bytes(steps)
    predictions = {}
    for name, sizes in by_policy.items():
        late = [sum(late_bytes.get(i, 0) for i in step.used) for step in steps]
        # Late parameters travel after backward.
        whole = [(*by_bucket, more) for by_bucket, more in zip(sizes, late, strict=True)]
        if ranks == 1:
            whole = [tuple(0 for _ in by_bucket) for by_bucket in whole]
        predictions[name] = Prediction(name, sum(map(sum, whole)), name != "auto", tuple(whole))
    return predictions


def zero_units(step: UnionStep, index: int) -> float:
    """Return which part of a parameter's units is zero on every rank in a step."""
    slot = step.slots[index]
    return 1 - step.units.get(index, 0).bit_count() / max(slot.units, 1)


# --- bytes by bucket


def _plan_settings(name: str) -> Any:
    policy = PRESETS[name]
    return _C.PlanSettings(
        in_place_bytes=policy.in_place_bytes, pack_bytes=policy.pack_bytes, gap_fraction=policy.gap_fraction
    )


def _mask(step: UnionStep, chosen: frozenset[int]) -> Any:
    mask = _C.UsageMask(step.layout.parameter_count)
    for index in chosen:
        if index < step.layout.parameter_count:
            mask.set(index)
    return mask


def _launched(step: UnionStep, plans: Sequence[Any]) -> list[int]:
    buckets = step.layout.buckets
    return [
        sum(message.numel * buckets[message.slices[0].bucket].element_bytes for message in plan.launches)
        for plan in plans
    ]


def _graph_bytes(step: UnionStep) -> list[int]:
    return _launched(step, _C.make_wire_plan(step.layout, _mask(step, step.used), _plan_settings("skip_unused")))


def _divided(step: UnionStep) -> frozenset[int]:
    return frozenset(i for i in step.used if i in step.slots and step.slots[i].units > 1 and not step.slots[i].sparse)


def _values_bytes(step: UnionStep, divided: frozenset[int], values: bool) -> list[int]:
    rest = frozenset(i for i in step.used if i not in divided and (not values or i in step.units))
    mask, apart = _mask(step, rest), _mask(step, divided)
    settings = _plan_settings("skip_zeros")
    planner = _C.plan_bucket_by_bucket if values else _C.make_wire_plan
    sizes = _launched(step, planner(step.layout, mask, settings, apart))
    for index in divided:
        slot = step.slots[index]
        sizes[slot.bucket] += _sent_elements(slot, step.units.get(index, 0)) * slot.element_bytes
    return sizes


def _sent_elements(slot: Slot, mask: int) -> int:
    used = mask.bit_count() * slot.unit_length
    if mask >> (slot.units - 1) & 1:
        used -= slot.units * slot.unit_length - slot.length  # the last unit may be shorter
    return slot.length if used * _WHOLE[1] >= slot.length * _WHOLE[0] else used


def _settled_bytes(steps: Sequence[UnionStep]) -> list[list[int]]:
    """Say what `auto` sends once its detectors have settled: on where, over these steps, they pay."""
    least = PRESETS["auto"].min_zero_fraction
    candidates = frozenset(i for step in steps for i in _divided(step))
    paying = set()
    for index in candidates:
        sizes = [(step.slots[index], step.units.get(index, 0)) for step in steps if index in step.used]
        whole = sum(slot.length for slot, _ in sizes)
        sent = sum(_sent_elements(slot, mask) for slot, mask in sizes)
        units = sum(slot.units for slot, _ in sizes)
        zero = sum(slot.units - mask.bit_count() for slot, mask in sizes)
        if whole - sent >= least * whole and zero >= max(_LEAST_ZERO_UNITS, least) * units and whole > sent:
            paying.add(index)
    rest_bytes = zero_bytes = 0
    for step in steps:
        for index in step.used - paying:
            slot = step.slots.get(index)
            if slot is None:
                continue
            rest_bytes += slot.length * slot.element_bytes
            zero_bytes += 0 if index in step.units else slot.length * slot.element_bytes
    values = zero_bytes > 0 and zero_bytes >= least * rest_bytes
    return [_values_bytes(step, _divided(step) & frozenset(paying), values) for step in steps]
