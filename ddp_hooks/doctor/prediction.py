"""Predicts what the hook would have sent in the watched steps, from the records of all ranks.

For ``skip_unused`` and ``skip_zeros``, the prediction is exact, because it makes the same plans from the same masks.
``auto`` turns its detectors on and off; for it, the prediction is what it sends once it has settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .settling import settle
from .traffic import Traffic, UnionStep, World, graph_traffic, mixed_traffic, units_traffic


@dataclass(frozen=True, slots=True)
class Prediction:
    """The bytes that a policy would have handed to collectives.

    Attributes:
        policy: its name.
        total: in all steps together.
        exact: whether the hook sends exactly that.
        by_step: for each step what leaves with each bucket, and last what leaves after backward.
    """

    policy: str
    total: Traffic
    exact: bool
    by_step: tuple[tuple[Traffic, ...], ...]


def dense_bytes(layout: Any) -> tuple[int, ...]:
    """Return the bytes that plain DDP hands over with each bucket."""
    return tuple(bucket.numel * bucket.element_bytes for bucket in layout.buckets)


def predict(steps: Sequence[UnionStep], unmanaged_bytes: dict[int, int], world: World) -> dict[str, Prediction]:
    """Return what each policy would have sent.

    Args:
        steps: the steps.
        unmanaged_bytes: of the parameters that DDP does not know, the bytes by index. The hook averages those that are
            unfrozen.
        world: who sends; one rank has nobody to send to.

    Returns:
        By the policy's name. Without a look at values there is ``skip_unused`` only.
    """
    names = ("skip_unused", "skip_zeros", "auto") if all(step.looked for step in steps) else ("skip_unused",)
    if world.ranks == 1:
        return {name: Prediction(name, Traffic(sent_bytes=(0,)), name != "auto", ((),) * len(steps)) for name in names}
    by_policy = {"skip_unused": [graph_traffic(step, world) for step in steps]}
    if "auto" in names:
        by_policy["skip_zeros"] = [_values_traffic(step, world) for step in steps]
        by_policy["auto"] = settle(steps, world)
    predictions = {}
    for name, traffic in by_policy.items():
        unmanaged = [sum(unmanaged_bytes.get(i, 0) for i in step.used) for step in steps]
        # Unmanaged parameters travel after backward, on the control group.
        whole = [
            (*by_bucket, Traffic(more, ring_bytes=more, messages=min(more, 1)))
            for by_bucket, more in zip(traffic, unmanaged, strict=True)
        ]
        total = Traffic(sent_bytes=(0,) * world.ranks)
        for step in whole:
            for one in step:
                total = total + one
        predictions[name] = Prediction(name, total, name != "auto", tuple(whole))
    return predictions


def _values_traffic(step: UnionStep, world: World) -> list[Traffic]:
    divided = step.divisible
    units = [Traffic()] * len(step.layout.buckets)
    for number, bucket in enumerate(step.layout.buckets):
        chosen = [piece.parameter for piece in bucket.slices if piece.parameter in divided]
        if chosen:
            units[number], _ = units_traffic(step, number, chosen, frozenset(), world)
    return mixed_traffic(step, divided, True, units, world)
