"""Gradients that travel coded arrive the same to the bit, in fewer bytes."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from profiling import profiled
from quick import thorough
from spawn import on_ranks, run_ranks, run_ranks_with_sparse_gradients
from test_equivalence import SCENARIOS, SLOW, Joined, OneHugeParameter
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Scenario, Trainer, compare, register
from tuned import Tuning, with_settings

import ddp_hooks
from ddp_hooks import _C, Policy
from ddp_hooks.serving import control_groups
from ddp_hooks_testing import _C as testing

CODED = Policy("coded", coded="on", tuning=Tuning(min_direct_bytes=0))
SMALL_SEGMENTS = with_settings(
    CODED, name="small segments", segment_bytes=300, min_owner_saving=0.0, min_divided_bytes=0, min_unit_bytes=1
)
ROWS = with_settings(SMALL_SEGMENTS, name="rows", skip_zero_rows="on", skip_zeros="on")
AUTO = with_settings(CODED, name="auto", coded="auto", first_pause_steps=2, longest_pause_steps=8)


# --- the same gradients, whatever DDP is used for


def ways_to_serve() -> Iterator[Any]:
    """Yield all of a scenario, a number of ranks and whether the compiled hook is registered.

    Without ``--all``, each scenario runs once, with the next of the others.
    """
    ways = list(itertools.product((2, 3), (True, False)))
    for turn, scenario in enumerate(SCENARIOS):
        for number, (world_size, native) in enumerate([*ways, (4, True), (4, False)]):
            name = f"{native}-{scenario.__name__}-{world_size}"
            is_chosen = number == turn % len(ways) and scenario not in SLOW
            yield pytest.param(scenario, world_size, native, id=name, marks=[] if is_chosen else pytest.mark.thorough)


@pytest.mark.parametrize(("scenario", "world_size", "native"), list(ways_to_serve()))
def test_same_as_plain_ddp(scenario: type[Scenario], world_size: int, native: bool) -> None:
    made = scenario()
    made.check_bytes = False
    run = run_ranks_with_sparse_gradients if scenario.has_sparse_gradients else run_ranks
    # Segments of 300 bytes would make 40,000 messages of the huge parameter.
    run(world_size, compare, made, CODED if scenario is OneHugeParameter else SMALL_SEGMENTS, native)


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

    def run(self, t: Trainer) -> None:
        # Without a change of weights: where ranks add in another order than plain DDP, weights would differ in their
        # last bit, and rounded to 16 bits in a bit that is 2,000 times as large.
        for i in range(self.steps):
            self.step(t, i)
            t.record()
            t.optimizer.zero_grad()


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


@pytest.mark.parametrize("world_size", [2, 3, *thorough(4, 5)])
@pytest.mark.parametrize("policy", [CODED, SMALL_SEGMENTS, ROWS, AUTO], ids=lambda p: p.name)
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


def odd(rank: int, seed: int, dtype: torch.dtype, policy: Policy, native: bool) -> None:
    ranks = dist.get_world_size()
    shapes = [(40, 24), (3, 5, 7), (64, 64), (1,), (130, 9)]
    models = [DistributedDataParallel(Injected(shapes, dtype), bucket_cap_mb=0.01) for _ in range(2)]
    state = register(models[1], policy, native)
    for step in range(4):
        everybody = []
        for other in range(ranks):
            draw = random.Random(f"{seed} {step} {other}")
            everybody.append([odd_gradient(shape, draw).to(dtype) for shape in shapes])
        for model in models:
            model.zero_grad()
            model([gradient.clone() for gradient in everybody[rank]]).backward()
        for index, (plain, ours) in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            assert plain.grad is not None
            assert ours.grad is not None
            what = f"parameter {index} in step {step}"
            if ranks > 2:
                # Where large numbers cancel, the order of a sum in 16 bits shows.
                loose = {"rtol": 0.05, "atol": 0.05 * float(plain.grad.nan_to_num(0, 0, 0).abs().max())}
                torch.testing.assert_close(
                    ours.grad,
                    plain.grad,
                    equal_nan=True,
                    msg=lambda m, what=what: f"{what}: {m}",
                    **(loose if dtype.itemsize == 2 else {}),
                )
                continue
            zero = torch.stack([gradients[index] for gradients in everybody]).eq(0).all(0)
            integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
            same = plain.grad.view(integers) == ours.grad.view(integers)
            same |= plain.grad.isnan() & ours.grad.isnan()  # infinity less infinity
            assert bool((same | (zero & (ours.grad == 0))).all()), what
        everywhere: list[Any] = [None] * ranks
        mine = [p.grad.view(torch.uint8).numpy().tobytes() for p in models[1].parameters()]  # type: ignore[union-attr]
        dist.all_gather_object(everywhere, mine)
        assert all(one == everywhere[0] for one in everywhere), f"ranks differ in step {step}"
    assert (state.stats().coded_bytes > 0) == (dtype.itemsize <= 4)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_odd_numbers(seed: int, world_size: int, dtype: torch.dtype, native: bool) -> None:
    run_ranks(world_size, odd, seed, dtype, SMALL_SEGMENTS, native)


# --- how it travels


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_coded_messages_leave_the_ring_if_that_saves_a_tenth(ranks: int) -> None:
    everybody = (1 << ranks) - 1

    def transport(contribution: float, sums: float) -> Any:
        parts = testing.CodedParts(contribution=contribution, sum=sums)
        return testing.transport_for(everybody, ranks, True, parts)

    expected = testing.Transport.BROADCAST if ranks == 2 else testing.Transport.BY_OWNER
    assert transport(0.86, 0.86) == transport(0.9, 0.9) == expected
    assert transport(0.92, 0.92) == transport(1.0, 1.0) == testing.Transport.ALL_REDUCE
    # Contributions of few bits need no owner, whose sum has more of them.
    assert transport(0.36, 0.86) == (testing.Transport.BROADCAST if ranks <= 3 else testing.Transport.BY_OWNER)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("element_bytes", [2, 4, 8])
def test_what_everybody_uses_travels_coded_once(ranks: int, element_bytes: int) -> None:
    units = _C.Units(64, 640)
    used = _C.UsageMask(64)
    for unit in range(10):
        used.set(unit)
    direct = _C.DirectSettings(
        direct=True, world_size=ranks, owners=True, segment_bytes=256, min_direct_bytes=0, min_owner_saving=0.0
    )
    direct = testing.coded(direct, testing.CodedParts(contribution=0.5, sum=0.75))
    settings = _C.PlanSettings(in_place_bytes=1, pack_bytes=1, gap_fraction=0.0, direct=direct)
    reduced, messages, (sent,) = testing.make_unit_plan([units], used, element_bytes, settings, [used] * ranks)
    assert sent == 640  # rows save nothing, whatever coding saves
    if element_bytes == 8:
        assert sum(message.numel for message in reduced) == 640
        assert not messages
        return
    assert not reduced
    assert all(message.is_coded and message.is_summed == (ranks > 2) for message in messages)
    elements = [
        part.offset + i
        for message in messages
        for group in message.groups
        for part in group.parts
        for i in range(part.length)
    ]
    assert sorted(elements) == list(range(640))
    # As much as a ring would carry before it is coded; of sums half each.
    payloads = [testing.bytes_of_direct_message(message, element_bytes) for message in messages]
    dense = 640 * element_bytes
    expected = (dense, 0) if ranks == 2 else (dense / 2, dense / 2)
    assert tuple(map(sum, zip(*payloads, strict=True))) == expected


def test_what_is_expected_of_coded_messages() -> None:
    adaptive = _C.AdaptiveSettings(min_zero_fraction=0.05, first_pause_steps=2, longest_pause_steps=8)
    rule = testing.CodingRule(coded=_C.When.ADAPTIVE, least_saving=0.1, adaptive=adaptive, world_size=2)
    mask = _C.UsageMask(70)
    mask.set(69)

    def after(step: int, *taken: int) -> tuple[float, float] | None:
        """What is expected in a step, if these ranks coded 6,400 bytes of contributions to so many in the last one."""
        told = _C.UsageMask(256)
        for one in taken:
            told.merge(rule.tell(mask, 6400, one, 0, 0))
        assert not taken or told.test(69)
        parts = rule.choose(step, told)
        return None if parts is None else (parts.contribution, parts.sum)

    hoped = (0.75, 0.75)
    assert after(0) == hoped
    assert after(1, 2400, 2360) == (0.375, 0.75)  # the most of any rank, rounded up to 1/64
    assert after(2, 2401) == (25 / 64, 0.75)
    assert after(3, 5800) is None  # too little: a pause, which doubles
    assert [after(step) for step in range(4, 6)] == [None, hoped]
    assert after(6, 6500) is None
    assert [after(step) for step in range(7, 11)] == [None, None, None, hoped]
    assert after(11, 640) == (7 / 64, 0.75)

    always = testing.CodingRule(coded=_C.When.ON, least_saving=0.1, adaptive=adaptive, world_size=2)
    parts = always.choose(1, always.tell(mask, 100, 110, 0, 0))
    assert parts is not None
    assert parts.contribution == 0.875  # whatever it saves
    off = testing.CodingRule(coded=_C.When.OFF, least_saving=0.1, adaptive=adaptive, world_size=2)
    assert off.tell(mask, 1, 1, 1, 1) == mask
    assert off.choose(0, mask) is None


def count_bytes(rank: int, dtype: torch.dtype, exact: bool) -> tuple[int, int, int, int]:
    ranks = dist.get_world_size()
    ddp = DistributedDataParallel(Injected([(512, 256), (1000,)], dtype))
    state = register(ddp, with_settings(CODED, segment_bytes=20_000), True)  # of which each rank has as many
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        numbers = [torch.randn(p.shape, generator=generator) for p in ddp.parameters()]
        ddp.zero_grad()
        state.reset_stats()
        with profiled() as profile:
            ddp([(n.bfloat16().float() if exact else n).to(dtype) for n in numbers]).backward()
    stats = state.stats()
    dense = sum(p.numel() for p in ddp.parameters()) * dtype.itemsize
    broadcast = ranks == 2 or exact  # three contributions of few bits take less than a sum on its way back
    assert stats.dense_bytes == dense
    assert stats.uncoded_bytes == dense * ranks / 2 if broadcast else dense
    assert stats.coded_steps == 1
    assert stats.payload_bytes == stats.coded_bytes == (stats.broadcast_bytes if broadcast else stats.owner_bytes)
    names = {event.name() for event in profile.profiler.kineto_results.events()}
    assert "ddp_hooks::encode" in names
    assert "ddp_hooks::all_reduce" not in names
    assert "coded: sent" in str(stats)
    return stats.payload_bytes, stats.sent_bytes, dense, stats.mask_bytes


@pytest.mark.parametrize("ranks", [2, 3])
def test_so_many_bytes(ranks: int) -> None:
    for dtype, exact, least, most in (
        (torch.float32, False, 0.84, 0.89),
        (torch.float32, True, 0.34, 0.40),
        (torch.bfloat16, False, 0.68, 0.80),
    ):
        everywhere = run_ranks(ranks, count_bytes, dtype, exact)
        payloads = {payload for payload, _, _, _ in everywhere}
        assert len(payloads) == 1  # every rank counts the same
        (payload,) = payloads
        dense = everywhere[0][2]
        share = ranks / 2 if exact else 1
        assert least * dense * share <= payload <= most * dense * share
        # As in a ring, but for what is coded; every rank about the same.
        ring = 2 * (ranks - 1) * payload / ranks
        for _, sent, _, _ in everywhere:
            assert sent == pytest.approx(ring, rel=0.1)


def the_same_bits_every_time(rank: int) -> list[bytes]:
    torch.manual_seed(5)
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(96, 96) for _ in range(6)]), bucket_cap_mb=0.05)
    register(ddp, with_settings(CODED, segment_bytes=5000), True)
    found = []
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ddp.zero_grad()
        ddp(torch.randn(8, 96, generator=generator)).square().mean().backward()
        found += [p.grad.numpy().tobytes() for p in ddp.parameters()]  # type: ignore[union-attr]
    return found


def test_the_same_bits_in_every_run() -> None:
    runs = [run_ranks(3, the_same_bits_every_time) for _ in range(3)]
    assert all(one == runs[0][0] for run in runs for one in run)


# --- when it is coded


def coded_steps(rank: int, policy: str, mbits: str | None, **settings: Any) -> tuple[int, str]:
    os.environ.pop("DDP_HOOKS_LINK_MBITS", None)
    if mbits is not None:
        os.environ["DDP_HOOKS_LINK_MBITS"] = mbits
    autocast = settings.pop("autocast", False)
    ddp = DistributedDataParallel(nn.Linear(512, 512))
    state = ddp_hooks.register(ddp, policy, **settings)
    for _ in range(4):
        ddp.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ddp(torch.randn(8, 512)).float().square().mean().backward()
    return state.stats().coded_steps, state.stats().why_uncoded


LITTLE = "coding the others would have saved too little"


@on_ranks(2)
def test_the_speed_of_the_link_decides_with_what_is_saved(rank: int) -> None:
    assert coded_steps(rank, "auto", "1000") == (4, "")
    assert coded_steps(rank, "auto", "1000", autocast=True) == (4, "")
    assert coded_steps(rank, "auto", "5000", autocast=True) == (4, "")
    assert coded_steps(rank, "auto", "10000", autocast=True) == (1, LITTLE)
    assert coded_steps(rank, "auto", "10000") == (1, LITTLE)
    # Nobody knows the speed of the loopback interface; the slowest that somebody knows counts.
    assert coded_steps(rank, "auto", None) == (1, LITTLE)
    assert coded_steps(rank, "auto", "1000" if rank == 0 else None) == (4, "")
    assert coded_steps(rank, "auto", "1000" if rank == 0 else "10000") == (4, "")
    assert coded_steps(rank, "auto", "100000") == (0, "the network (100,000 Mbit/s) is faster than coding")
    assert coded_steps(rank, "auto", "100000", coded="on") == (4, "")
    assert coded_steps(rank, "skip_unused", "1000") == (0, "")


@on_ranks(2)
def test_on_one_host_it_does_nothing_and_says_so(rank: int) -> None:
    os.environ["DDP_HOOKS_HOST"] = "one for both"
    ddp = DistributedDataParallel(nn.Linear(512, 512))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = ddp_hooks.register(ddp, coded="on")
    said = [str(one.message) for one in caught if "coded" in str(one.message)]
    assert said == (
        ["ddp_hooks: coded='on' does nothing, because several ranks share a host; gradients are sent as they are"]
        if rank == 0
        else []
    )
    ddp(torch.randn(8, 512)).square().mean().backward()
    assert state.stats().coded_bytes == 0


# --- bad messages


def _altered(rank: int) -> str:
    """Altered bytes, or sizes that cannot be: an error that names the rank and the message, and no damage."""
    altering: Any = None
    open_group = control_groups._open_group

    def open_altering(ddp: Any, name: str, *args: Any) -> Any:
        nonlocal altering
        opened = open_group(ddp, name, *args)
        if not name.endswith("/contributions"):
            return opened
        altering = testing.Altering(opened)
        return altering

    control_groups._open_group = open_altering
    try:
        ddp = DistributedDataParallel(nn.Linear(64, 64))
        state = register(ddp, SMALL_SEGMENTS, True)
    finally:
        control_groups._open_group = open_group
    ddp(torch.randn(2, 64)).sum().backward()
    if rank == 1:
        altering.alter_next(lambda sent: sent.fill_(255))
    # Held by the engine alone, like the other groups, or the others would wait for it until their timeout.
    altering = None
    try:
        ddp(torch.randn(2, 64)).sum().backward()
        failed = ""
    except RuntimeError as error:
        failed = str(error)
    state.close()
    return failed


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_altered_message_is_an_error_that_names_rank_and_message(ranks: int) -> None:
    failed = run_ranks(ranks, _altered)
    if ranks == 2:
        assert failed[1] == ""  # it has received what the other rank sent
    # What another rank sees first may be that this one cannot go on.
    assert any("a contribution from rank 1, coded message 0 of the step" in one for one in failed), failed
    assert all(failed[rank] for rank in range(ranks) if rank != 1)
