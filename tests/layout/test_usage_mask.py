"""UsageMask against its twin, a Python set, and against golden words: masks travel between ranks as these words."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks import _C

SIZES = (0, 1, 63, 64, 65, 1000)
WORD = (1 << 64) - 1


def mask_of(size: int, indices: set[int]) -> _C.UsageMask:
    mask = _C.UsageMask(size)
    for index in sorted(indices):
        mask.set(index)
    return mask


def words_of(size: int, indices: set[int]) -> list[int]:
    """Cut one big integer into words, the lowest indices first."""
    bits = sum(1 << index for index in indices)
    return [(bits >> (64 * word)) & WORD for word in range((size + 63) // 64)]


def check_same(mask: _C.UsageMask, twin: set[int], size: int) -> None:
    assert len(mask) == size
    assert mask.count() == len(twin)
    assert mask.indices() == sorted(twin)
    assert mask.words() == words_of(size, twin)
    assert [mask.test(i) for i in range(size)] == [i in twin for i in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_new_masks_are_empty_or_full(size: int) -> None:
    check_same(_C.UsageMask(size), set(), size)
    check_same(_C.UsageMask(size, False), set(), size)
    check_same(_C.UsageMask(size, used=True), set(range(size)), size)


@pytest.mark.parametrize("size", SIZES)
def test_bits_above_the_size_stay_zero(size: int) -> None:
    full = _C.UsageMask(size, True)
    other = _C.UsageMask(size, True)
    full.merge(other)
    for index in range(size):
        full.set(index)
    check_same(full, set(range(size)), size)
    # A full mask and one that was filled bit by bit are the same value, so they hit the same cached plan.
    assert full == mask_of(size, set(range(size)))


@pytest.mark.parametrize(
    ("size", "indices", "words"),
    [
        (0, set(), []),
        (1, {0}, [0x1]),
        (63, {0, 62}, [0x4000000000000001]),
        (64, {0, 63}, [0x8000000000000001]),
        (65, {0, 63, 64}, [0x8000000000000001, 0x1]),
        (65, {1, 3, 5, 7, 32}, [0x1000000AA, 0x0]),
        (130, {0, 4, 64, 100, 127, 128, 129}, [0x11, 0x8000001000000001, 0x3]),
    ],
)
def test_golden_words(size: int, indices: set[int], words: list[int]) -> None:
    assert mask_of(size, indices).words() == words


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", SIZES)
def test_random_operations(size: int, seed: int) -> None:
    rng = random.Random(seed * 10_000 + size)
    mask, twin = _C.UsageMask(size), set()
    for _ in range(150):
        operation = rng.choice(["set", "clear", "merge", "full"])
        if operation in ("set", "clear"):
            if size == 0:
                continue
            index = rng.choice([0, size - 1, rng.randrange(size)])
            getattr(mask, operation)(index)
            twin = twin | {index} if operation == "set" else twin - {index}
        else:
            density = 1.0 if operation == "full" else rng.choice([0.0, 0.05, 0.5, 0.95])
            indices = {i for i in range(size) if rng.random() < density}
            other = mask_of(size, indices)
            assert (mask == other) == (twin == indices)
            mask.merge(other)
            twin = twin | indices
            check_same(other, indices, size)  # the argument is only read
        check_same(mask, twin, size)


@st.composite
def two_sets(draw: st.DrawFn) -> tuple[int, set[int], set[int]]:
    size = draw(st.integers(0, 200))
    indices = st.sets(st.integers(0, size - 1)) if size else st.just(set())
    return size, draw(indices), draw(indices)


@settings(deadline=None, max_examples=100)
@given(two_sets())
def test_set_algebra(sets: tuple[int, set[int], set[int]]) -> None:
    size, a, b = sets
    union = mask_of(size, a)
    union.merge(mask_of(size, b))
    check_same(union, a | b, size)
    assert (mask_of(size, a) == mask_of(size, b)) == (a == b)


def test_masks_of_different_sizes_do_not_mix() -> None:
    # 65 and 66 bits have the same number of words, 64 and 65 do not.
    for size, other_size in ((65, 66), (64, 65), (0, 1)):
        mask, other = _C.UsageMask(size), _C.UsageMask(other_size)
        assert mask != other
        with pytest.raises(ValueError, match=f"expected {size} parameters, received {other_size}"):
            mask.merge(other)
        check_same(mask, set(), size)


def test_words_are_a_copy() -> None:
    mask = mask_of(65, {64})
    mask.words()[0] = WORD
    check_same(mask, {64}, 65)


@pytest.mark.parametrize("operation", ["test", "set", "clear"])
def test_an_index_outside_is_refused(operation: str) -> None:
    # 70 lies above the size but within the second word: safe to try.
    with pytest.raises(IndexError):
        getattr(_C.UsageMask(65), operation)(70)
