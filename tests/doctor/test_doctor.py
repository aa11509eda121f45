"""The doctor against what obviously happened: who got a gradient when."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import assert_same_gradients

import ddp_hooks
from ddp_hooks import _C


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


def check_verdicts(rank: int, views: bool, zero: bool) -> None:
    """Compare with an oracle."""
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
    ours = make(gradient_as_bucket_view=views)
    freeze_after_wrapping(ours)
    state = ddp_hooks.register(ours, "skip_unused")
    run_steps(ours, rank, steps, zero=zero)
    assert found.dense_bytes == state.stats().dense_bytes
    verdicts = {one.name: one.verdict for one in found.parameters}
    assert verdicts["forgotten.0.weight"] == verdicts["forgotten.1.bias"] == "never used"
    assert verdicts["frozen.weight"] == "frozen before wrapping"
    assert verdicts["late.weight"] == "frozen after wrapping"
    assert verdicts["silent.weight"] == "all zero"
    assert verdicts["table.weight"] == verdicts["masked.weight"] == "mostly zero by rows"
    assert verdicts["heads.1.weight"] == "not used by every rank"
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


@on_ranks(2)
def test_every_parameter_is_judged_by_what_happened_to_it(rank: int) -> None:
    for views in (False, True):
        for zero in (True, False):
            check_verdicts(rank, views, zero)


# --- what must not change


class Tower(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=sparse)
        self.body = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor, spare: bool = False) -> torch.Tensor:
        x = self.body(self.table(rows))
        return self.spare(x) if spare else x


def hooks_of(ddp: DistributedDataParallel) -> list[Any]:
    hooks: list[Any] = [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in ddp.modules()]
    return hooks + [list(p._post_accumulate_grad_hooks or {}) for p in ddp.parameters()]


def leave_no_trace(rank: int) -> None:
    rows = torch.arange(4) + rank
    plain, watched = (
        DistributedDataParallel(Tower(), find_unused_parameters=True, gradient_as_bucket_view=True) for _ in range(2)
    )
    watched.load_state_dict(plain.state_dict())
    order: list[str] = []
    watched.module.body.weight.register_post_accumulate_grad_hook(lambda p: order.append("first"))
    hooks = hooks_of(watched)
    with ddp_hooks.diagnose(watched) as diagnosis:
        watched.module.body.weight.register_post_accumulate_grad_hook(lambda p: order.append("second")).remove()
        for i in range(4):
            for ddp in (plain, watched):
                ddp.zero_grad(set_to_none=i != 2)
                with ddp.no_sync() if i == 1 else nullcontext():
                    ddp(rows, spare=i == 3 and rank == 0).square().sum().backward()
            assert_same_gradients(watched, plain)
        with pytest.raises(RuntimeError, match="received one that was used"):
            diagnosis.__enter__()
    assert hooks_of(watched) == hooks
    assert order == ["first"] * 4
    assert diagnosis.findings.steps == 3  # one of the passes was not synchronised
    assert diagnosis.findings.verdict("spare.weight").pattern == ("..#", "...")
    with pytest.raises(KeyError, match="spare"):
        diagnosis.findings.verdict("module.spare")
    # A rank that cannot take part is an error on both.
    with pytest.raises(RuntimeError, match=r"diagnose|expected"), ddp_hooks.diagnose(broken(watched, rank)):
        pass


def broken(ddp: DistributedDataParallel, rank: int) -> DistributedDataParallel:
    if rank == 1:
        ddp._use_python_reducer = True
    return ddp


def diagnose_oddities(rank: int) -> None:
    rows = torch.arange(4) + rank
    # Unfrozen after wrapping: DDP leaves each rank alone with it, and the hook averages it.
    found = []
    for policy in (None, "skip_unused"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(freeze(Tower()), find_unused_parameters=True)
        ddp.module.spare.requires_grad_(True)
        state = ddp_hooks.register(ddp, policy) if policy else None
        with ddp_hooks.diagnose(ddp) as diagnosis:
            for _ in range(2):
                ddp(rows, spare=True).sum().backward()
        found.append(diagnosis.findings)
        if state is not None:
            assert "registered already" in diagnosis.findings.advice
    assert found[0].verdict("spare.weight").verdict == "frozen when wrapped, trained since"
    assert found[0].problems[0].fact.startswith("spare was frozen when DDP was built and trained later")
    assert found[1].problems == ()
    # Sparse gradients are left out of the count and nothing breaks; all used, so the flag is not needed.
    ddp = DistributedDataParallel(Tower(sparse=True), find_unused_parameters=True)
    with ddp_hooks.diagnose(ddp) as diagnosis:
        for _ in range(3):
            ddp(rows, spare=True).sum().backward()
    answers = {one.question: one.verdict for one in diagnosis.findings.answers}
    assert answers["Is find_unused_parameters needed?"] == "no"
    assert answers["Is static_graph=True legal?"] == "as far as seen"
    assert diagnosis.findings.advice.startswith("ddp_hooks could skip next to nothing")
    assert diagnosis.findings.verdict("table.weight").verdict == "used"
    # No step at all.
    with ddp_hooks.diagnose(ddp) as diagnosis:
        pass
    assert diagnosis.findings.steps == 0
    assert "Nothing can be said" in str(diagnosis)
    # The memory for masks is full after a step.
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    with ddp_hooks.diagnose(ddp) as diagnosis:
        assert diagnosis.recorder is not None
        diagnosis.recorder.most_mask_bytes = 0
        run_steps(ddp, rank, 4)
    assert any("memory" in note for note in diagnosis.findings.notes)


def freeze(model: Tower) -> Tower:
    model.spare.requires_grad_(False)
    return model


def name_what_is_unfinished(rank: int) -> str:
    ddp = DistributedDataParallel(Tower())
    diagnosis = ddp_hooks.diagnose(ddp)

    def run_two_steps() -> None:
        with diagnosis:
            for _ in range(2):
                ddp(torch.arange(3)).sum().backward()

    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        run_two_steps()
    text = str(diagnosis)
    assert "backward left out spare, and DDP waits" in " ".join(text.split())
    if hasattr(caught.value, "add_note"):
        assert "backward left out spare, and DDP waits" in " ".join(caught.value.__notes__[0].split())
    return text


def diagnose_alone(rank: int) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    ddp = DistributedDataParallel(Tower(), find_unused_parameters=True, process_group=groups[rank])
    with ddp_hooks.diagnose(ddp) as diagnosis:
        for _ in range(3):
            ddp(torch.arange(3)).sum().backward()
    assert diagnosis.findings.policies == ()
    assert "One rank has nobody to send to" in str(diagnosis)
    assert diagnosis.findings.verdict("spare.weight").verdict == "never used"


class Level(nn.Module):
    """Three layers of one size, so that a mix-up of places does not show in sizes; the last may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, last: bool) -> torch.Tensor:
        x = self.b(self.a(torch.ones(2, 8)))
        return (self.c(x) if last else x).sum()


def rebuild_in_the_block(rank: int) -> None:
    size = 8 * 8 * 4

    def run(model: nn.Module, after: int, by_hand: bool, steps: int = 4) -> tuple[Any, DistributedDataParallel]:
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        ddp_hooks.register(ddp, ddp_hooks.Policy("test", rebuild_after=after))
        ddp_hooks.freeze(ddp, "a")
        counted: list[int] = []
        with ddp_hooks.diagnose(ddp) as diagnosis:
            assert diagnosis.recorder is not None
            diagnosis.recorder.on_step = counted.append
            for i in range(steps):
                ddp(i % 2 == 1).backward()
                for name in ("b", "c"):
                    gradient = ddp.module.get_parameter(f"{name}.weight").grad
                    assert (gradient is not None) == (name == "b" or i > 0)
                if by_hand and i == 1:
                    assert ddp_hooks.rebuild(ddp)
        # Whoever waits for a number of steps sees all of them.
        assert counted == list(range(1, steps + 1))
        return diagnosis.findings, ddp

    def facts(findings: Any) -> Any:
        verdicts = [(one.name, one.verdict, one.dense_bytes, one.pattern) for one in findings.parameters]
        return findings.steps, verdicts

    findings, ddp = run(Level(), 0, True)
    assert len(_C.reducer_parameters(ddp.reducer)) == 2
    # The same as of a block that ends before.
    expected, _ = run(Level(), 0, False, 2)
    assert facts(findings) == facts(expected)
    assert not any("anew" in note for note in expected.notes)
    assert any("made anew" in note and "2 of 4" in note for note in findings.notes)
    assert findings.dense_bytes == 2 * 3 * size
    # By itself, at the end of the third step, in which other parameters are used than in the second: never.
    findings, ddp = run(Level(), 2, False)
    assert len(_C.reducer_parameters(ddp.reducer)) == 3
    assert findings.steps == 4
    # At the end of the first step, about which nothing is said then; sizes differ.
    model = Level()
    model.a = nn.Linear(8, 8)
    findings, ddp = run(model, 1, False)
    assert len(_C.reducer_parameters(ddp.reducer)) == 2
    assert findings.steps == 0
    assert any("made anew" in note and "0 of 4" in note for note in findings.notes)
    # Names of what is missing are those of the new Reducer's parameters.
    ddp_hooks.rebuild(ddp, find_unused_parameters=False)
    ddp_hooks.unfreeze(ddp, "*")
    state = ddp_hooks.states()[-1]
    state.close()
    diagnosis = ddp_hooks.diagnose(ddp)

    def rebuild_and_fail() -> None:
        with diagnosis:
            ddp_hooks.register(ddp, "skip_unused")
            ddp_hooks.rebuild(ddp)
            ddp_hooks.states()[-1].close()
            for _ in range(2):
                ddp(False).backward()

    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        rebuild_and_fail()
    assert "backward left out c, and DDP waits for the gradients" in " ".join(str(diagnosis).split())


@on_ranks(2)
def test_the_module_is_left_as_it_was_and_oddities_are_understood(rank: int) -> None:
    leave_no_trace(rank)
    rebuild_in_the_block(rank)
    diagnose_oddities(rank)
    name_what_is_unfinished(rank)
    diagnose_alone(rank)
