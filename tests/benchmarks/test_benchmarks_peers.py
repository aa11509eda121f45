"""The peers that rows are compared with: the prototype gives plain DDP's gradients, and sends what it says it does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from quick import thorough
from spawn import on_ranks, run_ranks
from test_benchmarks_workloads import needs_transformers

from tools import peers, usage, workloads


def compare(rank: int, name: str) -> None:
    workload = workloads.make(name, "tiny")
    master = workload.build()
    ranks = dist.get_world_size()
    context = peers.Context(workload, master, rank, usage.find_usage(workload, master, ranks))
    plain, ours, nothing = (
        peers.PEERS[peer].build(context) for peer in (peers.BASELINE, "rows_prototype", peers.NOTHING)
    )
    others = [peers.PEERS[peer].build(context) for peer in ("rows_all_gather", "rows_sparse")]
    sent: list[torch.Tensor] = []
    all_reduce = dist.all_reduce

    def count(tensor: torch.Tensor, *args: object, **settings: object) -> object:
        sent.append(tensor)
        return all_reduce(tensor, *args, **settings)

    for step in range(2 * workload.patterns):  # buckets are rebuilt after the first
        pattern = step % workload.patterns
        for variant in (plain, ours, nothing, *others):
            variant.clear(pattern)
        plain.step(pattern)
        with mock.patch.object(dist, "all_reduce", count):
            sent.clear()
            ours.step(pattern)
            messages = [tensor for tensor in sent if tensor.is_floating_point()]
            assert sum(t.numel() * t.element_size() for t in messages) == ours.payload_bytes(pattern)
            assert sum(t.numel() for t in sent if not t.is_floating_point()) == sum(
                len(p) for p in master.parameters() if p.dim() > 1
            )
            sent.clear()
            nothing.step(pattern)
            assert sent == []
            assert nothing.payload_bytes(pattern) == 0
        expected, found = plain.gradients(pattern), ours.gradients(pattern)
        assert expected.keys() == found.keys()
        for key, gradient in expected.items():
            if ranks == 2:
                assert torch.equal(found[key], gradient), key
            else:
                torch.testing.assert_close(found[key], gradient)
        for other in others:
            other.step(pattern)
            found = other.gradients(pattern)
            for key, gradient in expected.items():
                torch.testing.assert_close(found[key], gradient)


@pytest.mark.parametrize("ranks", [2, *thorough(3)])
@pytest.mark.parametrize("name", ["ncf", "omnireduce:0.1", *thorough("zero_times_sum", "mixture")])
def test_the_prototype_sends_used_rows_and_gives_the_gradients_of_ddp(name: str, ranks: int) -> None:
    run_ranks(ranks, compare, name)


@pytest.mark.thorough
@needs_transformers
@pytest.mark.parametrize(
    "name",
    [
        "gpt2_autocast",
        "bert_autocast:bfloat16:3",
        "resnet_autocast:float16:2",
    ],
)
@on_ranks(2)
def test_peers_under_autocast_and_with_accumulation(rank: int, name: str) -> None:
    """Plain DDP against sums that nobody exchanges, and everybody else against plain DDP."""
    torch.set_num_threads(1)
    workload = workloads.make(name, "tiny")
    torch.manual_seed(1)
    master = workload.build()
    ranks = dist.get_world_size()
    context = peers.Context(workload, master, rank, usage.find_usage(workload, master, ranks))
    exact = (peers.BASELINE, "allreduce_hook", "ours:auto:native", "ours:skip_unused:native:skip_zero_rows=on")
    lossy = ("fp16_compress", "powersgd", "part:0.5")
    variants = {peer: peers.find(peer).build(context) for peer in (*exact, *lossy, peers.NOTHING, peers.COMPUTE)}
    largest = dict.fromkeys(variants, 0.0)
    for step in range(3 * workload.patterns):
        pattern = step % workload.patterns
        for variant in variants.values():
            variant.clear(pattern)
            variant.step(pattern)
        expected = variants[peers.BASELINE].gradients(pattern)
        for peer in (peers.NOTHING, peers.COMPUTE):
            total = {key: gradient.clone() for key, gradient in variants[peer].gradients(pattern).items()}
            for key, gradient in total.items():
                dist.all_reduce(gradient)
                torch.testing.assert_close(gradient / ranks, expected[key], rtol=1e-5, atol=1e-6)
        for peer, variant in variants.items():
            found = variant.gradients(pattern)
            assert found.keys() == expected.keys()
            largest[peer] = max(largest[peer], peers.max_difference(found, expected))
            if peer in exact:
                for key, gradient in expected.items():
                    assert torch.equal(found[key], gradient), f"{peer}: {key}"
    assert [peer for peer, difference in largest.items() if difference == 0] == list(exact)
    assert all(0 < largest[peer] < float("inf") for peer in lossy), largest


@on_ranks(2)
def test_a_share_of_the_bytes(rank: int) -> None:
    workload = workloads.make("ncf", "tiny")
    master = workload.build()
    context = peers.Context(workload, master, rank, usage.find_usage(workload, master, 2))
    variant = peers.find("part:0.25").build(context)
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def count(part: torch.Tensor, **how: Any) -> Any:
        reduced.append(part.nbytes)
        return all_reduce(part, **how)

    with mock.patch.object(dist, "all_reduce", count):
        variant.step(0)
    assert sum(reduced) == pytest.approx(context.dense_bytes / 4, abs=4 * len(reduced))
    assert variant.payload_bytes(0) == context.dense_bytes // 4


def test_a_policy_with_other_settings() -> None:
    peer = peers.find("ours:auto:native:owners=True,segment_bytes=4096")
    assert peer.is_ours
    assert "segment_bytes=4096" in peer.title
    for unknown in ("ours:auto:python:owners=True", "ours:auto:native:owners", "ours:none:native:owners=True"):
        with pytest.raises(ValueError, match="expected one of plain, oracle"):
            peers.find(unknown)


def test_words_are_settings_of_a_policy() -> None:
    peer = peers.find("ours:auto:native:skip_zero_rows=off,owners=False,name=mine")
    with mock.patch.object(peers, "_ours") as ours:
        peers.find("ours:auto:native:skip_zero_rows=off,owners=False").build(mock.Mock())
    policy = ours.call_args.args[0]
    assert (policy.skip_zero_rows, policy.tuning.owners) == ("off", False)
    assert peer.title.endswith("skip_zero_rows=off,owners=False,name=mine")
    with pytest.raises(TypeError, match="unheard_of"):
        peers.find("ours:auto:native:unheard_of=on").build(mock.Mock())
