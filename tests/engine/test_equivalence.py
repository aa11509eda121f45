"""The hook against plain DDP: the same gradients and weights, and no more bytes than the oracle counts."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quick import thorough
from spawn import run_ranks, run_ranks_with_sparse_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import Scenario, Trainer, compare, register
from tuned import Tuning, with_settings

import ddp_hooks


class Branches(nn.Module):
    """The example of the DDP questions: a trunk and two branches; one is taken."""

    def __init__(self, width: int = 64, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear1 = nn.Linear(8, width, dtype=dtype)
        self.linear2 = nn.Linear(width, width, dtype=dtype)
        self.linear3 = nn.Linear(width, width, dtype=dtype)
        self.head = nn.Linear(width, 4, dtype=dtype)
        self.never = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: torch.Tensor, second: bool, third: bool = False) -> torch.Tensor:
        x = torch.tanh(self.linear1(x))
        if second:
            x = torch.tanh(self.linear2(x))
        if third:
            x = torch.tanh(self.linear3(x))
        return self.head(x)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output.abs() ** 2).float().mean()


class AllUsed(Scenario):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8))).backward()


class BucketsAreRebuilt(AllUsed):
    """Without a graph search, DDP lays its buckets out anew after the first step."""

    find_unused_parameters = False
    ddp_options = {"bucket_cap_mb": 0.001}


class RankBranches(Scenario):
    """Rank 0 takes one branch, rank 1 the other."""

    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8), t.rank % 2 == 0, t.rank % 2 == 1)).backward()


class SmallBuckets(RankBranches):
    ddp_options = {"bucket_cap_mb": 0.001}


class StepBranches(Scenario):
    """The branch depends on the step, sometimes on the rank, and sometimes nobody takes it."""

    ddp_options = {"bucket_cap_mb": 0.01}
    steps = 9

    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8), i % 3 == 0, i % 3 == 1 and t.rank == 0)).backward()


class BucketViews(StepBranches):
    ddp_options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}


class ZeroedGradients(StepBranches):
    """Gradients are zeroed, not dropped: an unused parameter's .grad is defined."""

    set_to_none = False


class ZeroedBucketViews(BucketViews):
    set_to_none = False


class SharedPasses(Scenario):
    """Several passes through shared layers in one forward; another pass on some ranks and steps only."""

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.shared = nn.Linear(8, 8)
                self.extra = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
                x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
                return self.shared(self.extra(x)) if again else x

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8), (i + t.rank) % 3 == 0)).backward()


class NoSync(Scenario):
    """A branch that only an unsynchronised micro-step took still has to travel."""

    ddp_options = {"bucket_cap_mb": 0.01}

    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        with t.ddp.no_sync():
            loss_of(t.ddp(t.batch(4, 8), i % 2 == 0, i % 3 == t.rank)).backward()
        loss_of(t.ddp(t.batch(4, 8), False)).backward()


class NoSyncZeroedViews(NoSync):
    ddp_options = {"gradient_as_bucket_view": True}
    set_to_none = False


class StaticGraph(Scenario):
    """What is unused stays unused; DDP learns it in the first step. Each rank leaves another branch out."""

    ddp_options = {"static_graph": True, "bucket_cap_mb": 0.01}

    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8), t.rank == 0)).backward()


class Joined(Scenario):
    """Ranks run out of data at different times; those that did play along with zeros."""

    divide_by_initial_world_size = True

    def build(self) -> nn.Module:
        return Branches()

    def run(self, t: Trainer) -> None:
        with t.ddp.join(divide_by_initial_world_size=self.divide_by_initial_world_size):
            for i in range(3 + 2 * t.rank):
                loss_of(t.ddp(t.batch(4, 8), i % 2 == 0, t.rank == 1)).backward()
                t.record()
                t.optimizer.step()
                t.optimizer.zero_grad()


class JoinedDividedByTheRest(Joined):
    divide_by_initial_world_size = False


class JoinedWithoutSearch(Joined):
    find_unused_parameters = False

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))

    def run(self, t: Trainer) -> None:
        with t.ddp.join():
            for _ in range(3 + 2 * t.rank):
                loss_of(t.ddp(t.batch(4, 8))).backward()
                t.record()
                t.optimizer.step()
                t.optimizer.zero_grad()


class EvaluatesOnOneRank(StepBranches):
    """Forward passes in grad mode that nobody differentiates must leave no trace."""

    ddp_options = {"broadcast_buffers": False}

    def step(self, t: Trainer, i: int) -> None:
        if t.rank == 0:
            for _ in range(i % 3):
                t.ddp(torch.ones(2, 8), True, True)
        super().step(t, i)


class TwoForwardsOneBackward(Scenario):
    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        first = t.ddp(t.batch(4, 8), i % 2 == 0)
        second = t.ddp(t.batch(4, 8), i % 2 == 0)
        (loss_of(first) + loss_of(second)).backward()


class Float64(RankBranches):
    dtype = torch.float64

    def build(self) -> nn.Module:
        return Branches(dtype=self.dtype)

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8, dtype=self.dtype), t.rank % 2 == 0, i % 2 == 1)).backward()


class BFloat16(Float64):
    dtype = torch.bfloat16
    tolerance = 2e-2


class Float16(Float64):
    dtype = torch.float16
    tolerance = 2e-3


class MixedDtypes(Scenario):
    """Buckets hold one dtype each; leftovers of different dtypes must not meet in one message."""

    ddp_options = {"bucket_cap_mb": 0.001}
    tolerance = 2e-2

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(
                    nn.Linear(16, 16, dtype=(torch.float32, torch.bfloat16, torch.float64)[i % 3]) for i in range(12)
                )

            def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
                for i, layer in enumerate(self.layers):
                    if i % 5 != skip:
                        x = torch.tanh(layer(x.to(layer.weight.dtype))).float()
                return x

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 16), (i + t.rank) % 2)).backward()


class Complex(Scenario):
    ddp_options = {"bucket_cap_mb": 0.001}

    def build(self) -> nn.Module:
        return Branches(dtype=torch.complex64)

    def step(self, t: Trainer, i: int) -> None:
        # Small, to stay away from the poles of the complex tanh, near which rounding errors grow.
        batch = 0.1 * torch.complex(t.batch(4, 8), t.batch(4, 8))
        loss_of(t.ddp(batch, t.rank == 0, i % 2 == 0)).backward()


class SparseEmbedding(Scenario):
    """Sparse gradients pass through; the dense ones beside them are skipped as ever."""

    check_bytes = False
    has_sparse_gradients = True

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(20, 8, sparse=True)
                self.branches = Branches()

            def forward(self, tokens: torch.Tensor, second: bool) -> torch.Tensor:
                return self.branches(self.embedding(tokens).mean(1), second)

        return Model()

    def run(self, t: Trainer) -> None:
        # SGD with weight decay does not take sparse gradients.
        t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)
        super().run(t)

    def step(self, t: Trainer, i: int) -> None:
        tokens = torch.randint(20, (4, 3), generator=t.generator)
        loss_of(t.ddp(tokens, i % 2 == t.rank)).backward()


class TiedWeights(Scenario):
    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(20, 8)
                self.middle = nn.Linear(8, 8)
                self.output = nn.Linear(8, 20, bias=False)
                self.output.weight = self.embedding.weight

            def forward(self, tokens: torch.Tensor, middle: bool) -> torch.Tensor:
                x = self.embedding(tokens).mean(1)
                return self.output(self.middle(x) if middle else x)

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        tokens = torch.randint(20, (4, 3), generator=t.generator)
        loss_of(t.ddp(tokens, i % 2 == 0)).backward()


class NothingUsed(Scenario):
    """In some steps backward reaches the input but no parameter; DDP then reduces nothing at all."""

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
                return self.layer(x) if use else torch.tanh(x)

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        batch = t.batch(4, 8).requires_grad_()
        loss_of(t.ddp(batch, i % 2 == 0)).backward()


class NothingUsedAfterNoSync(NothingUsed):
    """The same after an unsynchronised pass on one rank, whose gradients wait for the next step that reduces."""

    check_bytes = False

    def step(self, t: Trainer, i: int) -> None:
        # Not after a step that reduced nothing: DDP then still expects one, and reduces under no_sync().
        if t.rank == 0 and i % 2 == 1:
            with t.ddp.no_sync():
                loss_of(t.ddp(t.batch(4, 8), True)).backward()
        super().step(t, i)

    def run(self, t: Trainer) -> None:
        for i in range(1, self.steps):
            self.step(t, i)
            t.record()
            if i % 2 == 0:
                t.optimizer.step()
                t.optimizer.zero_grad()


class SpecialValues(Scenario):
    """NaN and Inf on one rank reach every rank."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("nan", "inf", "tiny", "plain")})

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        model.forward = lambda x: {name: layer(x) for name, layer in model.items()}  # type: ignore[assignment]
        return super().wrap(model)

    def step(self, t: Trainer, i: int) -> None:
        factors = {"nan": float("nan"), "inf": float("inf"), "tiny": 1e-42, "plain": 1.0}
        outputs = t.ddp(torch.ones(2, 4))
        last = t.rank == t.world_size - 1
        sum(outputs[name].sum() * (factor if last else 0.0) for name, factor in factors.items()).backward()


class TwoModules(Scenario):
    """A second DDP module in the same process, with a hook of its own, trained in turn with the first."""

    check_bytes = False

    def build(self) -> nn.Module:
        return nn.ModuleList([Branches(), Branches()])

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        self.other = super().wrap(model[1])
        return super().wrap(model[0])

    def run(self, t: Trainer) -> None:
        if t.ddp._comm_hooks:
            ddp_hooks.register(self.other, "skip_unused")
        super().run(t)

    def step(self, t: Trainer, i: int) -> None:
        first = t.ddp(t.batch(4, 8), i % 2 == 0)
        second = self.other(t.batch(4, 8), i % 2 == 1, t.rank == 0)
        (loss_of(first) + loss_of(second)).backward()


class Checkpointed(Scenario):
    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.branches = Branches()

            def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
                return checkpoint(self.branches, x, second, use_reentrant=False)

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8), (i + t.rank) % 2 == 0)).backward()


class Compiled(Scenario):
    """torch.compile over the wrapped module; the backend does not matter to DDP, so the quick one."""

    steps = 4

    def build(self) -> nn.Module:
        return Branches()

    def run(self, t: Trainer) -> None:
        self.compiled = torch.compile(t.ddp, backend="aot_eager")
        super().run(t)

    def step(self, t: Trainer, i: int) -> None:
        loss_of(self.compiled(t.batch(4, 8), i % 2 == 0)).backward()


class ManyTinyParameters(Scenario):
    ddp_options = {"bucket_cap_mb": 0.001}
    steps = 3

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scales = nn.ParameterList(torch.randn(1 + i % 7) for i in range(2000))

            def forward(self, x: torch.Tensor, phase: int) -> torch.Tensor:
                used = [scale for i, scale in enumerate(self.scales) if (i * 7919) % 5 != phase]
                return x.sum() * torch.cat(used).sin().mean()

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        t.ddp(t.batch(4), i % 2).backward()


class OneHugeParameter(Scenario):
    ddp_options = {"bucket_cap_mb": 1}
    steps = 3

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.small = nn.Linear(4, 4)
                self.huge = nn.Parameter(torch.randn(3_000_000) * 0.01)

            def forward(self, x: torch.Tensor, huge: bool) -> torch.Tensor:
                x = self.small(x)
                return x + self.huge.sin().mean() if huge else x

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(2, 4), i > 0)).backward()


class LargeBuckets(StepBranches):
    ddp_options = {"bucket_cap_mb": 100}


class FrozenAfterWrapping(Scenario):
    """Layers are frozen, and unfrozen again, while training goes on; one of them on rank 0 only."""

    ddp_options = {"bucket_cap_mb": 0.01}
    steps = 8

    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        t.model.linear1.requires_grad_(i not in (2, 3, 4))
        t.model.linear2.requires_grad_(not (i in (3, 4, 5) and t.rank == 0))
        loss_of(t.ddp(t.batch(4, 8), True)).backward()


class FrozenWithStaleGradients(FrozenAfterWrapping):
    """Gradients are not cleared, so a frozen layer keeps the last one; DDP does not touch it."""

    def run(self, t: Trainer) -> None:
        for i in range(self.steps):
            self.step(t, i)
            t.record()
            t.optimizer.step()
            for parameter in t.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = None


class ZeroTimesSum(Scenario):
    """The usual trick to pacify DDP without a graph search; only skip_zeros sees through it."""

    find_unused_parameters = False
    ddp_options = {"bucket_cap_mb": 0.01}

    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        idle = sum(parameter.sum() for parameter in t.model.parameters())
        output = t.ddp(t.batch(4, 8), i % 2 == 0)
        (loss_of(output) + 0 * idle).backward()


class MaskedGradients(Scenario):
    """Gradients multiplied by a mask of zeros, which leaves zeros of both signs."""

    ddp_options = {"bucket_cap_mb": 0.01}

    def build(self) -> nn.Module:
        model = Branches()
        model.linear2.weight.register_hook(lambda gradient: gradient * 0)
        model.head.weight.register_hook(lambda gradient: gradient * (torch.arange(64, device=gradient.device) % 2))
        return model

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8), True, t.rank == 0)).backward()


class OneOutputInTheLoss(Scenario):
    """The module returns several outputs; the loss takes one of them."""

    graph_finds_all_used = True

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.trunk = nn.Linear(8, 8)
                self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

            def forward(self, x: torch.Tensor) -> dict[str, object]:
                x = torch.tanh(self.trunk(x))
                return {"heads": [head(x) for head in self.heads], "trunk": x}

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8))["heads"][(i + t.rank) % 3]).backward()


class InputGradients(Scenario):
    """One rank differentiates to the input first; that backward pass must not count as one."""

    def build(self) -> nn.Module:
        return Branches()

    def step(self, t: Trainer, i: int) -> None:
        batch = t.batch(4, 8).requires_grad_()
        output = t.ddp(batch, i % 2 == 0)
        loss = loss_of(output)
        if t.rank == 0:
            (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
            loss = loss + gradient.square().mean()
        loss.backward()


class AbandonedInputGradients(InputGradients):
    """One rank differentiates to the input and then never calls backward on that forward pass."""

    def step(self, t: Trainer, i: int) -> None:
        if t.rank == 0:
            batch = torch.ones(4, 8, requires_grad=True)
            torch.autograd.grad(t.ddp(batch, True, True).sum(), batch)
        super().step(t, i)


class ChannelsLast(Scenario):
    ddp_options = {"gradient_as_bucket_view": True}

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
                self.to(memory_format=torch.channels_last)

            def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
                for i, conv in enumerate(self.convs):
                    if i != skip:
                        x = torch.tanh(conv(x))
                return x

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(2, 3, 5, 5).to(memory_format=torch.channels_last), (i + t.rank) % 3)).backward()


class EmptyParameters(Scenario):
    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.empty = nn.Parameter(torch.zeros(0, 4))
                self.layer = nn.Linear(4, 4)
                self.other = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor, other: bool) -> torch.Tensor:
                return self.layer(x) + self.empty.sum() + (self.other(x) if other else 0)

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(2, 4), i % 2 == 0)).backward()


class Experts(Scenario):
    """Top-1 routing: which experts get tokens depends on the data of each rank."""

    ddp_options = {"bucket_cap_mb": 0.001}

    def build(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Linear(8, 16)
                self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, chosen = self.gate(x).softmax(-1).max(-1)
                out = torch.zeros_like(x)
                for index in chosen.unique().tolist():
                    rows = chosen == index
                    out[rows] = self.experts[index](x[rows]) * weight[rows, None]
                return out

        return Model()

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(5, 8))).backward()


class LazyBuckets(StepBranches):
    """Buckets get their memory in backward, and lose it again."""

    ddp_options = {"lazy_bucket_allocation": True, "bucket_cap_mb": 0.01}


class LazyBucketViews(LazyBuckets):
    ddp_options = {**LazyBuckets.ddp_options, "gradient_as_bucket_view": True}


class LazyZeroedViews(LazyBucketViews):
    set_to_none = False


class LazyBuiltAnew(BucketsAreRebuilt):
    ddp_options = {**BucketsAreRebuilt.ddp_options, "lazy_bucket_allocation": True}


class LazyNoSync(NoSync):
    ddp_options = LazyBuckets.ddp_options


class LazyStaticGraph(StaticGraph):
    ddp_options = {**StaticGraph.ddp_options, "lazy_bucket_allocation": True}


class LazyJoined(Joined):
    ddp_options = LazyBuckets.ddp_options


class LazySparse(SparseEmbedding):
    ddp_options = LazyBuckets.ddp_options


class LazyFrozen(FrozenWithStaleGradients):
    ddp_options = LazyBuckets.ddp_options


class FinalizedManually(StepBranches):
    """The user finalises, after backward."""

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super().wrap(model)
        ddp.require_manual_backward_finalization = True
        return ddp

    def step(self, t: Trainer, i: int) -> None:
        super().step(t, i)
        t.ddp.finalize_backward()


class FinalizedManuallyLazyViews(FinalizedManually):
    ddp_options = LazyBucketViews.ddp_options


class FinalizedManuallyWithoutSearch(FinalizedManually):
    find_unused_parameters = False
    ddp_options = {"bucket_cap_mb": 0.001}

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8))).backward()
        t.ddp.finalize_backward()


class FinalizedManuallyStaticGraph(FinalizedManually):
    ddp_options = StaticGraph.ddp_options

    def step(self, t: Trainer, i: int) -> None:
        loss_of(t.ddp(t.batch(4, 8), t.rank == 0)).backward()
        t.ddp.finalize_backward()


class FinalizedInBackward(FinalizedManually):
    """The user finalises in a hook of backward, where DDP allows it, with work of the pass still to come."""

    def step(self, t: Trainer, i: int) -> None:
        batch = t.batch(4, 8).requires_grad_()
        output = t.ddp(batch * 1, i % 3 == 0, i % 3 == 1 and t.rank == 0)
        early = not t.ddp.should_finalize_after_backward
        if early:
            batch.register_hook(lambda gradient: t.ddp.finalize_backward())
        loss_of(output).backward()
        if not early:
            t.ddp.finalize_backward()


# Options of DDP's that not every torch has.
LAZY: list[type[Scenario]] = [
    LazyBuckets,
    LazyBucketViews,
    LazyZeroedViews,
    LazyBuiltAnew,
    LazyNoSync,
    LazyStaticGraph,
    LazyJoined,
    LazySparse,
    LazyFrozen,
]
MANUAL: list[type[Scenario]] = [
    FinalizedManually,
    FinalizedManuallyLazyViews,
    FinalizedManuallyWithoutSearch,
    FinalizedManuallyStaticGraph,
    FinalizedInBackward,
]
ALLOCATES_LAZILY = "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel.__init__).parameters
FINALIZES_MANUALLY = hasattr(DistributedDataParallel, "finalize_backward")

SCENARIOS: list[type[Scenario]] = [
    AllUsed,
    BucketsAreRebuilt,
    RankBranches,
    SmallBuckets,
    StepBranches,
    BucketViews,
    ZeroedGradients,
    ZeroedBucketViews,
    SharedPasses,
    NoSync,
    NoSyncZeroedViews,
    StaticGraph,
    Joined,
    JoinedDividedByTheRest,
    JoinedWithoutSearch,
    EvaluatesOnOneRank,
    TwoForwardsOneBackward,
    Float64,
    BFloat16,
    Float16,
    MixedDtypes,
    Complex,
    SparseEmbedding,
    TiedWeights,
    NothingUsed,
    NothingUsedAfterNoSync,
    SpecialValues,
    TwoModules,
    Checkpointed,
    Compiled,
    ManyTinyParameters,
    OneHugeParameter,
    LargeBuckets,
    FrozenAfterWrapping,
    FrozenWithStaleGradients,
    ZeroTimesSum,
    MaskedGradients,
    OneOutputInTheLoss,
    InputGradients,
    AbandonedInputGradients,
    ChannelsLast,
    EmptyParameters,
    Experts,
    *(LAZY if ALLOCATES_LAZILY else []),
    *(MANUAL if FINALIZES_MANUALLY else []),
]

# Probes soon and often, so that a few steps see the detector go on and off.
EAGER_AUTO = ddp_hooks.Policy(
    "eager_auto",
    skip_zeros="adaptive",
    tuning=Tuning(first_pause_steps=1, longest_pause_steps=2, hold_steps=1),
)
# Packs everything: no run is large enough to travel in place.
PACK_ALL = ddp_hooks.Policy("pack_all", tuning=Tuning(in_place_bytes=1 << 40, pack_bytes=1 << 40, gap_fraction=0))
# Every run travels in place, in a message of its own.
SPLIT_ALL = ddp_hooks.Policy("split_all", tuning=Tuning(in_place_bytes=0, gap_fraction=0))


# A step opens with the last bucket, as on a device if there is less than 8 MiB; or with one in between.
HELD = ddp_hooks.Policy("held", tuning=Tuning(opening_bytes=1 << 40))
HELD_SHORTLY = ddp_hooks.Policy("held_shortly", tuning=Tuning(opening_bytes=3000))

# A policy, and whether the compiled hook is registered or that in Python.
WAYS: dict[str, tuple[ddp_hooks.Policy | str, bool]] = {
    "graph-native": ("skip_unused", True),
    "graph-python": ("skip_unused", False),
    "values-native": ("skip_zeros", True),
    "auto-python": (EAGER_AUTO, False),
}
# These take seconds on three ranks.
SLOW = (Compiled, ManyTinyParameters, OneHugeParameter)


def ways_to_serve() -> Iterator[Any]:
    """Yield all of a scenario, a way and a number of ranks.

    Without ``--all``, each scenario runs the first way on two ranks, where results are the same to the bit; and every
    other one the next of the other ways on three. test_coded runs each scenario once more.
    """
    for turn, scenario in enumerate(SCENARIOS):
        chosen = {(0, 2)} | ({(1 + turn // 2 % 3, 3)} if turn % 2 else set())
        for (number, way), world_size in itertools.product(enumerate(WAYS), (2, 3)):
            is_chosen = (number, world_size) in chosen and not (scenario in SLOW and world_size == 3)
            name = f"{scenario.__name__}-{way}-{world_size}"
            yield pytest.param(scenario, way, world_size, id=name, marks=[] if is_chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("scenario", "way", "world_size"), list(ways_to_serve()))
def test_same_as_plain_ddp(scenario: type[Scenario], way: str, world_size: int) -> None:
    run = run_ranks_with_sparse_gradients if scenario.has_sparse_gradients else run_ranks
    run(world_size, compare, scenario(), *WAYS[way])


HOLDING: dict[str, tuple[ddp_hooks.Policy, bool]] = {
    "native": (HELD, True),
    "shortly-native": (HELD_SHORTLY, True),
    "shortly-python": (HELD_SHORTLY, False),
    "values-native": (with_settings(EAGER_AUTO, opening_bytes=3000), True),
}
HELD_BUCKETS = [
    BucketsAreRebuilt,
    SmallBuckets,
    StepBranches,
    BucketViews,
    NoSync,
    StaticGraph,
    Joined,
    MixedDtypes,
    SparseEmbedding,
    FrozenAfterWrapping,
    AbandonedInputGradients,
    Experts,
]


def ways_to_hold() -> Iterator[Any]:
    """Yield what holds buckets in every way, and with ``--all`` each other scenario in one of the ways in turn."""
    for turn, scenario in enumerate([*HELD_BUCKETS, *(one for one in SCENARIOS if one not in HELD_BUCKETS)]):
        is_chosen = scenario in HELD_BUCKETS
        for way in HOLDING if is_chosen else [list(HOLDING)[turn % len(HOLDING)]]:
            marks = [] if is_chosen else pytest.mark.thorough
            yield pytest.param(scenario, way, id=f"{scenario.__name__}-{way}", marks=marks)


@pytest.mark.parametrize(("scenario", "way"), list(ways_to_hold()))
def test_steps_that_open_later(scenario: type[Scenario], way: str) -> None:
    """Buckets are held until the step opens, as on a device."""
    run = run_ranks_with_sparse_gradients if scenario.has_sparse_gradients else run_ranks
    run(2, compare, scenario(), *HOLDING[way])


PACKED = [StepBranches, MixedDtypes, Experts, ManyTinyParameters, Complex, Joined]


@pytest.mark.parametrize("scenario", PACKED)
@pytest.mark.parametrize("policy", [PACK_ALL, SPLIT_ALL, "allreduce"])
def test_every_way_to_pack(scenario: type[Scenario], policy: ddp_hooks.Policy | str) -> None:
    run_ranks(2, compare, scenario(), policy, True)


ALONE = [AllUsed, StepBranches, NoSync, StaticGraph, SparseEmbedding, Joined]


@pytest.mark.parametrize("scenario", ALONE)
@pytest.mark.parametrize("policy", ["skip_unused", "skip_zeros"])
def test_alone(scenario: type[Scenario], policy: str) -> None:
    run_ranks(1, compare, scenario(), policy, True)


class TwoBranches(nn.Module):
    """Two branches, and each pass takes one; also an embedding with sparse gradients, if asked for."""

    def __init__(self, dtype: torch.dtype, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16, sparse=True, dtype=dtype) if sparse else None
        self.first = nn.Linear(16, 16, dtype=dtype)
        self.branches = nn.ModuleList(nn.Linear(16, 16, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(16, 5, dtype=dtype)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        if self.embedding is not None:
            x = x + self.embedding(torch.arange(x.shape[0]))
        return self.head(torch.tanh(self.branches[branch](torch.tanh(self.first(x)))))


def gradients_of_rank_0(
    rank: int, dtype: torch.dtype, options: dict[str, object], set_to_none: bool, sparse: bool, policy: object
) -> list[torch.Tensor | None]:
    """All gradients of some steps in which those of the other ranks are zero."""
    torch.manual_seed(0)
    model = TwoBranches(dtype, sparse)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.001, **options)
    if policy is not None:
        register(ddp, *policy)
    gradients = []
    for step in range(4):
        output = ddp(torch.randn(8, 16, dtype=dtype), step // 2)
        (output.abs().float().square().sum() * (rank == 0)).backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            gradients.append(None if gradient is None else gradient.to_dense().detach().clone())
            if set_to_none or (gradient is not None and gradient.is_sparse):
                parameter.grad = None
            elif gradient is not None:
                gradient.zero_()
    return gradients


def compare_scaling(rank: int, dtype: torch.dtype, sparse: bool, every_way: bool) -> None:
    """With every policy in every way; or with two, of which one is registered natively and the other in Python."""
    batched = "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters
    switches = itertools.product((False, True), (False, True), (False, True)[: 1 + batched])
    for number, (views, set_to_none, in_batches) in enumerate(switches):
        options: dict[str, object] = {"gradient_as_bucket_view": views}
        if in_batches:
            options["batched_grad_copy"] = True
        plain = gradients_of_rank_0(rank, dtype, options, set_to_none, sparse, None)
        in_turns = [(PACK_ALL, number % 2 == 0), (SPLIT_ALL, number % 2 == 1)]
        for policy in itertools.product((PACK_ALL, SPLIT_ALL), (False, True)) if every_way else in_turns:
            ours = gradients_of_rank_0(rank, dtype, options, set_to_none, sparse, policy)
            for x, y in zip(ours, plain, strict=True):
                what = f"{options}, {set_to_none=}, {policy[0].name}, native={policy[1]}"
                assert (x is None) == (y is None), what
                assert x is None or y is None or torch.equal(x, y), f"{what}: {int((x != y).sum())} of {x.numel()}"


# test_sparse_gradients_are_scaled_as_plain_ddp_scales has a model of float32.
IN_EVERY_WAY = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


@pytest.mark.parametrize(
    ("dtype", "every_way"),
    [
        (torch.bfloat16, False),
        *(pytest.param(dtype, True, marks=pytest.mark.thorough) for dtype in IN_EVERY_WAY),
    ],
    ids=str,
)
def test_scaled_as_plain_ddp_scales(dtype: torch.dtype, every_way: bool) -> None:
    """A third is no binary fraction. With zeros from all ranks but one no sum is rounded, whatever its order."""
    run_ranks(3, compare_scaling, dtype, False, every_way)


@pytest.mark.parametrize("every_way", [False, *thorough(True)])
def test_sparse_gradients_are_scaled_as_plain_ddp_scales(every_way: bool) -> None:
    run_ranks(3, compare_scaling, torch.float32, True, every_way)
