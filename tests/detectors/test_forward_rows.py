"""Rows that a forward pass looked up, in place of a look at every row: against plain DDP, and where that is done.

A rank that knows too few rows loses gradients; one that knows none looks at every row, as always. So each way to change
a gradient on its way is compared with plain DDP, with changes that lie outside of what was looked up.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import pytest
import test_units
import torch
import torch.distributed as dist
import torch.nn.functional as F
from profiling import profiled
from spawn import on_ranks, run_ranks
from test_unit_scan import slow_unit_scan
from test_units import ADAPTIVE, EVERY_ROW, Rows, Table, compare_bytes, tokens
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training import Trainer, compare, register
from tuned import with_settings

from ddp_hooks import _C

LOOKED_UP, EVERYTHING = "ddp_hooks::scan_looked_up", "ddp_hooks::scan_units"


# --- the scan


@pytest.mark.parametrize("unit_length", [1, 3, 16, 100, 700, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_only_candidates_are_read(dtype: torch.dtype, unit_length: int) -> None:
    generator = random.Random(unit_length)
    length, offset = 5000, 7
    units = -(-length // unit_length)
    flat = torch.zeros(offset + length, dtype=dtype)
    chosen = [unit for unit in range(units) if generator.random() < 0.2] or [units - 1]
    for unit in chosen:
        at = offset + min(length - 1, unit * unit_length + generator.randrange(unit_length))
        flat[at] = generator.choice([1.0, -0.0, 0.0, float("nan")])
    words = [0] * -(-units // 64)
    for unit in chosen:
        words[unit // 64] |= 1 << unit % 64
    # Past the last unit nothing is looked at, whatever the candidates say.
    words[-1] |= ((1 << 64) - 1) & ~((1 << ((units - 1) % 64 + 1)) - 1)
    expected = slow_unit_scan(flat, offset, length, unit_length)
    assert _C.start_unit_scan(flat, offset, length, unit_length, words).wait() == expected
    assert _C.start_unit_scan(flat, offset, length, unit_length, []).wait() == ([0] * len(words), [])


# --- against plain DDP


class Counted(Rows):
    """Counts how many gradients were looked at only where rows had been looked up."""

    steps = 4
    find_unused_parameters = False
    # How many tables; in each step but the first, before which nobody knows the layout. None: that does not matter.
    known: ClassVar[int | None] = 1
    counts: Counter[str]

    def run(self, t: Trainer) -> None:
        if not t.ddp._comm_hooks:
            return super().run(t)
        self.counts = Counter()
        with profiled() as profile:
            super().run(t)
        # Making a tree of them, as events() does, takes longer than the steps.
        self.counts.update(event.name() for event in profile.profiler.kineto_results.events())


class Padding(Counted):
    options = {"padding_idx": 3}

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        indices = tokens(t, i, self.rows)
        indices[:, 0] = 3
        return t.ddp(indices).square().mean()


class ByFrequency(Counted):
    options = {"scale_grad_by_freq": True}


class MaxNorm(Counted, test_units.MaxNorm):
    pass


class Searched(Counted):
    find_unused_parameters = True


class SmallBuckets(Counted):
    ddp_options = {"bucket_cap_mb": 0.001}


class Narrow(Counted):
    """Indices of 32 bits, gradients of 64."""

    def build(self) -> nn.Module:
        return Table(self.rows).double()

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp(tokens(t, i, self.rows).int()).square().mean()


class Bags(Counted):
    known = 3

    def build(self) -> nn.Module:
        class All(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode=mode) for mode in ("mean", "sum", "max"))

            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                return torch.tanh(sum(bag(indices) for bag in self.bags))

        return All(self.rows)


class OnOneRank(Counted):
    """The others have no gradient of the second table."""

    find_unused_parameters = True
    known = None

    def build(self) -> nn.Module:
        return nn.ModuleDict({"first": Table(self.rows), "second": Table(self.rows)})

    def wrap(self, model: nn.Module) -> Any:
        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tables = model

            def forward(self, indices: torch.Tensor, which: str) -> torch.Tensor:
                return self.tables[which](indices)

        return super().wrap(Either())

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp(tokens(t, i, self.rows), "second" if t.rank == 1 and i != 3 else "first").square().mean()


class Viewed(Counted):
    """The table is another shape of the parameter: the same memory."""

    known = None

    def build(self) -> nn.Module:
        class Reshaped(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.randn(rows // 2, 16))

            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                return F.embedding(indices, self.table.view(-1, 8))

        return Reshaped(self.rows)


class Penalty(Counted):
    """The gradient of a gradient reaches the looked-up rows, and no others."""

    known = None

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        out = t.ddp(tokens(t, i, self.rows))
        (inner,) = torch.autograd.grad(out.square().sum(), t.model.table.weight, create_graph=True)
        return out.square().mean() + inner.square().mean()


class Unknown(Counted):
    known = 0


class Tied(Unknown):
    """The head's gradient has every row."""

    def build(self) -> nn.Module:
        class Language(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.table = nn.Embedding(rows, 8)

            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                return F.linear(torch.tanh(self.table(indices)), self.table.weight)

        return Language(self.rows)


class TiedToFewRows(Unknown):
    """Something else reads a row that nobody looks up."""

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp(tokens(t, i, 200)).square().mean() + t.model.table.weight[250 + i + t.rank].sum()


class TwoCalls(Unknown):
    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        table = t.model.table
        return t.ddp(tokens(t, i, 100)).square().mean() + table(tokens(t, i, 100) + 150).square().mean()


class TwoForwards(Unknown):
    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        first = t.ddp(tokens(t, i, 100))
        return (first * t.ddp(tokens(t, i, 100) + 150)).mean()


class Accumulated(Unknown, test_units.NoSync):
    """What no_sync() has left in .grad."""


class OnlyAccumulated(Unknown):
    """The pass that is reduced does not use the table, and .grad has rows of it."""

    find_unused_parameters = True

    def build(self) -> nn.Module:
        class MayLeaveOut(Table):
            def forward(self, indices: torch.Tensor, leave_out: bool) -> torch.Tensor:
                return self.head(torch.ones(2, 8)) if leave_out else super().forward(indices)

        return MayLeaveOut(self.rows)

    def step(self, t: Trainer, i: int) -> None:
        with t.ddp.no_sync():
            t.ddp(tokens(t, i, self.rows), False).square().mean().backward()
        t.ddp(tokens(t, i, self.rows), True).square().mean().backward()


class GradientsStay(Unknown):
    set_to_none = False

    def run(self, t: Trainer) -> None:
        t.model.table.weight.grad = torch.zeros_like(t.model.table.weight)
        super().run(t)


class BucketViews(Unknown):
    ddp_options = {"gradient_as_bucket_view": True}


def in_another_row(gradient: torch.Tensor) -> torch.Tensor:
    """Write where no token of `Hooked` leads, past torch's count of what is written."""
    gradient.data[280:290] += 1.0 + dist.get_rank()  # the average is nobody's own
    return gradient


class Hooked(Unknown):
    """Somebody changes the gradient before DDP has it."""

    def attach(self, t: Trainer) -> None:
        raise NotImplementedError

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        if i == 0:
            self.attach(t)
        return t.ddp(tokens(t, i, 200)).square().mean()


class TensorHook(Hooked):
    def attach(self, t: Trainer) -> None:
        t.model.table.weight.register_hook(in_another_row)


class TensorHookInPlace(Hooked):
    def attach(self, t: Trainer) -> None:
        t.model.table.weight.register_hook(lambda gradient: gradient.add_(1.0 + t.rank))


class AnotherTensor(Hooked):
    def attach(self, t: Trainer) -> None:
        t.model.table.weight.register_hook(lambda gradient: gradient + 1.0 + t.rank)


class AfterAccumulation(Hooked):
    def attach(self, t: Trainer) -> None:
        def write(weight: torch.Tensor) -> None:
            in_another_row(weight.grad)

        t.model.table.weight.register_post_accumulate_grad_hook(write)


class OnTheAccumulator(Hooked):
    def attach(self, t: Trainer) -> None:
        weight = t.model.table.weight
        accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_prehook(lambda gradients: (in_another_row(gradients[0]),))


class OnTheNode(Hooked):
    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        def attach(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            output.grad_fn.register_hook(lambda made, received: (in_another_row(made[0]),))

        handle = t.model.table.register_forward_hook(attach)
        loss = t.ddp(tokens(t, i, 200)).square().mean()
        handle.remove()
        return loss


class OnTheNodeLater(OnTheNode):
    """After the forward pass, which has watched the node."""

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        nodes: list[Any] = []
        handle = t.model.table.register_forward_hook(lambda module, arguments, output: nodes.append(output.grad_fn))
        loss = t.ddp(tokens(t, i, 200)).square().mean()
        handle.remove()
        nodes[0].register_hook(lambda made, received: (in_another_row(made[0]),))
        return loss


class WritesBehindVersions(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return in_another_row(gradient)


class BetweenTableAndParameter(Hooked):
    """What the embedding has made is handed on by somebody else, as the same memory in the same version."""

    def build(self) -> nn.Module:
        class Between(Table):
            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                rows = F.embedding(indices, WritesBehindVersions.apply(self.table.weight))
                return self.head(torch.tanh(rows))

        return Between(self.rows)

    def attach(self, t: Trainer) -> None:
        pass


class HookThatIsGone(Hooked):
    """It is not there any more when the rows are asked for."""

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        weight = t.model.table.weight

        def write(gradient: torch.Tensor) -> torch.Tensor:
            weight._backward_hooks = None
            return in_another_row(gradient)

        weight.register_hook(write)
        return t.ddp(tokens(t, i, 200)).square().mean()


class Full(TorchDispatchMode):
    """Answers in place of torch: a gradient that is full."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.fill_(1.0 + dist.get_rank()) if "embedding_dense_backward" in str(function) else result


class UnderAMode(Unknown):
    def step(self, t: Trainer, i: int) -> None:
        loss = t.ddp(tokens(t, i, self.rows)).square().mean()
        with Full():
            loss.backward()


class Masked(Unknown):
    """The table that is looked up is made of the parameter, whose gradient has rows of -0.0."""

    def build(self) -> nn.Module:
        class Product(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.randn(rows, 8))

            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                return F.embedding(indices, -2.0 * self.table)

        return Product(self.rows)


class Shuffled(Unknown):
    """Rows of the gradient of what is looked up are other rows of the parameter's."""

    def build(self) -> nn.Module:
        class Flipped(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.randn(rows, 8))

            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                return F.embedding(indices, self.table.flip(0))

        return Flipped(self.rows)


class Recomputed(Unknown):
    """The forward pass runs once more in backward, and its graph is one that nobody has watched."""

    reentrant = False

    def build(self) -> nn.Module:
        return Checkpointed(self.rows, self.reentrant)


class RecomputedInAPass(Recomputed):
    reentrant = True


class Checkpointed(nn.Module):
    def __init__(self, rows: int, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Table(rows), reentrant

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        def run(indices: torch.Tensor, anything: torch.Tensor) -> torch.Tensor:
            return self.inner(indices) + anything

        return checkpoint(run, indices, torch.zeros(1, requires_grad=True), use_reentrant=self.reentrant)


class SavedElsewhere(Unknown):
    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return t.ddp(tokens(t, i, self.rows)).square().mean()


class MoreTokensThanRows(Unknown):
    """Nothing would be saved."""

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp(tokens(t, i, 20, count=self.rows)).square().mean()


KNOWN: list[type[Counted]] = [
    Counted, Padding, ByFrequency, MaxNorm, Searched, SmallBuckets, Narrow, Bags, OnOneRank, Viewed, Penalty,
]  # fmt: skip
UNKNOWN: list[type[Counted]] = [
    Tied, TiedToFewRows, TwoCalls, TwoForwards, Accumulated, OnlyAccumulated, GradientsStay, BucketViews, TensorHook,
    TensorHookInPlace, AnotherTensor, AfterAccumulation, OnTheAccumulator, OnTheNode, OnTheNodeLater, UnderAMode,
    BetweenTableAndParameter, HookThatIsGone, Masked, Shuffled, Recomputed, RecomputedInAPass, SavedElsewhere,
    MoreTokensThanRows,
]  # fmt: skip


def check(rank: int, scenarios: list[type[Counted]], native: bool) -> None:
    for make in scenarios:
        try:
            scenario = make()
            compare(rank, scenario, EVERY_ROW, native)
            assert scenario.counts[EVERYTHING] >= scenario.steps - 1, scenario.counts
            if scenario.known is not None:
                expected = scenario.known * (scenario.steps - 1) if native else 0
                assert scenario.counts[LOOKED_UP] == expected, f"{scenario.counts[LOOKED_UP]} times, not {expected}"
        except Exception as error:
            raise AssertionError(f"{make.__name__}, native={native}: {error}") from error


def test_same_as_plain_ddp() -> None:
    run_ranks(2, check, KNOWN, True)


@pytest.mark.thorough
def test_same_as_plain_ddp_if_nobody_knows_what_was_looked_up() -> None:
    run_ranks(2, check, UNKNOWN, True)


@on_ranks(2)
def test_other_ways(rank: int) -> None:
    # The Reducer has copied the gradients into its buckets.
    check(rank, [Counted, TensorHook, TwoCalls], False)
    # What is sent is what was found, not what was looked up.
    for scenario in (Counted, Padding, MaxNorm):
        compare_bytes(rank, scenario(), EVERY_ROW, True)
    # Units of several rows, and units that are parts of a row; and those that `auto` finds in a step before.
    for changes in ({"min_unit_bytes": 100}, {"max_unit_bytes": 8}):
        pieces = Counted()
        compare(rank, pieces, with_settings(EVERY_ROW, **changes), True)
        assert pieces.counts[LOOKED_UP] == pieces.steps - 1
    adaptive = Counted()
    compare(rank, adaptive, ADAPTIVE, True)
    assert adaptive.counts[EVERYTHING] == adaptive.steps - 1
    assert adaptive.counts[LOOKED_UP] == adaptive.steps - 2


@on_ranks(2)
def test_declared_unused_once(rank: int) -> None:
    """What guards a declaration hands gradients on as they are, and changes nothing in later steps."""

    class Left(Table):
        def forward(self, indices: torch.Tensor | None) -> torch.Tensor:
            return self.head(torch.ones(1, 8)) if indices is None else super().forward(indices)

    ddp = DistributedDataParallel(Left())
    state = register(ddp, EVERY_ROW, True)
    indices = torch.tensor([[1, 2 + rank]])
    ddp(indices).square().mean().backward()
    with state.unused("table"):
        ddp(None).square().mean().backward()
    ddp.zero_grad()
    with profiled() as profile:
        ddp(indices).square().mean().backward()
    names = Counter(event.name() for event in profile.profiler.kineto_results.events())
    assert names[LOOKED_UP] == 1
