"""The doctor against what obviously happened: who got a gradient when, and what the hook then really sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from spawn import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks


class Branches(nn.Module):
    """A trunk, a head for each task, a table, a norm in channels-last, and what nobody ever calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, 32)  # large enough to fall apart into units; rows are short
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.trunk = nn.Linear(32, 640)
        self.heads = nn.ModuleList(nn.Linear(640, 200 + 40 * i) for i in range(3))
        self.masked = nn.Linear(640, 300)  # its gradient is zero but for some rows
        self.silent = nn.Linear(640, 7)  # its gradient is zero
        self.forgotten = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        self.frozen = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        for parameter in self.frozen.parameters():
            parameter.requires_grad_(False)

    def forward(self, rows: torch.Tensor, head: int, cancel: float) -> torch.Tensor:
        image = torch.ones(1, 4, 5, 5).to(memory_format=torch.channels_last)
        x = torch.relu(self.trunk(self.table(rows).mean(0))) * self.scale
        masked = self.masked(x)[:20].sum()
        # What cancels between the ranks is zero on average, and was sent all the same.
        return self.heads[head](x).sum() * cancel + masked + 0 * self.silent(x).sum() + self.conv(image).mean()


def run_steps(
    ddp: DistributedDataParallel, rank: int, steps: int, record: Callable[[], None] = lambda: None, zero: bool = True
) -> None:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
    for i in range(steps):
        rows = torch.randint(0, 40 + i, (6,), generator=generator)
        if i == 3:
            with ddp.no_sync():
                ddp(rows, 2, 1.0).backward()
        head = (i // 2) % 2 if rank == 0 or i % 2 else 1
        cancel = 1.0 if rank == 0 or i != 4 else -1.0
        ddp(rows, head, cancel).backward()
        record()
        optimizer.step()
        optimizer.zero_grad(set_to_none=zero or i % 2 == 0)


def make(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Branches()
    return DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.5, **options)


def freeze_after_wrapping(ddp: DistributedDataParallel) -> None:
    for parameter in ddp.module.late.parameters():
        parameter.requires_grad_(False)


def check_exact(rank: int, views: bool, zero: bool) -> dict[str, int]:
    """Compare with the oracle, and with the hook that runs the same steps."""
    steps = 7
    ddp = make(gradient_as_bucket_view=views)
    freeze_after_wrapping(ddp)
    names = [name for name, _ in ddp.module.named_parameters()]
    seen: list[set[str]] = []
    current: set[str] = set()
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: current.add(name))
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad
    ]

    def record() -> None:
        seen.append(set(current))
        current.clear()

    with ddp_hooks.diagnose(ddp) as diagnosis:
        run_steps(ddp, rank, steps, record, zero)
    for handle in handles:
        handle.remove()
    found = diagnosis.findings
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seen)
    assert [one.name for one in found.parameters] == names
    for one in found.parameters:
        for r, pattern in enumerate(one.pattern):
            assert [c == "#" for c in pattern] == [one.name in step for step in everyone[r]], (one, r)
        union = [one.name in (a | b) for a, b in zip(*everyone, strict=True)]
        assert one.steps_used == sum(union)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, str(diagnosis))
    assert texts[0] == texts[1]
    sent = {}
    for policy in ("skip_unused", "skip_zeros"):
        ours = make(gradient_as_bucket_view=views)
        freeze_after_wrapping(ours)
        state = ddp_hooks.register(ours, policy)
        run_steps(ours, rank, steps, zero=zero)
        statistics = state.stats()
        assert found.dense_bytes == statistics.dense_bytes
        assert found.policy(policy).payload_bytes == statistics.payload_bytes, policy
        assert found.policy(policy).exact
        sent[policy] = statistics.payload_bytes
    verdicts = {one.name: one.verdict for one in found.parameters}
    assert verdicts["forgotten.0.weight"] == verdicts["forgotten.1.bias"] == "never used"
    assert verdicts["frozen.weight"] == "frozen before wrapping"
    assert verdicts["late.weight"] == "frozen after wrapping"
    assert verdicts["silent.weight"] == "all zero"
    assert verdicts["table.weight"] == verdicts["masked.weight"] == "mostly zero by rows"
    assert verdicts["heads.1.weight"] == "used by some ranks only"
    assert verdicts["heads.2.weight"] == "used in some steps"
    assert verdicts["trunk.weight"] == verdicts["scale"] == "used"
    modules = {(one.name, one.verdict, one.parameters) for one in found.modules}
    assert ("forgotten", "never used", 4) in modules
    assert ("late", "frozen after wrapping", 2) in modules
    answers = {one.question: one for one in found.answers}
    assert answers["Is find_unused_parameters needed?"].verdict == "yes"
    assert answers["Is static_graph=True legal?"].verdict == "no"
    assert "forgotten" in answers["Is something unused that was probably meant to be used?"].reason
    assert "ddp_hooks.register(ddp" in found.advice
    json.dumps(diagnosis.to_dict())
    return sent


def exactness(rank: int) -> None:
    for views in (False, True):
        for zero in (True, False):
            sent = check_exact(rank, views, zero)
            assert sent["skip_zeros"] < sent["skip_unused"]


def test_bytes_are_those_that_the_hook_sends() -> None:
    run_ranks(2, exactness)
