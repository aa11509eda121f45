"""pack and sum_contributions against torch's products and sums, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_slice_copy import (
    DTYPES,
    WORDS,
    Ranges,
    all_kinds_of_numbers,
    assert_same_bits,
    assert_same_numbers,
    total,
)

from ddp_hooks_testing import _C as testing
from ddp_hooks_testing._C import Contribution, SliceSum, sum_contributions

pytestmark = pytest.mark.usefixtures("instructions")


def unsigned(flat: torch.Tensor) -> list[int]:
    word = WORDS[flat.dtype]
    return [bits & ((1 << torch.iinfo(word).bits) - 1) for bits in flat.view(word).tolist()]


def from_unsigned(bits: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    word = WORDS[dtype]
    sign = 1 << (torch.iinfo(word).bits - 1)
    return torch.tensor([each - 2 * sign if each & sign else each for each in bits], dtype=word).view(dtype)


def some_numbers(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    """Return all kinds of numbers, others for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return all_kinds_of_numbers(dtype, size)[torch.randperm(size, generator=generator)]


def packed(flat: torch.Tensor, slices: Ranges, offset: int = 0) -> torch.Tensor:
    """Pack at an offset of a buffer; what surrounds it must not change."""
    size = total(slices) * flat.element_size()
    buffer = torch.full((offset + size + 5,), 0xA5, dtype=torch.uint8)
    testing.pack(buffer[offset:], flat, slices)
    assert buffer[:offset].tolist() == [0xA5] * offset
    assert buffer[offset + size :].tolist() == [0xA5] * 5
    return buffer[offset : offset + size]


def slow_pack(flat: torch.Tensor, slices: Ranges) -> list[int]:
    """The twin: number after number, byte after byte."""
    return [
        byte
        for offset, length in slices
        for bits in unsigned(flat[offset : offset + length])
        for byte in bits.to_bytes(flat.element_size(), "little")
    ]


# --- pack


@DTYPES
@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 400)), max_size=6),
    gap=st.integers(0, 3),
    offset=st.integers(0, 9),
    seed=st.integers(0, 1 << 30),
)
def test_packs_slices_of_any_length(dtype: torch.dtype, lengths: list[int], gap: int, offset: int, seed: int) -> None:
    slices, position = [], 0
    for length in lengths:
        slices.append((position, length))
        position += length + gap
    flat = all_kinds_of_numbers(dtype, position)
    before = flat.clone()
    random.Random(seed).shuffle(slices)
    assert packed(flat, slices, offset).tolist() == slow_pack(flat, slices)
    assert_same_bits(flat, before)


@DTYPES
def test_packs_memory_that_is_not_aligned(dtype: torch.dtype) -> None:
    numbers = all_kinds_of_numbers(dtype, 101)
    memory = bytearray(101 * dtype.itemsize + 2)
    flat = torch.frombuffer(memory, dtype=dtype, offset=1, count=101)
    assert flat.data_ptr() % dtype.itemsize != 0
    flat.view(WORDS[dtype]).copy_(numbers.view(WORDS[dtype]))
    assert packed(flat, [(3, 98)], 3).tolist() == slow_pack(numbers, [(3, 98)])


@DTYPES
@pytest.mark.parametrize("divides", [False, True], ids=["times", "over"])
def test_slices_are_scaled_on_the_way(dtype: torch.dtype, divides: bool) -> None:
    flat = all_kinds_of_numbers(dtype, 300)
    slices = [(7, 93), (100, 7), (107, 50), (200, 0), (201, 99)]
    divisors = [3.0, 1.0, 2.0, 5.0, 1.0]
    parts = [
        packed(flat if divisor == 1 else scaled(flat, divisor, divides), [one])
        for one, divisor in zip(slices, divisors, strict=True)
    ]
    buffer = torch.full((sum(part.numel() for part in parts),), 0xA5, dtype=torch.uint8)
    testing.pack(buffer, flat, slices, divisors, divides)
    assert_same_numbers(buffer.view(dtype), torch.cat(parts).view(dtype))


def test_refuses_to_pack_what_does_not_fit() -> None:
    flat, buffer = torch.zeros(9), torch.zeros(35, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="expected a buffer of at least 36 bytes, received 35"):
        testing.pack(buffer, flat, [(0, 9)])
    with pytest.raises(RuntimeError, match="expected a range within 9 elements"):
        testing.pack(buffer, flat, [(7, 3)])
    with pytest.raises(RuntimeError, match="expected a buffer of uint8, received"):
        testing.pack(flat, flat, [(0, 1)])
    with pytest.raises(RuntimeError, match=r"expected gradients on the CPU.*, received meta"):
        testing.pack(buffer.to("meta"), flat, [(0, 1)])
    with pytest.raises(RuntimeError, match="expected gradients of float32"):
        testing.pack(buffer, flat.int(), [(0, 1)])
    testing.pack(buffer[:0], flat, [])


# --- sums


OWN, PACKED = "own", "packed"  # where a contribution lies


@dataclass
class Case:
    """Contributions to slices of one tensor, as the owner has received them."""

    flat: torch.Tensor
    buffer: torch.Tensor
    slices: list[tuple[int, int, list[Contribution], float, bool, bool]] = field(default_factory=list)
    expected: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    received: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # what the buffer held, and has to hold

    def sums_on(self, flat: torch.Tensor) -> list[SliceSum]:
        return [SliceSum(flat, *each) for each in self.slices]

    @property
    def sums(self) -> list[SliceSum]:
        return self.sums_on(self.flat)


def scaled(numbers: torch.Tensor, divisor: float, divides: bool) -> torch.Tensor:
    return numbers / divisor if divides else numbers * (1 / divisor)


def slow_sum(contributions: Sequence[torch.Tensor], divisor: float, adds_zero: bool) -> torch.Tensor:
    """The twin: torch's own operations, one after the other; a sum that is no number is always the same NaN."""
    result = scaled(contributions[0], divisor, False)
    for numbers in contributions[1:]:
        result = result + scaled(numbers, divisor, False)
        result = torch.where(result.isnan(), torch.tensor(torch.nan, dtype=result.dtype), result)
    return result + 0.0 if adds_zero else result


def make_case(
    dtype: torch.dtype,
    plan: Sequence[tuple[int, Sequence[str]]],
    divisor: float,
    adds_zero: bool,
    seed: int,
    offset: int = 0,
    alignment: int = 1,
) -> Case:
    """Make slices of the lengths in `plan`, each of the contributions next to it: its own one, or packed ones."""
    rng = random.Random(seed)
    storage = all_kinds_of_numbers(dtype, sum(length for length, _ in plan) + 5 * len(plan) + offset)
    case = Case(storage[offset:], torch.empty(0, dtype=torch.uint8))
    case.expected = case.flat.clone()
    bytes_before = 3 if alignment == 1 else 8
    parts, position = [torch.full((bytes_before,), 0x5A, dtype=torch.uint8)], 0
    for length, kinds in plan:
        position += rng.randrange(5)
        terms, contributions = [], []
        for kind in kinds:
            if kind == OWN:
                terms.append(case.flat[position : position + length].clone())
                contributions.append(Contribution(own=True))
                continue
            numbers = some_numbers(dtype, length, rng.randrange(1 << 30))
            contributions.append(Contribution(bytes_before))
            parts.append(packed(numbers, [(0, length)]))
            bytes_before += parts[-1].numel()
            terms.append(numbers)
        case.slices.append((position, length, contributions, divisor, adds_zero))
        case.expected[position : position + length] = slow_sum(terms, divisor, adds_zero)
        position += length
    storage = torch.empty(bytes_before + alignment, dtype=torch.uint8)
    skip = -storage.data_ptr() % alignment
    case.buffer = storage[skip : skip + bytes_before]
    torch.cat(parts, out=case.buffer)
    case.received = case.buffer.clone()
    return case


def assert_sum(case: Case) -> None:
    assert_same_numbers(case.flat, case.expected)
    assert torch.equal(case.buffer, case.received)


def check_sum(case: Case) -> None:
    sum_contributions(case.buffer, case.sums)
    assert_sum(case)


PAIRS = [pair for pair in itertools.product((OWN, PACKED), repeat=2) if pair != (OWN, OWN)]
DIVISORS = pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 4.0, 7.0])


@DTYPES
@DIVISORS
def test_two_contributions_of_every_kind(dtype: torch.dtype, divisor: float) -> None:
    plan = [(length, pair) for pair in PAIRS for length in (0, 1, 37, 300)]
    for adds_zero in (False, True):
        check_sum(make_case(dtype, plan, divisor, adds_zero, 5))


def with_own(plan: Sequence[tuple[int, int, int]]) -> list[tuple[int, list[str]]]:
    """Make a plan of (length, number of contributions, which of them is the slice's own)."""
    return [(length, [OWN if i == own else PACKED for i in range(count)]) for length, count, own in plan]


@DTYPES
@settings(deadline=None, max_examples=60)
@given(
    plan=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 40), st.integers(0, 400), st.integers(2040, 2060)),
            st.integers(1, 5),
            st.integers(-1, 4),
        ),
        max_size=4,
    ),
    divisor=st.sampled_from([1.0, 2.0, 3.0, 8.0]),
    adds_zero=st.booleans(),
    offset=st.integers(0, 3),
    seed=st.integers(0, 1 << 30),
)
def test_any_number_of_contributions(
    dtype: torch.dtype,
    plan: list[tuple[int, int, int]],
    divisor: float,
    adds_zero: bool,
    offset: int,
    seed: int,
) -> None:
    check_sum(make_case(dtype, with_own(plan), divisor, adds_zero, seed, offset))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_the_order_of_ranks_decides(count: int) -> None:
    # Sums of three and more depend on the order: each is another one here.
    received = set()
    rng = random.Random(count)
    for _ in range(24):
        order = rng.sample(range(count), count)
        values = [torch.full((1500,), [1.0, 1e8, -1e8, 3.0, 5.0, 2.0**24, 1e-8, 7.0, -3.0][i]) for i in order]
        buffer = packed(torch.cat(values), [(0, 1500 * count)])
        result = torch.empty(1500)
        sum_contributions(buffer, [SliceSum(result, 0, 1500, [Contribution(6000 * i) for i in range(count)])])
        assert_same_bits(result, slow_sum(values, 1.0, False))
        received.add(float(result[0]))
    assert len(received) > 1 or count < 3


@DTYPES
def test_zeros_of_either_sign(dtype: torch.dtype) -> None:
    for signs in itertools.product((0.0, -0.0), repeat=2):
        numbers = [torch.full((21,), sign, dtype=dtype) for sign in signs]
        buffer = packed(numbers[1], [(0, 21)])
        for adds_zero in (False, True):
            for count in (1, 2):
                result = numbers[0].clone()
                contributions = [Contribution(own=True), Contribution(0)][:count]
                sum_contributions(buffer, [SliceSum(result, 0, 21, contributions, 2.0, adds_zero=adds_zero)])
                negative = all(sign == 0.0 and str(sign) == "-0.0" for sign in signs[:count]) and not adds_zero
                assert_same_bits(result, torch.full((21,), -0.0 if negative else 0.0, dtype=dtype))


def test_flushes_what_torch_flushes(floating_point_mode: None) -> None:
    for dtype in (torch.float32, torch.float64):
        tiny = torch.finfo(dtype).tiny
        numbers = torch.tensor([tiny, tiny / 2, 3 * tiny, -tiny], dtype=dtype)
        buffer = packed(numbers, [(0, 4)])
        result = numbers.clone()
        sum_contributions(buffer, [SliceSum(result, 0, 4, [Contribution(own=True), Contribution(0)], 3.0)])
        assert_same_bits(result, slow_sum([numbers, numbers], 3.0, False))


def test_both_ranks_of_two_make_the_same() -> None:
    # Each has its own number in place and the other one's packed; the order is that of ranks on both.
    numbers = [some_numbers(torch.float32, 5000, seed) for seed in (1, 2)]
    results = []
    for rank in (0, 1):
        result = numbers[rank].clone()
        buffer = packed(numbers[1 - rank], [(0, 5000)])
        contributions = [Contribution(own=i == rank) for i in (0, 1)]
        sum_contributions(buffer, [SliceSum(result, 0, 5000, contributions, 2.0)])
        results.append(result)
    assert_same_numbers(results[0], results[1])


def test_own_contributions_need_nothing_received() -> None:
    flat = torch.tensor([2.0, -0.0, 6.0])
    sum_contributions(None, [SliceSum(flat, 0, 3, [Contribution(own=True)], 2.0, adds_zero=True)])
    assert_same_bits(flat, torch.tensor([1.0, 0.0, 3.0]))
    sum_contributions(None, [])


def test_refuses_sums_that_do_not_fit() -> None:
    flat, buffer = torch.zeros(9), torch.zeros(32, dtype=torch.uint8)

    def add(length: int, contributions: Sequence[Contribution], received: torch.Tensor | None = buffer) -> None:
        sum_contributions(received, [SliceSum(flat, 0, length, contributions)])

    add(8, [Contribution(0)])
    with pytest.raises(RuntimeError, match="expected contributions within 32 bytes, received offset 4 and 32 bytes"):
        add(8, [Contribution(4)])
    with pytest.raises(RuntimeError, match="expected contributions within 32 bytes, received offset -4 and 4 bytes"):
        add(1, [Contribution(-4)])
    with pytest.raises(RuntimeError, match="expected contributions within 0 bytes"):
        add(1, [Contribution(0)], None)
    with pytest.raises(RuntimeError, match="expected at least one contribution, received none"):
        add(1, [])
    with pytest.raises(RuntimeError, match="expected one contribution that lies in the slice itself, received 2"):
        add(1, [Contribution(own=True), Contribution(own=True)])
    with pytest.raises(RuntimeError, match="expected a range within 9 elements"):
        add(10, [Contribution(own=True)])
    with pytest.raises(RuntimeError, match="expected received data of uint8, received"):
        add(1, [Contribution(own=True)], flat)
