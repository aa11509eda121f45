"""Gradients that hold numbers of fewer bits travel in fewer bits, and arrive the same to the bit."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairwise import in_turn, thorough
from profiling import profiled
from spawn import run_ranks, run_ranks_with_sparse_gradients
from test_equivalence import SCENARIOS, SLOW, Joined
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, Trainer, compare, register
from tuned import Tuning, with_settings

from ddp_hooks import _C, Policy
from ddp_hooks_testing import _C as testing

NARROW = Policy("narrow", narrow="on", tuning=Tuning(min_divided_bytes=0, min_unit_bytes=1, min_direct_bytes=0))
SMALL_SEGMENTS = with_settings(NARROW, name="small segments", segment_bytes=300, min_owner_saving=0.0)
ADAPTIVE = with_settings(NARROW, name="adaptive", narrow="adaptive", first_pause_steps=2, longest_pause_steps=8)
# Of plans.
NO_THRESHOLDS = {"min_direct_bytes": 0, "min_owner_saving": 0.0}
FORMS = [_C.Width.BFLOAT16, _C.Width.FLOAT16]


def is_bfloat16(numbers: torch.Tensor) -> bool:
    return bool((numbers.view(torch.int32) & 0xFFFF == 0).all())


def is_float16(numbers: torch.Tensor) -> bool:
    return bool((numbers.half().float().view(torch.int32) == numbers.view(torch.int32)).all())


# --- which units travel how, without processes


class Case:
    """Units of some gradients, who has them, and which forms hold them."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.ranks = draw.choice([2, 3, 4, 8])
        self.units: list[Any] = []
        bit = 0
        shapes = []
        for _ in range(draw.randint(1, 4)):
            length, count = draw.choice([1, 3, 64]), draw.randint(1, 150)
            shapes.append((length, length * count - draw.randint(0, length - 1), bit, count))
            bit += -(-count // 64) * 64
        for length, slice_length, first, count in shapes:
            asks = draw.random() < 0.8
            words = -(-count // 64) * 64
            bits = [bit, bit + words] if asks else [0, 0]
            bit += 2 * words if asks else 0
            self.units.append(_C.Units(length, slice_length, first, FORMS if asks else [_C.Width.FULL] * 2, bits))
        self.used = _C.UsageMask(bit)
        self.by_rank = [_C.UsageMask(bit) for _ in range(self.ranks)]
        self.expected: dict[tuple[int, int], tuple[int, Any]] = {}  # by gradient and unit
        share, narrow = draw.choice([0.1, 0.6, 1.0]), draw.choice([0.0, 0.5, 1.0])
        for i, (units, (_, _, first, _)) in enumerate(zip(self.units, shapes, strict=True)):
            for unit in range(len(units)):
                who = [rank for rank in range(self.ranks) if draw.random() < share]
                if not who:
                    continue
                width = draw.choice(FORMS) if draw.random() < narrow and self.asks(i) else _C.Width.FULL
                for rank in who:
                    self.by_rank[rank].set(first + unit)
                self.used.set(first + unit)
                if self.asks(i):
                    for form, begin in zip(FORMS, self.inexact(i), strict=True):
                        # The first form that holds it is taken; what comes behind may hold it, too.
                        if width == _C.Width.FULL or FORMS.index(form) < FORMS.index(width):
                            self.used.set(begin + unit)
                self.expected[i, unit] = (sum(1 << rank for rank in who), width)
        self.segment_bytes = draw.choice([1, 40, 4000])

    def asks(self, gradient: int) -> bool:
        return self.units[gradient].forms[0] != _C.Width.FULL

    def inexact(self, gradient: int) -> list[int]:
        return self.units[gradient].first_inexact_bits

    def plan(self) -> tuple[Any, Any, Any]:
        direct = _C.DirectSettings(
            direct=True, world_size=self.ranks, owners=True, segment_bytes=self.segment_bytes, **NO_THRESHOLDS
        )
        settings = _C.PlanSettings(in_place_bytes=400, pack_bytes=4000, gap_fraction=0.0, direct=direct)
        return _C.make_unit_plan(self.units, self.used, 4, settings, self.by_rank)


@pytest.mark.parametrize("seed", range(80))
def test_every_used_element_travels_once_in_its_width(seed: int) -> None:
    case = Case(seed)
    reduced, direct, sent = case.plan()
    elements: Counter[tuple[int, int]] = Counter()
    for run in itertools.chain.from_iterable(message.stretches for message in reduced):
        elements.update((run.place, run.offset + i) for i in range(run.length))
    for message in direct:
        for group in message.groups:
            for part in group.parts:
                elements.update((part.place, part.offset + i) for i in range(part.length))
                units = case.units[part.place]
                for unit in {(part.offset + i) // units.length for i in range(part.length)}:
                    assert case.expected[part.place, unit] == (part.contributors, part.width)
                assert message.is_summed == (
                    testing.transport_for(part.contributors, case.ranks, True, part.width) == testing.Transport.BY_OWNER
                )
    assert set(elements.values()) <= {1}
    for (gradient, unit), _ in case.expected.items():
        units = case.units[gradient]
        assert all((gradient, i) in elements for i in range(units.begin(unit), units.end(unit)))
    for units, (count, at_full_width) in zip(case.units, sent, strict=True):
        assert count <= at_full_width + 1e-9
        assert at_full_width <= units.slice_length


def test_a_message_is_counted_as_what_a_ring_of_the_same_bytes_would_carry() -> None:
    for ranks in (2, 3, 4):
        everybody = (1 << ranks) - 1
        units = _C.Units(64, 640, 0, FORMS, [64, 128])
        used = _C.UsageMask(192)
        by_rank = [_C.UsageMask(192) for _ in range(ranks)]
        for unit in range(10):
            used.set(unit)
            for mask in by_rank:
                mask.set(unit)
        direct = _C.DirectSettings(direct=True, world_size=ranks, owners=True, segment_bytes=256, **NO_THRESHOLDS)
        settings = _C.PlanSettings(in_place_bytes=1, pack_bytes=1, gap_fraction=0.0, direct=direct)
        reduced, messages, ((sent, full),) = _C.make_unit_plan([units], used, 4, settings, by_rank)
        assert not reduced
        part = {2: 0.5, 3: 0.75, 4: 0.75}[ranks]
        assert (sent, full) == (640 * part, 640)
        payload, narrow = map(sum, zip(*(testing.bytes_of_direct_message(one, 4) for one in messages), strict=True))
        assert payload == 4 * 640 * part
        assert 0 < narrow <= payload
        busiest = max(
            sum(testing.contribution_bytes(group, rank, 4) for message in messages for group in message.groups)
            for rank in range(ranks)
        )
        assert busiest == 2 * 640  # everybody contributes everything, in half of its bytes
        assert all(part.contributors == everybody for m in messages for group in m.groups for part in group.parts)


# --- the same gradients, whatever DDP is used for


@pytest.mark.parametrize("world_size", [2, *thorough(3, 4)])
@pytest.mark.parametrize(("scenario", "native"), in_turn(SCENARIOS, [True, False], SLOW))
def test_same_as_plain_ddp(scenario: type[Scenario], world_size: int, native: bool) -> None:
    made = scenario()
    made.check_bytes = False  # what is counted here are whole parameters
    run = run_ranks_with_sparse_gradients if scenario.has_sparse_gradients else run_ranks
    run(world_size, compare, made, SMALL_SEGMENTS, native)


class Autocast(Scenario):
    """Embedding, linear layers and norms under autocast; each rank takes its own branch now and then."""

    check_bytes = False
    steps = 5
    dtype = torch.bfloat16
    loss_scale = 1.0

    def build(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "words": nn.Embedding(200, 32),
                "first": nn.Linear(32, 48),
                "norm": nn.LayerNorm(48),
                "branches": nn.ModuleList(nn.Linear(48, 48) for _ in range(2)),
                "head": nn.Linear(48, 7),
            }
        )

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        return super().wrap(_Forward(model, self.dtype, self.device))

    def step(self, t: Trainer, i: int) -> None:
        words = torch.randint(200, (6, 3), generator=t.generator)
        (t.ddp(words, (i + t.rank) % 2).float().square().mean() * self.loss_scale).backward()


class _Forward(nn.Module):
    def __init__(self, parts: nn.Module, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.parts, self.dtype, self.device = parts, dtype, device

    def forward(self, words: torch.Tensor, branch: int) -> torch.Tensor:
        with torch.autocast(self.device, dtype=self.dtype):
            parts: Any = self.parts
            hidden = parts["norm"](torch.relu(parts["first"](parts["words"](words).mean(1))))
            return parts["head"](parts["branches"][branch](hidden))


class Float16Autocast(Autocast):
    dtype = torch.float16
    loss_scale = 256.0


class Accumulated(Autocast):
    """Two passes for each step: sums need more bits."""

    def step(self, t: Trainer, i: int) -> None:
        with t.ddp.no_sync():
            super().step(t, i)
        super().step(t, i)


class AutocastBucketViews(Autocast):
    ddp_options = {"gradient_as_bucket_view": True}


class AutocastJoined(Joined):
    check_bytes = False


@pytest.mark.parametrize("world_size", [2, 3, *thorough(4)])
@pytest.mark.parametrize("policy", [NARROW, SMALL_SEGMENTS, ADAPTIVE], ids=lambda p: p.name)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("scenario", [Autocast, Float16Autocast, Accumulated, AutocastBucketViews, AutocastJoined])
def test_autocast(scenario: type[Scenario], world_size: int, policy: Policy, native: bool) -> None:
    run_ranks(world_size, compare, scenario(), policy, native)


# --- odd numbers


class _Inject(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.sum() * 0

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient.clone(), None


class Injected(nn.Module):
    """Its gradients are what it is told."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([_Inject.apply(p, g) for p, g in zip(self.parameters_, gradients, strict=True)]).sum()


def odd_numbers(count: int, draw: random.Random) -> torch.Tensor:
    """Bit patterns of float32: exact in 16 bits or nearly, zeros, denormals, infinities, not NaN."""
    kind = draw.choice(["bfloat16", "float16", "zeros", "wide", "mixed"])
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    normal = torch.randn(count, generator=generator) * 10.0 ** draw.randint(-6, 4)
    if kind == "zeros":
        return torch.where(torch.rand(count, generator=generator) < 0.5, 0.0, -0.0)
    if kind == "wide":
        return normal
    numbers = normal.bfloat16().float() if kind == "bfloat16" else normal.half().float()
    special = [0.0, -0.0, 2.0**-149, -(2.0**-133), 2.0**-24, 2.0**-14, 65504.0, 65536.0, float("inf"), 3.0e38]
    for _ in range(draw.randint(0, 3)):
        numbers[draw.randrange(count)] = draw.choice(special)
    if kind == "mixed":
        numbers[draw.randrange(count)] = 1 + 2.0**-23
    return numbers


def odd_gradient(shape: tuple[int, ...], draw: random.Random) -> torch.Tensor:
    rows, numbers = shape[0], torch.Size(shape).numel()
    return torch.stack([odd_numbers(numbers // rows, draw) for _ in range(rows)]).reshape(shape)


def odd(rank: int, seed: int, dtype: torch.dtype, policy: Policy, native: bool, device: str = "cpu") -> None:
    ranks = dist.get_world_size()
    shapes = [(40, 24), (3, 5, 7), (64, 64), (1,), (130, 9)]
    models = [DistributedDataParallel(Injected(shapes, dtype).to(device), bucket_cap_mb=0.01) for _ in range(2)]
    register(models[1], policy, native)
    for step in range(4):
        everybody = []
        for other in range(ranks):
            draw = random.Random(f"{seed} {step} {other}")
            everybody.append([odd_gradient(shape, draw).to(device, dtype) for shape in shapes])
        for model in models:
            model.zero_grad()
            model([gradient.clone() for gradient in everybody[rank]]).backward()
        for index, (plain, ours) in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            assert plain.grad is not None
            assert ours.grad is not None
            what = f"parameter {index} in step {step}"
            if ranks > 2:
                torch.testing.assert_close(
                    ours.grad, plain.grad, equal_nan=True, msg=lambda m, what=what: f"{what}: {m}"
                )
                continue
            zero = torch.stack([gradients[index] for gradients in everybody]).eq(0).all(0)
            integers = torch.int64 if dtype == torch.float64 else torch.int32
            same = plain.grad.view(integers) == ours.grad.view(integers)
            same |= plain.grad.isnan() & ours.grad.isnan()  # infinity less infinity
            assert bool((same | (zero & (ours.grad == 0))).all()), what
        everywhere: list[Any] = [None] * ranks
        dist.all_gather_object(everywhere, [p.grad.cpu().numpy().tobytes() for p in models[1].parameters()])  # type: ignore[union-attr]
        assert all(one == everywhere[0] for one in everywhere), f"ranks differ in step {step}"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_odd_numbers(seed: int, world_size: int, dtype: torch.dtype, native: bool) -> None:
    run_ranks(world_size, odd, seed, dtype, SMALL_SEGMENTS, native)


# --- how much is sent


def count_bytes(rank: int, dtype: torch.dtype, exact: Any, device: str = "cpu") -> None:
    """A table with some rows looked up, and a dense layer: half of what is used, where that is narrow."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 64), nn.Flatten(), nn.Linear(4 * 64, 32)).to(device)
    ddp = DistributedDataParallel(model)
    state = register(ddp, NARROW, True)
    found: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: found.append(gradient.cpu().clone()))
    words = torch.randint(100, (3, 4), generator=torch.Generator().manual_seed(rank)).to(device)
    with torch.autocast(device, dtype=dtype):
        (ddp(words).float().square().sum() * 16).backward()
    others: list[Any] = [None] * 2
    dist.all_gather_object(others, {tuple(g.shape): g for g in found})
    expected = narrow = 0
    for shape in ((100, 64), (32, 4 * 64), (32,)):
        rows = [other[shape].reshape(shape[0], -1) for other in others]
        if len(shape) == 1:  # a row of one number is a unit, too
            assert all(not one.eq(0).all() for one in rows)
        for row in range(shape[0]):
            mine = [one[row] for one in rows if bool(one[row].ne(0).any())]
            is_narrow = bool(mine) and all(exact(one) for one in mine)
            size = 4 * rows[0].shape[1]
            expected += (-(-rows[0].shape[1] // 2) * 4 if is_narrow else size) * bool(mine)
            narrow += is_narrow
    stats = state.stats()
    assert narrow > 30
    assert stats.units_narrow == narrow
    # Packed numbers that follow each other share what a lone one is rounded up to.
    assert expected - 4 * 32 <= stats.payload_bytes <= expected
    assert stats.narrow_steps == 1
    assert "narrow: sent " in str(stats)
    assert "in 1 of 1 steps" in str(stats)


@pytest.mark.parametrize(
    ("dtype", "exact"), [(torch.bfloat16, is_bfloat16), (torch.float16, is_float16)], ids=["bfloat16", "float16"]
)
def test_half_of_the_bytes(dtype: torch.dtype, exact: Any) -> None:
    run_ranks(2, count_bytes, dtype, exact)


def switches(rank: int, views: bool) -> None:
    """Autocast for some steps, then full width, then autocast again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views)
    state = register(ddp, with_settings(ADAPTIVE, min_divided_bytes=1024), True)
    dense = sum(p.numel() for p in model.parameters()) * 4

    def step(autocast: bool) -> tuple[int, int]:
        ddp.zero_grad()
        state.reset_stats()
        data = torch.randn(8, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            ddp(data).float().square().mean().backward()
        stats = state.stats()
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (stats.payload_bytes, stats.narrow_steps))
        assert len(set(everywhere)) == 1, everywhere
        return everywhere[0]

    with_autocast = [step(True) for _ in range(6)]
    assert with_autocast[0] == (dense, 0)  # nobody has seen a gradient
    assert all(on == 1 and payload < 0.55 * dense for payload, on in with_autocast[1:])
    without = [step(False) for _ in range(20)]
    assert without[0][1] == 1  # until somebody has noticed
    assert all(payload == dense for payload, _ in without)
    assert sum(on for _, on in without) == 1
    again = [step(True) for _ in range(12)]
    assert again[-1][1] == 1
    assert again[-1][0] < 0.55 * dense


def test_adaptive_goes_on_and_off_in_the_same_step_everywhere() -> None:
    run_ranks(2, switches, False)
    run_ranks(2, switches, True)
    run_ranks(3, switches_on_three)


def switches_on_three(rank: int) -> None:
    """One rank without autocast is enough to send everything whole."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(128, 128))
    state = register(ddp, with_settings(ADAPTIVE, min_divided_bytes=1024), True)
    for i in range(12):
        ddp.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank != 1 or i >= 6):
            ddp(torch.randn(8, 128)).float().square().mean().backward()
        if i == 5:
            assert state.stats().narrow_steps == 0
            assert state.stats().payload_bytes == state.stats().dense_bytes
    assert state.stats().narrow_steps >= 3


def without_direct(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    state = register(ddp, with_settings(NARROW, direct=False), True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ddp(torch.randn(8, 64)).float().square().mean().backward()
    stats = state.stats()
    assert (stats.narrow_steps, stats.narrow_bytes) == (0, 0)
    assert stats.payload_bytes == stats.dense_bytes


def test_what_is_all_reduced_is_never_narrow() -> None:
    run_ranks(2, without_direct)


# --- beside collectives of the program's own


class _SumInBackward(torch.autograd.Function):
    """Its backward pass has a collective of its own, on the group that DDP uses, as synchronised normalisation has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class SumsInBackward(nn.Module):
    """Backward goes through pairs of layers, a bucket each; between the two of them it sums.

    When a bucket is ready it pauses, on one rank, until masks are back there; then come a gradient, the sum, and the
    gradient that makes the next bucket ready.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
        self.head = nn.Linear(64, 128, bias=False)  # as large as a pair

    def forward(self, x: torch.Tensor, seconds: float) -> torch.Tensor:
        for first, second in zip(self.pairs[::2], self.pairs[1::2], strict=True):
            x = _Pause.apply(torch.tanh(second(_SumInBackward.apply(first(x)))), seconds)
        return self.head(x)


def sums_in_backward(rank: int, native: bool) -> None:
    torch.manual_seed(0)
    model = SumsInBackward()
    plain = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=2**-5)
    ours = DistributedDataParallel(model, bucket_cap_mb=2**-5)
    state = register(ours, NARROW, native)
    for step in range(6):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        for ddp in (plain, ours):
            ddp.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                ddp(data, 0.05 * (rank == step % 2)).float().square().mean().backward()
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
    assert state.stats().narrow_bytes > 0


@pytest.mark.parametrize("native", [True, *thorough(False)], ids=["native", "python"])
def test_collectives_of_the_programs_own_within_backward(native: bool) -> None:
    """What a rank starts on the group comes between the same two of these everywhere, whenever its masks are back."""
    run_ranks(2, sums_in_backward, native, timeout=60.0)


# --- when they leave


def sends_by_bucket(rank: int, alike: bool) -> list[bool]:
    """Return whether messages leave while each bucket is taken: a small one, and five of 3 MiB."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 768, bias=False), *(nn.Linear(768, 1024, bias=False) for _ in range(4))]
    branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    model = Chain(nn.ModuleList(layers), branches)
    ddp = DistributedDataParallel(model, bucket_cap_mb=3, find_unused_parameters=True)
    register(ddp, NARROW, True)
    for _ in range(2):  # DDP makes its buckets anew after the first
        with profiled() as profile, torch.autocast("cpu", dtype=torch.bfloat16):
            ddp(torch.randn(4, 1024), 0 if alike else rank).float().square().mean().backward()
    events = profile.profiler.kineto_results.events()
    names = ("ddp_hooks::all_reduce", "ddp_hooks::all_to_all")
    sent = [event.start_ns() for event in events if event.name() in names]
    taken = sorted((event.start_ns(), event.end_ns()) for event in events if event.name() == "ddp_hooks::bucket")
    return [any(begin <= time <= end for time in sent) for begin, end in taken]


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList, branches: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.branches = branches

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)[:, :768]
        return torch.cat([x, self.branches[branch](x[:, :8])], 1)


def test_the_first_buckets_leave_at_once() -> None:
    """While less than 8 MiB came before, the link is idle; where ranks use different layers nothing is waited for."""
    for sent in run_ranks(2, sends_by_bucket, True):
        assert sent == [True, True, True, True, False, True]
    for sent in run_ranks(2, sends_by_bucket, False):
        assert sent == [False, False, False, False, False, True]
