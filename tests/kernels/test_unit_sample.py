"""sample_units against a look at every element's bits of the units that are sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from test_nonzero_scan import DTYPES, WORDS, oracle
from test_packing import WIDTHS
from test_unit_scan import random_slice, random_widths, slow_inexact

from ddp_hooks_testing import _C as testing

SAMPLED, GLANCED, GLANCED_ELEMENTS, WIDTH_ELEMENTS = 64, 8, 8, 1024
Slices = Sequence[tuple[int, int, int]]


def zeros_in(flat: torch.Tensor, offset: int, length: int, unit_length: int, count: int, most: int) -> tuple[int, int]:
    """Return how many of `count` units, evenly spread, begin with zeros, and how many that are."""
    units = -(-length // unit_length)
    taken = min(count, units)
    zeros = 0
    for i in range(taken):
        begin = i * units // taken * unit_length
        end = min(begin + min(unit_length, most), length)
        zeros += not oracle(flat[offset + begin : offset + end])[0]
    return zeros, taken


def sampled_zeros(flat: torch.Tensor, offset: int, length: int, unit_length: int) -> tuple[int, int]:
    return zeros_in(flat, offset, length, unit_length, SAMPLED, length)


def slow_sample(flat: torch.Tensor, slices: Slices) -> list[float]:
    fractions = []
    for one in slices:
        at_a_glance, _ = zeros_in(flat, *one, GLANCED, GLANCED_ELEMENTS)
        zeros, taken = sampled_zeros(flat, *one)
        fractions.append(zeros / taken if at_a_glance else 0.0)
    return fractions


def narrow_in(flat: torch.Tensor, offset: int, length: int, unit_length: int, count: int, most: int) -> list[int]:
    """Return how many of `count` units, evenly spread, begin with what each form holds, and are not zero."""
    units = -(-length // unit_length)
    taken = min(count, units)
    narrow = [0, 0]
    for i in range(taken):
        begin = offset + i * units // taken * unit_length
        end = min(begin + unit_length, offset + length)
        looked_at = min(end - begin, most, WIDTH_ELEMENTS)
        inexact = slow_inexact(flat, begin, looked_at, looked_at)
        whole = flat[begin : min(end, begin + most)]
        for k in range(len(WIDTHS.get(flat.dtype, ()))):
            narrow[k] += oracle(whole)[0] and not inexact[k][0]
    return narrow


def sampled_fractions(flat: torch.Tensor, offset: int, length: int, unit_length: int) -> tuple[float, float]:
    zeros, taken = sampled_zeros(flat, offset, length, unit_length)
    narrow = max(narrow_in(flat, offset, length, unit_length, SAMPLED, length))
    return zeros / taken, narrow / (taken - zeros) if taken > zeros else 0.0


def slow_sample_of_widths(flat: torch.Tensor, slices: Slices) -> list[tuple[float, float]]:
    fractions = []
    for one in slices:
        zeros_at_a_glance, _ = zeros_in(flat, *one, GLANCED, GLANCED_ELEMENTS)
        narrow_at_a_glance = narrow_in(flat, *one, GLANCED, GLANCED_ELEMENTS)
        goes_on = zeros_at_a_glance or any(narrow_at_a_glance)
        fractions.append(sampled_fractions(flat, *one) if goes_on else (0.0, 0.0))
    return fractions


def random_slices(dtype: torch.dtype, rng: random.Random) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Return a flat tensor and slices of it, dense, sparse and between; what lies between the slices is NaN."""
    parts, slices, position = [], [], 0
    for _ in range(rng.randint(1, 6)):
        unit_length = rng.choice([1, 3, 8, 9, 64, 129, 2050])
        length = rng.randint(1, unit_length * rng.choice([1, 7, 63, 64, 65, 200]))
        length = min(length, 6000)
        offset = rng.randrange(9)
        part = random_slice(dtype, rng, length, unit_length, offset, rng.choice([(0.0,), (0.0, 0.0, 0.1), (1.0,)]))
        parts.append(part)
        slices.append((position + offset, length, unit_length))
        position += part.numel()
    return torch.cat(parts), slices


@DTYPES
@pytest.mark.parametrize("seed", range(12))
def test_against_every_element(dtype: torch.dtype, seed: int) -> None:
    flat, slices = random_slices(dtype, random.Random(seed))
    assert testing.sample_units(flat, slices) == [(zeros, 0.0) for zeros in slow_sample(flat, slices)]
    rng = random.Random(seed)
    rng.shuffle(slices)
    assert testing.sample_units(flat, slices) == [(zeros, 0.0) for zeros in slow_sample(flat, slices)]
    assert testing.sample_units(flat, slices, widths=True) == slow_sample_of_widths(flat, slices)


def random_slices_of_widths(dtype: torch.dtype, rng: random.Random) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Return a flat tensor and slices of it, whose units are of all widths; no form holds what lies between them."""
    parts, slices, position = [], [], 0
    for _ in range(rng.randint(1, 5)):
        unit_length = rng.choice([1, 3, 8, 9, 64, 129, 1023, 1024, 1025, 2050])
        length = min(rng.randint(1, unit_length * rng.choice([1, 7, 64, 65, 200])), 6000)
        offset = rng.randrange(9)
        parts.append(random_widths(dtype, rng, length, unit_length, offset))
        slices.append((position + offset, length, unit_length))
        position += parts[-1].numel()
    return torch.cat([part.view(WORDS[dtype]) for part in parts]).view(dtype), slices


@DTYPES
@pytest.mark.parametrize("seed", range(12))
def test_widths_against_every_element(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    flat, slices = random_slices_of_widths(dtype, random.Random(seed))
    assert testing.sample_units(flat, slices, widths=True) == slow_sample_of_widths(flat, slices)


def test_of_nothing() -> None:
    assert testing.sample_units(torch.zeros(3), []) == []
    for bad in ((0, 0, 1), (0, 3, 0)):
        with pytest.raises(RuntimeError, match="expected units of at least one element"):
            testing.sample_units(torch.zeros(3), [bad])
    with pytest.raises(RuntimeError, match="expected a range within 3 elements"):
        testing.sample_units(torch.zeros(3), [(0, 2, 1), (2, 2, 1)])


def test_a_glance_tells_dense_gradients_apart() -> None:
    # Every unit begins with a non-zero, so it does not matter what follows; and a negative zero is a zero.
    flat = torch.zeros(100, 32)
    flat[:, 0] = 1e-45
    assert testing.sample_units(flat.flatten(), [(0, 3200, 32)]) == [(0.0, 0.0)]
    flat[:, 0] = -0.0
    assert testing.sample_units(flat.flatten(), [(0, 3200, 32)]) == [(1.0, 0.0)]
    flat[:, 9] = torch.tensor([1], dtype=WORDS[torch.float32]).view(torch.float32)
    assert testing.sample_units(flat.flatten(), [(0, 3200, 32)]) == [(0.0, 0.0)]


def test_widths_are_those_of_the_better_form() -> None:
    table = torch.zeros(64, 2000)
    table[:32, 5] = 1.0 + 2.0**-10  # float16 only
    table[32:52, 0] = 2.0**100  # bfloat16 only
    table[52:56, 0] = 1.0  # both
    assert testing.sample_units(table.flatten(), [(0, 128_000, 2000)], widths=True) == [(8 / 64, 36 / 56)]
    table[:32, 1024] = 1.0 + 2.0**-20  # no longer looked at
    assert testing.sample_units(table.flatten(), [(0, 128_000, 2000)], widths=True) == [(8 / 64, 36 / 56)]
    table[:32, 1023] = 1.0 + 2.0**-20
    assert testing.sample_units(table.flatten(), [(0, 128_000, 2000)], widths=True) == [(8 / 64, 24 / 56)]


def test_a_glance_tells_wide_numbers_apart() -> None:
    table = torch.full((64, 2000), 1.0 + 2.0**-20)
    table[1] = 1.0  # narrow, but not among those glanced at
    assert testing.sample_units(table.flatten(), [(0, 128_000, 2000)], widths=True) == [(0.0, 0.0)]
    table[0, :8] = 1.0  # what is glanced at is narrow, and no more
    assert testing.sample_units(table.flatten(), [(0, 128_000, 2000)], widths=True) == [(0.0, 1 / 64)]
