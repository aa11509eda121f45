"""Hosts with several ranks on a pretended device: what few hosts use crosses between them once, if a policy asks."""

from __future__ import annotations

from collections import Counter

import pytest
import test_direct
import test_units
import torch
from quick import thorough
from test_direct import DIRECT, DIRECT_ROWS, Heads
from test_hosts import LAYOUTS, on_hosts
from test_pretend import RESTING, at_once, dropped_within_backward, on_device, on_pretended, run_pretended
from test_pretend import pytestmark as pytestmark
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, assert_same_gradients, compare, register
from tuned import with_settings

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks.serving.topology import Topology

# What plain DDP would do: nobody has asked for more.
UNASKED = with_settings(DIRECT, name="unasked", owners=None)
# A message for all that leaves the all-reduces.
ONE_MESSAGE = with_settings(DIRECT, name="one message", segment_bytes=1 << 20)


def same_as_plain_ddp(rank: int, layout: str, scenarios: list[type[Scenario]], policy: ddp_hooks.Policy) -> None:
    on_hosts(rank, layout)
    for scenario in scenarios:
        compare(rank, on_device(scenario()), policy, True)


FEW = [test_direct.RandomRanks]
FEW_ROWS = [test_units.OnOneRank, test_units.NoSync]
# On three hosts owners sum what two have.
OTHERS = [layout for layout in LAYOUTS if layout != "2 x 2"]


@pytest.mark.parametrize(
    ("layout", "scenarios", "policy"),
    [
        ("2 x 2", FEW, at_once(DIRECT)),
        ("2 x 2", FEW_ROWS, at_once(DIRECT_ROWS)),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("2 x 2", [test_direct.Half, test_direct.KeptGradients, test_direct.ManyBuckets], at_once(DIRECT)),
                *((layout, FEW, at_once(DIRECT)) for layout in OTHERS),
                *((layout, FEW_ROWS[:1], DIRECT_ROWS) for layout in OTHERS),
            )
        ),
    ],
)
def test_same_as_plain_ddp(layout: str, scenarios: list[type[Scenario]], policy: ddp_hooks.Policy) -> None:
    run_pretended(len(LAYOUTS[layout]), 3, same_as_plain_ddp, layout, scenarios, policy)


class Pair:
    """A model with the hook, and the same with plain DDP."""

    def __init__(self, policy: ddp_hooks.Policy) -> None:
        modules = []
        for _ in range(2):
            torch.manual_seed(0)
            modules.append(DistributedDataParallel(Heads(5).to("pretend"), find_unused_parameters=True))
        self.ours, self.plain = modules
        self.state = register(self.ours, policy, True)
        self.head_bytes = sum(p.nbytes for p in self.ours.module.trunk.parameters())

    def step(self, head: int) -> ddp_hooks.statistics.Statistics:
        """Compare a step's gradients, and return what it counted."""
        self.state.reset_stats()
        for ddp in (self.ours, self.plain):
            ddp.zero_grad()
            ddp(torch.ones(2, 64, device="pretend"), head).square().sum().backward()
        assert_same_gradients(self.ours, self.plain, exact=False)
        return self.state.stats()


# Which head each rank of a host uses, on the first host and on the second.
USES = {
    "a head for each rank": ((0, 1), (2, 3)),
    "a head for each host": ((0, 0), (1, 1)),
    "one that a rank uses alone": ((0, 0), (1, 4)),
    # The only host that has something to send would send as much as in a ring.
    "one host alone": ((0, 0), (0, 4)),
}


@pytest.mark.parametrize("layout", ["2 x 2", *thorough("interleaved")])
@on_pretended(4, 1)
def test_bytes_between_hosts(rank: int, layout: str) -> None:
    """What one host uses crosses once, a half of it from each of its ranks."""
    from ddp_hooks_testing import _pretend

    on_hosts(rank, layout)
    hosts = LAYOUTS[layout]
    pair = Pair(ONE_MESSAGE)
    head = pair.head_bytes
    for name, heads in USES.items():
        by_rank = [heads[host][hosts[:other].count(host)] for other, host in enumerate(hosts)]
        leaving = set() if name == "one host alone" else set(by_rank)
        here = len(leaving & set(heads[hosts[rank]]))
        before = Counter(_pretend.bytes_by_group())
        stats = pair.step(by_rank[rank])
        given = Counter(_pretend.bytes_by_group()) - before
        all_reduced = 1 + len(set(by_rank) - leaving)
        assert stats.payload_bytes == (all_reduced + len(leaving)) * head, name
        assert (stats.broadcast_bytes, stats.owner_bytes) == (len(leaving) * head, 0), name
        assert stats.sent_bytes == all_reduced * 2 * 3 * head // 4 + here * head // 2, name
        # To whoever adds up, and then between hosts; and this rank's half of all, which its neighbour gathers.
        assert given["ALLTOALL_BASE", 2] == here * head + here * head // 2, name
        assert given["_ALLGATHER_BASE", 2] == len(leaving) * head // 2, name
        use = by_rank[rank]
        ranks = tuple(other for other in range(4) if by_rank[other] == use)
        assert pair.state.usage()[f"heads.{use}.weight"].ranks == ranks, name


@on_pretended(4, 2)
def test_a_policy_switches_it_on_and_off(rank: int) -> None:
    on_hosts(rank, "2 x 2")
    pair = Pair(UNASKED)
    state = pair.state
    for policy, crosses in ((UNASKED, False), (DIRECT, True), (UNASKED, False), (DIRECT, True)):
        if policy != state.policy:
            state.set_policy(policy)
        topology = str(state.topology)
        assert ("which add up what few hosts use before it leaves" in topology) == crosses
        assert ("gradients are all-reduced, because owners=True was not set" in topology) != crosses
        for step in range(2):
            stats = pair.step((rank + step) % 4)
            assert stats.broadcast_bytes == crosses * 4 * pair.head_bytes
            assert stats.payload_bytes == 5 * pair.head_bytes
    ddp_hooks.rebuild(pair.ours)
    assert pair.step(rank).broadcast_bytes == 4 * pair.head_bytes
    state.close()
    pair.ours.zero_grad()
    pair.ours(torch.ones(2, 64, device="pretend"), rank).sum().backward()


@on_pretended(4, 4)
def test_groups_that_cannot_be_opened(rank: int) -> None:
    """A rank cannot have the groups: every rank is told, and what was in force stays."""
    on_hosts(rank, "2 x 2")
    pair = Pair(UNASKED)
    make = _C.HostsOnStreams

    def fail(**_: object) -> None:
        raise MemoryError("no room on rank 1")

    _C.HostsOnStreams = fail if rank == 1 else make
    with pytest.raises(RuntimeError, match="rank 1: could not open the groups of hosts: no room on rank 1"):
        pair.state.set_policy(DIRECT)
    _C.HostsOnStreams = make
    assert pair.state.policy == UNASKED
    assert pair.step(rank).broadcast_bytes == 0
    pair.state.set_policy(DIRECT)
    assert pair.step(rank).broadcast_bytes > 0


@on_pretended(4, 5)
def test_uneven_hosts(rank: int) -> None:
    """On other hosts all is all-reduced, whatever is asked for."""
    import os

    os.environ["DDP_HOOKS_HOST"] = "aaab"[rank]
    pair = Pair(DIRECT)
    assert pair.step(rank).broadcast_bytes == 0
    assert "hosts with different numbers of ranks: gradients are all-reduced" in str(pair.state.topology)


@pytest.mark.parametrize(("hosts", "adds_up"), [(8, True), (9, False)])
def test_of_many_ranks_nobody_knows_who_contributes(hosts: int, adds_up: bool) -> None:
    places = tuple(tuple(range(8 * host, 8 * host + 8)) for host in range(hosts))
    topology = Topology(places, ("",) * hosts, is_on_streams=True)
    assert not topology.adds_up_in_hosts
    assert topology.under(DIRECT).adds_up_in_hosts == adds_up
    assert ("more than 64 ranks" in str(topology.under(DIRECT))) != adds_up


def nothing_after_a_failure(rank: int) -> None:
    from ddp_hooks_testing import _pretend

    on_hosts(rank, "2 x 2")
    pair = Pair(ONE_MESSAGE)

    def step() -> int:
        pair.ours.zero_grad()
        before = _pretend.counts()["collectives"]
        pair.ours(torch.ones(2, 64, device="pretend"), rank).sum().backward()
        return int(_pretend.counts()["collectives"] - before)

    step()
    per_step = step()
    assert per_step >= 4
    for number in range(1, per_step + 1):
        before = _pretend.counts()["collectives"]
        _pretend.fail_collective(number)
        with pytest.raises(RuntimeError, match="failed on purpose"):
            step()
        assert _pretend.counts()["collectives"] - before == number - 1
        _pretend.synchronize()  # nothing orders the next step with what is under way of this one
        # The last one is DDP's own, and what it then does is not this package's.
        assert number == per_step or pair.step(rank).broadcast_bytes == 4 * pair.head_bytes


def test_nothing_is_sent_after_what_could_not_be() -> None:
    for seed in RESTING[:1]:
        run_pretended(4, seed, nothing_after_a_failure)


@on_pretended(4, RESTING[0])
def test_dropped_within_backward(rank: int) -> None:
    on_hosts(rank, "2 x 2")
    dropped_within_backward(rank, with_settings(at_once(DIRECT_ROWS), pack_bytes=1000), 1)


@pytest.mark.parametrize("layout", ["2 x 2", *thorough("interleaved")])
@on_pretended(4, 6)
def test_rows_of_hosts(rank: int, layout: str) -> None:
    """Each rank looks up rows of its own: what a host has of them crosses once, and every rank is known."""
    on_hosts(rank, layout)
    hosts = LAYOUTS[layout]
    ddp = DistributedDataParallel(nn.Embedding(4096, 16).to("pretend"))
    state = register(ddp, with_settings(DIRECT_ROWS, segment_bytes=1 << 20), True)
    row = 16 * 4
    for _ in range(2):
        state.reset_stats()
        ddp.zero_grad()
        ddp(torch.arange(40 * rank, 40 * rank + 60, device="pretend")).sum().backward()
        usage = state.usage()["weight"].units
        assert usage is not None
        assert (usage.used_here, usage.used_by_rank) == (60, (60,) * len(hosts))
        assert ddp.module.weight.grad.cpu()[:, 0].sum() == 60
    of_host = {row for r, host in enumerate(hosts) if host == hosts[rank] for row in range(40 * r, 40 * r + 60)}
    others = {row for r, host in enumerate(hosts) if host != hosts[rank] for row in range(40 * r, 40 * r + 60)}
    assert state.stats().broadcast_bytes == len(of_host ^ others) * row
    # Of 20 rows that both hosts have, all ranks send what a ring of four sends.
    shared = len(of_host & others) * row
    assert state.stats().sent_bytes == pytest.approx(len(of_host - others) * row / 2 + 1.5 * shared, abs=row)
