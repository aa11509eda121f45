"""Translates a policy into the settings of an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from ..statistics import Statistics
from ..wording import describe_bytes

_C = _extension.load()

_WHEN = {"off": _C.When.OFF, "on": _C.When.ON, "adaptive": _C.When.ADAPTIVE}
# A guess, not measured on a GPU yet: a quarter of the bytes makes up for a host that no longer runs ahead.
_MIN_ZERO_FRACTION_ON_DEVICE = 0.25
# The largest set of ranks that a message can describe (csrc/layout/contributors.h).
_MOST_RANKS = 64
# Reasons why adaptive policies send nothing narrow.
SHARED_HOSTS = "several ranks share a host"
FAST_LINKS = "calibrate=True measured that sending full width is faster than making gradients narrow"


def engine_settings(
    policy: Policy, description: Mapping[str, str], hosts: Sequence[Sequence[int]], costs: Any = None
) -> Any:
    """Translate a policy for the engine of one module.

    Args:
        policy: the policy.
        description: what all ranks of the module have in common. The engine's messages carry a hash of it.
        hosts: the ranks of each host.
        costs: measured times of collectives on the module's process group, a ``_C.CollectiveCosts``; None if there are
            none.

    Returns:
        A ``_C.EngineSettings``.
    """
    if not policy.tuning.calibrate:
        costs = None
    digest = hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=8).digest()
    return _C.EngineSettings(
        skip_unused=policy.skip_unused,
        skip_zeros=_WHEN[policy.skip_zeros],
        skip_zero_rows=_WHEN[policy.skip_zero_rows],
        narrow=_WHEN[policy.narrow],
        units=unit_settings(policy),
        # The engine takes the number of ranks from the module's group.
        plan=plan_settings(policy, may_send_directly(hosts, costs), 1, costs),
        adaptive=adaptive_settings(policy, is_on_device=description.get("device", "cpu") != "cpu"),
        rebuild_after=policy.rebuild_after,
        configuration=int.from_bytes(digest, "little"),
    )


def may_send_directly(hosts: Sequence[Sequence[int]], costs: Any = None) -> bool:
    """Say whether gradients may be sent directly instead of being all-reduced.

    Without measured times, bytes decide. They count what each rank sends, so they are meaningful only if every rank has
    a host, and therefore a link, of its own.

    Args:
        hosts: the ranks of each host.
        costs: measured times of collectives, or None.
    """
    return costs is not None or all(len(ranks) == 1 for ranks in hosts)


def why_nothing_is_narrow(
    policy: Policy,
    hosts: Sequence[Sequence[int]],
    costs: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    parameters: Sequence[torch.Tensor],
) -> str:
    """Say why gradients travel at full width whatever their values, which the engine decides from its settings.

    Args:
        policy: the policy.
        hosts: the ranks of each host.
        costs: measured times of collectives, or None.
        group: the module's process group.
        device: the module's device.
        parameters: the parameters in its Reducer.

    Returns:
        A clause; empty if there is no such reason, or if the policy does not ask for narrow gradients.
    """
    ranks = group.size()
    if policy.narrow == "off" or ranks == 1:
        return ""
    if not policy.tuning.calibrate:
        costs = None
    if not policy.tuning.direct:
        return "narrow gradients need direct=True"
    if not may_send_directly(hosts, costs):
        return SHARED_HOSTS
    if ranks > _MOST_RANKS:
        return f"narrow gradients need at most {_MOST_RANKS} ranks, and there are {ranks}"
    if not _C.can_send_directly(group, device):
        return "narrow gradients need a gloo or NCCL process group"
    if policy.narrow == "adaptive" and costs is not None and not costs.narrow_pays(ranks):
        return FAST_LINKS
    if all(parameter.dtype.itemsize <= 2 for parameter in parameters):
        return "every gradient has 16 bits or fewer"
    settings = unit_settings(policy)
    if all(_is_one_unit(parameter, settings) for parameter in parameters):
        return f"every parameter has less than {describe_bytes(settings.min_divided_bytes)}"
    return ""


def _is_one_unit(parameter: torch.Tensor, settings: Any) -> bool:
    length = parameter.numel() * (2 if parameter.is_complex() else 1)
    row_length = length // parameter.shape[0] if length > 0 and parameter.dim() > 0 else 0
    element_bytes = parameter.numel() * parameter.element_size() // max(length, 1)
    return len(_C.units_of(_C.ParameterSlice(0, 0, length, row_length), element_bytes, settings)) <= 1


def why_little_is_narrow(policy: Policy, counted: Statistics) -> str:
    """Say why gradients travelled at full width because of their values.

    Args:
        policy: the policy.
        counted: the counters since this policy is in force.

    Returns:
        A clause; empty if the reason is unknown, or if the policy does not ask for narrow gradients.
    """
    # The sample of the first step decides for the second step.
    if policy.narrow == "off" or counted.steps < 2:
        return ""
    if counted.accumulated_steps:
        return (
            f"{counted.accumulated_steps:,} of {counted.steps:,} steps sent sums of several passes, which need full "
            "width"
        )
    if counted.narrow_bytes:
        return ""
    if counted.units_narrow:
        return "sending narrow gradients in separate messages would save too little"
    if counted.narrow_steps:
        return "gradients needed all of their bits"
    return "samples of the gradients needed all of their bits"


def _constants(policy: Policy, *names: str) -> dict[str, Any]:
    """Return the constants of the engine that a test has changed. Users cannot change them."""
    return {name: getattr(policy.tuning, name) for name in names if hasattr(policy.tuning, name)}


def plan_settings(policy: Policy, may_be_direct: bool, world_size: int, costs: Any = None) -> Any:
    """Return a ``_C.PlanSettings``, which says how used gradients travel.

    Args:
        policy: the policy.
        may_be_direct: whether gradients may be sent directly, if the policy allows it.
        world_size: the number of ranks.
        costs: measured times of collectives, or None.
    """
    return _C.PlanSettings(
        in_place_bytes=policy.tuning.in_place_bytes,
        pack_bytes=policy.tuning.pack_bytes,
        direct=_C.DirectSettings(
            direct=policy.tuning.direct and may_be_direct,
            world_size=world_size,
            owners=policy.tuning.owners,
            segment_bytes=policy.tuning.segment_bytes,
            costs=_C.CollectiveCosts() if costs is None else costs,
            **_constants(policy, "min_direct_bytes", "min_owner_saving"),
        ),
        **_constants(policy, "gap_fraction"),
    )


def unit_settings(policy: Policy) -> Any:
    """Return a ``_C.UnitSettings``, which says how gradients are divided into units."""
    return _C.UnitSettings(
        min_unit_bytes=policy.tuning.min_unit_bytes,
        max_unit_bytes=policy.tuning.max_unit_bytes,
        **_constants(policy, "min_divided_bytes"),
    )


def adaptive_settings(policy: Policy, *, is_on_device: bool) -> Any:
    """Return a ``_C.AdaptiveSettings``, which says when adaptive settings look at values."""
    # On a GPU, the host stays at most one bucket ahead of a scan's answer, so zeros must save more.
    least_zeros = _MIN_ZERO_FRACTION_ON_DEVICE if is_on_device else 0.0
    return _C.AdaptiveSettings(
        min_zero_fraction=max(policy.tuning.min_zero_fraction, least_zeros),
        **_constants(policy, "hold_steps", "first_pause_steps", "longest_pause_steps"),
    )
