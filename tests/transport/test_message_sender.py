"""What is handed to the data group's collectives, and how."""

from __future__ import annotations

from typing import Any

import pytest
import slow_group
import torch
import torch.distributed as dist
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import register
from tuned import Tuning

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

BACKEND = "recording_gloo"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# All of a bucket travels in one message, however large its gaps.
WITH_GAPS = ddp_hooks.Policy("with gaps", tuning=Tuning(in_place_bytes=0, gap_fraction=1.0, direct=False))


class RecordingGroup(slow_group.SlowGroup):
    """Keeps copies of the gradients that it is told to sum, as they were handed over."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner, 0)
        self.summed: list[torch.Tensor] = []

    def allreduce(self, tensors: Any, options: Any = None) -> slow_group.SlowWork:
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            if tensor.is_floating_point():
                self.summed.append(tensor.detach().clone())
        return super().allreduce(tensors, options)


def new_recording_group() -> tuple[Any, RecordingGroup]:
    made: list[RecordingGroup] = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> RecordingGroup:
        made.append(RecordingGroup(dist.ProcessGroupGloo(store, rank, size, timeout=timeout)))
        return made[-1]

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    try:
        group = dist.new_group(backend=BACKEND)
    finally:
        dist.Backend.backend_list.remove(BACKEND)
    return group, made[-1]


class Sandwich(nn.Module):
    """Between two layers that are used lies one that may not be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.between = nn.Linear(16, 4)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        y = self.last(x).square().sum()
        return y + self.between(x).sum() if all_of_it else y


def gradients_of(ddp: DistributedDataParallel) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks(2)
def test_zeros_are_sent_in_gaps_as_plain_ddp_does(rank: int, native: bool, views: bool) -> None:
    def run(hooked: bool) -> list[tuple[list[torch.Tensor], list[torch.Tensor | None]]]:
        torch.manual_seed(0)
        group, recording = new_recording_group()
        model = Sandwich()
        # What is in new memory is NaN then, the buckets' own included.
        torch.use_deterministic_algorithms(True)
        try:
            ddp = DistributedDataParallel(
                model, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=views
            )
        finally:
            torch.use_deterministic_algorithms(False)
        state = register(ddp, WITH_GAPS, native) if hooked else None
        seen = []
        # Nobody has written to the gap yet; then it holds an earlier gradient.
        for all_of_it in (False, True, False, False):
            recording.summed.clear()
            ddp(torch.full((4, 8), rank + 1.0), all_of_it).backward()
            seen.append((list(recording.summed), gradients_of(ddp)))
            ddp.zero_grad(set_to_none=True)
        if state is not None:
            sizes = [parameter.numel() for parameter in model.parameters()]
            assert state.stats().payload_bytes == 4 * 4 * sum(sizes), "the gap was not sent along"
        return seen

    for (plain_sent, plain), (sent, gradients) in zip(run(hooked=False), run(hooked=True), strict=True):
        assert len(plain_sent) == len(sent) == 1
        torch.testing.assert_close(sent[0], plain_sent[0], rtol=0, atol=0)
        for expected, received in zip(plain, gradients, strict=True):
            assert (expected is None) == (received is None)
            if expected is not None:
                torch.testing.assert_close(received, expected, rtol=0, atol=0)


@on_ranks(2)
def test_gaps_hold_afterwards_what_they_held_before(rank: int) -> None:
    group, recording = new_recording_group()
    model = Sandwich()
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True, gradient_as_bucket_view=True)
    ddp_hooks.register(ddp, WITH_GAPS)
    ddp(torch.ones(4, 8), True).backward()
    assert model.between.weight.grad is not None
    with torch.no_grad():
        model.between.weight.grad.fill_(rank + 7.0)  # lies in the bucket
    for parameter in (*model.first.parameters(), *model.last.parameters()):
        parameter.grad = None
    recording.summed.clear()
    ddp(torch.ones(4, 8), False).backward()
    (sent,) = recording.summed
    assert sent.numel() == sum(parameter.numel() for parameter in model.parameters())
    assert not (sent == rank + 7.0).any()
    assert torch.equal(model.between.weight.grad, torch.full_like(model.between.weight, rank + 7.0))


@on_ranks(2)
def test_a_group_may_lack_a_backend_for_a_device(rank: int) -> None:
    """Who averages gradients on a GPU is asked of every group that sums them, whoever has written it."""
    gloo, on_cpu_only = dist.group.WORLD, dist.new_group(backend="cpu:gloo")
    assert gloo is not None
    assert isinstance(on_cpu_only, dist.ProcessGroup)
    in_python, _ = new_recording_group()
    assert testing.backend_name(gloo, CPU) == testing.backend_name(gloo, CUDA) == "gloo"
    assert testing.backend_name(on_cpu_only, CPU) == "gloo"
    assert testing.backend_name(on_cpu_only, CUDA) == ""
    assert testing.backend_name(in_python, CPU) == testing.backend_name(in_python, CUDA) == ""
    assert _C.can_code(gloo, CPU, 2)
    assert not _C.can_code(in_python, CPU, 2)
    # One backend by three names; "nccl" calls itself nccl2 in torch 2.15.
    names = ("nccl", "nccl2", "nccl-lazy", "gloo", "", "nccl3")
    assert [name for name in names if testing.is_on_streams(name, CUDA)] == ["nccl", "nccl2", "nccl-lazy"]
    assert not any(testing.is_on_streams(name, CPU) for name in names)
