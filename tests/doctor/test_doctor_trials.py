"""Policies that the doctor tries while a module trains: what is measured, what is refused, and what is left behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks.doctor.findings import Findings, find
from ddp_hooks.doctor.records import RankRecord
from ddp_hooks.doctor.text import host_lines
from ddp_hooks.doctor.timing import Division, Trial, divide, estimate, sum_up
from ddp_hooks.serving.topology import Topology
from ddp_hooks.statistics import Statistics

# Three with plain DDP, three with "skip_unused", and six with "auto"; the last two of each policy count.
STEPS = 12
ROWS = 3000


class Model(nn.Module):
    """A table that is mostly zeros, a part that some steps or ranks leave out, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 64)
        self.trunk = nn.Linear(64, 64)
        self.heads = nn.ModuleList(nn.Linear(64, 900) for _ in range(3))

    def forward(self, rows: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](torch.relu(self.trunk(self.table(rows)))).square().mean()


def make(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Model(), bucket_cap_mb=0.5, **{"find_unused_parameters": True, **options})


def run_steps(ddp: DistributedDataParallel, rank: int, first: int, stop: int, passes: int = 1) -> list[torch.Tensor]:
    """Train, and return the gradients of all steps."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    gradients = []
    for step in range(first, stop):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        for number in range(passes):
            rows = torch.randint(ROWS, (40,), generator=generator)
            with nullcontext() if number + 1 == passes else ddp.no_sync():
                ddp(rows, (step + rank) % 2 if step % 3 else 0).backward()
        gradients += [one.grad.clone() for one in ddp.parameters() if one.grad is not None]
        optimizer.step()
    return gradients


def is_plain(ddp: DistributedDataParallel) -> bool:
    is_served = any(state.serves(ddp) for state in ddp_hooks.states())
    return not is_served and not _C.reducer_has_hook(ddp.reducer) and not ddp._comm_hooks


def check_exact(rank: int, passes: int, **options: Any) -> None:
    """The same gradients as without a trial, in every bit, and the counters of the hook in the same steps."""
    plain, tried, ours = (make(**options) for _ in range(3))
    hooks = [len(tried._forward_hooks), len(tried._forward_pre_hooks)]
    with ddp_hooks.diagnose(tried, trial_steps=STEPS) as diagnosis:
        gradients = run_steps(tried, rank, 0, STEPS, passes)
        assert is_plain(tried), "at the end of the last step"
        gradients += run_steps(tried, rank, STEPS, STEPS + 2, passes)
    expected = run_steps(plain, rank, 0, STEPS + 2, passes)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert [len(tried._forward_hooks), len(tried._forward_pre_hooks)] == hooks
    found = diagnosis.findings
    assert [(one.policy, one.steps) for one in found.policies] == [("skip_unused", 2), ("auto", 2)]
    assert found.steps == STEPS + 2
    assert not any("tried" in note for note in found.notes)
    run_steps(ours, rank, 0, 3, passes)
    state = ddp_hooks.register(ours, "skip_unused")
    for one, first, stop in zip(found.policies, (3, 6), (6, 12), strict=True):
        if one.policy != "skip_unused":
            state.set_policy(one.policy)
        run_steps(ours, rank, first, stop - 2, passes)
        before = state.stats()
        run_steps(ours, rank, stop - 2, stop, passes)
        counted = state.stats() - before
        assert one.saved_fraction == counted.saved_fraction > 0
        assert one.step_bytes == round((counted.payload_bytes + counted.mask_bytes) / 2)
        assert one.sent_bytes[rank] == counted.sent_bytes
    state.close()
    assert found.policy("auto").saved_fraction > found.policy("skip_unused").saved_fraction + 0.05
    assert 'register(ddp, "auto"). It saves' in found.advice
    assert found.division is not None
    assert found.policy("auto").step_seconds is not None
    assert found.policy("auto").step_seconds <= found.division.step_seconds
    with pytest.raises(KeyError, match=r"expected one of .*'skip_unused', 'auto'"):
        found.policy("skip_zeros")


def end_early(rank: int) -> None:
    """What was tried until then counts, and nothing is left behind."""
    ddp = make()
    with ddp_hooks.diagnose(ddp, trial_steps=STEPS) as diagnosis:
        run_steps(ddp, rank, 0, 11)
    assert is_plain(ddp)
    assert [(one.policy, one.steps) for one in diagnosis.findings.policies] == [("skip_unused", 2), ("auto", 1)]
    with ddp_hooks.diagnose(ddp, trial_steps=STEPS) as diagnosis:
        run_steps(ddp, rank, 0, 7)
    assert [one.policy for one in diagnosis.findings.policies] == ["skip_unused"]
    assert any("not all policies were tried, because the run ended before" in one for one in diagnosis.findings.notes)
    with ddp_hooks.diagnose(ddp, trial_steps=30) as diagnosis:
        run_steps(ddp, rank, 0, 3)
    assert diagnosis.findings.policies == ()
    assert any("no policy was tried, because the run ended before" in one for one in diagnosis.findings.notes)
    assert "of the bytes held parameters that no rank used" in diagnosis.findings.advice
    # An error that every rank raises ends the trial, too.
    diagnosis = ddp_hooks.diagnose(ddp, trial_steps=STEPS)

    def raise_in_a_trial() -> None:
        with diagnosis:
            run_steps(ddp, rank, 0, 7)
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        raise_in_a_trial()
    assert is_plain(ddp)
    run_steps(ddp, rank, 0, 2)


def refuse(rank: int) -> None:
    """What speaks against a trial on one rank keeps all ranks from it."""

    def diagnose(ddp: DistributedDataParallel, during: Callable[[], Any] = lambda: None) -> Findings:
        with ddp_hooks.diagnose(ddp, trial_steps=STEPS) as diagnosis:
            run_steps(ddp, rank, 0, 6)
            during()
            run_steps(ddp, rank, 6, STEPS)
        return diagnosis.findings

    ddp = make()
    if rank == 1:
        ddp.register_comm_hook(None, allreduce_hook)
    found = diagnose(ddp)
    assert found.policies == ()
    assert found.steps == STEPS
    assert any("no policy was tried, because a communication hook is already registered" in one for one in found.notes)
    # The script registers a hook of its own while a policy is tried: that one stays.
    ddp = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = diagnose(ddp, lambda: ddp.register_comm_hook(None, allreduce_hook))
    assert [hook for hook, _ in ddp._comm_hooks] == [allreduce_hook]
    assert [one.policy for one in found.policies] == ["skip_unused"]
    # A hook of this package is the script's own.
    ddp = make()
    state = ddp_hooks.register(ddp, "skip_unused")
    found = diagnose(ddp)
    assert found.policies == ()
    assert "registered already" in found.advice
    assert state.stats().steps == STEPS
    state.close()
    ddp = make()
    with ddp.join(), ddp_hooks.diagnose(ddp, trial_steps=STEPS) as diagnosis:
        run_steps(ddp, rank, 0, STEPS)
    assert any("no policy was tried, because the script trains within" in one for one in diagnosis.findings.notes)
    with pytest.raises(ValueError, match="trial_steps to be 0 or at least 8, received 4"):
        ddp_hooks.diagnose(ddp, trial_steps=4)
    with (
        pytest.raises(RuntimeError, match="the same trial_steps on every rank, received 9, 10"),
        ddp_hooks.diagnose(ddp, trial_steps=9 + rank),
    ):
        pass
    assert is_plain(ddp)


def freeze_in_a_trial(rank: int) -> None:
    """Without the flag plain DDP would wait, which the hook of the trial does not."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with ddp_hooks.diagnose(ddp, trial_steps=STEPS) as diagnosis:
        for step in range(8):
            if step == 5:
                ddp.module[0].requires_grad_(False)
            ddp(torch.randn(4, 8)).sum().backward()
            ddp.zero_grad()
    problem = diagnosis.findings.problems[0]
    assert problem.fact == "0 is frozen since step 5, and DDP without ddp_hooks would wait for its gradients."


def stop_short_in_a_trial(rank: int) -> None:
    """A pass that DDP has not finished keeps the hook, and the report says what is missing."""
    ddp = make(find_unused_parameters=False)
    inputs = torch.arange(8)

    def use_all() -> torch.Tensor:
        return torch.stack([ddp(inputs, 0), *(head(torch.ones(64)).mean() for head in ddp.module.heads)]).sum()

    with ddp_hooks.diagnose(ddp, trial_steps=STEPS) as diagnosis:
        for _ in range(6):
            use_all().backward()
        ddp(inputs, 0).backward()
    assert "backward left out heads.1, heads.2" in diagnosis.findings.problems[0].fact
    assert diagnosis.findings.policies == ()
    assert ddp_hooks.states()[-1].serves(ddp)


@on_ranks(2)
def test_policies_are_tried_and_nothing_is_left_behind(rank: int) -> None:
    check_exact(rank, 1)
    check_exact(rank, 2, gradient_as_bucket_view=True)
    end_early(rank)
    refuse(rank)
    freeze_in_a_trial(rank)
    stop_short_in_a_trial(rank)
    dist.barrier()


def test_the_estimate_is_what_the_link_saves() -> None:
    division = Division(10.0, 4.0, 6.0, 9.0, 0.0)
    assert [estimate(division, fraction, 5.0) for fraction in (1.0, 0.5, 0.0)] == [10.0, 5.5, 4.0]
    assert estimate(division, 0.0, 3.0) == 3.0
    assert divide([]) is None


def counted(sent: int, hosts: tuple[tuple[int, ...], ...], *, is_on_streams: bool = False) -> Trial:
    statistics = Statistics(steps=2, dense_bytes=200, payload_bytes=100, sent_bytes=sent, broadcast_bytes=20)
    topology = Topology(hosts, ("",) * len(hosts), can_add_up=True, is_on_streams=is_on_streams)
    return Trial("auto", statistics, (1.0, 1.0), topology)


@pytest.mark.parametrize(
    ("hosts", "sent", "link_bytes", "plain_link_bytes", "said"),
    [
        (((0, 1, 2, 3),), (80, 80, 80, 80), 40, 150, ""),
        (((0,), (1,)), (60, 100), 50, 100, "1.50 times as much of what every rank uses"),
        # Each has sent its share of what its host has.
        (((0, 1), (2, 3)), (40, 40, 50, 50), 50, 150, "On 4 hosts, each would send 1.50 times"),
        (((0, 1), (2,), (3,)), (80, 80, 80, 80), 40, 150, "Ranks of a host could add up first"),
        # In a ring of ranks, each one's neighbour is on the other host.
        (((0, 2), (1, 3)), (40, 40, 50, 50), 45, 300, "On 4 hosts, each would send 1.50 times"),
    ],
)
def test_what_crosses_between_hosts(
    hosts: tuple[tuple[int, ...], ...], sent: tuple[int, ...], link_bytes: int, plain_link_bytes: int, said: str
) -> None:
    division = Division(10.0, 1.0, 9.0, 9.0, 0.0)
    one = sum_up([counted(bytes_sent, hosts) for bytes_sent in sent], division)
    assert (one.link_bytes, one.plain_link_bytes) == (link_bytes, plain_link_bytes)
    assert one.step_seconds == pytest.approx(10 - 9 * (1 - link_bytes / plain_link_bytes))
    text = " ".join(" ".join(host_lines([one])).split())
    assert said in text
    assert ("busiest" in text) == (len(hosts) > 1)


def test_what_crosses_between_hosts_on_a_device() -> None:
    """A ring over all ranks carries what is all-reduced; the rest crosses once."""
    of_ring = 2 * 3 * 80 // 4
    sent = (of_ring + 10, of_ring + 12, of_ring, of_ring)
    trials = [counted(bytes_sent, ((0, 1), (2, 3)), is_on_streams=True) for bytes_sent in sent]
    one = sum_up(trials, None)
    assert one.link_bytes == (of_ring + 22) // 2
    assert "if they use the same layers" not in " ".join(host_lines([one]))


def test_nothing_is_said_of_policies_if_a_rank_is_missing() -> None:
    hosts = ((0, 1), (2, 3))
    records = [
        RankRecord(("w",), (4,), (), ("w",), (), (), False, False, False, 4, rank=rank, trials=(counted(40, hosts),))
        for rank in (0, 1, 3)
    ]
    assert find(records).policies == ()
