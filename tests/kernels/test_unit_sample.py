"""sample_units against a look at every element's bits of the units that are sampled."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from test_nonzero_scan import oracle
from test_slice_copy import DTYPES, WORDS
from test_unit_scan import random_slice

from ddp_hooks_testing import _C as testing

SAMPLED, GLANCED, GLANCED_ELEMENTS = 64, 8, 8
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
    assert testing.sample_units(flat, slices) == slow_sample(flat, slices)
    rng = random.Random(seed)
    rng.shuffle(slices)
    assert testing.sample_units(flat, slices) == slow_sample(flat, slices)


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
    assert testing.sample_units(flat.flatten(), [(0, 3200, 32)]) == [0.0]
    flat[:, 0] = -0.0
    assert testing.sample_units(flat.flatten(), [(0, 3200, 32)]) == [1.0]
    flat[:, 9] = torch.tensor([1], dtype=WORDS[torch.float32]).view(torch.float32)
    assert testing.sample_units(flat.flatten(), [(0, 3200, 32)]) == [0.0]
