"""gather_scaled and scatter against torch's own indexing and multiplication, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks_testing import _C as testing

WORDS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
DTYPES = pytest.mark.parametrize("dtype", list(WORDS), ids=lambda dtype: str(dtype).removeprefix("torch."))
# One over the world size: exact for 2, rounded for 3.
FACTORS = pytest.mark.parametrize("factor", [1.0, 1 / 2, 1 / 3, 1 / 7, 1 / 1024])
Ranges = list[tuple[int, int]]


def assert_same_bits(received: torch.Tensor, expected: torch.Tensor) -> None:
    word = WORDS[expected.dtype]
    assert received.dtype == expected.dtype
    assert torch.equal(received.view(word), expected.view(word))


def assert_same_numbers(received: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, except that a NaN is a NaN: torch.mul itself makes bfloat16 NaNs of two kinds, by position."""
    nan = expected.isnan()
    assert torch.equal(received.isnan(), nan)
    assert_same_bits(received.masked_fill(nan, 0), expected.masked_fill(nan, 0))


def oracle_gather(flat: torch.Tensor, ranges: Ranges, factor: float) -> torch.Tensor:
    index = [i for offset, length in ranges for i in range(offset, offset + length)]
    return torch.mul(flat[torch.tensor(index, dtype=torch.int64)], factor)


def oracle_scatter(message: torch.Tensor, flat: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    index = [i for offset, length in ranges for i in range(offset, offset + length)]
    result = flat.clone()
    result[torch.tensor(index, dtype=torch.int64)] = message[: len(index)]
    return result


def all_kinds_of_numbers(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Random bit patterns, so every exponent turns up, with the special ones between them."""
    word = WORDS[dtype]
    info = torch.iinfo(word)
    generator = torch.Generator().manual_seed(size)
    words = torch.randint(info.min, info.max, (size,), dtype=word, generator=generator)
    inf = int(torch.tensor([float("inf")], dtype=dtype).view(word))
    one = int(torch.tensor([1.0], dtype=dtype).view(word))
    positive = [0, 1, 2, 3, one - 1, one, one + 1, inf - 1, inf, inf + 1, info.max]
    special = torch.tensor(positive + [value + info.min for value in positive], dtype=word)
    places = torch.randperm(size, generator=generator)[: len(special)]
    words[places] = special[: len(places)]
    return words.view(dtype)


def random_ranges(rng: random.Random, size: int, longest: int) -> Ranges:
    """Ranges in order that do not overlap, some of them empty."""
    ranges, position = [], 0
    while position < size:
        position += rng.choice([0, 1, rng.randrange(longest + 1)])
        length = min(rng.choice([0, 1, rng.randrange(longest + 1)]), size - position)
        if length < 0:
            break
        ranges.append((position, length))
        position += length
    return ranges


def total(ranges: Ranges) -> int:
    return sum(length for _, length in ranges)


def check_gather(flat: torch.Tensor, ranges: Ranges, factor: float) -> None:
    before = flat.clone()
    # The message lies in the middle of a staging buffer; what surrounds it must not change.
    staging = torch.full((total(ranges) + 7,), 3.0, dtype=flat.dtype)
    message = staging[3 : 3 + total(ranges)]
    testing.gather_scaled(message, flat, ranges, factor)
    assert_same_numbers(message, oracle_gather(flat, ranges, factor))
    assert staging[:3].tolist() == [3.0] * 3
    assert staging[3 + total(ranges) :].tolist() == [3.0] * 4
    assert_same_bits(flat, before)


def check_scatter(flat: torch.Tensor, ranges: Ranges) -> None:
    message = all_kinds_of_numbers(flat.dtype, total(ranges) + 2)[1:-1]
    before = message.clone()
    expected = oracle_scatter(message, flat, ranges)
    testing.scatter(message, flat, ranges)
    # Scatter copies: even a NaN's payload arrives.
    assert_same_bits(flat, expected)
    assert_same_bits(message, before)


@DTYPES
@FACTORS
@pytest.mark.parametrize("seed", range(3))
def test_random_slices(dtype: torch.dtype, factor: float, seed: int) -> None:
    rng = random.Random(seed)
    for longest in (3, 40, 500):
        size = rng.choice([1, 63, 1000, 2500])
        flat = all_kinds_of_numbers(dtype, size + 5)[5:]
        ranges = random_ranges(rng, size, longest)
        check_gather(flat, ranges, factor)
        check_scatter(flat.clone(), ranges)
        rng.shuffle(ranges)  # a message may hold its slices in any order
        check_gather(flat, ranges, factor)
        check_scatter(flat.clone(), ranges)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@FACTORS
def test_every_number_of_sixteen_bits(dtype: torch.dtype, factor: float, floating_point_mode: None) -> None:
    flat = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    message = torch.empty_like(flat)
    testing.gather_scaled(message, flat, [(0, flat.numel())], factor)
    assert_same_numbers(message, torch.mul(flat, factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@FACTORS
def test_wide_numbers_of_every_size(dtype: torch.dtype, factor: float, floating_point_mode: None) -> None:
    flat = all_kinds_of_numbers(dtype, 20_001)
    message = torch.empty_like(flat)
    testing.gather_scaled(message, flat, [(0, flat.numel())], factor)
    assert_same_numbers(message, torch.mul(flat, factor))


@DTYPES
def test_scatter_keeps_denormals_when_the_cpu_flushes_them(dtype: torch.dtype, floating_point_mode: None) -> None:
    check_scatter(torch.zeros(300, dtype=dtype), [(0, 100), (150, 150)])


@DTYPES
def test_averaging_is_what_ddp_does_without_a_hook(dtype: torch.dtype) -> None:
    # DDP multiplies by 1 / world size while it fills a bucket.
    for world_size in range(2, 9):
        gradient = all_kinds_of_numbers(dtype, 700)
        bucket = torch.empty_like(gradient)
        torch.mul(gradient, torch.tensor(1.0 / world_size, dtype=torch.float64), out=bucket)
        message = torch.empty_like(gradient)
        testing.gather_scaled(message, gradient, [(0, 700)], 1.0 / world_size)
        assert_same_numbers(message, bucket)


@DTYPES
@FACTORS
def test_many_tiny_slices(dtype: torch.dtype, factor: float) -> None:
    flat = all_kinds_of_numbers(dtype, 4000)
    ranges = [(offset, 1) for offset in range(0, 4000, 2)]
    check_gather(flat, ranges, factor)
    check_scatter(flat.clone(), ranges)


@DTYPES
def test_empty_ranges(dtype: torch.dtype) -> None:
    flat = all_kinds_of_numbers(dtype, 50)
    for ranges in ([], [(0, 0)], [(50, 0)], [(0, 0), (7, 3), (10, 0), (10, 1), (50, 0)]):
        check_gather(flat, ranges, 0.5)
        check_scatter(flat.clone(), ranges)
    check_gather(flat[:0], [(0, 0)], 0.5)
    check_scatter(flat[:0].clone(), [(0, 0)])


@DTYPES
def test_in_place(dtype: torch.dtype) -> None:
    flat = all_kinds_of_numbers(dtype, 333)
    expected = torch.mul(flat, 1 / 3)
    testing.gather_scaled(flat, flat, [(0, 333)], 1 / 3)
    assert_same_numbers(flat, expected)


@settings(deadline=None, max_examples=50)
@given(
    dtype=st.sampled_from(list(WORDS)),
    seed=st.integers(0, 2**32),
    size=st.integers(1, 300),
    longest=st.integers(1, 50),
)
def test_scatter_undoes_gather(dtype: torch.dtype, seed: int, size: int, longest: int) -> None:
    ranges = random_ranges(random.Random(seed), size, longest)
    flat = all_kinds_of_numbers(dtype, size)
    flat = flat.masked_fill(flat.isnan(), 1.5)
    message = torch.empty(total(ranges), dtype=dtype)
    testing.gather_scaled(message, flat, ranges, 1.0)
    result = flat.clone()
    for offset, length in ranges:
        result[offset : offset + length] = 77.0
    testing.scatter(message, result, ranges)
    assert_same_bits(result, flat)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e5m2])
def test_refuses_what_a_gradient_cannot_be(dtype: torch.dtype) -> None:
    flat = torch.zeros(3, dtype=dtype)
    for call in (
        lambda: testing.gather_scaled(flat, flat, [(0, 3)], 1.0),
        lambda: testing.scatter(flat, flat, [(0, 3)]),
    ):
        with pytest.raises(RuntimeError, match="expected gradients of float32, float64, float16 or bfloat16, received"):
            call()


def test_refuses_another_device() -> None:
    flat = torch.zeros(3, device="meta")
    with pytest.raises(RuntimeError, match=r"expected gradients on the CPU.*, received meta"):
        testing.gather_scaled(flat, flat, [(0, 3)], 1.0)
    with pytest.raises(RuntimeError, match=r"expected gradients on the CPU.*, received meta"):
        testing.scatter(flat, flat, [(0, 3)])


@DTYPES
@pytest.mark.parametrize("seed", range(20))
def test_scatter_add_is_torchs_addition(dtype: torch.dtype, seed: int) -> None:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    to = torch.randn(1000).to(dtype)
    to[::7] = -0.0
    ranges: Ranges = []
    end = 0
    while end < len(to):
        begin = end + generator.choice([0, 0, 1, 50])
        length = min(generator.choice([0, 1, 3, 64, 257]), max(len(to) - begin, 0))
        end = begin + max(length, 1)
        if begin < len(to):
            ranges.append((begin, length))
    message = torch.randn(sum(length for _, length in ranges)).to(dtype)
    message[::5] = -0.0
    expected, position = to.clone(), 0
    for begin, length in ranges:
        expected[begin : begin + length] += message[position : position + length]
        position += length
    testing.scatter_add(message, to, ranges)
    assert_same_bits(to, expected)


def test_scatter_add_refuses_what_does_not_fit() -> None:
    with pytest.raises(RuntimeError, match="expected slices of 3 elements, received 4"):
        testing.scatter_add(torch.ones(3), torch.ones(9), [(0, 2), (5, 2)])
    with pytest.raises(RuntimeError):
        testing.scatter_add(torch.ones(3), torch.ones(9), [(7, 3)])
    with pytest.raises(RuntimeError, match="expected slices of"):
        testing.scatter_add(torch.ones(3), torch.ones(9, dtype=torch.float64), [(0, 3)])
