"""Begins to serve a module: its ranks meet, agree, open control groups, and each makes a service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .. import _extension
from ..policies import Policy
from .absentees import meet_to_register
from .agreement import propose, settle
from .control_groups import ControlGroups, new_name, open_control_groups
from .ddp_methods import keep_place
from .disabling import DisabledService, check_alike, disabled_service, is_disabled, warn_of_it
from .endpoints import Endpoint, find_endpoint
from .hosts_on_streams import with_hosts_on_streams
from .modules import describe, parameters_of, why_not_coded, why_unsupported
from .service import REGISTERED, Service, groups_to_share, registered_service
from .topology import topology_of

_C = _extension.load()


def serve(
    ddp: DistributedDataParallel,
    function: str,
    policy: Policy,
    problem: str | None,
    *,
    hook: Callable[..., Any],
    state: object,
    native: bool,
) -> Service | DisabledService:
    """Serve a module; every rank of its process group calls it.

    Args:
        ddp: the module.
        function: the public function that every rank has called.
        policy: the policy, which every rank must have chosen.
        problem: why this rank cannot take part, or None.
        hook: the function that DDP calls, or would call, with ``state``.
        state: the state that the hook is registered with.
        native: let the Reducer call the engine itself.

    Returns:
        The service, or one that does nothing if the hook is disabled on every rank.

    Raises:
        RanksAbsentError: some ranks did not call it within the group's timeout.
        RefusedError: on every rank, if some rank has a problem or cannot serve its module, or if ranks differ.
    """
    meet_to_register(ddp.process_group, function)
    groups = _agree(ddp, function, policy, problem)
    service: Service | DisabledService
    if groups is None:
        service = DisabledService(ddp, state)
        warn_of_it()
    else:
        service = Service(ddp, policy, groups, hook=hook, state=state, native=native)
    keep_place(ddp)
    return service


def service_of(ddp: DistributedDataParallel) -> Service | DisabledService | None:
    """Return the service of a module whose hook is registered with DDP, or what takes its place; otherwise None."""
    return disabled_service(ddp) if is_disabled() else registered_service(ddp)


def _agree(ddp: DistributedDataParallel, function: str, policy: Policy, problem: str | None) -> ControlGroups | None:
    """Make sure that all ranks can serve the module in the same way, and open its groups, or share existing ones.

    Returns:
        The groups; None if the hook is disabled on every rank.

    Raises:
        RefusedError: on every rank, if some rank has a problem or an unsupported module, or if ranks differ.
    """
    if is_disabled():
        proposals = propose(ddp, function, {}, problem)
        check_alike(function, [each.own is None for each in proposals])
        settle(function, proposals)
        return None
    problem = problem or why_unsupported(ddp) or why_not_coded(policy, ddp)
    # An unsupported module may lack some of what is described.
    description = {} if problem else {REGISTERED: "no", **describe(policy, ddp, *parameters_of(ddp))}
    sharable = groups_to_share(ddp)
    own = (new_name(), tuple(find_endpoint(ddp.process_group)), tuple(sharable))
    proposals = propose(ddp, function, description, problem, own)
    check_alike(function, [each.own is None for each in proposals])
    offers = settle(function, proposals)
    endpoints = [Endpoint(*endpoint) for _, endpoint, _ in offers]
    # Ranks differ in which of the services that share groups still exist.
    shared = set(sharable).intersection(*(theirs for _, _, theirs in offers))
    groups = sharable[min(shared)] if shared else open_control_groups(ddp, function, offers[0][0], endpoints)
    # Not those of another service: it may have gone on some ranks.
    groups = replace(groups, topology=topology_of(ddp.process_group, ddp.device, endpoints), on_streams=None)
    return with_hosts_on_streams(ddp, function, f"{offers[0][0]}/hosts", groups, policy)
