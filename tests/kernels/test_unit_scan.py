"""start_unit_scan against a look at every element's bits, unit by unit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_nonzero_scan import nonzero_words, oracle
from test_slice_copy import DTYPES, WORDS

from ddp_hooks import _C

LINE_BYTES, BLOCK_BYTES = 64, 1024  # what the CPU kernel tests first in a unit, and then at once
FLOAT_UNITS = (1, 3, 15, 16, 17, 64, 100, 271, 272, 273, 384, 528, 2000)  # around lines and blocks, and between them

UnitScan = Callable[[torch.Tensor, int, int, int], tuple[list[int], list[int]]]


def slow_unit_scan(flat: torch.Tensor, offset: int, length: int, unit_length: int) -> tuple[list[int], list[int]]:
    """The twin: one unit after another, each by `oracle`, which looks at one element after another."""
    nonzero, negative_zeros = [], []
    units = range(0, length, unit_length)
    for unit, begin in enumerate(units):
        end = min(begin + unit_length, length)
        any_nonzero, any_negative_zero = oracle(flat[offset + begin : offset + end])
        if any_nonzero:
            nonzero.append(unit)
        if any_negative_zero:
            negative_zeros.append(unit)
    words = [0] * -(-len(units) // 64)
    for unit in nonzero:
        words[unit // 64] |= 1 << unit % 64
    return words, negative_zeros


def scan_on_the_cpu(flat: torch.Tensor, offset: int, length: int, unit_length: int) -> tuple[list[int], list[int]]:
    return _C.start_unit_scan(flat, offset, length, unit_length).wait()


def check(
    flat: torch.Tensor, offset: int, length: int, unit_length: int, scan: UnitScan = scan_on_the_cpu
) -> tuple[list[int], list[int]]:
    received = scan(flat, offset, length, unit_length)
    assert received == slow_unit_scan(flat, offset, length, unit_length)
    return received


def random_slice(
    dtype: torch.dtype, rng: random.Random, length: int, unit_length: int, offset: int, densities: tuple[float, ...]
) -> torch.Tensor:
    """Return a flat tensor with a slice at `offset`, each of its units filled to one of the densities.

    What lies before and after the slice is NaN: one element too many on either side would be found. Every other element
    that is filled is a -0.0 in some units, and none but those in others.
    """
    word = WORDS[dtype]
    kinds = list(nonzero_words(dtype).values())
    sign = torch.iinfo(word).min
    flat = torch.full((offset + length + 9,), float("nan"), dtype=dtype)
    values = [0] * length
    for begin in range(0, length, unit_length):
        end = min(begin + unit_length, length)
        choices = rng.choice([[0, sign], [sign], kinds, [*kinds, sign, sign]])
        density = rng.choice(densities)
        for _ in range(round(density * (end - begin)) or rng.randrange(2)):
            values[rng.randrange(begin, end)] = rng.choice(choices)
    flat.view(word)[offset : offset + length] = torch.tensor(values, dtype=word)
    return flat


@DTYPES
@pytest.mark.parametrize("unit_length", [*FLOAT_UNITS, 10**6, 1 << 62])
def test_units_of_every_length(dtype: torch.dtype, unit_length: int) -> None:
    rng = random.Random(unit_length)
    for _ in range(5):
        length, offset = rng.randrange(1, 5000), rng.randrange(40)
        check(random_slice(dtype, rng, length, unit_length, offset, (0.0, 0.0, 0.1)), offset, length, unit_length)


@DTYPES
@settings(deadline=None, max_examples=150)
@given(
    length=st.one_of(st.integers(0, 200), st.integers(0, 6000)),
    unit_length=st.one_of(st.integers(1, 20), st.integers(1, 700), st.integers(1, 7000)),
    offset=st.integers(0, 40),
    seed=st.integers(0, 1 << 30),
)
def test_random_slices(dtype: torch.dtype, length: int, unit_length: int, offset: int, seed: int) -> None:
    flat = random_slice(dtype, random.Random(seed), length, unit_length, offset, (0.0, 0.0, 0.02, 1.0))
    check(flat, offset, length, unit_length)


@DTYPES
@pytest.mark.parametrize("background", [0.0, -0.0], ids=["zeros", "negative zeros"])
def test_a_single_nonzero_is_found_anywhere_in_its_unit(dtype: torch.dtype, background: float) -> None:
    for unit_length in FLOAT_UNITS:
        flat = torch.full((5 * unit_length // 2 + 1,), background, dtype=dtype)
        words = flat.view(WORDS[dtype])
        before = int(words[0])
        # The first unit, the one in the middle, and the last one, which is shorter.
        for unit in range(3):
            begin, end = unit * unit_length, min((unit + 1) * unit_length, flat.numel())
            borders = {begin + step // dtype.itemsize for step in (LINE_BYTES, LINE_BYTES + BLOCK_BYTES)}
            positions = {begin, (begin + end) // 2, end - 1, *borders, *(border - 1 for border in borders)}
            for position in sorted(position for position in positions if begin <= position < end):
                for name, word in nonzero_words(dtype).items():
                    words[position] = word
                    received = _C.start_unit_scan(flat, 0, flat.numel(), unit_length).wait()
                    others = [other for other in range(3) if other != unit] if before else []
                    assert received == ([1 << unit], others), f"{name} at {position}, units of {unit_length}"
                words[position] = before


@DTYPES
def test_every_place_of_a_negative_zero(dtype: torch.dtype) -> None:
    for unit_length in (1, 2, 3, 5, 31, 33, 100, 600):
        flat = torch.zeros(3 * unit_length, dtype=dtype)
        for position in range(flat.numel()):
            flat[position] = -0.0
            assert _C.start_unit_scan(flat, 0, flat.numel(), unit_length).wait() == ([0], [position // unit_length])
            flat[position] = 0.0


@pytest.mark.parametrize("values", [[1.0, -1.0], [-1.0, 1.0], [float("inf"), -float("inf")], [float("nan"), 0.0]])
def test_what_adds_up_to_nothing_is_something(values: list[float]) -> None:
    assert check(torch.tensor(values), 0, 2, 2) == ([1], [])


@DTYPES
def test_denormals_are_seen_when_they_are_flushed_to_zero(dtype: torch.dtype) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals to zero")
    try:
        flat = torch.ones(200, dtype=WORDS[dtype]).view(dtype)
        assert _C.start_unit_scan(flat, 0, 200, 100).wait() == ([0b11], [])
    finally:
        torch.set_flush_denormal(False)


@DTYPES
def test_memory_that_is_not_aligned(dtype: torch.dtype) -> None:
    size, bytes_each = 1203, dtype.itemsize
    memory = bytearray(b"\xff" * (size * bytes_each + 2))
    flat = torch.frombuffer(memory, dtype=dtype, offset=1, count=size)
    assert flat.data_ptr() % bytes_each != 0
    for unit_length in (1, 3, 100, 401, 2000):
        memory[1:-1] = bytes(size * bytes_each)
        last = (size - 1) // unit_length
        words = [0] * (last // 64 + 1)
        assert _C.start_unit_scan(flat, 0, size, unit_length).wait() == (words, [])
        memory[-2] = 0x80  # the sign of the last element (little endian)
        assert _C.start_unit_scan(flat, 0, size, unit_length).wait() == (words, [last])
        memory[-2] = 1
        words[-1] = 1 << last % 64
        assert _C.start_unit_scan(flat, 0, size, unit_length).wait() == (words, [])


def test_bits_past_the_last_unit_are_zero() -> None:
    for units in (1, 63, 64, 65, 128, 200):
        words, negative_zeros = _C.start_unit_scan(torch.ones(3 * units), 0, 3 * units, 3).wait()
        assert sum(word << 64 * i for i, word in enumerate(words)) == (1 << units) - 1
        assert len(words) == -(-units // 64)
        assert negative_zeros == []


def test_nothing_has_no_units() -> None:
    for flat, offset in ((torch.empty(0), 0), (torch.ones(5), 0), (torch.ones(5), 5)):
        assert _C.start_unit_scan(flat, offset, 0, 7).wait() == ([], [])


def test_the_answer_stays() -> None:
    flat = torch.tensor([0.0, -0.0, 1.0])
    pending = _C.start_unit_scan(flat, 0, 3, 1)
    flat.fill_(1.0)
    assert pending.wait() == ([0b100], [1])
    assert pending.wait() == ([0b100], [1])


@pytest.mark.parametrize("unit_length", [0, -1])
def test_refuses_units_of_nothing(unit_length: int) -> None:
    with pytest.raises(
        RuntimeError, match=f"expected units of at least one element, received unit_length {unit_length}"
    ):
        _C.start_unit_scan(torch.zeros(3), 0, 3, unit_length)


def test_refuses_more_units_than_an_index_counts() -> None:
    # Refused before the device is, so that no memory is needed for so many.
    flat = torch.empty((1 << 32) + 1, device="meta")
    with pytest.raises(RuntimeError, match="expected at most 4294967296 units, received 4294967297"):
        _C.start_unit_scan(flat, 0, flat.numel(), 1)
    with pytest.raises(RuntimeError, match=r"expected gradients on the CPU.*, received meta"):
        _C.start_unit_scan(flat, 0, flat.numel(), 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, torch.float8_e5m2])
def test_refuses_what_a_gradient_cannot_be(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="expected gradients of float32, float64, float16 or bfloat16, received"):
        _C.start_unit_scan(torch.zeros(3, dtype=dtype), 0, 3, 1)


@pytest.mark.parametrize(("offset", "length"), [(-1, 2), (0, 6), (5, 1), (0, -1)])
def test_refuses_a_range_outside(offset: int, length: int) -> None:
    with pytest.raises(RuntimeError, match="expected a range within 5 elements, received offset"):
        _C.start_unit_scan(torch.zeros(5), offset, length, 1)


def test_refuses_what_is_not_flat() -> None:
    with pytest.raises(RuntimeError, match="expected a flat, contiguous tensor, received sizes"):
        _C.start_unit_scan(torch.zeros(2, 3), 0, 6, 3)
