"""What DDP does not average because it does not know it, or because a hook of the script's own does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

import ddp_hooks
from ddp_hooks.doctor.findings import Findings
from ddp_hooks.doctor.other_hooks import OtherHook, read_other_hook
from ddp_hooks.doctor.problem import Kind

STEPS = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 20)
        self.head = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


def train(ddp: DistributedDataParallel, rank: int, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        ddp(torch.randn(4, 10, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def seen(ddp: DistributedDataParallel, rank: int, change: Callable[[], object] = lambda: None) -> Findings:
    with ddp_hooks.diagnose(ddp) as diagnosis:
        train(ddp, rank, 1)
        change()
        train(ddp, rank)
    return diagnosis.findings


def wrap(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net() if model is None else model, **options)


def replace_the_head(ddp: DistributedDataParallel) -> None:
    ddp.module.head = nn.Linear(20, 10)


def assign_all(ddp: DistributedDataParallel) -> None:
    ddp.module.load_state_dict({k: v.clone() for k, v in ddp.module.state_dict().items()}, assign=True)


def normalise_weights(ddp: DistributedDataParallel) -> None:
    weight_norm(ddp.module.head)  # type: ignore[arg-type]


def add_an_adapter(ddp: DistributedDataParallel) -> None:
    ddp.module.head = nn.Sequential(ddp.module.head, nn.Linear(10, 10))  # type: ignore[arg-type]


@on_ranks(2)
def test_parameters_that_came_after_wrapping(rank: int) -> None:
    for change, names, verdict in (
        (replace_the_head, "head was replaced", "replaced after wrapping"),
        (assign_all, "The whole model was replaced", "replaced after wrapping"),
        (normalise_weights, "head.parametrizations came after wrapping", "added after wrapping"),
        (add_an_adapter, "head.1 came after wrapping", "added after wrapping"),
    ):
        for watched in (True, False):  # a diagnosis may begin after the change
            ddp = wrap(find_unused_parameters=True)
            if not watched:
                change(ddp)
            found = seen(ddp, rank, partial(change, ddp) if watched else lambda: None)
            assert [one.kind for one in found.problems] == [Kind.APART], (change, watched)
            if watched or change not in (normalise_weights, assign_all):  # old names are gone then
                assert names in found.problems[0].fact, (change, watched, found.problems[0].fact)
                assert verdict in {one.verdict for one in found.parameters}
            assert "ddp_hooks.rebuild(ddp)" in found.problems[0].change
            assert found.advice == ""
            assert found.answers == ()
    # A hook that serves the module averages the new ones after a rebuild.
    ddp = wrap(find_unused_parameters=True)
    ddp_hooks.register(ddp)
    replace_the_head(ddp)
    ddp_hooks.rebuild(ddp)
    assert seen(ddp, rank).problems == ()
    # What is put in its place again, or is tied, is no stranger.
    ddp = wrap(find_unused_parameters=True)
    head = ddp.module.head
    assert seen(ddp, rank, lambda: (replace_the_head(ddp), setattr(ddp.module, "head", head))).problems == ()
    ddp = wrap(find_unused_parameters=True)
    found = seen(ddp, rank, lambda: setattr(ddp.module.head, "bias", None))
    assert "head.bias is no longer part of the model" in found.problems[0].fact
    assert found.problems[0].kind is Kind.FORGOTTEN
    # Frozen ones are nobody's concern.
    ddp = wrap()
    found = seen(ddp, rank, lambda: setattr(ddp.module, "teacher", nn.Linear(2, 2).requires_grad_(False)))
    assert found.problems == ()


@on_ranks(2)
def test_a_new_head_without_the_flag(rank: int) -> None:
    ddp = wrap()
    diagnosis = ddp_hooks.diagnose(ddp)

    def run() -> None:
        with diagnosis:
            replace_the_head(ddp)
            train(ddp, rank)

    with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
        run()
    found = diagnosis.findings
    assert [one.kind for one in found.problems] == [Kind.GRADIENTS_MISSING]
    assert "holds the old parameters, waits for their gradients" in found.problems[0].fact
    assert "find_unused_parameters" not in str(diagnosis)
    if hasattr(caught.value, "__notes__"):
        assert "head was replaced after wrapping" in " ".join(caught.value.__notes__[0].split())


@on_ranks(2)
def test_what_was_frozen_at_wrapping(rank: int) -> None:
    for alone in (False, True):
        model = Net()
        model.head.requires_grad_(False)
        ddp = wrap(model)
        model.head.requires_grad_(True)
        model.body.requires_grad_(not alone)
        with ddp_hooks.diagnose(ddp) as diagnosis:
            train(ddp, rank)
        found = diagnosis.findings
        assert found.problems[0].fact.startswith("head was frozen when DDP was built and trained later")
        assert "the replicas differ in 2 of 4 parameters" in found.problems[0].fact
        assert "ddp_hooks.rebuild(ddp)" in found.problems[0].change
        assert any("broadcast_parameters" in one for one in found.problems[0].details)
        assert len(found.problems) == 1
        assert found.steps == (0 if alone else STEPS)
        assert found.verdict("head.weight").verdict == "frozen when wrapped, trained since"
        raises = "nothing that DDP knows was used; ddp_hooks.register(ddp) raises there" in found.problems[0].details[0]
        assert raises == alone
        assert "saved" not in str(diagnosis)
        assert "find_unused_parameters" not in str(diagnosis)
        # So it is, and so it is put right.
        ddp_hooks.register(ddp)
        if alone:
            with pytest.raises(RuntimeError, match=r"ddp_hooks\.rebuild"):
                train(ddp, rank, 1)
            ddp = wrap(model)
            continue
        ddp_hooks.sync.broadcast_parameters(ddp)
        ddp_hooks.rebuild(ddp)
        assert seen(ddp, rank).problems == ()


# --- hooks of the script's own


class Wide(nn.Module):
    """Most of it is an embedding that is used by rows, if it has one."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 8)
        self.out = nn.Linear(8, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids))  # type: ignore[no-any-return]


def hooked(rank: int, rows: int, hook: Any, state: Any = None) -> tuple[Findings, str]:
    ddp = wrap(Wide(rows))
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    else:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with ddp_hooks.diagnose(ddp) as diagnosis:
        for step in range(STEPS):
            ddp(torch.randint(rows, (8,), generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()
            ddp.zero_grad()
    return diagnosis.findings, " ".join(str(diagnosis).split())


def mine(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


mine.__annotations__.clear()  # they are texts, and DDP compares them with types


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that are handed to torch.distributed.all_reduce."""
    sizes: list[int] = []
    original = dist.all_reduce

    def count(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **options)

    dist.all_reduce = count
    try:
        yield sizes
    finally:
        dist.all_reduce = original


@on_ranks(2)
def test_hooks_of_the_scripts_own(rank: int) -> None:
    size = 4 * (20_000 * 8 + 8 * 64 + 64)
    for hook, name in ((default_hooks.fp16_compress_hook, "fp16_compress_hook"), (None, "FP16_COMPRESS")):
        with counted() as sizes:
            found, text = hooked(rank, 20_000, hook)
        assert hook is None or sum(sizes) == STEPS * size // 2
        assert found.other_hook == OtherHook(name, "rounds every gradient to float16", size // 2)
        assert found.problems == ()
        assert "Add after wrapping" not in text
        assert f"{name}, which rounds every gradient to float16" in found.advice
        assert "without that one, ddp_hooks.register(ddp) would hand over about 6.40 kB" in found.advice, found.advice
    # Where it sends less than ours would, nobody is sent away from it.
    found, text = hooked(rank, 8, default_hooks.fp16_compress_hook)
    assert "would be refused beside it; in its place it would skip next to nothing" in found.advice
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    with counted() as sizes:
        found, text = hooked(rank, 20_000, powerSGD_hook.powerSGD_hook, state)
    assert found.other_hook is not None
    assert found.other_hook.step_bytes == (sum(sizes) - 2 * size) // (STEPS - 2)
    assert "approximates gradients by matrices of rank 2 from step 3 on" in found.advice
    # torch's own refuses the shape that it passes here, so batched_powerSGD_hook raises; what it sends is the same.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2)
    with counted() as sizes, mock.patch.object(powerSGD_hook, "_orthogonalize"):
        found, text = hooked(rank, 20_000, powerSGD_hook.batched_powerSGD_hook, state)
    assert found.other_hook is not None
    assert found.other_hook.step_bytes == (sum(sizes) - 2 * size) // (STEPS - 2)
    assert "approximates each bucket by a square matrix of rank 3 from step 3 on" in found.advice
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    found, _ = hooked(rank, 20_000, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), state)
    assert found.other_hook is not None
    assert found.other_hook.name == "powerSGD_hook within fp16_compress_wrapper"
    ddp = wrap(Wide(20_000))  # torch quantizes on GPUs only
    ddp.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    quantizing = read_other_hook(ddp)
    assert quantizing is not None
    assert quantizing.step_bytes == size // 4
    found, text = hooked(rank, 20_000, mine)
    assert "a communication hook of its own, mine; plain DDP hands over" in found.advice
    found, text = hooked(rank, 20_000, debugging_hooks.noop_hook)
    assert found.problems[0].fact.endswith("noop_hook, which sends nothing, so DDP averages nothing.")
    assert found.advice == ""
    # Ours is none of them.
    ddp = wrap()
    ddp_hooks.register(ddp)
    assert seen(ddp, rank).other_hook is None
