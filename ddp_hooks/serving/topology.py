"""Which ranks share a host, and how gradients travel between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from .. import _extension
from ..policies import Policy
from .endpoints import Endpoint, group_by_host, slowest_link

_C = _extension.load()

# The largest set of ranks or hosts that a message can describe (csrc/layout/contributors.h).
MOST_IN_SET = 64


@dataclass(frozen=True, slots=True)
class Topology:
    """The hosts of a module's ranks, as the ranks found them out when it was registered; ``print`` it as a table."""

    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host, in the order of their first ranks."""
    names: tuple[str, ...] = ()
    """The name of each host."""
    link_mbits: int | None = None
    """The speed of the slowest host's network interface, in Mbit/s; None if no rank knows its own."""
    can_add_up: bool = False
    """Whether ranks of a host could add up what they have before it leaves the host: on CPUs, over gloo; on a device
    what few hosts have, if the policy asks for it."""
    is_on_streams: bool = False
    """Whether collectives are put on streams of a device."""

    def under(self, policy: Policy) -> Topology:
        """Return the topology with what a policy asks for."""
        # Nobody has measured on a device whether it pays that ranks sum for others. Masks travel from every rank there,
        # and of many ranks it is not known who contributes.
        asks = policy.skip_unused and policy.tuning.direct and policy.tuning.owners is True
        return replace(self, can_add_up=True) if self.is_on_streams and asks and not self._has_many_ranks else self

    @property
    def _has_many_ranks(self) -> bool:
        return sum(map(len, self.hosts)) > MOST_IN_SET

    @property
    def has_one_rank_each(self) -> bool:
        """Whether every rank has a host of its own."""
        return all(len(ranks) == 1 for ranks in self.hosts)

    @property
    def adds_up_in_hosts(self) -> bool:
        """Whether ranks of a host add up what they have: there are several hosts, each with as many ranks."""
        sizes = {len(ranks) for ranks in self.hosts}
        return self.can_add_up and len(self.hosts) > 1 and len(sizes) == 1 and sizes != {1}

    @property
    def counts_bytes(self) -> bool:
        """Whether the bytes that cross between hosts follow from who contributes."""
        return self.has_one_rank_each or self.adds_up_in_hosts

    def __str__(self) -> str:
        """Show the ranks of each host, and how gradients cross between hosts."""
        width = max(4, *(len(name) for name in self.names))
        lines = [f"{'host':<{width}}  ranks"]
        lines += [
            f"{name:<{width}}  {' '.join(map(str, ranks))}" for name, ranks in zip(self.names, self.hosts, strict=True)
        ]
        speed = "unknown" if self.link_mbits is None else f"{self.link_mbits:,} Mbit/s"
        return "\n".join([*lines, f"{self._scheme()}; slowest network interface: {speed}"])

    def _scheme(self) -> str:
        if len(self.hosts) == 1:
            return "one host: gradients are all-reduced"
        if self.has_one_rank_each:
            return f"{len(self.hosts)} hosts with a rank each"
        if len({len(ranks) for ranks in self.hosts}) > 1:
            return "hosts with different numbers of ranks: gradients are all-reduced"
        each = f"{len(self.hosts)} hosts with {len(self.hosts[0])} ranks each"
        if self.adds_up_in_hosts:
            what = "what few hosts use before it" if self.is_on_streams else "before anything"
            return f"{each}, which add up {what} leaves"
        reason = "they are not on CPUs over gloo"
        if self.is_on_streams:
            reason = "owners=True was not set"
        if self.is_on_streams and self._has_many_ranks:
            reason = f"there are more than {MOST_IN_SET} ranks"
        return f"{each}: gradients are all-reduced, because {reason}"


def topology_of(group: dist.ProcessGroup, device: torch.device, endpoints: Sequence[Endpoint]) -> Topology:
    """Return the topology of a group's ranks."""
    hosts = group_by_host([endpoint.host for endpoint in endpoints])
    # Without the boot id and the namespace, which nobody reads.
    names = tuple(endpoints[ranks[0]].host.split(" ")[0] for ranks in hosts)
    can_add_up, is_on_streams = _C.can_code(group, device, len(hosts)), _C.puts_on_streams(group, device)
    return Topology(hosts, names, slowest_link(endpoints), can_add_up, is_on_streams)
