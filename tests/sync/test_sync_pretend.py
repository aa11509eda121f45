"""ddp_hooks.sync on the pretended device: the same values as on the CPU, and how often the host waits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_pretend import on_pretended, run_pretended
from test_pretend import pytestmark as pytestmark
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import _C, sync
from ddp_hooks.serving.groups import control_device, host_groups


def counts() -> dict[str, int]:
    from ddp_hooks_testing import _pretend

    return dict(_pretend.counts())


def tensors_of_all_kinds() -> list[torch.Tensor]:
    """More bytes than a copy takes, in few and in many tensors; the second one begins where no block does."""
    torch.manual_seed(0)
    large = torch.randn(5_000_001)
    return [
        torch.randn(3),
        large,
        large[7:4_000_000],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, dtype=torch.complex64).conj(),
        torch.arange(10, dtype=torch.int16)[::3],
        torch.tensor(True),
        torch.empty(0),
        *torch.randn(300, 1000).unbind(),
    ]


@on_pretended(1, 0)
def test_tensors_are_hashed_in_few_copies(rank: int) -> None:
    tensors = tensors_of_all_kinds()
    on_device = [tensor.to("pretend") for tensor in tensors]
    expected = _C.hash_tensors(tensors)
    before = counts()
    assert torch.equal(_C.hash_tensors(on_device), expected)
    copies = -(-sum(tensor.nbytes for tensor in tensors) // (16 << 20))
    assert counts()["host_waits"] - before["host_waits"] <= copies + 1
    # Those of several devices, in any order.
    assert torch.equal(_C.hash_tensors([tensors[0], on_device[1], tensors[2]]), expected[:3])


@on_pretended(1, 37)
def test_hashes_follow_the_stream(rank: int) -> None:
    """What the current stream has not written yet is waited for, and what it writes afterwards does not count."""
    for _ in range(10):
        tensor = torch.zeros(100_000, device="pretend")
        stream = torch.Stream(device="pretend")
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            tensor.fill_(1)
            digests = _C.hash_tensors([tensor])
            tensor.fill_(2)
        torch.accelerator.current_stream().wait_stream(stream)
        assert torch.equal(digests, _C.hash_tensors([torch.ones(100_000)]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 2).bfloat16()
        self.register_buffer("table", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x).bfloat16()) + self.table[0]


def change(module: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for number, tensor in enumerate((*module.parameters(), *module.buffers())):
            tensor += rank * (number + 1)


def synchronised(rank: int) -> None:
    """Every function does to tensors on the device what it does on the CPU; the host waits for no data."""
    for function in (sync.broadcast_parameters, sync.average_parameters):
        for async_op in (False, True):
            modules: list[nn.Module] = [Model(), Model().to("pretend")]
            for module in modules:
                change(module, rank)
                before = counts()
                done: Any = function(module, async_op=async_op)
                if async_op:
                    done.wait()
                assert counts()["host_waits"] == before["host_waits"]
            assert sync.verify_replicas(modules[1]).in_step
            for a, b in zip(modules[0].state_dict().values(), modules[1].state_dict().values(), strict=True):
                assert torch.equal(a, b.cpu())


def differing(rank: int) -> None:
    module = Model().to("pretend")
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 4, device="pretend")).sum().backward()
    optimizer.step()
    assert sync.verify_replicas(module, optimizer=optimizer).in_step
    with torch.no_grad():
        module.table[999] += rank
    report = sync.verify_replicas(module, optimizer=optimizer)
    assert [difference.name for difference in report.differences] == ["table"]
    assert report.differences[0].max_abs_differences == (0.0, 1.0)


def averaged(rank: int) -> None:
    """Local SGD, as on the CPU."""
    found = []
    for device in ("cpu", "pretend"):
        module = Model().to(device)
        averager = sync.PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.full((2, 4), 0.5 * rank + step)
            x[0] = 1
            module(x.to(device)).float().square().mean().backward()
            optimizer.step()
            averager.average_parameters(module.parameters())
        found.append([parameter.detach().cpu() for parameter in module.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("function", [synchronised, differing, averaged])
def test_as_on_the_cpu(function: Any) -> None:
    run_pretended(2, 37, function)


class Untouched(nn.Module):
    """What forward leaves alone is what a mode makes of it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2, device=device)
        self.register_buffer("table", torch.zeros(1000, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("mode", ["broadcast", "average", "changed", "before_eval"])
@on_pretended(2, 37)
def test_buffers(rank: int, mode: Any) -> None:
    """A group without the CPU, as NCCL is: as on the CPU, and the host waits only where it looks at values."""
    group = dist.new_group(backend="pretend:pretend")
    found = []
    for device in ("cpu", "pretend"):
        ddp = DistributedDataParallel(Untouched(device), process_group=group if device == "pretend" else None)
        buffer_sync = sync.BufferSync(ddp, mode)
        for step in range(4):
            with torch.no_grad():
                ddp.module.table += rank + step
                ddp.module.count += 1 + rank
            x = torch.ones(2, 4, device=device)
            before = counts()["host_waits"]
            loss = ddp(x).sum()
            waits = counts()["host_waits"] - before
            if step != 1:  # in which DDP makes its buckets anew
                assert waits <= (2 if (mode, device) == ("changed", "pretend") else 0)
            loss.backward()
        ddp.eval()
        found.append((buffer_sync.stats(), [buffer.cpu() for buffer in ddp.buffers()]))
        assert sync.verify_replicas(ddp, process_group=ddp.process_group).in_step
    (stats, expected), (device_stats, buffers) = found
    assert device_stats == stats
    assert stats.syncs > 0
    for a, b in zip(expected, buffers, strict=True):
        assert torch.equal(a, b)


@on_pretended(2, 0)
def test_the_group_on_the_host_ends(rank: int) -> None:
    """The group on the host goes with the module's group, and is opened once for it."""
    opened = []
    group = dist.new_group(backend="pretend:pretend")
    for _ in range(2):
        ddp = DistributedDataParallel(Untouched("pretend"), process_group=group)
        buffer_sync = sync.BufferSync(ddp)
        ddp(torch.ones(2, 4, device="pretend")).sum().backward()
        buffer_sync.remove()
        opened.append(host_groups[group])
    assert opened[0] is opened[1]
    alive = weakref.ref(group)
    del ddp, buffer_sync, opened
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert alive() is None  # and so it is not in host_groups, which is weak


@on_pretended(2, 0)
def test_records_travel_on_the_device_of_the_tensors(rank: int) -> None:
    """No rank has called set_device(): records travel on the device that the tensors are on."""
    current: list[int] = []
    entered = torch.accelerator.device_index
    torch.accelerator.device_index = lambda index: current.append(index) or entered(index)  # type: ignore
    tensors = [torch.ones(3, device="pretend")]
    group = dist.new_group(backend="pretend:pretend")
    averager = sync.PeriodicModelAverager(period=1, warmup_steps=0, process_group=group)
    tensors[0].grad = torch.ones(3, device="pretend")
    for function in (
        lambda: sync.broadcast_parameters(tensors, process_group=group),
        lambda: sync.average_parameters(tensors, process_group=group),
        lambda: sync.verify_replicas(tensors, process_group=group),
        lambda: averager.average_parameters(tensors),
    ):
        current.clear()
        function()
        assert current
        assert set(current) == {0}
    group.bound_device_id = torch.device("pretend", 0)
    assert control_device(group) == torch.device("pretend", 0)
