"""tests/tools/quick.py loses no value, and takes few tests."""

from __future__ import annotations

from itertools import product

import pytest
from quick import each_value


@pytest.mark.parametrize("sizes", [(1,), (2, 2), (3, 4, 2), (2, 2, 2, 2), (5, 1, 3, 2)])
def test_every_value_is_there(sizes: tuple[int, ...]) -> None:
    tested = list(product(*(range(size) for size in sizes)))
    chosen = [tested[position] for position in each_value(tested)]
    assert len(chosen) == max(sizes)
    for parameter, size in enumerate(sizes):
        assert {values[parameter] for values in chosen} == set(range(size))


def test_what_does_not_exist_is_not_asked_for() -> None:
    assert each_value([(0, 0), (1, 1)]) == {0, 1}


def test_without_parameters() -> None:
    assert each_value([()]) == {0}
