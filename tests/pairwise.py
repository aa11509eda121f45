"""Chooses a few of a test's combinations of parameters in which each two values still meet.

Most defects that depend on parameters depend on one value or on two together (D. R. Kuhn, D. R. Wallace, A. M. Gallo,
"Software Fault Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004), so that pairs find most of
what the whole product finds, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

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
