"""Ranks that share hosts add up first under FSDP2, too: the same gradients, and what crosses between hosts, once."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import test_fsdp
import test_fsdp_unusual
import torch
from spawn import RankFailure, on_ranks, run_ranks
from test_fsdp import CASES, ON, POLICIES, Case, Given, assert_same, bits, experts, train
from test_fsdp_registration import AT_ONCE_SECONDS, served
from torch.distributed.fsdp import fully_shard
from tuned import with_settings

from ddp_hooks import fsdp
from ddp_hooks.fsdp import exchange

pytestmark = served

# Ranks of one host are neighbours, as launchers number them, or not. In the last three, ranks do not add up first.
LAYOUTS = {
    "2 x 2": (0, 0, 1, 1),
    "interleaved": (0, 1, 0, 1),
    "3 x 2": (0, 0, 1, 1, 2, 2),
    "2 x 3": (0, 0, 0, 1, 1, 1),
    "uneven": (0, 0, 1),
    "one host": (0, 0, 0),
    "a rank each": (0, 1, 2),
}
ADDING_UP = [name for name, hosts in LAYOUTS.items() if len(hosts) > 3]


def on_hosts(rank: int, layout: str) -> None:
    os.environ["DDP_HOOKS_HOST"] = f"host {LAYOUTS[layout][rank]}"


# --- the same as plain FSDP2


def compare_on_hosts(rank: int, layout: str, names: list[str], policies: list[str]) -> None:
    on_hosts(rank, layout)
    for sent in test_fsdp.compare_all(rank, names, policies, 3).values():
        for policy, stats in sent.items():
            assert stats.payload_bytes <= stats.dense_bytes, policy


SOME = ["dense", "bfloat16 sums", "unused here and there", "sums alone"]


@pytest.mark.parametrize(
    ("layout", "names", "policies"),
    [
        ("2 x 2", SOME, ["on"]),
        ("interleaved", ["unused here and there"], ["restless", "skip_unused"]),
        ("uneven", ["unused here and there"], ["on"]),
        pytest.param("2 x 2", list(CASES), ["on", "restless", "skip_unused"], marks=pytest.mark.thorough),
        *(
            pytest.param(layout, list(CASES), ["on"], marks=pytest.mark.thorough)
            for layout in LAYOUTS
            if layout != "2 x 2"
        ),
    ],
)
def test_gradients_are_those_of_plain_fsdp2(layout: str, names: list[str], policies: list[str]) -> None:
    run_ranks(len(LAYOUTS[layout]), compare_on_hosts, layout, names, policies, timeout=300)


def train_in_unusual_ways(rank: int, names: list[str]) -> None:
    on_hosts(rank, "2 x 2")
    test_fsdp_unusual.compare(rank, names, ["restless"])


@pytest.mark.thorough
def test_unusual_ways_to_train() -> None:
    names = [way.__name__ for way in test_fsdp_unusual.WAYS if way.__name__ != "Alone"]
    run_ranks(4, train_in_unusual_ways, names, timeout=300)


def train_twice(rank: int, layout: str) -> None:
    on_hosts(rank, layout)
    case = CASES["float32"]
    runs = []
    for _ in range(2):
        model = case.make()
        state = fsdp.register(model, POLICIES["restless"])
        runs.append(list(train(case, model, rank, range(4))))
        state.close()
    for first, second in zip(*runs, strict=True):
        for name, expected in first.items():
            assert torch.equal(bits(second[name]), bits(expected)), name


def test_runs_have_the_same_bits() -> None:
    run_ranks(4, train_twice, "2 x 2")


# --- bytes

# Elements of a gradient, and those of each part that are not zero.
NUMEL, FILLED = 4800, 320


def count_bytes(rank: int, layout: str) -> None:
    """Compare the counters with what collectives are given."""
    on_hosts(rank, layout)
    hosts = LAYOUTS[layout]
    adds_up = layout in ADDING_UP
    handed_over: dict[int, int] = {}
    all_to_all = exchange._all_to_all

    def record(group: Any, received: torch.Tensor, sent: torch.Tensor, *sizes: Any) -> None:
        to_itself = sizes[1][group.rank()] if sizes else sent.nbytes // group.size()
        handed_over[id(group)] = handed_over.get(id(group), 0) + sent.nbytes - to_itself
        all_to_all(group, received, sent, *sizes)

    exchange._all_to_all = record  # type: ignore[assignment]
    numbers = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    numbers.view(len(hosts), -1)[:, FILLED:] = 0
    peers = (len(set(hosts)) if adds_up else len(hosts)) - 1
    full, sent = (peers * numel * 4 for numel in (NUMEL // len(hosts), FILLED))
    first_of_host = hosts.index(hosts[rank]) == rank
    first_host = hosts[rank] == 0
    for name, gradient, expected in (
        ("all have it", numbers, sent),
        ("one of each host has it", numbers * first_of_host, sent * (adds_up or first_of_host)),
        ("one host has it", numbers * first_host, sent * first_host),
        ("none has it", numbers * 0.0, 0),
    ):
        model = fully_shard(Given(NUMEL))
        state = fsdp.register(model, with_settings(ON, coded="off"))
        for step in range(2):
            handed_over.clear()
            state.reset_stats()
            model.zero_grad()
            model(gradient + 0.0).backward()  # without -0.0, which is sent
            stats = state.stats()
            assert (stats.payload_bytes, stats.sent_bytes, stats.dense_bytes) == (expected, expected, full), name
            groups = state._opened
            assert len(groups) == adds_up
            group = id(groups[0].between) if adds_up else next(iter(handed_over))
            assert handed_over.pop(group) == expected + stats.mask_bytes, f"{name}, step {step}"
            assert len(handed_over) == adds_up
        state.close()
        assert all(each.within is each.between is None for each in groups)
    exchange._all_to_all = all_to_all


@pytest.mark.parametrize(
    "layout", ["2 x 2", "uneven", *(pytest.param(each, marks=pytest.mark.thorough) for each in LAYOUTS)]
)
def test_bytes_between_hosts(layout: str) -> None:
    run_ranks(len(LAYOUTS[layout]), count_bytes, layout)


def code_between_hosts(rank: int, layout: str) -> tuple[str, float]:
    on_hosts(rank, layout)
    os.environ["DDP_HOOKS_LINK_MBITS"] = "1000"
    case = CASES["dense"]
    model = case.make()
    state = fsdp.register(model)
    list(train(case, model, rank, range(3)))
    stats = state.stats()
    return stats.why_uncoded, stats.coded_bytes / max(stats.uncoded_bytes, 1)


def test_what_crosses_between_hosts_is_coded() -> None:
    for why, part in run_ranks(4, code_between_hosts, "2 x 2"):
        assert why == ""
        assert 0.2 < part < 0.95
    for why, part in run_ranks(3, code_between_hosts, "uneven"):
        assert (why, part) == ("hosts have different numbers of ranks", 0)


# --- usage, and what differs


@on_ranks(4)
def test_usage_is_that_of_hosts(rank: int) -> None:
    on_hosts(rank, "2 x 2")
    case = Case(experts, sends_unused=True, chosen=lambda rank, step, layer: (rank,) if rank < 3 else (0,))
    model = case.make()
    state = fsdp.register(model, ON)
    list(train(case, model, rank, range(1)))
    usage = state.usage()
    for expert in range(4):
        one = usage[f"layers.1.experts.{expert}.weight"]
        assert (one.used_anywhere, one.used_here, one.ranks) == (
            expert < 3,
            expert == (rank if rank < 3 else 0),
            None,
        )


@pytest.mark.parametrize(("odd", "hosts_exchange_masks"), [([3], True), ([2, 3], True), ([3], False)])
@on_ranks(4)
def test_different_gradients_are_an_error_on_every_host(rank: int, odd: list[int], hosts_exchange_masks: bool) -> None:
    on_hosts(rank, "2 x 2")
    case = Case(experts, chosen=lambda rank, step, layer: (int(rank in odd),))
    model = case.make()
    state = fsdp.register(model, ON)
    if not hosts_exchange_masks:
        for each in state._served:
            each.reduce_scatter.exchange.begin = lambda *_: False  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the ranks hold gradients of different parameters") as caught:
        list(train(case, model, rank, range(1)))
    assert time.monotonic() - start < AT_ONCE_SECONDS
    text = str(caught.value)
    if odd == [3]:
        # Those beside it name it, and the others its host.
        expected = {0: "rank 2 and others on its host differ", 1: "rank 3 and others on its host differ"}
        assert expected.get(rank, "rank 3 has no gradient of layers.2.experts.0.weight") in text
    else:
        assert f"rank {rank % 2 + 2} has no gradient of layers.2.experts.0.weight" in text
        assert "on its host" not in text
    test_fsdp.recover(model)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    sure = Case(experts, chosen=case.chosen, sends_unused=True)
    for ours, plain in zip(train(sure, model, rank, range(2)), train(sure, sure.make(), rank, range(2)), strict=True):
        assert_same(ours, plain, "after an error")


@on_ranks(4)
def test_special_numbers(rank: int) -> None:
    on_hosts(rank, "interleaved")
    specials = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45, -1e-40, 1.5, 3e37])
    for seed in range(4):
        draw = torch.Generator().manual_seed(100 * seed + rank)
        gradient = specials[torch.randint(len(specials), (60,), generator=draw)].repeat_interleave(16)
        plain, ours = test_fsdp.reduce_with_and_without(gradient)
        assert torch.allclose(ours, plain, 1e-6, 0.0, equal_nan=True)
        negative = (bits(plain) == bits(torch.tensor([-0.0]))) & (plain == 0)
        assert torch.equal(bits(ours)[negative], bits(plain)[negative])


# --- ends


def end_in_backward(rank: int, how: str) -> None:
    on_hosts(rank, "2 x 2")
    test_fsdp_unusual.end_in_backward(rank, how)


@pytest.mark.parametrize("how", ["dies", pytest.param("raises", marks=pytest.mark.thorough)])
def test_a_rank_that_does_not_come_is_an_error_on_every_host(how: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(4, end_in_backward, how, collective_timeout=2)
    text = str(caught.value)
    assert "hung" not in text
    for rank in (0, 2, 3):
        assert "RuntimeError" in text.split(f"--- rank {rank} ")[1].split("---")[0]
