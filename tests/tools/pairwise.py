"""Chooses a few of a test's combinations of parameters in which each two values still meet.

Most defects that depend on parameters depend on one value or on two together (D. R. Kuhn, D. R. Wallace, A. M. Gallo,
"Software Fault Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004), so that pairs find most of
what the whole product finds, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]


def _pairs(combination: Sequence[int]) -> set[Pair]:
    return set(combinations(enumerate(combination), 2))


def pairwise(tested: Sequence[Sequence[int]]) -> set[int]:
    """Choose from ``tested``, which holds a number for each parameter's value by test, so that no pair is lost.

    Greedy: always the first of those tests that bring the most pairs that none has brought yet.

    Returns:
        Positions in ``tested``. All of them for tests with one parameter, which have no pairs.
    """
    if any(len(combination) < 2 for combination in tested):
        return set(range(len(tested)))
    left = [_pairs(combination) for combination in tested]
    chosen: set[int] = set()
    while any(left):
        best = max(range(len(left)), key=lambda position: (len(left[position]), -position))
        chosen.add(best)
        brought = set(left[best])
        left = [pairs - brought for pairs in left]
    return chosen


def in_turn(first: Sequence[Any], second: Sequence[Any], rare: Sequence[Any] = ()) -> list[Any]:
    """Return all combinations as parameters; those in which each value of the longer meets the next are not thorough.

    For what is slow and is tested with all pairs elsewhere. With one of ``first`` that is ``rare``, all are thorough.
    """
    turns = max(len(first), len(second))
    chosen = {(turn % len(first), turn % len(second)) for turn in range(turns)}
    return [
        pytest.param(
            a, b, id=f"{_name(b)}-{_name(a)}", marks=[] if (i, j) in chosen and a not in rare else pytest.mark.thorough
        )
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def thorough(*values: Any) -> list[Any]:
    """Return values of one parameter that only ``--all`` tests."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


def _name(value: Any) -> str:
    return value if isinstance(value, str) else str(getattr(value, "__name__", None) or getattr(value, "name", value))
