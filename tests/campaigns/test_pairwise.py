"""tests/tools/pairwise.py loses no pair, and takes few tests."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import in_turn, pairwise


@pytest.mark.parametrize("sizes", [(2, 2), (3, 4, 2), (2, 2, 2, 2), (5, 1, 3, 2)])
def test_every_pair_is_there(sizes: tuple[int, ...]) -> None:
    tested = list(product(*(range(size) for size in sizes)))
    chosen = [tested[position] for position in pairwise(tested)]
    for a, b in combinations(range(len(sizes)), 2):
        expected = set(product(range(sizes[a]), range(sizes[b])))
        assert {(one[a], one[b]) for one in chosen} == expected


def test_few_are_enough() -> None:
    tested = list(product(range(4), repeat=4))
    assert 16 <= len(pairwise(tested)) <= 32  # of 256; 16 is the least, because two parameters have as many pairs


def test_what_does_not_exist_is_not_asked_for() -> None:
    assert pairwise([(0, 0), (1, 1)]) == {0, 1}


def test_one_parameter_keeps_all() -> None:
    assert pairwise([(0,), (1,), (2,)]) == {0, 1, 2}


def test_it_chooses_the_same_each_time() -> None:
    tested = list(product(range(6), range(4), range(2)))
    assert pairwise(tested) == pairwise(list(tested))


@pytest.mark.parametrize(("first", "second"), [("abcdefg", "xyz"), ("ab", "wxyz"), ("abc", "xyz"), ("ab", "x")])
def test_in_turn_every_value_is_there(first: str, second: str) -> None:
    parameters = in_turn(first, second)
    assert {one.values for one in parameters} == set(product(first, second))
    chosen = [one.values for one in parameters if not one.marks]
    assert len(chosen) == max(len(first), len(second))
    assert {a for a, _ in chosen} == set(first)
    assert {b for _, b in chosen} == set(second)
