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
from .topology import MOST_IN_SET, Topology

_C = _extension.load()

_WHEN = {"off": _C.When.OFF, "on": _C.When.ON, "adaptive": _C.When.ADAPTIVE, "auto": _C.When.ADAPTIVE}
# A guess, not measured on a GPU yet: a quarter of the bytes makes up for a host that no longer runs ahead.
_MIN_ZERO_FRACTION_ON_DEVICE = 0.25
# What it takes to code a byte of a gradient and to decode one; coding has to save more time than that on the link. With
# two hosts on two cores, a byte took 0.5e-9 s of a step at 1 Gbit/s and 1.1e-9 s at 10 Gbit/s, where gloo needs the
# cores (benchmarks/results.md). With more cores it takes less.
_CODING_SECONDS_PER_BYTE = 0.6e-9
# With less than this fraction saved, a second phase or adding up on every rank costs more (csrc/layout/transports.cpp).
_LEAST_CODED_SAVING = 0.1
# Assumed if no rank knows the speed of its network interface, as is usual in virtual machines.
_USUAL_LINK_MBITS = 10_000
# Numbers of more bytes are not coded (csrc/plan/reduction_plan.cpp).
_MOST_CODED_ELEMENT_BYTES = 4
# Reasons why policies code nothing.
SHARED_HOSTS = "several ranks share a host"
ON_DEVICES = "only gradients on the CPU are coded, over gloo"
_UNEVEN_HOSTS = "hosts have different numbers of ranks"


def engine_settings(
    policy: Policy,
    description: Mapping[str, str],
    topology: Topology,
) -> Any:
    """Translate a policy for the engine of one module.

    Args:
        policy: the policy.
        description: what all ranks of the module have in common. The engine's messages carry a hash of it.
        topology: its ranks' hosts.

    Returns:
        A ``_C.EngineSettings``.
    """
    is_on_device = description.get("device", "cpu") != "cpu"
    digest = hashlib.blake2b(repr(sorted(description.items())).encode(), digest_size=8).digest()
    return _C.EngineSettings(
        skip_unused=policy.skip_unused,
        skip_zeros=_WHEN[policy.skip_zeros],
        skip_zero_rows=_WHEN[policy.skip_zero_rows],
        coded=_C.When.OFF if why_links_need_no_code(policy, topology) else _WHEN[policy.coded],
        least_coded_saving=least_coded_saving(topology.link_mbits),
        units=unit_settings(policy),
        # The engine takes the number of ranks from the module's group.
        plan=plan_settings(policy, topology.counts_bytes, 1, is_on_device=is_on_device),
        adaptive=adaptive_settings(policy, is_on_device=is_on_device),
        rebuild_after=policy.rebuild_after,
        configuration=int.from_bytes(digest, "little"),
        **_constants(policy, "opening_bytes"),
    )


def why_links_need_no_code(policy: Policy, topology: Topology) -> str:
    """Say why nothing is coded because of hosts and links, as a clause; empty if there is no such reason."""
    if not topology.counts_bytes:
        return SHARED_HOSTS if len(topology.hosts) == 1 else _UNEVEN_HOSTS
    if policy.coded == "auto" and least_coded_saving(topology.link_mbits) >= 1:
        speed = "" if topology.link_mbits is None else f" ({topology.link_mbits:,} Mbit/s)"
        return f"the network{speed} is faster than coding"
    return ""


def least_coded_saving(link_mbits: int | None) -> float:
    """Return the fraction of the bytes on the link that coding has to save to be worth its time.

    Args:
        link_mbits: the speed of the slowest host's network interface, in Mbit/s; None if it is unknown.
    """
    mbits = _USUAL_LINK_MBITS if link_mbits is None else link_mbits
    return max(_LEAST_CODED_SAVING, _CODING_SECONDS_PER_BYTE * mbits / 8e-6)


def why_nothing_is_coded(
    policy: Policy,
    topology: Topology,
    group: dist.ProcessGroup,
    device: torch.device,
    parameters: Sequence[torch.Tensor],
) -> str:
    """Say why no gradient is coded whatever its values, which the engine decides from its settings.

    Returns:
        A clause; empty if there is no such reason, or if the policy does not ask for coded gradients.
    """
    if policy.coded == "off" or group.size() == 1:
        return ""
    if not policy.tuning.direct:
        return "coded gradients need direct=True"
    if why := why_links_need_no_code(policy, topology):
        return why
    hosts = len(topology.hosts)
    if hosts > MOST_IN_SET:
        return f"coded gradients need at most {MOST_IN_SET} hosts, and there are {hosts}"
    if not _C.can_code(group, device, hosts):
        return ON_DEVICES
    real_bytes = [parameter.element_size() // (2 if parameter.is_complex() else 1) for parameter in parameters]
    if all(size > _MOST_CODED_ELEMENT_BYTES for size in real_bytes):
        return "numbers of 64 bits are not coded"
    return ""


def why_little_is_coded(policy: Policy, counted: Statistics) -> str:
    """Say why gradients were not coded because of their values.

    Args:
        policy: the policy.
        counted: the counters since this policy is in force.

    Returns:
        A clause; empty if the reason is unknown, or if the policy does not ask for coded gradients.
    """
    # What the first step saves decides for the second one.
    if policy.coded == "off" or counted.steps < 2:
        return ""
    if counted.coded_steps == 0:
        return "no step had enough gradients that could be"
    return "coding the others would have saved too little" if counted.coded_steps < counted.steps - 1 else ""


def _constants(policy: Policy, *names: str) -> dict[str, Any]:
    """Return the constants of the engine that a test has changed. Users cannot change them."""
    return {name: getattr(policy.tuning, name) for name in names if hasattr(policy.tuning, name)}


def plan_settings(policy: Policy, may_be_direct: bool, world_size: int, *, is_on_device: bool) -> Any:
    """Return a ``_C.PlanSettings``, which says how used gradients travel.

    Args:
        policy: the policy.
        may_be_direct: whether gradients may be sent directly, if the policy allows it.
        world_size: the number of ranks.
        is_on_device: whether gradients are on another device than the CPU.
    """
    owners = policy.tuning.owners
    return _C.PlanSettings(
        in_place_bytes=policy.tuning.in_place_bytes,
        pack_bytes=policy.tuning.pack_bytes,
        direct=_C.DirectSettings(
            direct=policy.tuning.direct and may_be_direct,
            world_size=world_size,
            owners=not is_on_device if owners is None else owners,
            segment_bytes=policy.tuning.segment_bytes,
            **_constants(policy, "min_direct_bytes", "min_owner_saving"),
        ),
        # On a device, copies are nearly free, and a collective is not.
        one_message_per_bucket=is_on_device,
        **_constants(policy, "gap_fraction"),
    )


def unit_settings(policy: Policy) -> Any:
    """Return a ``_C.UnitSettings``, which says how gradients are divided into units."""
    return _C.UnitSettings(
        min_unit_bytes=policy.tuning.min_unit_bytes,
        max_unit_bytes=policy.tuning.max_unit_bytes,
        **_constants(policy, "min_divided_bytes"),
    )


def adaptive_settings(policy: Policy, *, is_on_device: bool, least_saving: float = 0.0) -> Any:
    """Return a ``_C.AdaptiveSettings``, which says when adaptive settings look at values.

    Args:
        policy: the policy.
        is_on_device: whether gradients are on another device than the CPU.
        least_saving: the fraction of the bytes that a look has to save at least.
    """
    # On a GPU, the host stays at most one bucket ahead of a scan's answer, so zeros must save more.
    least_zeros = _MIN_ZERO_FRACTION_ON_DEVICE if is_on_device else 0.0
    return _C.AdaptiveSettings(
        min_zero_fraction=max(policy.tuning.min_zero_fraction, least_zeros, least_saving),
        **_constants(policy, "hold_steps", "first_pause_steps", "longest_pause_steps"),
    )
