"""Scans of whole slices against a look at every element: only +0.0 and -0.0 are zeros, in any mode of the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_slice_copy import DTYPES, WORDS

from ddp_hooks_testing import _C as testing

BLOCK = 1024  # elements: a few blocks of the CPU kernel, whose own borders test_unit_scan.py looks at
SIZES = (0, 1, 2, 7, 8, 9, 31, 64, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 5)


def nonzero_scan(flat: torch.Tensor) -> tuple[bool, bool]:
    """Return whether there is a non-zero, and if not, whether there is a -0.0."""
    return testing.start_scan(flat, [(0, flat.numel())]).wait()[0]


def oracle(flat: torch.Tensor) -> tuple[bool, bool]:
    negative_zero = torch.iinfo(WORDS[flat.dtype]).min  # the sign bit alone
    words = flat.view(WORDS[flat.dtype]).tolist()
    any_nonzero = any(word not in (0, negative_zero) for word in words)
    return any_nonzero, not any_nonzero and negative_zero in words


def check(flat: torch.Tensor) -> tuple[bool, bool]:
    received = nonzero_scan(flat)
    assert received == oracle(flat)
    return received


def interesting_positions(size: int) -> list[int]:
    candidates = {0, 1, size // 2, size - 2, size - 1}
    for border in range(BLOCK, size + 1, BLOCK):
        candidates |= {border - 1, border, border + 1}
    return sorted(position for position in candidates if 0 <= position < size)


def nonzero_words(dtype: torch.dtype) -> dict[str, int]:
    """Bit patterns of every kind of non-zero, as the signed integers that torch stores."""
    word = WORDS[dtype]
    sign = torch.iinfo(word).min
    inf = int(torch.tensor([float("inf")], dtype=dtype).view(word))
    one = int(torch.tensor([1.0], dtype=dtype).view(word))
    positive = {
        "smallest denormal": 1,
        "smallest normal": int(torch.tensor([torch.finfo(dtype).tiny], dtype=dtype).view(word)),
        "one": one,
        "largest": inf - 1,
        "inf": inf,
        "signalling nan": inf + 1,
        "nan": torch.iinfo(word).max,
    }
    return positive | {f"-{name}": value + sign for name, value in positive.items()}


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_zeros_of_either_sign(dtype: torch.dtype, size: int) -> None:
    flat = torch.zeros(size, dtype=dtype)
    assert check(flat) == (False, False)
    for position in interesting_positions(size):
        flat[position] = -0.0
        assert check(flat) == (False, True)
        flat[position] = 0.0
    flat.fill_(-0.0)
    assert check(flat) == (False, size > 0)


@DTYPES
@pytest.mark.parametrize("background", [0.0, -0.0], ids=["zeros", "negative zeros"])
def test_a_single_nonzero_is_found_anywhere(dtype: torch.dtype, background: float, floating_point_mode: None) -> None:
    for size in SIZES:
        flat = torch.full((size,), background, dtype=dtype)
        words = flat.view(WORDS[dtype])
        for position in interesting_positions(size):
            before = int(words[position])
            for name, word in nonzero_words(dtype).items():
                words[position] = word
                assert nonzero_scan(flat)[0], f"{name} at {position} of {size}"
            words[position] = before
        assert not nonzero_scan(flat)[0]


@DTYPES
def test_every_kind_of_nonzero_is_one(dtype: torch.dtype, floating_point_mode: None) -> None:
    for name, word in nonzero_words(dtype).items():
        flat = torch.tensor([word], dtype=WORDS[dtype]).view(dtype)
        assert check(flat) == (True, False), name


@DTYPES
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7, BLOCK - 1, BLOCK + 1])
def test_views_end_where_they_end(dtype: torch.dtype, offset: int) -> None:
    # The neighbours on both sides are NaN: one element too many on either side would be found.
    for size in (0, 1, 3, 8, BLOCK, BLOCK + 1):
        storage = torch.full((offset + size + 9,), float("nan"), dtype=dtype)
        view = storage[offset : offset + size]
        view.zero_()
        assert check(view) == (False, False)
        if size:
            view[-1] = -0.0
            assert check(view) == (False, True)
            view[0] = 1.0
            assert check(view) == (True, False)


@DTYPES
def test_memory_that_is_not_aligned(dtype: torch.dtype) -> None:
    size, bytes_each = BLOCK + 3, dtype.itemsize
    memory = bytearray(b"\xff" * (size * bytes_each + 2))
    flat = torch.frombuffer(memory, dtype=dtype, offset=1, count=size)
    assert flat.data_ptr() % bytes_each != 0
    memory[1:-1] = bytes(size * bytes_each)
    assert nonzero_scan(flat) == (False, False)
    memory[-2] = 0x80  # the sign of the last element (little endian)
    assert nonzero_scan(flat) == (False, True)
    memory[1] = 1  # the smallest denormal
    assert nonzero_scan(flat)[0]


@DTYPES
@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(0, 3 * BLOCK),
    offset=st.integers(0, 9),
    elements=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 40)), max_size=4),
)
def test_random_gradients(dtype: torch.dtype, size: int, offset: int, elements: list[tuple[float, int]]) -> None:
    sign = torch.iinfo(WORDS[dtype]).min
    choices = [sign, *nonzero_words(dtype).values()]
    words = torch.zeros(offset + size, dtype=WORDS[dtype])
    flat = words.view(dtype)[offset:]
    for place, kind in elements if size else []:
        words[offset + int(place * size)] = choices[kind] if kind < len(choices) else sign
    check(flat)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, torch.float8_e5m2])
def test_refuses_what_a_gradient_cannot_be(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="expected gradients of float32, float64, float16 or bfloat16, received"):
        nonzero_scan(torch.zeros(3, dtype=dtype))


def test_refuses_another_device() -> None:
    with pytest.raises(RuntimeError, match=r"expected gradients on the CPU.*, received meta"):
        nonzero_scan(torch.zeros(3, device="meta"))
