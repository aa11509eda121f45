"""Finds out which ranks share a host, and chooses the address at which this package's gloo groups listen.

By default, a gloo group of torch listens at the address of the hostname, unless ``GLOO_SOCKET_IFNAME`` names an
interface. On many systems that address is 127.0.1.1, which other hosts cannot reach, and programs with NCCL have no
reason to set the variable. So every rank looks for a better address, tells the others, and uses the first of these:

1. ``GLOO_SOCKET_IFNAME``, as torch does.
2. The address at which the gloo backend of the module's process group listens, if there is one.
3. The local address of the route to the host of the process group's store, or to ``MASTER_ADDR``. On that host itself,
   which may also resolve its name to 127.0.1.1, the route to a rank on another host.
4. torch's choice.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .groups import store_of

# Overrides the name of this rank's host.
HOST_VARIABLE = "DDP_HOOKS_HOST"
# Overrides the speed of this host's network interface, in Mbit/s.
LINK_VARIABLE = "DDP_HOOKS_LINK_MBITS"
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_INTERFACES = Path("/sys/class/net")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_ANY_PORT = 9  # nothing is sent there


class Endpoint(NamedTuple):
    """The place of a rank, in plain values that every version of this package can read."""

    host: str
    """Equal on ranks that share a host."""
    address: str | None
    """Its own on the way to the process group's store; None if that is not known."""
    link_mbits: int | None = None
    """The speed of its network interface in Mbit/s; None if that is not known."""


def find_endpoint(group: dist.ProcessGroup) -> Endpoint:
    """Return the host of this rank, the address at which others may reach it, and the speed of its interface."""
    address = None
    with suppress(RuntimeError, ValueError):  # the store is gone or does not answer
        address = _address_towards_store(group)
    return Endpoint(host_of_this_rank(), address, _link_mbits(address))


def _link_mbits(address: str | None) -> int | None:
    """Return the speed of the interfaces that gradients probably travel on, in Mbit/s; None if it is unknown."""
    if named := os.environ.get(LINK_VARIABLE):
        with suppress(ValueError):
            return max(1, int(named))
    interfaces = os.environ.get(_INTERFACE_VARIABLE)
    names = interfaces.split(",") if interfaces else [] if address is None else [interface_of(address)]
    speeds = []
    for name in names:
        # Virtual interfaces have no speed, -1, or one that means nothing.
        with suppress(OSError, ValueError):
            speeds.append(int((_INTERFACES / str(name) / "speed").read_text()))
    return sum(speeds) if len(speeds) == len(names) and all(speed > 0 for speed in speeds) and speeds else None


def host_of_this_rank() -> str:
    """Return a string that only ranks on this host have in common."""
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named
    parts = [socket.gethostname()]
    # Machines may share a name, and containers on one machine may have separate networks.
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def slowest_link(endpoints: Iterable[Endpoint]) -> int | None:
    """Return the speed of the slowest of the endpoints' interfaces, in Mbit/s; None if none is known."""
    return min((endpoint.link_mbits for endpoint in endpoints if endpoint.link_mbits is not None), default=None)


def group_by_host(hosts: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, in the order of their first ranks.

    Args:
        hosts: the host of each rank, as a value that ranks on one host have in common.
    """
    ranks_of: dict[object, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in ranks_of.values())


@dataclass(frozen=True, slots=True)
class Listener:
    """The address at which gloo groups of this rank listen.

    Attributes:
        make_devices: makes the devices of a gloo group, or returns existing ones.
        description: the address, its interface, and the reason for the choice.
    """

    make_devices: Callable[[], list[Any]]
    description: str


def choose_listener(group: dist.ProcessGroup, endpoints: Sequence[Endpoint]) -> Listener:
    """Choose the address at which gloo groups of this rank listen.

    Args:
        group: the process group whose ranks, or some of them, will form the gloo groups.
        endpoints: every rank's, by rank.
    """
    interfaces = os.environ.get(_INTERFACE_VARIABLE)
    if interfaces:
        # Several interfaces are separated by commas; each gets a part of the connections.
        names = interfaces.split(",")
        described = " and ".join(f"{address_of(name) or 'no address'} (interface {name})" for name in names)
        return Listener(
            lambda: [_device(interface=name) for name in names], f"{described}, set by {_INTERFACE_VARIABLE}"
        )
    devices = _devices_of(group)
    if devices:
        return Listener(lambda: devices, "the address of the process group's own gloo backend")
    address, reason = _choose_address(endpoints, dist.get_rank(group))
    if address is None:
        return Listener(
            lambda: [dist.ProcessGroupGloo.create_default_device()],
            f"the address of this host's name {socket.gethostname()} ({_address_of_name() or 'none'})",
        )
    return Listener(
        lambda: [_device(hostname=address)], f"{address} (interface {interface_of(address) or 'unknown'}), {reason}"
    )


@contextmanager
def torch_listens_for(group: dist.ProcessGroup, endpoints: Sequence[Endpoint]) -> Iterator[None]:
    """Let gloo groups that torch makes in this block listen where ours would, as far as a variable can express it.

    Args:
        group: the process group of the ranks that make the groups.
        endpoints: every rank's, by rank.
    """
    address, _ = _choose_address(endpoints, dist.get_rank(group))
    interface = None if address is None else interface_of(address)
    if interface is None or os.environ.get(_INTERFACE_VARIABLE):
        yield
        return
    os.environ[_INTERFACE_VARIABLE] = interface
    try:
        yield
    finally:
        del os.environ[_INTERFACE_VARIABLE]


def _choose_address(endpoints: Sequence[Endpoint], rank: int) -> tuple[str | None, str]:
    """Return the address at which others reach this rank, or None, and the reason for the choice."""
    own = endpoints[rank]
    if own.address is None or ipaddress.ip_address(own.address).is_loopback:
        # The store may be on this host, under a name that only this host knows.
        for other in endpoints:
            if other.host != own.host and other.address and not ipaddress.ip_address(other.address).is_loopback:
                return _address_towards(other.address) or own.address, "on the route to another host"
    return own.address, "on the route to the process group's store"


def advise(listener: Listener) -> str:
    """Say where this rank listens, and what to do if other ranks cannot reach it."""
    return (
        f"This rank listened at {listener.description}; if other hosts cannot reach it, set {_INTERFACE_VARIABLE} "
        "on each host to an interface that they can reach"
    )


def _devices_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the devices of the group's gloo backend; none if it has no such backend."""
    try:
        options = group._get_backend(torch.device("cpu")).options
    except (RuntimeError, AttributeError):
        return []
    return list(getattr(options, "_devices", ()))


def _device(**where: str) -> Any:
    return dist.ProcessGroupGloo.create_device(**where)


def _address_towards_store(group: dist.ProcessGroup) -> str | None:
    store = store_of(group)
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    for host in (getattr(store, "host", None), os.environ.get("MASTER_ADDR")):
        if host and (address := _address_towards(host)):
            return address
    return None


def _address_towards(host: str) -> str | None:
    """Return this host's address on the route to another host; None if there is no route."""
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, there in found:
        with suppress(OSError, ValueError), socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # chooses a route, and sends nothing
            address = str(probe.getsockname()[0])
            # A link-local address is useless without its interface.
            if not ipaddress.ip_address(address.partition("%")[0]).is_link_local:
                return address
    return None


def _address_of_name() -> str | None:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return None


def address_of(interface: str) -> str | None:
    """Return the first address of a network interface; None if it has no address or does not exist."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _GET_ADDRESS, request)[20:24])
    return next((address for name, address in _addresses_of_version_6() if name == interface), None)


def interface_of(address: str) -> str | None:
    """Return the network interface with an address; None if no interface is known to have it."""
    for _, name in socket.if_nameindex():
        if address_of(name) == address:
            return name
    return next((name for name, other in _addresses_of_version_6() if other == address), None)


def _addresses_of_version_6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [(name, str(ipaddress.IPv6Address(int(digits, 16)))) for digits, _, _, _, _, name in fields]
