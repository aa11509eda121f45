"""Which ranks share a host, and where a rank's gloo groups listen; two hosts are two network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_direct
import torch
import torch.distributed as dist
from spawn import run_ranks
from test_docs import blocks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tuned import Tuning

import ddp_hooks
from ddp_hooks import Policy
from ddp_hooks.serving import endpoints
from ddp_hooks.serving.endpoints import Endpoint

# --- hosts


def test_ranks_are_grouped_in_the_order_of_each_hosts_first() -> None:
    assert endpoints.group_by_host(["b", "a", "b", "c", "a"]) == ((0, 2), (1, 4), (3,))


def test_the_variable_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDP_HOOKS_HOST", raising=False)
    by_system = endpoints.host_of_this_rank()
    assert by_system == endpoints.host_of_this_rank()
    assert os.uname().nodename in by_system
    monkeypatch.setenv("DDP_HOOKS_HOST", "mine")
    assert endpoints.host_of_this_rank() == "mine"


def test_the_speed_of_the_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the interface says, or the variable; interfaces that share the connections count together."""
    speeds = {"eth0": "1000\n", "eth1": "2500\n", "virtual": "-1\n"}
    for name, speed in speeds.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed)
    monkeypatch.setattr(endpoints, "_INTERFACES", tmp_path)
    monkeypatch.delenv("DDP_HOOKS_LINK_MBITS", raising=False)
    for named, found in (
        ("eth0", 1000),
        ("eth0,eth1", 3500),
        ("eth0,virtual", None),
        ("virtual", None),
        ("none", None),
    ):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
        assert endpoints._link_mbits("127.0.0.1") == found
    monkeypatch.setattr(endpoints, "interface_of", {"10.0.0.1": "eth1"}.get)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert endpoints._link_mbits("10.0.0.1") == 2500
    assert endpoints._link_mbits("10.0.0.2") is None
    assert endpoints._link_mbits(None) is None
    monkeypatch.setenv("DDP_HOOKS_LINK_MBITS", "400")
    assert endpoints._link_mbits(None) == 400
    slowest = [endpoints.Endpoint("a", None, mbits) for mbits in (None, 2500, 1000)]
    assert endpoints.slowest_link(slowest) == 1000
    assert endpoints.slowest_link(slowest[:1]) is None


def heads_of_their_own(rank: int, hosts: str) -> tuple[int, int]:
    """Return how much a step broadcasts and codes, where each rank uses another part of the model."""
    os.environ["DDP_HOOKS_HOST"] = hosts[rank]
    policy = Policy("direct", coded="on", tuning=Tuning(min_direct_bytes=0, min_divided_bytes=0))
    model = test_direct.Heads(3)
    plain = DistributedDataParallel(model, find_unused_parameters=True)
    ours = DistributedDataParallel(model, find_unused_parameters=True)
    state = ddp_hooks.register(ours, policy)
    for _ in range(3):
        gradients = []
        for ddp in (plain, ours):
            ddp.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                ddp(torch.ones(2, 64), rank).float().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None])
        for theirs, mine in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs)
    statistics = state.stats()
    return statistics.broadcast_bytes, statistics.coded_bytes


@pytest.mark.parametrize("hosts", ["ab", "aa", "aab", "abc"])
def test_bytes_decide_only_where_each_rank_has_a_host(hosts: str) -> None:
    decides = len(set(hosts)) == len(hosts)
    for broadcast_bytes, coded_bytes in run_ranks(len(hosts), heads_of_their_own, hosts):
        assert (broadcast_bytes > 0, coded_bytes > 0) == (decides, decides)


def trained(rank: int, delays: list[float]) -> bytes:
    """Train with each rank on a host of its own, and other delays in each run; return the weights."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(test_direct.Heads(3), find_unused_parameters=True, bucket_cap_mb=0.01)
    tuning = Tuning(min_direct_bytes=0, min_divided_bytes=0)
    ddp_hooks.register(ddp, Policy("mine", skip_zero_rows="adaptive", coded="on", tuning=tuning))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        time.sleep(delays[rank])
        optimizer.zero_grad()
        x = torch.randn(4, 64, generator=generator) * (torch.rand(64, generator=generator) < 0.1)
        ddp(x, (rank * step) % 3).square().sum().backward()
        optimizer.step()
    return b"".join(bytes(parameter.detach().view(torch.uint8).flatten().tolist()) for parameter in ddp.parameters())


def test_a_program_gives_the_same_bits_in_every_run() -> None:
    """Three ranks add in an order that must not depend on who came first."""
    runs = [run_ranks(3, trained, delays) for delays in ([0, 0, 0], [0.01, 0, 0.005], [0, 0.01, 0])]
    assert {weights for run in runs for weights in run} == {runs[0][0]}


def registers_without_messages_of_gradients(rank: int) -> list[str]:
    """Return which collectives of torch a registration calls, of those that are no gathers of agreement."""
    called = []
    others = ["all_to_all_single", "all_to_all", "all_reduce", "reduce_scatter_tensor", "broadcast", "barrier"]
    with pytest.MonkeyPatch.context() as patch:
        for name in others:
            patch.setattr(dist, name, lambda *_, name=name, **__: called.append(name))
        ddp_hooks.register(DistributedDataParallel(nn.Linear(8, 8)))
    return called


def test_a_registration_agrees_and_does_nothing_else() -> None:
    assert run_ranks(2, registers_without_messages_of_gradients) == [[], []]


# --- where groups listen

HERE, THERE = Endpoint("a", "10.0.0.1"), Endpoint("b", "10.0.0.2")


def described(rank: int, variable: str | None, has_backend: bool, known: list[Endpoint]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if variable is not None:
            patch.setenv("GLOO_SOCKET_IFNAME", variable)
        if not has_backend:
            patch.setattr(endpoints, "_devices_of", lambda group: [])  # as with NCCL
        listener = endpoints.choose_listener(dist.group.WORLD, known)
        if "10.0." not in listener.description:
            assert listener.make_devices()
        return listener.description


def test_in_which_order_an_address_is_chosen() -> None:
    (text,) = run_ranks(1, described, "lo", True, [HERE])
    assert text == "127.0.0.1 (interface lo), set by GLOO_SOCKET_IFNAME"
    (text,) = run_ranks(1, described, None, True, [HERE])
    assert text == "the address of the process group's own gloo backend"
    (text,) = run_ranks(1, described, None, False, [HERE])
    assert text == "10.0.0.1 (interface unknown), on the route to the process group's store"
    (text,) = run_ranks(1, described, None, False, [Endpoint("a", None)])
    assert text.startswith(f"the address of this host's name {os.uname().nodename} (")


def test_a_loopback_address_is_kept_among_ranks_of_one_host() -> None:
    alone, beside = Endpoint("a", "127.0.0.1"), Endpoint("a", "10.0.0.9")
    assert endpoints._choose_address([alone, beside], 0)[0] == "127.0.0.1"
    # This machine's own address on the way to another host; without a way there, what it was.
    assert endpoints._choose_address([alone, Endpoint("b", "127.0.0.2")], 0)[0] == "127.0.0.1"


def test_interfaces_and_their_addresses() -> None:
    assert endpoints.address_of("lo") == "127.0.0.1"
    assert endpoints.interface_of("127.0.0.1") == "lo"
    assert endpoints.interface_of("10.255.255.254") is None
    assert endpoints.address_of("no such thing") is None


# --- two hosts

TRAINS = """
import os, sys
from datetime import timedelta

import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_hooks
from ddp_hooks.serving import endpoints
from ddp_hooks import sync

(case,) = sys.argv[1:]
# Only the data group is told its interface, as NCCL is by a variable of its own.
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
dist.init_process_group("gloo", timeout=timedelta(seconds=3 if case == "unreachable" else 8))
dist.barrier()
del os.environ["GLOO_SOCKET_IFNAME"]
if case != "gloo":
    endpoints._devices_of = lambda group: []  # NCCL has none
if case == "unreachable":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
ddp = DDP(torch.nn.Linear(8, 8))
try:
    state = ddp_hooks.register(ddp)
except RuntimeError as error:
    print("REFUSED", error)
    dist.barrier()
    sys.exit()
ddp(torch.ones(2, 8)).sum().backward()
print("trained", len(state.topology.hosts), "hosts")
with ddp_hooks.diagnose(ddp):
    ddp(torch.ones(2, 8)).sum().backward()
print("diagnosed")
if case == "master by name":
    # torch makes this group; each host has shared memory of its own.
    sync.sharing.shared_memory_identity = lambda: str(dist.get_rank())
    sync.share_parameters(torch.nn.Linear(4, 4)).release()
    print("shared")
"""


class Hosts:
    """Two network namespaces with a link, whose names resolve to 127.0.1.1 at home, as on Debian."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"ddp-hooks-{os.getpid()}-{letter}" for letter in "ab"]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        here, there = self.names
        ip("link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", "eth0", "netns", there)
        for rank, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"10.0.0.{rank + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", name, "link", "set", interface, "up")
            home = [f"127.0.1.1 host-{letter}" for letter in "ab"[rank]]
            others = [f"10.0.0.{other + 1} host-{'ab'[other]}" for other in range(2) if other != rank]
            (self.folder / f"hosts-{rank}").write_text("\n".join(["127.0.0.1 localhost", *home, *others, ""]))

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def train(self, case: str, master: str) -> list[str]:
        """Run the script above on both, and return what each prints."""
        (self.folder / "trains.py").write_text(TRAINS)
        where = f"WORLD_SIZE=2 MASTER_ADDR={master} MASTER_PORT=29587"
        return self.run([f"RANK={rank} {where} python trains.py '{case}'" for rank in range(2)])

    def run(self, commands: list[str]) -> list[str]:
        """Run a command on each, and return what they print."""
        processes = []
        for rank, name in enumerate(self.names):
            # In name and mount namespaces of its own, with names that resolve differently than elsewhere.
            inside = (
                f"hostname host-{'ab'[rank]} && mount --bind {self.folder}/hosts-{rank} /etc/hosts && "
                f"export PATH={Path(sys.executable).parent}:$PATH && {commands[rank]}"
            )
            environment = {key: value for key, value in os.environ.items() if key != "DDP_HOOKS_HOST"}
            command = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", inside]
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                    cwd=self.folder,
                )
            )
        return [process.communicate(timeout=90)[0] for process in processes]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs ip (of iproute2) and unshare (of util-linux), to make hosts of namespaces")
    made = Hosts(tmp_path)
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"namespaces cannot be made here: {error.stderr.decode().strip()}")
    yield made
    made.remove()


@pytest.mark.parametrize(
    ("case", "master", "last"),
    [
        pytest.param("gloo", "10.0.0.1", "diagnosed", marks=pytest.mark.thorough),
        pytest.param("like NCCL", "10.0.0.1", "diagnosed", marks=pytest.mark.thorough),
        # Also like NCCL. The host of rank 0 knows itself as 127.0.1.1.
        ("master by name", "host-a", "shared"),
    ],
)
def test_two_hosts_meet_without_a_variable(hosts: Hosts, case: str, master: str, last: str) -> None:
    for text in hosts.train(case, master):
        assert "trained 2 hosts" in text, text
        assert last in text, text


@pytest.mark.thorough
def test_the_page_on_several_machines_launches_the_script_of_the_readme(hosts: Hosts) -> None:
    (script,) = blocks("README.md", "python")
    (hosts.folder / "train.py").write_text(script)
    commands = [command.strip() for command in blocks("docs/several-machines.md", "bash")]
    for text, shown in zip(hosts.run(commands), ["saved)", ""], strict=True):
        assert shown in text, text


@pytest.mark.thorough
def test_hosts_that_do_not_meet_are_told_address_and_variable(hosts: Hosts) -> None:
    for text in hosts.train("unreachable", "10.0.0.1"):
        assert text.count("REFUSED register: refused on every rank") == 1, text
        assert "This rank listened at 127.0.0.1 (interface lo), set by GLOO_SOCKET_IFNAME" in text
        assert "set GLOO_SOCKET_IFNAME on each host to an interface that they can reach" in text
