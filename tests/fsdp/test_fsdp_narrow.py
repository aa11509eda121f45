"""ddp_hooks.fsdp on a pretended device: bfloat16 gradients are sent in 16 bits, and are those of plain FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from test_fsdp import Case, assert_same, bits, blocks, experts
from test_fsdp_devices import ALL, complaints, make, memory_that_ends_late, optimizer_of, train
from test_pretend import on_pretended
from test_pretend import pytestmark as pytestmark
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ddp_hooks import fsdp
from ddp_hooks.fsdp import devices, routes

WITHOUT_LOOKS = {"skip_zeros": "off", "skip_zero_rows": "off"}
COUNTS = ("launches", "host_waits", "collectives", "collective_bytes")


def counts() -> dict[str, int]:
    from ddp_hooks_testing import _pretend

    return {name: _pretend.counts()[name] for name in COUNTS}


def without_sign_of_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return bits(tensor.cpu() + 0.0)


def train_both(case: Case, rank: int, steps: int, **settings: Any) -> tuple[fsdp.ShardState, list[dict[str, int]]]:
    """Train plain FSDP2 and a registered model on the device; compare, and return what each of them asked for."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("pretend", (ranks,))
    found, asked = [], []
    for is_ours in (False, True):
        model = make(case, mesh)
        if is_ours:
            state = fsdp.register(model, **settings)
        # As in test_fsdp.train, sums of more than two ranks are compared at one place.
        optimizer = optimizer_of(model, 1e-2 if ranks == 2 else 0.0)
        before = counts()
        found.append(train(case, model, optimizer, rank, range(steps)))
        asked.append({name: after - before[name] for name, after in counts().items()})
    reduced = case.mixed.reduce_dtype or case.mixed.param_dtype
    precision = torch.finfo(torch.bfloat16).eps if reduced == torch.bfloat16 else None
    for step, (plain, ours) in enumerate(zip(*found, strict=True)):
        plain, ours = ({name: tensor.cpu() + 0.0 for name, tensor in each.items()} for each in (plain, ours))
        assert_same(ours, plain, f"step {step}", precision)
    return state, asked


NARROW = ["dense", "recomputed", "adapters", "prefetched", "unused here and there", "by columns"]


@on_pretended(2, 5)
def test_bfloat16_gradients_travel_in_16_bits(rank: int) -> None:
    steps = 3
    with memory_that_ends_late():
        for name in NARROW:
            state, (plain, ours) = train_both(ALL[name], rank, steps, **WITHOUT_LOOKS)
            stats = state.stats()
            assert 2 * stats.payload_bytes == 2 * stats.sent_bytes == stats.dense_bytes > 0, name
            # With two ranks, an input is twice what a rank sends.
            assert plain["collective_bytes"] - ours["collective_bytes"] == stats.dense_bytes, name
            assert ours["host_waits"] == plain["host_waits"], name
            assert ours["collectives"] == plain["collectives"], name
            # Owners add up in a launch of their own.
            assert ours["launches"] - plain["launches"] <= stats.messages, name


@on_pretended(2, 6)
def test_other_gradients_are_reduced_by_torch(rank: int) -> None:
    """Accumulated gradients have more bits, on one rank or on all; and what is not asked for is not done."""
    with memory_that_ends_late():
        state, _ = train_both(ALL["several passes"], rank, 2, **WITHOUT_LOOKS)
        assert state.stats().payload_bytes == state.stats().dense_bytes > 0
        # On rank 1, the first of two passes leaves the experts out, so only rank 0 has accumulated their gradients.
        differing = Case(experts, passes=2, chosen=lambda rank, step, layer: () if rank == 1 and step < 7 else (0,))
        state, _ = train_both(differing, rank, 2, **WITHOUT_LOOKS)
        assert state.stats().payload_bytes == state.stats().dense_bytes > 0
        for case, settings in ((ALL["float32"], {}), (ALL["dense"], {"coded": "off"})):
            state, (plain, ours) = train_both(case, rank, 2, **settings, **WITHOUT_LOOKS)
            assert state.stats().payload_bytes == state.stats().dense_bytes > 0
            assert plain == ours


@on_pretended(2, 7)
def test_a_message_that_is_not_waited_for_is_noticed(rank: int) -> None:
    original = dist.all_to_all_single
    with memory_that_ends_late():
        for mistake in (False, True):
            model = make(ALL["dense"], init_device_mesh("pretend", (2,)))
            fsdp.register(model, **WITHOUT_LOOKS)  # for which the host would wait
            if mistake:
                devices.dist.all_to_all_single = lambda *args, **options: original(*args, async_op=True, **options)
            try:
                for step in range(3):
                    model(torch.full((2, 3), step + rank)).float().square().mean().backward()
                    for parameter in model.parameters():
                        parameter.grad = None
            finally:
                devices.dist.all_to_all_single = original
            found = complaints()
            assert any("nothing orders that with" in text for text in found) == mistake


class Alone:
    """Stands for a group of one rank on the host."""

    def __init__(self) -> None:
        self.backend = self
        self.messages = 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Alone:
        self.messages += 1
        return self

    def wait(self) -> None:
        """There is nobody to wait for."""


class Reduced:
    names = ("weight",)
    has_wide = False


def test_an_answer_does_not_outlive_its_pass() -> None:
    alone, first, second = Alone(), Reduced(), Reduced()
    agreement = routes.WideGradients(alone, [first, second])  # type: ignore[arg-type, list-item]

    def reduce_in_backward(*groups: Reduced) -> list[bool]:
        answers: list[bool] = []
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: answers.extend(agreement.anywhere(g, g.has_wide) for g in groups))  # type: ignore[arg-type]
        x.sum().backward()
        return answers

    assert reduce_in_backward(second) == [False]
    first.has_wide = True
    assert reduce_in_backward(first, second) == [True, False]
    assert alone.messages == 2


@on_pretended(2, 9)
def test_gradients_that_are_wider_than_at_registration(rank: int) -> None:
    """FSDP2 decides in its first forward pass in which type gradients are, so perhaps after registration."""
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    case = Case(blocks, mixed, prepare=lambda model: model.bfloat16())
    found, states = [], []
    with memory_that_ends_late():
        for is_ours in (False, True):
            model = make(case, init_device_mesh("pretend", (2,)))
            if is_ours:
                states.append(fsdp.register(model))
            model.float()
            found.append(train(case, model, optimizer_of(model), rank, range(2)))
    stats = states[0].stats()
    assert stats.payload_bytes == stats.dense_bytes > 0
    for plain, ours in zip(*found, strict=True):
        for name, expected in plain.items():
            assert torch.equal(without_sign_of_zeros(ours[name]), without_sign_of_zeros(expected)), name
