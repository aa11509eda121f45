"""What is unused inside a parameter: its units, against plain DDP, and against an oracle that counts their bytes."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from profiling import profiled
from quick import thorough
from spawn import on_ranks, run_ranks, run_ranks_with_sparse_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Run, Scenario, Trainer, assert_same, compare, register, train
from tuned import Tuning, with_settings

import ddp_hooks
from ddp_hooks import _C, Policy
from ddp_hooks_testing import _C as testing

EVERY_ROW = Policy("every row", skip_zero_rows="on", tuning=Tuning(min_divided_bytes=0, min_unit_bytes=1))
# The first buckets of a step are held, as on a device.
HELD_ROWS = with_settings(EVERY_ROW, name="held rows", opening_bytes=1000)
SMALL_MESSAGES = with_settings(EVERY_ROW, name="small messages", in_place_bytes=96, pack_bytes=64)
ADAPTIVE = with_settings(EVERY_ROW, name="adaptive", skip_zero_rows="adaptive", min_divided_bytes=256, direct=False)
WITH_VALUES = with_settings(EVERY_ROW, name="with values", skip_zeros="on")


# --- units, without processes


@dataclass
class Place:
    """A parameter of `rows` rows of `row_length` elements."""

    rows: int
    row_length: int
    element_bytes: int

    @property
    def elements(self) -> int:
        return self.rows * self.row_length

    def units(self, settings: _C.UnitSettings) -> _C.Units:
        slice_ = _C.ParameterSlice(0, 0, self.elements, self.row_length)
        return _C.units_of(slice_, self.element_bytes, settings)


def settings(divided: int = 0, least: int = 1, most: int = 1 << 20) -> _C.UnitSettings:
    return _C.UnitSettings(min_divided_bytes=divided, min_unit_bytes=least, max_unit_bytes=most)


@pytest.mark.parametrize(
    ("place", "unit_settings", "length"),
    [
        (Place(10, 16, 4), settings(), 16),  # a row a unit
        (Place(10, 16, 4), settings(divided=641), 160),  # too small to be divided
        (Place(10, 16, 4), settings(divided=640), 16),
        (Place(10, 16, 4), settings(least=65), 32),  # two rows
        (Place(10, 16, 4), settings(least=10_000), 160),
        (Place(10, 16, 4), settings(least=2**63 - 1), 160),
        (Place(10, 1, 8), settings(least=20), 3),  # the last unit has one row only
        (Place(4, 1024, 4), settings(most=1024), 256),  # a quarter of a row
        (Place(4, 1000, 4), settings(most=1024), 250),
        (Place(4, 1009, 4), settings(most=1024), 1009),  # a prime number of elements stays in one piece
        (Place(4, 1024, 4), settings(least=4096, most=1024), 1024),  # the least wins
    ],
)
def test_units_of_a_parameter(place: Place, unit_settings: _C.UnitSettings, length: int) -> None:
    units = place.units(unit_settings)
    assert units.length == length
    ends = [0, *(units.end(i) for i in range(len(units)))]
    assert [units.begin(i) for i in range(len(units))] == ends[:-1]
    assert ends == sorted(set(ends))
    assert ends[-1] == place.elements


def test_a_parameter_without_dimensions_is_one_unit() -> None:
    assert len(_C.units_of(_C.ParameterSlice(0, 0, 1, 0), 4, settings())) == 1
    assert len(_C.units_of(_C.ParameterSlice(0, 0, 0, 0), 4, settings())) == 0


def random_units(generator: random.Random) -> tuple[list[_C.Units], _C.UsageMask]:
    units, bits = [], 0
    for _ in range(generator.randint(1, 4)):
        length = generator.randint(1, 9)
        one = _C.Units(length, generator.randint(1, 200), bits)
        bits += (len(one) + 63) // 64 * 64
        units.append(one)
    used = _C.UsageMask(bits)
    density = generator.choice([0.0, 0.02, 0.5, 0.97, 1.0])
    for one in units:
        first = first_bit(units, one)
        for unit in range(len(one)):
            if generator.random() < density:
                used.set(first + unit)
    return units, used


def first_bit(units: list[_C.Units], wanted: _C.Units) -> int:
    bits = 0
    for one in units:
        if one is wanted:
            return bits
        bits += (len(one) + 63) // 64 * 64
    raise AssertionError


@pytest.mark.parametrize("seed", range(40))
def test_every_used_unit_is_sent_once(seed: int) -> None:
    generator = random.Random(seed)
    units, used = random_units(generator)
    one_message = generator.random() < 0.5
    plan = _C.PlanSettings(
        in_place_bytes=generator.choice([0, 40, 1 << 20]),
        pack_bytes=generator.choice([0, 100]),
        one_message_per_bucket=one_message,
        gap_fraction=0.0,
    )
    element_bytes = 4
    messages = testing.make_unit_plan(units, used, element_bytes, plan)[0]
    assert len(messages) <= 1 or not one_message
    sent: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(units))}
    for message in messages:
        runs = message.stretches
        assert message.in_place == (len(runs) == 1)
        assert message.in_place or all(run.length * element_bytes < 1 << 20 for run in runs)
        for run in runs:
            assert run.length > 0
            sent[run.place].append((run.offset, run.offset + run.length))
    for index, one in enumerate(units):
        first = first_bit(units, one)
        elements = {e for u in range(len(one)) if used.test(first + u) for e in range(one.begin(u), one.end(u))}
        assert testing.elements_in_units(one, used) == len(elements)
        covered = list(itertools.chain.from_iterable(range(*stretch) for stretch in sent[index]))
        assert len(covered) == len(set(covered))
        size = one.end(len(one) - 1)
        whole = len(elements) * 16 >= size * 15
        assert set(covered) == (set(range(size)) if whole else elements)


def test_no_gap_holds_what_travels_otherwise() -> None:
    """A gap is put back as it was; what is scattered into it meanwhile would be lost."""
    slices = [_C.ParameterSlice(0, 0, 1000), _C.ParameterSlice(1, 1000, 4), _C.ParameterSlice(2, 1004, 1000)]
    layout = _C.LayoutOfBuckets([_C.BucketLayout(slices, 4)], 3)
    agreed, divided = _C.UsageMask(3, True), _C.UsageMask(3)
    agreed.clear(1)
    plan = _C.PlanSettings(in_place_bytes=1000, pack_bytes=1000, gap_fraction=0.5)
    assert [len(m.gaps) for m in testing.make_reduction_plan(layout, agreed, plan)[0].launches] == [1]
    divided.set(1)
    for make in (testing.make_reduction_plan, testing.plan_bucket_by_bucket):
        assert [len(m.gaps) for m in make(layout, agreed, plan, divided)[0].launches] == [0, 0]


# --- against plain DDP


def tokens(t: Trainer, i: int, vocabulary: int, count: int = 12) -> torch.Tensor:
    """Half of them are the same on every rank."""
    shared = torch.Generator(t.generator.device).manual_seed(1000 + i)
    common = torch.randint(0, vocabulary, (count // 2,), generator=shared)
    own = torch.randint(0, vocabulary, (count - count // 2,), generator=t.generator)
    return torch.cat([common, own]).reshape(2, -1)


class Table(nn.Module):
    def __init__(self, rows: int = 300, width: int = 8, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, **options)
        self.head = nn.Linear(width, 4)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(indices)))


class Rows(Scenario):
    """An embedding with few rows in use."""

    rows = 300
    check_bytes = False
    counts_units = True
    options: dict[str, Any] = {}

    def build(self) -> nn.Module:
        return Table(self.rows, **self.options)

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp(tokens(t, i, self.rows)).square().mean()

    def step(self, t: Trainer, i: int) -> None:
        self.loss(t, i).backward()


class WithoutSearch(Rows):
    find_unused_parameters = False


class Views(Rows):
    ddp_options = {"gradient_as_bucket_view": True}


class ViewsThatStay(Views):
    set_to_none = False


class GradientsStay(Rows):
    set_to_none = False


class StaticGraph(Rows):
    ddp_options = {"static_graph": True}


class ManyBuckets(Rows):
    ddp_options = {"bucket_cap_mb": 0.001}

    def build(self) -> nn.Module:
        return nn.Sequential(Table(self.rows), nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 4))


class RankBuckets(ManyBuckets):
    """Where ranks use different parameters, nobody waits before the last bucket."""

    def build(self) -> nn.Module:
        class Both(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.tables = nn.ModuleList(Table(rows) for _ in range(3))

            def forward(self, indices: torch.Tensor, which: list[int]) -> torch.Tensor:
                return sum(self.tables[i](indices) for i in which)

        return Both(self.rows)

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp(tokens(t, i, self.rows), [i % 3, (i + t.rank) % 3]).square().mean()


class OnOneRank(Rows):
    """The others make a gradient of what they receive."""

    def build(self) -> nn.Module:
        return Both(self.rows)

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp(tokens(t, i, self.rows), second=t.rank == 1 and i != 3).square().mean()


class Both(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.second = Table(rows), Table(rows)

    def forward(self, indices: torch.Tensor, second: bool) -> torch.Tensor:
        return self.second(indices) if second else self.first(indices)


class Padding(Rows):
    options = {"padding_idx": 0}

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        indices = tokens(t, i, self.rows)
        indices[:, 0] = 0
        return t.ddp(indices).square().mean()


class MaxNorm(Rows):
    """Writes into the rows that a forward pass reads, so these have to be the same on every rank."""

    options = {"max_norm": 0.5}

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        indices = torch.randint(0, self.rows, (2, 6), generator=torch.Generator().manual_seed(i))
        return (t.ddp(indices) + t.batch(4)).square().mean()


class ScaledByFrequency(Rows):
    options = {"scale_grad_by_freq": True}


class SparseTable(Rows):
    """Passes through as it is."""

    options = {"sparse": True}
    counts_units = False

    def run(self, t: Trainer) -> None:
        for i in range(self.steps):
            self.step(t, i)
            t.record()
            with torch.no_grad():
                for parameter in t.model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad.to_dense()
            t.optimizer.zero_grad()


class UsedTwice(Rows):
    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return (t.ddp(torch.cat([tokens(t, i, 50), tokens(t, i + 1, self.rows)]))).square().mean()


class Bag(Rows):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(self.rows, 8, mode="mean"), nn.Linear(8, 4))


class Tied(Rows):
    """The head's gradient is dense, and so is that of the table."""

    def build(self) -> nn.Module:
        class Language(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.table = nn.Embedding(rows, 8)
                self.head = nn.Linear(8, rows, bias=False)
                self.head.weight = self.table.weight

            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                return self.head(torch.tanh(self.table(indices)))

        return Language(self.rows)


class Experts(Rows):
    """Stacked into one tensor; a rank's tokens reach few of them."""

    dtype = torch.float32

    def build(self) -> nn.Module:
        class Mixture(nn.Module):
            def __init__(self, dtype: torch.dtype) -> None:
                super().__init__()
                self.up = nn.Parameter(torch.randn(16, 12, 6).to(dtype))
                self.down = nn.Parameter(torch.randn(16, 6, 12).to(dtype))

            def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
                return sum(torch.tanh(x @ self.up[e].T) @ self.down[e].T for e in chosen)

        return Mixture(self.dtype)

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        chosen = [(i + t.rank) % 16, 2 * i % 16, 9]
        output = t.ddp(t.batch(4, 6, dtype=self.dtype), chosen)
        return (output.abs() ** 2).float().mean()


class HalfExperts(Experts):
    dtype = torch.float16
    tolerance = 3e-3


class BrainExperts(Experts):
    dtype = torch.bfloat16
    tolerance = 3e-2


class DoubleExperts(Experts):
    dtype = torch.float64


class ComplexExperts(Experts):
    dtype = torch.complex64


class Mixed(Rows):
    def build(self) -> nn.Module:
        class Two(nn.Module):
            def __init__(self, rows: int) -> None:
                super().__init__()
                self.float32, self.float64 = Table(rows), Table(rows).double()

            def forward(self, indices: torch.Tensor) -> torch.Tensor:
                return self.float32(indices) + self.float64(indices)

        return Two(self.rows)


class PrunedFilters(Rows):
    """In channels-last order a filter is a stretch of memory, too."""

    def build(self) -> nn.Module:
        return nn.Conv2d(4, 32, 3).to(memory_format=torch.channels_last)

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        kept = torch.zeros(32)
        kept[[i, t.rank + 8]] = 1
        return (t.ddp(t.batch(2, 4, 6, 6)) * kept[:, None, None]).square().mean()


class NoSync(Rows):
    def step(self, t: Trainer, i: int) -> None:
        with t.ddp.no_sync():
            self.loss(t, i).backward()
        self.loss(t, i + 100).backward()


class FrozenNowAndThen(Rows):
    def step(self, t: Trainer, i: int) -> None:
        table = next(module for module in t.model.modules() if isinstance(module, nn.Embedding))
        table.weight.requires_grad_(i % 3 != 1 and not (i == 2 and t.rank == 0))
        super().step(t, i)


class SpecialNumbers(Rows):
    """Nothing is dropped that is not zero: sums that cancel, denormals, infinities, numbers that are none."""

    steps = 5

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        output = t.ddp(tokens(t, i, self.rows, 4)).sum()
        rank = t.rank  # the hook would keep the trainer, and with it the module, alive
        values = [1.0, -1.0, 1e-44, -0.0, 0.0, float("inf"), float("nan"), 2.0]

        def overwrite(gradient: torch.Tensor) -> torch.Tensor:
            gradient = torch.zeros_like(gradient)
            gradient[5 + rank] = torch.tensor(values[:2] + [0.0] * 6)
            gradient[20 + i, 7] = 1e-44
            gradient[40, rank] = float("inf") if i == 2 else 0.0
            gradient[41, 3] = float("nan") if i == 3 and rank == 0 else 0.0
            gradient[60 + rank] = -0.0
            gradient[299, 7] = 1.0
            return gradient

        if i == 0:
            t.model.table.weight.register_hook(overwrite)
        return output

    def run(self, t: Trainer) -> None:
        for i in range(self.steps):
            self.step(t, i)
            t.record()
            t.optimizer.zero_grad()


class NegativeZeros(Rows):
    """Rows of -0.0 next to each other, with few and with many other rows between."""

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        if i == 0:
            generator = torch.Generator().manual_seed(t.rank)
            rows, share = self.rows, [0.5, 0.05, 1.0][t.rank % 3]  # not the trainer, which the hook would keep alive

            def negate(gradient: torch.Tensor) -> torch.Tensor:
                negative = torch.rand(rows, 1, generator=generator) < share
                return torch.where(negative, -gradient, gradient)

            t.model.table.weight.register_hook(negate)
        return super().loss(t, i)


class ClippedAdam(Rows):
    def run(self, t: Trainer) -> None:
        optimizer = torch.optim.AdamW(t.model.parameters(), lr=0.01)
        for i in range(self.steps):
            self.step(t, i)
            nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
            t.record()
            optimizer.step()
            optimizer.zero_grad()


class NothingAtAll(Rows):
    """Every gradient is zero."""

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return 0.0 * super().loss(t, i)


SCENARIOS = [
    Rows,
    WithoutSearch,
    Views,
    ViewsThatStay,
    GradientsStay,
    StaticGraph,
    ManyBuckets,
    RankBuckets,
    OnOneRank,
    Padding,
    MaxNorm,
    ScaledByFrequency,
    SparseTable,
    UsedTwice,
    Bag,
    Tied,
    Experts,
    HalfExperts,
    BrainExperts,
    DoubleExperts,
    ComplexExperts,
    Mixed,
    PrunedFilters,
    NoSync,
    FrozenNowAndThen,
    SpecialNumbers,
    NegativeZeros,
    ClippedAdam,
    NothingAtAll,
]


def compare_all(rank: int, scenarios: list[type[Rows]], policies: list[Policy], every_way: bool = True) -> None:
    """Train each scenario with each policy, registered natively and through Python, or with each in turn."""
    # What differs between the ways to register does not depend on the number of ranks.
    ways = [True, False] if dist.get_world_size() == 2 else [True]
    for number, (scenario, policy, native) in enumerate(itertools.product(scenarios, policies, ways)):
        if len(ways) == 2 and not every_way and number % 4 not in (0, 3):
            continue
        try:
            compare(rank, scenario(), policy, native)
            if scenario.counts_units and policy.skip_zero_rows == "on":
                compare_bytes(rank, scenario(), policy, native)
        except Exception as error:
            raise AssertionError(f"{scenario.__name__}, {policy.name}, native={native}: {error}") from error


def compare_bytes(rank: int, scenario: Rows, policy: Policy, native: bool) -> None:
    """Every unit that holds a non-zero on some rank is sent, and nothing else of its parameter."""
    torch.manual_seed(0)
    model = scenario.build()
    gradients: dict[int, torch.Tensor] = {}
    steps: list[dict[int, list[bool]]] = []
    shapes = list(model.parameters())

    def note(index: int) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            gradients[index] = parameter.grad.detach().clone()

        return hook

    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(note(index))
    ddp = scenario.wrap(model)
    generator = torch.Generator().manual_seed(100 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def record() -> None:
        steps.append({i: nonzero_units(gradient, policy) for i, gradient in gradients.items()})
        gradients.clear()

    scenario.run(Trainer(rank, dist.get_world_size(), ddp, model, optimizer, generator, record))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, steps)
    expected = 0
    for step in zip(*everyone, strict=True):
        for index in set().union(*step):
            units = [any(bits) for bits in zip(*(s[index] for s in step if index in s), strict=True)]
            sizes = unit_bytes(shapes[index], policy)
            sent = sum(size for size, used in zip(sizes, units, strict=True) if used)
            if len(sizes) == 1 and policy.skip_zeros == "off":
                sent = sizes[0]  # used, whatever it holds
            whole = sum(sizes)
            expected += whole if sent * 16 >= whole * 15 else sent
    statistics = train(scenario, rank, policy, native).statistics
    assert statistics is not None
    assert statistics.payload_bytes == expected, f"{statistics.payload_bytes} bytes, expected {expected}"


def unit_bytes(parameter: torch.Tensor, policy: Policy) -> list[int]:
    """Return the size of each unit, where rows are neither too long nor too short to be one."""
    size = parameter.element_size() * parameter.numel()
    rows = parameter.shape[0]
    assert policy.tuning.min_unit_bytes == 1
    assert size // rows <= policy.tuning.max_unit_bytes
    return [size // rows] * rows


def nonzero_units(gradient: torch.Tensor, policy: Policy) -> list[bool]:
    # Not zero, or no number at all.
    return [not bool((row == 0).all()) for row in gradient]


@pytest.mark.parametrize(
    ("part", "world_size", "every_way"),
    [
        *((part, 2, False) for part in (1, 2, 3)),
        (0, 3, False),
        *(pytest.param(part, 2, True, marks=pytest.mark.thorough) for part in range(4)),
        *(pytest.param(part, 3, True, marks=pytest.mark.thorough) for part in (1, 2, 3)),
    ],
)
def test_same_as_plain_ddp(world_size: int, part: int, every_way: bool) -> None:
    run_ranks_with_sparse_gradients(world_size, compare_all, SCENARIOS[part::4], [EVERY_ROW, ADAPTIVE], every_way)


@pytest.mark.parametrize("every_way", [False, *thorough(True)])
@pytest.mark.parametrize("policy", [SMALL_MESSAGES, WITH_VALUES, HELD_ROWS], ids=lambda policy: policy.name)
def test_every_way_to_send_units(policy: Policy, every_way: bool) -> None:
    scenarios = [Rows, ManyBuckets, RankBuckets, OnOneRank, Experts, Views, NothingAtAll]
    run_ranks(2, compare_all, scenarios, [policy], every_way)


class FewRows(Rows):
    options: dict[str, Any] = {}
    steps = 4


@pytest.mark.parametrize("every_way", [False, *thorough(True)])
@on_ranks(2)
def test_pieces(rank: int, every_way: bool) -> None:
    """Units of several rows, and units that are parts of a row."""
    for changes in ({"min_unit_bytes": 100}, {"max_unit_bytes": 8}, {"min_unit_bytes": 100_000}):
        compare_all(rank, [FewRows, Experts, PrunedFilters], [with_settings(ADAPTIVE, **changes)], every_way)
        for number, scenario in enumerate((FewRows, Experts, PrunedFilters)):
            for native in (True, False) if every_way else (number % 2 == 0,):
                compare(rank, scenario(), with_settings(EVERY_ROW, **changes), native)


def masks_that_grow(rank: int, direct: bool = True) -> None:
    """The room for a compressed mask follows from the step before; what does not fit takes a second exchange."""
    policy = with_settings(EVERY_ROW, direct=direct)

    class Growing(Rows):
        rows = 6000
        steps = 8

        def loss(self, t: Trainer, i: int) -> torch.Tensor:
            count = [10, 10, 2000, 10, 10, 4000, 4000, 10][i]
            own = torch.randint(0, self.rows, (2, count), generator=t.generator)
            return t.ddp(own).square().mean()

    for scenario in (Growing, type("GrowingBuckets", (Growing,), {"ddp_options": {"bucket_cap_mb": 0.001}})):
        compare_all(rank, [scenario], [policy])
        statistics = train(scenario(), rank, policy, True).statistics
        assert statistics is not None
        # The mask of the parameters, that of the units, and twice more for the head; twice there was too little room.
        single = statistics.exchanges - 2
        assert single % scenario.steps == 0
        assert statistics.skip_zero_rows_steps == scenario.steps


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_masks_that_grow(world_size: int) -> None:
    run_ranks(world_size, masks_that_grow)


@pytest.mark.thorough
@on_ranks(6, timeout=300.0)
def test_masks_on_a_grid(rank: int) -> None:
    """Six ranks are two axes."""
    compare(rank, Rows(), EVERY_ROW, True)
    compare(rank, Rows(), with_settings(EVERY_ROW, min_direct_bytes=0, min_owner_saving=0), True)
    masks_that_grow(rank)
    # Where nobody asks who uses what, masks are merged and compressed again on their way.
    compare(rank, Rows(), with_settings(EVERY_ROW, direct=False), True)
    masks_that_grow(rank, direct=False)


# --- gradients that somebody else reads, or has dropped


class SharedMemory(Rows):
    """Autograd makes two gradients of one memory, which the layer below has yet to read."""

    steps = 3
    find_unused_parameters = False
    ddp_options = {"bucket_cap_mb": 0.01}
    counts_units = False

    def build(self) -> nn.Module:
        class Positions(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.below = nn.Linear(128, 128)
                self.first, self.second = (nn.Parameter(torch.randn(1, 4096, 128)) for _ in range(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (self.below(x) + self.first.squeeze(0) + self.second.squeeze(0)) * x

        return Positions()

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        x = t.batch(4096, 128)
        x[2100:] = 0
        return t.ddp(x).square().mean()


def test_gradients_that_share_memory() -> None:
    run_ranks(2, compare_all, [SharedMemory], [EVERY_ROW, with_settings(ADAPTIVE, in_place_bytes=1 << 16)])


class ForeignMemory(Rows):
    """Two gradients of one memory, though neither's storage knows."""

    steps = 4
    ddp_options = {"bucket_cap_mb": 0.0001}
    counts_units = False

    def build(self) -> nn.Module:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
                return first.sum() + second.sum()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
                memory = np.zeros((64, 4), dtype=np.float32)
                memory[::5] = float(gradient)
                return torch.from_numpy(memory), torch.from_numpy(memory)

        class Foreign(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = (nn.Parameter(torch.ones(64, 4)) for _ in range(2))

            def forward(self) -> torch.Tensor:
                return Twice.apply(self.first, self.second)

        return Foreign()

    def loss(self, t: Trainer, i: int) -> torch.Tensor:
        return t.ddp() * (t.rank + i)


def test_gradients_of_foreign_memory() -> None:
    run_ranks(2, compare_all, [ForeignMemory], [EVERY_ROW])


@on_ranks(2)
def test_gradient_in_a_later_hook(rank: int) -> None:
    """Who hangs a hook behind DDP's finds there what this rank computed, however long after."""
    torch.manual_seed(0)
    model = Table()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.001)
    state = register(ddp, EVERY_ROW, True)
    table = model.table.weight
    seen = []

    def look(*_: object) -> None:
        time.sleep(0.2)
        seen.append(table.grad.clone())

    table.expand_as(table).grad_fn.next_functions[0][0].register_hook(look)
    loss = ddp(torch.tensor([[1, 2 + rank]])).square().mean()
    alone = torch.autograd.grad(loss, table, retain_graph=True)[0]
    loss.backward()
    assert state.usage()["table.weight"].units.used_here == 2
    torch.testing.assert_close(seen, [alone], rtol=0, atol=0)


@on_ranks(2)
def test_table_of_two_modules(rank: int) -> None:
    """Both Reducers hear of one gradient, and each averages what this rank computed."""

    class Looker(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.table = table

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.table(i).sum()

    late = [False]

    def come_late(*_: object) -> None:
        time.sleep(0.05 * late[0])

    for hooked in ((True, True), (True, False), (False, True)):
        table = nn.Embedding(8192, 16)
        modules, states = [], []
        for ours in hooked:
            modules.append(DistributedDataParallel(Looker(table), find_unused_parameters=True))
            if ours:
                states.append(register(modules[-1], EVERY_ROW, True))
            # Between the two, on one of the ranks.
            table.weight.expand_as(table.weight).grad_fn.next_functions[0][0].register_hook(come_late)
        for step in range(4):
            late[0] = step % 2 == rank
            first, second = (module(torch.arange(8) * 8 + rank) for module in modules)
            (first + 2 * second).backward()
            used = table.weight.grad[:64].reshape(8, 8, 16)[:, :2]
            assert used.eq(1.5).all(), used.unique()
            table.weight.grad = None
        assert all(state.stats().skip_zero_rows_steps == 4 for state in states)


@on_ranks(2)
def test_dropped_gradients(rank: int) -> None:
    """Registered through Python, the hook reads what the Reducer copied, whatever becomes of .grad."""
    found = []
    for policy in (None, EVERY_ROW):
        torch.manual_seed(0)
        model = Table()
        ddp = DistributedDataParallel(model)
        if policy is not None:
            state = register(ddp, policy, False)
        head = model.head.weight
        accumulator = head.expand_as(head).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_, head=head: setattr(head, "grad", None))
        ddp(torch.tensor([[1, 2 + rank]])).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert state.usage()["head.weight"].units.used_here == 4
    for ours, plain in zip(found[1], found[0], strict=True):
        assert_same(ours, plain, True, 0.0, "gradient")


@on_ranks(2)
def test_usage_beside_values(rank: int) -> None:
    """What is agreed on by units is not looked at by the scan of its bucket's zeros."""
    ddp = DistributedDataParallel(Table())
    state = register(ddp, with_settings(WITH_VALUES, min_divided_bytes=1000), True)
    ddp(torch.tensor([[1, 2 + rank]])).square().mean().backward()
    usage = state.usage()
    assert usage["head.weight"].units is None
    assert usage["table.weight"].units == ddp_hooks.statistics.UnitUsage(300, 2, 3, (2, 2))
    assert usage["table.weight"].used_here


# --- the adaptive detector


@on_ranks(2)
def test_auto_pauses_for_ever(rank: int) -> None:
    most = 2**63 - 1
    ddp = DistributedDataParallel(Table(1024, 64))
    pauses = {"first_pause_steps": most, "longest_pause_steps": most, "min_zero_fraction": 0.3}
    state = register(ddp, with_settings(ADAPTIVE, **pauses), True)
    half = torch.arange(1024).reshape(2, -1)[rank][None]
    for _ in range(5):
        ddp(half).sum().backward()
        ddp.zero_grad()
    assert state.stats().skip_zero_rows_steps == 1


@on_ranks(2)
def test_auto_leaves_what_is_sent_whole(rank: int) -> None:
    """A twentieth is what the policy asks for, but so little is not worth to be left out."""
    ddp = DistributedDataParallel(Table(1000, 64))
    state = register(ddp, with_settings(ADAPTIVE, first_pause_steps=100), True)
    for rows in (10, *[945] * 5):
        ddp(torch.arange(rows)[None]).sum().backward()
        ddp.zero_grad()
    assert state.stats().skip_zero_rows_steps == 1


@pytest.mark.parametrize("views", [False, True], ids=["gradients", "views"])
@pytest.mark.parametrize("drops", [False, True], ids=["keeps", "drops"])
@on_ranks(2)
def test_auto_finds_rows(rank: int, views: bool, drops: bool) -> None:
    class Large(Rows):
        rows = 4000

    ddp = DistributedDataParallel(Table(Large.rows), gradient_as_bucket_view=views)
    state = register(ddp, "auto", True)
    generator = torch.Generator().manual_seed(rank)
    dense = sum(p.numel() for p in ddp.parameters()) * 4
    table = ddp.module.table.weight
    for step in range(20):
        state.reset_stats()
        ddp(torch.randint(0, Large.rows, (2, 10), generator=generator)).square().mean().backward()
        statistics, usage = state.stats(), state.usage()["table.weight"]
        if step < 1:
            assert statistics.payload_bytes == dense
            assert statistics.skip_zero_rows_steps == 0
            assert usage.units is None
        elif step != 16:  # then skip_zeros is tried, too
            # A unit is eight rows: 256 bytes.
            assert usage.units is not None
            assert usage.units.units == Large.rows // 8
            assert 1 < usage.units.used_here <= 20
            assert usage.units.used_here < usage.units.used_anywhere <= 40
            assert statistics.payload_bytes == usage.units.used_anywhere * 256 + dense - table.numel() * 4
            assert statistics.units_sent == usage.units.used_anywhere
            assert "in 1 of 1 steps" in str(statistics)
        ddp.zero_grad(set_to_none=drops)


@on_ranks(2)
def test_auto_leaves_dense_ones(rank: int) -> None:
    """One rank's dense gradient is enough; and what seems sparse everywhere and is not together is left for a while."""
    ddp = DistributedDataParallel(Table(1024, 64))
    policy = with_settings(ADAPTIVE, first_pause_steps=4, min_zero_fraction=0.3)
    state = register(ddp, policy, True)
    half = torch.arange(1024).reshape(2, -1)[rank][None]
    everything = torch.arange(1024)[None]

    def step(indices: torch.Tensor) -> int:
        state.reset_stats()
        ddp(indices).sum().backward()
        ddp.zero_grad()
        return state.stats().skip_zero_rows_steps

    assert [step(everything if rank == 0 else half) for _ in range(6)] == [0] * 6
    # Each rank's half is zero, but not the same one: tried once, then after 4 steps, then after 8.
    tried = [i for i in range(20) if step(half)]
    assert tried[0] == 1
    assert [b - a for a, b in itertools.pairwise(tried)] == [5, 9]
    few = torch.arange(8)[None]
    on = [step(few) for _ in range(24)]
    assert on[-1] == 1
    first = on.index(1)
    assert all(on[first:])


@on_ranks(2)
def test_a_bucket_is_sampled_at_once(rank: int) -> None:
    """All gradients of a bucket are sampled at once: on a device each sample is a launch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(7)))
    ddp = DistributedDataParallel(model)
    register(ddp, ADAPTIVE, True)
    for _ in range(2):  # DDP makes its buckets anew after the first
        ddp(torch.randn(64, 32)).square().sum().backward()
    with profiled() as profile:
        ddp(torch.randn(64, 32)).square().sum().backward()
    names = Counter(event.name() for event in profile.profiler.kineto_results.events())
    assert names["ddp_hooks::bucket"] == 1
    assert names["ddp_hooks::sample"] == 1


@on_ranks(2)
def test_ranks_join(rank: int) -> None:
    """A rank that has no more batches plays along; meanwhile parameters are sent whole."""

    def gradients(hook: bool) -> list[torch.Tensor]:
        found = []
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Table(300), find_unused_parameters=True)
        if hook:
            ddp_hooks.register(ddp, EVERY_ROW)
        generator = torch.Generator().manual_seed(rank)
        with ddp.join():
            for _ in range(3 + 2 * rank):
                ddp(torch.randint(0, 300, (2, 5), generator=generator)).square().mean().backward()
                found += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
                ddp.zero_grad()
        return found

    for ours, plain in zip(gradients(True), gradients(False), strict=True):
        assert_same(ours, plain, True, 0.0, "gradient")


@on_ranks(2)
def test_late_and_rebuilt(rank: int) -> None:
    """A table that was frozen when DDP was made, unfrozen, and known again after a rebuild."""

    class Sum(Both):
        def forward(self, indices: torch.Tensor, second: bool) -> torch.Tensor:
            return self.first(indices) + (self.second(indices) if second else 0)

    runs: list[Run] = []
    for hook in (False, True):
        torch.manual_seed(0)
        model = Sum(300)
        if hook:
            model.second.requires_grad_(False)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if hook:
            register(ddp, EVERY_ROW, True)
            model.second.requires_grad_(True)
        generator = torch.Generator().manual_seed(rank)
        run = Run()
        for step in range(6):
            if hook and step == 3:
                assert ddp_hooks.rebuild(ddp)
            ddp(torch.randint(0, 300, (2, 5), generator=generator), step % 2 == 1).square().mean().backward()
            run.gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            ddp.zero_grad()
        runs.append(run)
    for step, (ours, plain) in enumerate(zip(runs[1].gradients, runs[0].gradients, strict=True)):
        for i, (x, y) in enumerate(zip(ours, plain, strict=True)):
            if x is None or y is None:
                assert x is None
                assert y is None or not y.any()
            else:
                assert_same(x, y, True, 0.0, f"gradient {i} in step {step}")
