"""Trains the same model with plain DDP and with the hook, and compares gradients, weights and bytes.

The oracle for the bytes is slow and obvious: hooks on every parameter note which ones accumulated a gradient on this
rank since the last synchronised backward pass; the union over the ranks is what has to travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_hooks

# How much more than the used parameters' bytes a plan may send (gaps that are not worth a split).
GAP_ALLOWANCE = 0.01


@dataclass
class Trainer:
    """What a scenario has at hand while it trains."""

    rank: int
    world_size: int
    ddp: DistributedDataParallel
    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    record: Callable[[], None] = lambda: None

    def batch(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random data, different on every rank, the same in every run."""
        return torch.randn(*shape, generator=self.generator).to(dtype)


class Scenario:
    """One way to use DDP. Subclasses say what differs from the plainest training loop."""

    steps = 6
    # Where everything is made that does not say where: model, batches, random numbers.
    device = "cpu"
    find_unused_parameters = True
    ddp_options: dict[str, Any] = {}
    set_to_none = True
    # Sums of more than two numbers depend on their order; 16-bit types feel it.
    tolerance = 1e-5
    # The oracle counts dense gradients of one module.
    check_bytes = True
    has_sparse_gradients = False
    # Everything is reachable from the module's outputs, which is all that a graph search looks at.
    graph_finds_all_used = False

    def build(self) -> nn.Module:
        raise NotImplementedError

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        return DistributedDataParallel(model, find_unused_parameters=self.find_unused_parameters, **self.ddp_options)

    def step(self, t: Trainer, i: int) -> None:
        """Leave reduced gradients behind."""
        raise NotImplementedError

    def run(self, t: Trainer) -> None:
        for i in range(self.steps):
            self.step(t, i)
            t.record()
            t.optimizer.step()
            t.optimizer.zero_grad(set_to_none=self.set_to_none)


@dataclass
class Run:
    """What one training run left behind on one rank."""

    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    # By step: the parameters (by index) that this rank used, and those whose gradient here was not all zero.
    used: list[set[int]] = field(default_factory=list)
    nonzero: list[set[int]] = field(default_factory=list)
    statistics: ddp_hooks.statistics.Statistics | None = None
    usage: dict[str, ddp_hooks.statistics.ParameterUsage] = field(default_factory=dict)


def register(ddp: DistributedDataParallel, policy: ddp_hooks.Policy | str, native: bool) -> ddp_hooks.SkipUnusedState:
    """Register the hook in either way."""
    if native:
        return ddp_hooks.register(ddp, policy)
    state = ddp_hooks.SkipUnusedState(ddp, policy)
    ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
    return state


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().clone() if tensor.layout == torch.sparse_coo else tensor.detach().clone()


def train(scenario: Scenario, rank: int, policy: ddp_hooks.Policy | str | None, native: bool) -> Run:
    """Train once; ``policy=None`` is plain DDP."""
    with nullcontext() if scenario.device == "cpu" else torch.device(scenario.device):
        return _train(scenario, rank, policy, native)


def _train(scenario: Scenario, rank: int, policy: ddp_hooks.Policy | str | None, native: bool) -> Run:
    torch.manual_seed(0)
    torch._dynamo.reset()
    run = Run()
    model = scenario.build()
    parameters = list(model.parameters())
    used: set[int] = set()
    nonzero: set[int] = set()

    def note(index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                used.add(index)
                gradient = _dense(parameter.grad)
                if bool((gradient != 0).any()):
                    nonzero.add(index)

        return hook

    if policy is None:
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note(index))
    ddp = scenario.wrap(model)
    state = None
    if policy is not None:
        state = register(ddp, policy, native)
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)

    def record() -> None:
        run.gradients.append([None if p.grad is None else _dense(p.grad) for p in parameters])
        run.used.append(set(used))
        run.nonzero.append(set(nonzero))
        used.clear()
        nonzero.clear()

    trainer = Trainer(
        rank,
        dist.get_world_size(),
        ddp,
        model,
        optimizer,
        torch.Generator(scenario.device).manual_seed(100 + rank),
        record,
    )
    scenario.run(trainer)
    run.weights = [p.detach().clone() for p in parameters]
    if state is not None:
        run.statistics = state.stats()
        run.usage = state.usage()
    return run


# The last one: several policies are compared with it one after another.
_plain_runs: dict[Any, Run] = {}


def train_with_plain_ddp(scenario: Scenario, rank: int) -> Run:
    """Train, or return the last run if it was of the same scenario; every rank has made the same calls."""
    settings = vars(scenario)
    if not all(isinstance(value, str | int | float) for value in settings.values()):
        return train(scenario, rank, None, False)
    key = (type(scenario), tuple(sorted(settings.items())), dist.get_world_size())
    if key not in _plain_runs:
        _plain_runs.clear()
        _plain_runs[key] = train(scenario, rank, None, False)
    return _plain_runs[key]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(ours: torch.Tensor, plain: torch.Tensor, exact: bool, tolerance: float, what: str) -> None:
    if exact:
        # +0.0 and -0.0 are equal here: skip_zeros may turn a zero's sign.
        same = torch.equal(torch.isnan(ours), torch.isnan(plain)) and torch.equal(
            ours.nan_to_num(0.0, 1.0, -1.0), plain.nan_to_num(0.0, 1.0, -1.0)
        )
        assert same, f"{what}: differs by up to {(ours - plain).abs().max()}"
    else:
        torch.testing.assert_close(
            ours, plain, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


def assert_same_gradients(ours: nn.Module, plain: nn.Module, *, exact: bool = True) -> None:
    """Expect equal gradients, or nearly equal ones, and none where plain DDP leaves none."""
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
            torch.testing.assert_close(a.grad.cpu(), b.grad.cpu(), **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def expected_bytes(runs: list[Run], sizes: list[int], which: str) -> int:
    """Bytes of what any rank used, over all steps; ``runs`` holds every rank's plain run."""
    total = 0
    for step in range(max(len(run.used) for run in runs)):
        union: set[int] = set()
        for run in runs:
            if step < len(run.used):
                union |= getattr(run, which)[step]
        total += sum(sizes[index] for index in union)
    return total


def compare(rank: int, scenario: Scenario, policy: ddp_hooks.Policy | str, native: bool) -> None:
    """Assert that the hook gives plain DDP's gradients and weights, and sends what the oracle says."""
    world_size = dist.get_world_size()
    plain = train_with_plain_ddp(scenario, rank)
    ours = train(scenario, rank, policy, native)
    policy = ddp_hooks.policies.resolve(policy)
    exact = world_size <= 2
    assert len(ours.gradients) == len(plain.gradients) > 0
    for step, (a, b) in enumerate(zip(ours.gradients, plain.gradients, strict=True)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            what = f"gradient of parameter {index} in step {step}"
            assert (x is None) == (y is None), f"{what}: ours is {x}, plain DDP's is {y}"
            if x is not None and y is not None:
                assert_same(x, y, exact, scenario.tolerance, what)
    for index, (x, y) in enumerate(zip(ours.weights, plain.weights, strict=True)):
        assert_same(x, y, exact, scenario.tolerance, f"weight {index}")

    digest = hashlib.sha256(b"".join(bits(weight) for weight in ours.weights)).hexdigest()
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, digest)
    assert len(set(digests)) == 1, "the ranks' weights differ bitwise"

    if not scenario.check_bytes:
        return
    sizes = [weight.numel() * weight.element_size() for weight in ours.weights]
    counted = Run(used=plain.used, nonzero=plain.nonzero)
    runs: list[Any] = [None] * world_size
    dist.all_gather_object(runs, counted)
    statistics = ours.statistics
    assert statistics is not None
    if world_size == 1:
        assert statistics.payload_bytes == 0
        return
    if not policy.skip_unused and policy.skip_zeros == "off":
        assert statistics.payload_bytes == statistics.dense_bytes
        return
    searched = scenario.find_unused_parameters or scenario.ddp_options.get("static_graph", False)
    graph_detects = searched and not scenario.graph_finds_all_used
    steps = max(len(run.used) for run in runs)
    everything = sum(sizes) * steps
    assert statistics.dense_bytes == sum(sizes) * statistics.steps
    used = expected_bytes(runs, sizes, "used") if graph_detects else everything
    nonzero = expected_bytes(runs, sizes, "nonzero")
    expected = {"off": (used, used), "on": (nonzero, nonzero), "adaptive": (nonzero, used)}[policy.skip_zeros]
    assert expected[0] <= statistics.payload_bytes <= expected[1] * (1 + GAP_ALLOWANCE), (
        f"payload: expected {expected} bytes, handed {statistics.payload_bytes} to collectives; {statistics}"
    )
