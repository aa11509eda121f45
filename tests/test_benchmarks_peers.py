"""The peers that rows are compared with: the prototype gives plain DDP's gradients, and sends what it says it does."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

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


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["ncf", "omnireduce:0.1", "zero_times_sum", "mixture"])
def test_the_prototype_sends_used_rows_and_gives_the_gradients_of_ddp(name: str, ranks: int) -> None:
    run_ranks(ranks, compare, name)


def test_a_policy_with_other_settings() -> None:
    peer = peers.find("ours:auto:native:owners=True,segment_bytes=4096")
    assert peer.is_ours
    assert "segment_bytes=4096" in peer.title
    for unknown in ("ours:auto:python:owners=True", "ours:auto:native:owners", "ours:none:native:owners=True"):
        with pytest.raises(ValueError, match="expected one of plain, oracle"):
            peers.find(unknown)
