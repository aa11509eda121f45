"""Ranks that share hosts add up first, so that what crosses between hosts crosses once: gradients, bytes, topology."""

from __future__ import annotations

import os
import time

import pytest
import test_coded
import test_direct
import torch
from quick import thorough
from spawn import RankFailure, on_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, bits, compare, register, train
from tuned import with_settings

import ddp_hooks
from ddp_hooks.serving import control_groups

# Ranks of one host are neighbours, as launchers number them, or not.
LAYOUTS = {"2 x 2": (0, 0, 1, 1), "interleaved": (0, 1, 0, 1), "3 x 2": (0, 0, 1, 1, 2, 2), "2 x 3": (0, 0, 0, 1, 1, 1)}


def on_hosts(rank: int, layout: str) -> None:
    os.environ["DDP_HOOKS_HOST"] = f"host {LAYOUTS[layout][rank]}"


def coded(scenario: type[Scenario]) -> Scenario:
    """Of what is coded, the oracle knows no bytes."""
    made = scenario()
    made.check_bytes = False
    return made


def same_as_plain_ddp(rank: int, layout: str, every_way: bool) -> None:
    on_hosts(rank, layout)
    for scenario in test_direct.SCENARIOS:
        for native in (True, False) if every_way else (True,):
            compare(rank, scenario(), test_direct.DIRECT, native)
            compare(rank, coded(scenario), with_settings(test_direct.DIRECT, coded="on"), native)
        compare(rank, scenario(), with_settings(test_direct.DIRECT, in_place_bytes=0, segment_bytes=64), True)
        compare(rank, scenario(), with_settings(test_direct.DIRECT, skip_zeros="on"), True)
    for number, scenario in enumerate(test_direct.ROWS):
        if not every_way and number % 3:
            continue
        compare(rank, scenario(), test_direct.DIRECT_ROWS, True)
        compare(rank, coded(scenario), with_settings(test_direct.DIRECT_ROWS, coded="on"), True)


@pytest.mark.parametrize(
    ("layout", "every_way"),
    [
        ("2 x 2", False),
        pytest.param("2 x 2", True, marks=pytest.mark.thorough),
        *(pytest.param(layout, False, marks=pytest.mark.thorough) for layout in LAYOUTS if layout != "2 x 2"),
    ],
)
def test_same_as_plain_ddp(layout: str, every_way: bool) -> None:
    run_ranks(len(LAYOUTS[layout]), same_as_plain_ddp, layout, every_way, timeout=300.0)


# --- bytes


@pytest.mark.parametrize("layout", ["2 x 2", "interleaved"])
@on_ranks(4)
def test_bytes_between_hosts(rank: int, layout: str) -> None:
    """A head for each rank, and one for all: what crosses between hosts is each host's part, once."""
    on_hosts(rank, layout)
    ddp = DistributedDataParallel(test_direct.Heads(5), find_unused_parameters=True)
    state = register(ddp, with_settings(test_direct.DIRECT, coded="off"), True)
    head = sum(p.numel() for p in ddp.module.trunk.parameters()) * 4
    ddp(torch.ones(2, 64), rank).sum().backward()
    stats = state.stats()
    assert stats.payload_bytes == 5 * head
    assert (stats.broadcast_bytes, stats.owner_bytes) == (4 * head, 0)
    # A rank sends its half of its host's two heads, and of the trunk's sum what a ring of two would.
    assert stats.sent_bytes == pytest.approx(head + head / 2, rel=0.01)
    assert state.usage()[f"heads.{rank}.weight"].ranks == (rank,)

    state.set_policy(with_settings(test_direct.DIRECT, direct=False))
    state.reset_stats()
    ddp(torch.ones(2, 64), rank).sum().backward()
    assert state.stats().sent_bytes == 2 * 3 * 5 * head // 4
    assert state.stats().broadcast_bytes == 0


def masks_between_hosts(rank: int, layout: str) -> None:
    """Masks of rows cross between hosts as one for each host, and nobody knows of more than hosts."""
    on_hosts(rank, layout)
    control_groups.LARGEST_AXIS = 2
    hosts = len(set(LAYOUTS[layout]))
    ddp = DistributedDataParallel(nn.Embedding(4096, 16))
    state = register(ddp, with_settings(test_direct.DIRECT_ROWS, coded="off"), True)
    row = 16 * 4
    for _ in range(3):
        state.reset_stats()
        ddp.zero_grad()
        ddp(torch.arange(40 * rank, 40 * rank + 60)).sum().backward()
        usage = state.usage()["weight"].units
        assert usage is not None
        last = 40 * (len(LAYOUTS[layout]) - 1) + 60
        assert (usage.used_here, usage.used_anywhere, usage.used_by_rank) == (60, last, None)
    # What all that have it send is what the ranks of a host had, once.
    rows = [
        {row for r, host in enumerate(LAYOUTS[layout]) if host == h for row in range(40 * r, 40 * r + 60)}
        for h in range(hosts)
    ]
    assert 0 < state.stats().sent_bytes <= 1.2 * row * sum(map(len, rows)) * (hosts - 1)


@pytest.mark.parametrize("layout", ["2 x 2", "interleaved", *thorough("3 x 2", "2 x 3")])
def test_masks_between_hosts(layout: str) -> None:
    run_ranks(len(LAYOUTS[layout]), masks_between_hosts, layout)


def same_bits(rank: int, layout: str, runs: int) -> None:
    on_hosts(rank, layout)
    seen = set()
    for _ in range(runs):
        run = train(test_direct.RandomRanks(), rank, with_settings(test_direct.DIRECT, coded="auto"), True)
        seen.add(b"".join(bits(weight) for weight in run.weights))
    assert len(seen) == 1


@pytest.mark.parametrize("layout", ["2 x 2", pytest.param("3 x 2", marks=pytest.mark.thorough)])
def test_every_run_has_the_same_bits(layout: str) -> None:
    run_ranks(len(LAYOUTS[layout]), same_bits, layout, 10)


def wrapped_twice(rank: int, layout: str) -> None:
    """Two wrappers of one model in one backward pass: their exchanges are under way together."""
    on_hosts(rank, layout)
    ranks, size = len(LAYOUTS[layout]), 4096
    model = nn.Embedding(size, 16)
    wrappers = [DistributedDataParallel(model) for _ in range(2)]
    for ddp in wrappers:
        register(ddp, with_settings(test_direct.DIRECT_ROWS, coded="off"), True)
    for step in range(100):
        model.weight.grad = None
        first = [torch.arange(10) + 2000 * i + step for i in range(2)]
        sum(ddp(rows + 20 * rank).sum() for ddp, rows in zip(wrappers, first, strict=True)).backward()
        expected = torch.zeros(size)
        for other in range(ranks):
            for rows in first:
                expected[rows + 20 * other] += 1 / ranks
        torch.testing.assert_close(model.weight.grad[:, 0], expected)


@pytest.mark.parametrize("layout", ["2 x 2", *thorough("3 x 2")])
def test_a_model_that_is_wrapped_twice(layout: str) -> None:
    run_ranks(len(LAYOUTS[layout]), wrapped_twice, layout)


# --- topology


def shown(rank: int) -> tuple[str, ...]:
    os.environ["DDP_HOOKS_LINK_MBITS"] = "1000"
    texts = []
    for hosts in ("abab", "aabc", "aaaa", "abcd"):
        os.environ["DDP_HOOKS_HOST"] = hosts[rank]
        ddp = DistributedDataParallel(nn.Linear(512, 64))
        state = ddp_hooks.register(ddp)
        texts.append(str(state.topology))
        ddp(torch.randn(2, 512)).sum().backward()
        assert state.stats().broadcast_bytes == 0
        state.close()
    return tuple(texts)


def test_what_a_state_says_of_its_hosts() -> None:
    texts = set(run_ranks(4, shown))
    assert len(texts) == 1
    link = "; slowest network interface: 1,000 Mbit/s"
    assert texts.pop() == (
        f"host  ranks\na     0 2\nb     1 3\n2 hosts with 2 ranks each, which add up before anything leaves{link}",
        "host  ranks\na     0 1\nb     2\nc     3\n"
        f"hosts with different numbers of ranks: gradients are all-reduced{link}",
        f"host  ranks\na     0 1 2 3\none host: gradients are all-reduced{link}",
        f"host  ranks\na     0\nb     1\nc     2\nd     3\n4 hosts with a rank each{link}",
    )


# --- failures


def altered(rank: int) -> str:
    on_hosts(rank, "2 x 2")
    return test_coded._altered(rank)


def test_an_altered_message_is_an_error_on_every_rank() -> None:
    failed = run_ranks(4, altered)
    assert any("a contribution from rank 1, coded message 0 of the step" in one for one in failed), failed
    # Whoever has received what it waits for may go on; nobody hangs.
    assert sum(one != "" for one in failed) >= 2


def dying_rank(rank: int) -> None:
    on_hosts(rank, "2 x 2")
    ddp = DistributedDataParallel(test_direct.Heads(4), find_unused_parameters=True)
    register(ddp, with_settings(test_direct.DIRECT, coded="on"), True)
    ddp(torch.ones(2, 64), rank).sum().backward()
    if rank == 3:
        os._exit(3)
    started = time.monotonic()

    def train_on() -> None:
        for _ in range(100):
            ddp(torch.ones(2, 64), rank).sum().backward()

    with pytest.raises(RuntimeError):
        train_on()
    assert time.monotonic() - started < 20
    raise RuntimeError(f"rank {rank} was told")


@pytest.mark.thorough
def test_a_rank_that_dies_is_an_error_on_both_hosts() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(4, dying_rank, collective_timeout=10.0)
    assert all(f"rank {rank} was told" in str(caught.value) for rank in range(3))
