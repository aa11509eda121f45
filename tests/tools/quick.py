"""Chooses what `make test` runs: a few of a test's combinations of parameters, in which each value still occurs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest


def each_value(tested: Sequence[Sequence[Hashable]]) -> set[int]:
    """Choose from ``tested``, which holds each test's values of its parameters, so that no value is lost.

    Greedy: always the first of those tests that bring the most values that none has brought yet.

    Returns:
        Positions in ``tested``.
    """
    left = [set(enumerate(values)) or {None} for values in tested]
    chosen: set[int] = set()
    while any(left):
        best = max(range(len(left)), key=lambda position: (len(left[position]), -position))
        chosen.add(best)
        brought = left[best]
        left = [values - brought for values in left]
    return chosen


def thorough(*values: Any) -> list[Any]:
    """Return values of one parameter that only ``--all`` tests."""
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]
