"""Registers modules that FSDP2 manages; their states have statistics and usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._version import __version__
from ..policies import Policy, resolve
from ..serving.agreement import exchange_proposals, settle
from ..serving.control_groups import GroupsOfHosts, new_name, open_groups_of_hosts
from ..serving.disabling import VARIABLE, check_alike, is_disabled, warn_of_it
from ..serving.endpoints import Endpoint, find_endpoint
from ..serving.engine_settings import ON_DEVICES, least_coded_saving, why_links_need_no_code
from ..serving.topology import Topology, topology_of
from ..statistics import ParameterUsage, Statistics
from ..wording import short
from . import param_groups
from .devices import DeviceReduceScatter
from .exchange import DIFFERS_IN_HOST, Announcement, LayoutsDiffer, Questions, Staging
from .hosts import AverageOverHosts
from .param_groups import ParamGroup, Participants
from .reduction import ReduceScatter, participants_of_host
from .routes import Route, open_routes

_FUNCTION = "ddp_hooks.fsdp.register"
_CPU = torch.device("cpu")


class ShardState:
    """The result of :func:`ddp_hooks.fsdp.register`: statistics and usage of a module with ``fully_shard``."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[ParamGroup],
        topologies: Mapping[str, Topology],
        groups_of_hosts: Mapping[str, GroupsOfHosts],
        mesh: DeviceMesh | None,
        routes: Mapping[str, Route],
    ) -> None:
        self._policy, self.mesh = policy, mesh
        hosts = None if mesh is None else mesh.get_group(0)
        self._staging = Staging(groups[0].device if groups else _CPU)
        self._opened: list[GroupsOfHosts | Route] = [*groups_of_hosts.values(), *routes.values()]
        self._served = [
            _ServedGroup(self, group, policy, topologies, groups_of_hosts, self._staging, hosts, routes)
            for group in groups
        ]
        self._earlier, self._earlier_of_hosts = Statistics(), Statistics()
        device_types = {group.device_type for group in groups}
        reducing = [group.process_group for group in groups]
        self._why_uncoded = _why_uncoded(policy, topologies, reducing, device_types)
        self._why_uncoded_of_hosts = _why_uncoded(policy, topologies, [hosts], device_types)
        self._is_open = True

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    def stats(self) -> Statistics:
        """Return the counters since registration, or since :meth:`reset_stats`. They are this rank's own.

        Returns:
            Bytes are those that this rank sends in reduce-scatters: ``payload_bytes`` were sent, ``dense_bytes`` would
            be sent in full. If ranks of a host add up first, both count what leaves the host after that. A bucket is
            one reduce-scatter. All-gathers of parameters are not counted.
        """
        return replace(self._total() - self._earlier, why_uncoded=self._why_uncoded)

    def host_stats(self) -> Statistics:
        """Return the same counters for the averages over hosts; all are zero unless a mesh was passed.

        Returns:
            ``dense_bytes`` are those that a ring all-reduce over hosts would send.
        """
        counted = self._total_of_hosts() - self._earlier_of_hosts
        return replace(counted, why_uncoded=self._why_uncoded_of_hosts)

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._earlier, self._earlier_of_hosts = self._total(), self._total_of_hosts()

    def usage(self) -> dict[str, ParameterUsage]:
        """Return how each parameter was used in its last reduction on this rank, by name.

        Returns:
            ``ranks`` are the ranks with a gradient, if they exchanged codes in that step. Otherwise, and if hosts
            average or ranks of a host add up, it is None, and ``used_anywhere`` is True for everything that was sent.
            Empty before the first step.
        """
        return {usage.name: usage for served in self._served for usage in served.usage()}

    def close(self) -> None:
        """Remove everything that was installed. Every rank calls it, between the same steps.

        The module then trains as plain FSDP2. If a mesh was passed, each host then trains by itself.
        """
        if self._is_open:
            for served in self._served:
                served.group.remove()
            for opened in self._opened:
                opened.close()
            self._staging.clear()
        self._is_open = False

    def _total(self) -> Statistics:
        return _sum([served.reduce_scatter.statistics for served in self._served])

    def _total_of_hosts(self) -> Statistics:
        return _sum([served.over_hosts.statistics for served in self._served if served.over_hosts is not None])

    def __repr__(self) -> str:
        """Name the policy, and whether the state serves a module."""
        return f"ShardState(policy={self._policy.name!r}, {'attached' if self._is_open else 'closed'})"


def _questions(policy: Policy, topology: Topology) -> Questions:
    """Return what a policy asks of the gradients that a process group carries."""
    is_worth_code = not why_links_need_no_code(policy, topology)
    return Questions.of(policy, least_coded_saving(topology.link_mbits) if is_worth_code else None)


def _why_uncoded(
    policy: Policy,
    topologies: Mapping[str, Topology],
    process_groups: Sequence[dist.ProcessGroup | None],
    device_types: Iterable[str],
) -> str:
    """Say why no gradient is coded; empty if some are, or if the policy does not ask for it."""
    found = [topologies[name] for name in map(_name_of, process_groups) if name in topologies]
    if found and policy.coded == "auto" and not {*device_types} <= {"cpu"}:
        return ON_DEVICES
    reasons = [why_links_need_no_code(policy, topology) for topology in found]
    return reasons[0] if policy.coded == "auto" and reasons and all(reasons) else ""


def _sum(counted: Sequence[Statistics]) -> Statistics:
    total = Statistics()
    for each in counted:
        total += each
    # Otherwise, each group would count the step again.
    steps: dict[str, Any] = {
        name: max((getattr(each, name) for each in counted), default=0)
        for name in ("steps", "coded_steps", "skip_zeros_steps", "skip_zero_rows_steps")
    }
    return replace(total, **steps)


class _ServedGroup:
    """A group of parameters with its reductions, and how its parameters were used."""

    def __init__(
        self,
        owner: ShardState,
        group: ParamGroup,
        policy: Policy,
        topologies: Mapping[str, Topology],
        groups_of_hosts: Mapping[str, GroupsOfHosts],
        staging: Staging,
        hosts: dist.ProcessGroup | None,
        routes: Mapping[str, Route],
    ) -> None:
        self.group = group
        columns = group.columns()
        self._ranks = [] if group.process_group is None else dist.get_process_group_ranks(group.process_group)
        name = _name_of(group.process_group)
        questions = _questions(policy, topologies.get(name, Topology()))
        by_host = groups_of_hosts.get(name)
        route = routes.get(name, Route())
        self._adds_up_in_hosts = by_host is not None or route.hosts is not None
        self.reduce_scatter: ReduceScatter
        if group.device_type == "cpu":
            self.reduce_scatter = ReduceScatter(columns, group.names, policy, questions, staging, by_host)
            group.install(self._reduce, owner, self._finish)
        else:
            self.reduce_scatter = on_device = DeviceReduceScatter(group, route, policy, staging)
            group.install(self._reduce, owner, self._finish, on_device.dtype_of_memory)
        self.over_hosts = None
        if hosts is not None:
            numel = sum(column.length for column in columns)
            questions = _questions(policy, topologies[_name_of(hosts)])
            self.over_hosts = AverageOverHosts(hosts, group.names, numel, policy, questions, staging)
        self._last: Participants | None = None
        self._announced: list[Announcement] | None = None
        self._announced_now: list[Announcement] | None = None
        if self.over_hosts is not None:
            group.install_hook(self._average_over_hosts)

    def _reduce(self, output: torch.Tensor, flat: torch.Tensor, process_group: dist.ProcessGroup, op: Any) -> bool:
        participants = self.group.participants
        if participants is None:  # not called from the group's own backward
            return False
        try:
            return self.reduce_scatter(output, flat, process_group, op, participants)
        except LayoutsDiffer as error:
            members = range(len(self._ranks)) if error.ranks is None else error.ranks
            who = [f"rank {self._ranks[member]}" for member in members]
            raise RuntimeError(self._describe(error.announced, who)) from None
        finally:
            self._announced_now = self.reduce_scatter.announced

    def _average_over_hosts(self, shard: torch.Tensor) -> None:
        participants = self.group.participants
        if self.over_hosts is None or participants is None:
            raise RuntimeError("ddp_hooks.fsdp: a gradient was reduced outside its group's backward pass")
        if not self.group.reduces_everywhere:
            raise RuntimeError(
                "ddp_hooks.fsdp: expected set_requires_all_reduce(True) with a mesh of hosts, because gradients that "
                "are left out once are never averaged; accumulate with set_requires_gradient_sync(False)"
            )
        if len(self._ranks) > 1:
            participants = participants_of_host(participants, self._announced_now)
        try:
            # FSDP2 divides only by the ranks of a host, unless a divisor was set.
            local_ranks = None if self.group.divides_by_itself else max(len(self._ranks), 1)
            self.over_hosts(shard, participants, local_ranks, self.group.sums_alone)
        except LayoutsDiffer as error:
            who = [f"host {host}" for host in range(len(error.announced))]
            raise RuntimeError(self._describe(error.announced, who)) from None
        self._announced_now = self.over_hosts.announced

    def _finish(self, participants: Participants) -> None:
        self._last = participants
        self._announced, self._announced_now = self._announced_now, None

    def _describe(self, announced: Sequence[Announcement], who: Sequence[str]) -> str:
        anywhere = frozenset().union(*(each.included for each in announced))
        lines = []
        for one, each in zip(who, announced, strict=True):
            if each.digest == DIFFERS_IN_HOST:
                lines.append(f"{one} and others on its host differ")
            missing = sorted(anywhere - each.included)
            if missing:
                names = ", ".join(self.group.names[i] for i in missing[:5]) + (", ..." if len(missing) > 5 else "")
                lines.append(f"{one} has no gradient of {names}")
        if not lines:
            names = ", ".join(self.group.names[:3]) + (", ..." if len(self.group.names) > 3 else "")
            lines.append(f"ranks are reducing different modules, this one the module of {names}")
        return (
            f"ddp_hooks.fsdp: the ranks hold gradients of different parameters: {'; '.join(lines)}. "
            "Plain FSDP2 would mix them up or hang; call set_reduce_scatter_unused_params(True) on the module; "
            "ddp_hooks then sends nothing for unused parameters"
        )

    def usage(self) -> Iterator[ParameterUsage]:
        """Return how each parameter was used in the last reduction."""
        if self._last is None:
            return
        for i, name in enumerate(self.group.names):
            ranks = None
            used_anywhere = i in self._last.included
            if self._announced is not None:
                who = [place for place, each in enumerate(self._announced) if i in each.used]
                used_anywhere = bool(who)
                if self.over_hosts is None and not self._adds_up_in_hosts:
                    ranks = tuple(self._ranks[place] for place in who)
            yield ParameterUsage(
                name,
                self.group.numel(i),
                used_here=i in self._last.used,
                used_anywhere=used_anywhere,
                frozen=self.group.is_frozen(i),
                ranks=ranks,
            )


def register(
    module: nn.Module, policy: Policy | str = "auto", *, mesh: DeviceMesh | None = None, **settings: Any
) -> ShardState:
    """Let FSDP2's reduce-scatters skip zeros, and send fewer bits where that is lossless. Every rank calls it.

    Call it once between two steps, after the last ``fully_shard``. Gradients are those of plain FSDP2, bitwise on two
    ranks, and up to the order of additions on more. Calling it again with the same policy returns the existing state.

    Args:
        module: the root module to which ``torch.distributed.fsdp.fully_shard`` was applied, or the result of
            ``torch.compile`` for it. It must be on the CPU, with gloo, or on a GPU, where nothing is coded:
            gradients in bfloat16 that are summed in float32 are sent in 16 bits, and ranks of a host add up first.
        policy: what to skip; the same on every rank. ``"auto"`` decides from the savings of earlier steps, the same on
            every rank. ``"skip_unused"`` skips parameters without a gradient, and reads none. ``"skip_zeros"`` skips
            zeros. ``"allreduce"`` only counts bytes.
        mesh: a mesh of hosts x ranks per host, if ``fully_shard`` was applied over its second dimension only. Shards
            are then averaged over its first dimension, as in HSDP, but without zeros, and in fewer bits where that is
            lossless. On a GPU, all of them are sent. For ``replicate``, a mesh whose second dimension has one rank.
        settings: fields of :class:`ddp_hooks.Policy` or of :class:`ddp_hooks.Tuning` to set differently.

    Returns:
        The state, with statistics and usage by name.

    Raises:
        TypeError: FSDP2 does not manage the module; the message says what it is.
        ValueError: a setting is out of range, or has no meaning here.
        RefusedError: on every rank of the default process group, if some rank's module cannot be served, another rank
            raised one of these errors, or ranks differ.
        RuntimeError: this torch has another FSDP2, or the module is registered with another policy.
    """
    registration = _Registration(module, policy, mesh, settings)
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise registration.error or RuntimeError(f"{_FUNCTION}: expected an initialized process group, found none")
    registration.exchange(world)
    others = [group for group in registration.process_groups if _name_of(group) != _name_of(world)]
    for process_group in others:
        try:
            registration.exchange(process_group)
        except Exception as error:  # kept until every rank knows
            registration.keep(error)
    if others:
        registration.exchange(world)
    if is_disabled():
        warn_of_it()
        return ShardState(registration.policy, [], {}, {}, None, {})
    if registration.known is not None:
        return registration.known
    routes = registration.open_routes(world) if registration.is_on_device else {}
    opened = registration.groups_of_hosts
    return ShardState(registration.policy, registration.groups, registration.topologies, opened, mesh, routes)


class _Registration:
    """A rank's part of a registration. Its problems are exchanged before any rank raises.

    Attributes:
        policy: the policy; ``auto`` until it is known to be valid.
        groups: the groups of parameters.
        known: the existing state of the module, or None.
        process_groups: the process groups of its reductions, each once, in the same order on every rank.
        topologies: for each process group that has exchanged, by name, the hosts of its ranks.
        groups_of_hosts: the groups that were opened because ranks share hosts, by the name of the process group.
        error: the exception to raise on this rank, while the others raise a RefusedError.
    """

    def __init__(
        self, module: nn.Module, policy: Policy | str, mesh: DeviceMesh | None, settings: Mapping[str, Any]
    ) -> None:
        self.policy = resolve("auto")
        self.groups: list[ParamGroup] = []
        self.known: ShardState | None = None
        self.process_groups: list[dist.ProcessGroup] = []
        self.topologies: dict[str, Topology] = {}
        self.groups_of_hosts: dict[str, GroupsOfHosts] = {}
        self.error: Exception | None = None
        self._problem: str | None = None
        self._description: dict[str, str] = {}
        self._reducing: set[str] = set()  # the names of process groups that reduce-scatter
        self._device = _CPU
        try:
            self._look(module, policy, mesh, settings)
        except Exception as error:
            self.keep(error)

    def keep(self, error: Exception) -> None:
        """Let the next exchange raise this error, and tell every other rank."""
        if self._problem is None:
            self.error, self._problem = error, f"{type(error).__name__}: {error}"

    def exchange(self, process_group: dist.ProcessGroup) -> None:
        """Raise on every rank of the group if one of them has a problem, or if they differ.

        Otherwise, open groups over which its ranks add up in hosts, if they will.
        """
        is_ours = any(_name_of(process_group) == _name_of(each) for each in self.process_groups)
        description = self._description if is_ours else {}
        own = (tuple(find_endpoint(process_group)), is_disabled(), new_name())
        offers = exchange_proposals(process_group, _FUNCTION, description, self._problem, own)
        check_alike(_FUNCTION, [each.own[1] for each in offers])
        settled = settle(_FUNCTION, offers, self.error)
        endpoints = [Endpoint(*endpoint) for endpoint, *_ in settled]
        name = _name_of(process_group)
        topology = topology_of(process_group, self._device, endpoints)
        # Averages over hosts are those of one rank each.
        can_add_up = name in self._reducing and (topology.can_add_up or self._is_on_streams(process_group))
        self.topologies[name] = topology = replace(topology, can_add_up=can_add_up)
        is_served = self.known is None and not is_disabled() and _questions(self.policy, topology).any
        if self.is_on_device or not is_served or not topology.adds_up_in_hosts or name in self.groups_of_hosts:
            return
        ranks = SimpleNamespace(process_group=process_group, device=_CPU, device_type=_CPU.type)
        opened = open_groups_of_hosts(ranks, _FUNCTION, settled[0][2], topology, endpoints)
        self.groups_of_hosts[name] = opened

    @property
    def is_on_device(self) -> bool:
        """Whether gradients are on another device than the CPU."""
        return self._device.type != "cpu"

    def _is_on_streams(self, process_group: dist.ProcessGroup) -> bool:
        """Say whether a group puts collectives on streams of a device; with gloo, the host would wait for them."""
        return self.is_on_device and process_group._get_backend(self._device).name() != "gloo"

    def open_routes(self, world: dist.ProcessGroup) -> dict[str, Route]:
        """Open what ranks on a device need to reduce, by the name of the process group. Collective over ``world``.

        Raises:
            RefusedError: on every rank, if some rank could not open it.
        """
        narrows, looks = self.policy.coded != "off", Questions.on_device(self.policy).zeros
        serving = {
            _name_of(group): group
            for group in self.process_groups
            if _name_of(group) in self._reducing
            and (narrows or looks)
            and group.size() > 1
            and self._is_on_streams(group)
        }
        narrow = {
            name: [each for each in self.groups if narrows and _name_of(each.process_group) == name and each.widens]
            for name in serving
        }
        routes = open_routes(world, _FUNCTION, serving, self.topologies, narrow, looks, self._device, self.keep)
        try:
            self.exchange(world)  # which raises what could not be opened
        except Exception:
            for route in routes.values():
                route.close()
            raise
        return routes

    def _look(
        self, module: nn.Module, policy: Policy | str, mesh: DeviceMesh | None, settings: Mapping[str, Any]
    ) -> None:
        groups = self.groups = param_groups.find(module)
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"{_FUNCTION}: expected mesh to be a DeviceMesh or None, received {short(mesh)}")
        self.policy = _resolve(policy, settings)
        known = next((owner for group in groups if isinstance(owner := group.owner, ShardState)), None)
        if known is not None and all(group.owner is known for group in groups):
            for name, has, received in (("policy", known.policy, self.policy), ("mesh", known.mesh, mesh)):
                if has != received:
                    raise RuntimeError(
                        f"{_FUNCTION}: the module is already registered with {name}={has!r}, received "
                        f"{received!r}; close() that state first"
                    )
            self.known = known
        elif problem := _why_not_disabled(mesh) if is_disabled() else _why_unsupported(groups, mesh):
            self._problem = problem
            return
        self._device = groups[0].device
        hosts = None if mesh is None else mesh.get_group(0)
        reducing = [group.process_group for group in groups]
        self._reducing = {_name_of(each) for each in reducing}
        found = {_name_of(each): each for each in [*reducing, hosts]}
        self.process_groups = [each for each in found.values() if each is not None]
        self._description = _describe(self.policy, groups, mesh, self.known)


def _resolve(policy: Policy | str, settings: Mapping[str, Any]) -> Policy:
    chosen = resolve(policy, settings, _FUNCTION)
    if chosen.rebuild_after:
        raise ValueError(
            f"{_FUNCTION}: expected rebuild_after=0, received {chosen.rebuild_after}: FSDP2 has nothing to rebuild"
        )
    return chosen


def _why_not_disabled(mesh: DeviceMesh | None) -> str | None:
    if mesh is None:
        return None
    return (
        f"the environment variable {VARIABLE} is set, and without ddp_hooks nothing would average over the hosts of "
        "the mesh; unset it, or apply fully_shard over both dimensions of the mesh and do not register"
    )


def _why_unsupported(groups: Sequence[ParamGroup], mesh: DeviceMesh | None) -> str | None:
    for group in groups:
        if problem := group.why_unsupported() or _why_not_over_hosts(group, mesh):
            return problem
    return None


def _why_not_over_hosts(group: ParamGroup, mesh: DeviceMesh | None) -> str | None:
    way_out = "over the second dimension of a mesh of hosts x ranks per host, and pass that mesh to register"
    if mesh is None:
        if group.process_group is None:
            return f"FSDP2 itself all-reduces parameters under replicate(); apply it {way_out}"
        return None
    if mesh.ndim != 2:
        return f"expected a mesh of two dimensions, hosts x ranks per host, received one of {mesh.ndim}"
    if group.replicas is not None and dist.get_world_size(group.replicas) > 1:
        return f"FSDP2 itself averages over hosts here; apply fully_shard or replicate {way_out}"
    local = group.process_group or group.replicas
    if local is None or dist.get_process_group_ranks(local) != dist.get_process_group_ranks(mesh.get_group(1)):
        return "expected fully_shard over the second dimension of the mesh, but it is applied over other ranks"
    if group.has_hook:
        return "an all-reduce hook is already set, and FSDP2 takes only one; do not set it"
    return None


def _name_of(process_group: dist.ProcessGroup | None) -> str:
    return "" if process_group is None else process_group.group_name


def _describe(
    policy: Policy, groups: Sequence[ParamGroup], mesh: DeviceMesh | None, known: ShardState | None
) -> dict[str, str]:
    columns = [column for group in groups for column in group.columns()]
    return {
        "ddp_hooks": __version__,
        "torch": torch.__version__,
        "policy": repr(policy),
        "parameters": f"{len(columns)} in {len(groups)} groups, with {sum(column.length for column in columns)} "
        "elements per rank",
        "gradients": f"on {', '.join(sorted({group.device_type for group in groups}))}, those of "
        f"{sum(group.widens for group in groups)} groups in bfloat16 before they are reduced in float32",
        "mesh": "none" if mesh is None else str(tuple(mesh.mesh.shape)),
        "module": "not registered" if known is None else "already registered",
    }
