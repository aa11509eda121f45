"""What a policy is to the engine of a module."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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


def engine_settings(
    policy: Policy, description: Mapping[str, str], hosts: Sequence[Sequence[int]], costs: Any = None
) -> Any:
    """Translate a policy for the engine of one module.

    Args:
        policy: the policy.
        description: what the module's ranks have in common; the engine's messages carry a hash of it.
        hosts: the ranks of each host.
        costs: what collectives take on the module's process group, a ``_C.CollectiveCosts``; None without a
            measurement.

    Returns:
        A ``_C.EngineSettings``.
    """
    if not policy.tuning.calibrate:
        costs = None
    digest = hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=8).digest()
    return _C.EngineSettings(
        graph_detector=policy.skip_unused,
        values_detector=_DETECTOR[policy.skip_zeros],
        rows_detector=_DETECTOR[policy.skip_zero_rows],
        widths_detector=_DETECTOR[policy.narrow],
        units=unit_settings(policy),
        plan=_C.PlanSettings(
            in_place_bytes=policy.tuning.in_place_bytes,
            pack_bytes=policy.tuning.pack_bytes,
            gap_fraction=policy.tuning.gap_fraction,
            direct=_C.DirectSettings(
                allowed=policy.tuning.direct and may_send_directly(hosts, costs),
                world_size=1,  # the engine asks the module's group
                sums=policy.tuning.owners,
                least_saving_of_sums=policy.tuning.min_owner_saving,
                segment_bytes=policy.tuning.segment_bytes,
                min_bytes=policy.tuning.min_direct_bytes,
                costs=_C.CollectiveCosts() if costs is None else costs,
            ),
        ),
        probe=probe_settings(policy, is_on_device=description.get("device", "cpu") != "cpu"),
        rebuild_after_steps=policy.rebuild_after,
        configuration=int.from_bytes(digest, "little"),
    )


def may_send_directly(hosts: Sequence[Sequence[int]], costs: Any = None) -> bool:
    """Say whether anything may leave the all-reduces, which is decided by bytes where nothing was measured.

    Transports count what ranks send, so bytes only decide where each rank has a host, and thereby a link, of its own.

    Args:
        hosts: the ranks of each host.
        costs: what collectives take, or None.
    """
    return costs is not None or all(len(ranks) == 1 for ranks in hosts)


def unit_settings(policy: Policy) -> Any:
    """Return into what units gradients fall under a policy: a ``_C.UnitSettings``."""
    return _C.UnitSettings(
        min_divided_bytes=policy.tuning.min_divided_bytes,
        min_unit_bytes=policy.tuning.min_unit_bytes,
        max_unit_bytes=policy.tuning.max_unit_bytes,
    )


def probe_settings(policy: Policy, *, is_on_device: bool) -> Any:
    """Return when an adaptive detector asks: a ``_C.ProbeSettings``."""
    # On a GPU the answer of a scan holds the host back to one bucket behind the device, so more has to be gained.
    least_zeros = _MIN_ZERO_FRACTION_ON_DEVICE if is_on_device else 0.0
    return _C.ProbeSettings(
        min_zero_fraction=max(policy.tuning.min_zero_fraction, least_zeros),
        hold_steps=policy.tuning.hold_steps,
        first_pause_steps=policy.tuning.first_pause_steps,
        longest_pause_steps=policy.tuning.longest_pause_steps,
    )
