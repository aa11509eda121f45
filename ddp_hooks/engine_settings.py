"""What a policy is to the engine of a module."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from . import _extension
from .policies import Policy

_C = _extension.load()

_DETECTOR = {
    "off": _C.ValuesDetector.OFF,
    "on": _C.ValuesDetector.ON,
    "adaptive": _C.ValuesDetector.ADAPTIVE,
}
# A guess until it is measured on a GPU: a quarter of the bytes for a host that no longer runs ahead.
_MIN_ZERO_FRACTION_ON_DEVICE = 0.25


def engine_settings(policy: Policy, description: Mapping[str, str]) -> Any:
    """Translate a policy for the engine of one module.

    Args:
        policy: the policy.
        description: what the module's ranks have in common; the engine's messages carry a hash of it.

    Returns:
        A ``_C.EngineSettings``.
    """
    # On a GPU the answer of a scan holds the host back to one bucket behind the device, so more has to be gained.
    least_zeros = 0.0 if description.get("device", "cpu") == "cpu" else _MIN_ZERO_FRACTION_ON_DEVICE
    digest = hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=8).digest()
    return _C.EngineSettings(
        graph_detector=policy.graph,
        values_detector=_DETECTOR[policy.values],
        units_detector=_DETECTOR[policy.units],
        units=_C.UnitSettings(
            min_divided_bytes=policy.min_divided_bytes,
            min_unit_bytes=policy.min_unit_bytes,
            max_unit_bytes=policy.max_unit_bytes,
        ),
        plan=_C.PlanSettings(
            in_place_bytes=policy.in_place_bytes,
            pack_bytes=policy.pack_bytes,
            gap_fraction=policy.gap_fraction,
            direct=_C.DirectSettings(
                allowed=policy.direct,
                world_size=1,  # the engine asks the module's group
                owners=policy.owners,
                segment_bytes=policy.segment_bytes,
                min_bytes=policy.min_direct_bytes,
            ),
        ),
        probe=_C.ProbeSettings(
            min_zero_fraction=max(policy.min_zero_fraction, least_zeros),
            hold_steps=policy.hold_steps,
            first_pause_steps=policy.first_pause_steps,
            longest_pause_steps=policy.longest_pause_steps,
        ),
        rebuild_after_steps=policy.rebuild_after,
        averages_contributors=policy.average == "contributors",
        configuration=int.from_bytes(digest, "little"),
    )
