"""FSDP2 on a pretended device: gradients are those of the CPU, and mistakes with streams and memory are noticed.

Everything here is torch's own. It shows what the device can be trusted with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_fsdp import CASES, Case, Model, batches, bits, blocks, local
from test_pretend import pytestmark as pytestmark
from test_pretend import run_pretended
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.functional import cross_entropy


@contextmanager
def memory_that_ends_late() -> Iterator[None]:
    """Let memory end where FSDP2 relies on; see tests/pretend/memory.h."""
    from ddp_hooks_testing import _pretend

    _pretend.end_memory_late(True)
    try:
        yield
    finally:
        _pretend.end_memory_late(False)


# --- collectives


def collectives(device: str, rank: int, asynchronous: bool) -> list[torch.Tensor]:
    """Use each collective on two streams of one group, which do not wait for each other."""
    ranks = dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    streams = [torch.Stream(device="pretend") for _ in range(2)]
    found = []
    for number in range(6):
        values = torch.randn(ranks * 6, generator=draw)
        with streams[number % 2]:
            flat = values.to(device)
            everything = flat.new_empty(ranks * flat.numel())
            part, averaged = flat.new_empty(6), flat.new_empty(6)
            # To each rank as many as its number is large, and one more.
            sent = [1 + other for other in range(ranks)]
            uneven = flat.new_empty(ranks * (1 + rank))
            total = flat.clone()
            works = [
                dist.all_gather_single(everything, flat, async_op=asynchronous),
                dist.reduce_scatter_single(part, flat, async_op=asynchronous),
                dist.reduce_scatter_single(averaged, flat, dist.ReduceOp.AVG, async_op=asynchronous),
                dist.all_to_all_single(uneven, flat[: sum(sent)], [1 + rank] * ranks, sent, async_op=asynchronous),
                dist.all_reduce(total, async_op=asynchronous),
            ]
            for work in works:
                if asynchronous:
                    work.wait()
            found += [everything, part, averaged, uneven, total]
    for stream in streams:
        torch.accelerator.current_stream().wait_stream(stream)
    return [tensor.cpu() for tensor in found]


def compare_collectives(rank: int) -> None:
    for asynchronous in (False, True):
        pairs = zip(*(collectives(device, rank, asynchronous) for device in ("cpu", "pretend")), strict=True)
        for expected, received in pairs:
            assert torch.equal(bits(received), bits(expected))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_collectives_are_those_of_gloo(ranks: int) -> None:
    run_pretended(ranks, 3, compare_collectives)


# --- training


def prefetching(model: Any) -> None:
    """Gather the parameters of two layers ahead, and let two reduce-scatters be under way, in a group of their own."""
    layers = list(model.layers)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group(True)


ALL = {**CASES, "prefetched": Case(lambda: blocks(5), prepare=prefetching)}


def make(case: Case, mesh: DeviceMesh) -> Any:
    torch.manual_seed(7)
    model: Any = Model(case.layers()).to(mesh.device_type)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=case.mixed, **(case.shard or {}))
    model.set_reduce_scatter_unused_params(case.sends_unused)
    if case.prepare is not None:
        case.prepare(model)
    return model


def optimizer_of(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    # On the CPU torch would choose another implementation.
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


def train(
    case: Case, model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> list[dict[str, torch.Tensor]]:
    """Return what this rank holds of gradients after each step. The host does not wait for the device."""
    device = next(model.parameters()).device
    found = []
    for step in steps:
        for number in range(case.passes):
            model.set_requires_gradient_sync(number == case.passes - 1)
            for i, layer in enumerate(model.layers):
                if case.chosen is not None and hasattr(layer, "chosen"):
                    layer.chosen = case.chosen(rank, step + 7 * number, i)
            tokens, targets = batches(rank, case.passes * step + number)
            cross_entropy(model(tokens).flatten(0, 1).float(), targets.to(device)).backward()
        if case.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        found.append({n: local(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_same(received: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert received.keys() == expected.keys(), what
    for name, one in expected.items():
        assert torch.equal(bits(received[name].cpu()), bits(one)), f"{what}: {name}"


def compare(rank: int, names: list[str], shape: tuple[int, ...], steps: int) -> None:
    """Train on the CPU and on the device."""
    names_of_sides = ("hosts", "local")[-len(shape) :]
    meshes = [init_device_mesh(device, shape, mesh_dim_names=names_of_sides) for device in ("cpu", "pretend")]
    with memory_that_ends_late():
        for name in names:
            found = []
            for mesh in meshes:
                model = make(ALL[name], mesh)
                found.append(train(ALL[name], model, optimizer_of(model), rank, range(steps)))
            for step, (expected, received) in enumerate(zip(*found, strict=True)):
                assert_same(received, expected, f"{name}, step {step}")


FEW = ["dense", "several passes", "recomputed", "adapters", "prefetched"]
MANY = ["float32", "unused here and there", "by columns", "kept whole", "bfloat16 sums", "float16"]


@pytest.mark.parametrize("names", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)], ids=["few", "many"])
def test_gradients_are_those_of_the_cpu(names: list[str]) -> None:
    run_pretended(2, 5, compare, names, (2,), 3)


@pytest.mark.parametrize(
    ("shape", "names"),
    [((2, 2), ["dense"]), pytest.param((2, 2), FEW, marks=pytest.mark.thorough)],
    ids=["hosts", "all over hosts"],
)
def test_on_four_ranks(shape: tuple[int, ...], names: list[str]) -> None:
    run_pretended(4, 6, compare, names, shape, 2)


@pytest.mark.thorough
def test_fifty_steps() -> None:
    run_pretended(2, 7, compare, ["several passes", "adapters"], (2,), 50)


def checkpointed(rank: int, folder: str) -> None:
    """A checkpoint of two steps on the device, from which the next two go on, on the device as on the CPU."""
    case = CASES["adapters"]
    with memory_that_ends_late():
        found = []
        for device in ("cpu", "pretend"):
            mesh = init_device_mesh(device, (2,))
            model = make(case, mesh)
            optimizer = optimizer_of(model)
            train(case, model, optimizer, rank, range(2))
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(saved, checkpoint_id=f"{folder}/{device}")
            other = make(case, mesh)
            for parameter in other.parameters():
                nn.init.zeros_(parameter)
            optimizer = optimizer_of(other)
            train(case, other, optimizer, rank, range(1))
            loaded = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer), strict=True))
            dcp.load(loaded, checkpoint_id=f"{folder}/{device}")
            set_state_dict(other, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            found.append(train(case, other, optimizer, rank, range(2, 4)))
        for expected, received in zip(*found, strict=True):
            assert_same(received, expected, "after a checkpoint")


@pytest.mark.thorough
def test_checkpoint(tmp_path: Path) -> None:
    run_pretended(2, 8, checkpointed, str(tmp_path))


# --- mistakes


class Narrow(DefaultReduceScatter):
    """Adds up in 32 bits what has been rounded to 16, on a stream of its own; without a mistake."""

    def __init__(self) -> None:
        self.stream = torch.Stream(device="pretend")

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.begin()
        with self.stream:
            rounded = input_tensor.bfloat16().float()
            super().__call__(output_tensor, rounded, group, op)
        self.end()

    def begin(self) -> None:
        self.stream.wait_stream(torch.accelerator.current_stream())

    def end(self) -> None:
        torch.accelerator.current_stream().wait_stream(self.stream)


class BeginsEarly(Narrow):
    def begin(self) -> None:
        pass


class EndsEarly(Narrow):
    def end(self) -> None:
        pass


class IsNotWaitedFor(DefaultReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        super().__call__(output_tensor, input_tensor, group, op, async_op=True)


class Drops(DefaultReduceScatter):
    """Sends from memory of the stream that computes gradients, and lets go of it at once."""

    held: torch.Tensor | None = None

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        memory = super().allocate(size, dtype=dtype, device=device)
        if self.held is None:  # for an input
            self.held = torch.empty_like(memory)
        return memory

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        assert self.held is not None
        self.held.copy_(input_tensor)
        super().__call__(output_tensor, self.held, group, op)
        self.let_go(self.held)
        self.held = None

    def let_go(self, memory: torch.Tensor) -> None:
        pass


class DropsRecorded(Drops):
    def let_go(self, memory: torch.Tensor) -> None:
        memory.record_stream(torch.accelerator.current_stream())


def complaints() -> list[str]:
    """Wait for the device, and return what went wrong there."""
    from ddp_hooks_testing import _pretend

    found = []
    while True:
        try:
            _pretend.synchronize()
        except RuntimeError as error:
            found.append(str(error))
        else:
            return found


def mistaken(rank: int) -> dict[str, list[str]]:
    """Train with each reduce-scatter, without anything that makes the host wait and raise."""
    found = {}
    with memory_that_ends_late():
        for kind in (DefaultReduceScatter, Narrow, DropsRecorded, BeginsEarly, EndsEarly, IsNotWaitedFor, Drops):
            torch.manual_seed(7)
            model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to("pretend")
            for layer in model:
                fully_shard(layer).set_custom_reduce_scatter(kind())
            fully_shard(model)
            for step in range(3):
                model(torch.full((2, 16), 0.1 * (step + rank))).square().mean().backward()
                for parameter in model.parameters():
                    local(parameter.grad).mul_(2)
                    parameter.grad = None
            del model
            found[kind.__name__] = complaints()
    return found


def test_mistakes_are_noticed() -> None:
    for found in run_pretended(2, 4, mistaken):
        for name in ("DefaultReduceScatter", "Narrow", "DropsRecorded"):
            assert found.pop(name) == []
        for name, complained in found.items():
            assert any("nothing orders that with" in text for text in complained), name
