"""The doctor's time estimate against the hook's measured step, on a link of a known rate."""

from __future__ import annotations

import statistics
import time
from typing import Any

import slow_group
import torch
import torch.distributed as dist
from spawn import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks

RATE = 25e6  # bytes handed over, a second
BACKEND = "paced_gloo"


class PacedGroup(slow_group.SlowGroup):
    """Carries one all-reduce after the other, each at the link's rate."""

    def _start(self) -> None:
        free = 0.0
        while True:
            begin, result, work = self._starts.get()
            # What DDP gathers when it is made is lists of tensors, and no gradient.
            gradients = [tensor for tensor in result if isinstance(tensor, torch.Tensor)]
            size = sum(tensor.numel() * tensor.element_size() for tensor in gradients)
            free = max(free, time.monotonic()) + size / RATE
            begin().wait()
            time.sleep(max(free - time.monotonic(), 0.0))
            work.later.set_result(result)

    def _complete(self) -> None:
        pass


def make_group() -> Any:
    def create(store: Any, rank: int, size: int, timeout: Any) -> PacedGroup:
        return PacedGroup(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), 0)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    return dist.new_group(backend=BACKEND)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
        self.towers = nn.ModuleList(nn.Linear(256, 1024) for _ in range(4))

    def forward(self, x: torch.Tensor, tower: int) -> torch.Tensor:
        return self.towers[tower](self.trunk(x))


def compare_estimates(rank: int) -> tuple[float, float, float]:
    def make() -> DistributedDataParallel:
        torch.manual_seed(0)
        options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 1, "process_group": make_group()}
        return DistributedDataParallel(Towers(), **options)

    def step(ddp: DistributedDataParallel) -> None:
        ddp(torch.ones(8, 256), 1).sum().backward()
        time.sleep(0.01)  # an optimizer
        ddp.zero_grad()

    ddp = make()
    with ddp_hooks.diagnose(ddp) as diagnosis:
        for _ in range(7):
            step(ddp)
    division = diagnosis.findings.division
    assert division is not None
    assert division.bytes_per_second is not None
    ours = make()
    ddp_hooks.register(ours, "skip_unused")
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        step(ours)
        seconds.append(time.perf_counter() - start)
    estimate = diagnosis.findings.policy("skip_unused").step_seconds
    assert estimate is not None
    return division.bytes_per_second, estimate, statistics.median(seconds[2:])


def test_the_estimate_is_within_a_fifth_of_the_measured_step() -> None:
    for rate, estimate, measured in run_ranks(2, compare_estimates, timeout=40):
        assert 0.8 * RATE < rate < 1.2 * RATE
        assert 0.8 < estimate / measured < 1.25, f"estimated {estimate * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms"
        print(f"rate {rate / 1e6:.2f} MB/s, estimated {estimate * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms")
