"""Along which grids n ranks can gather: n as a product, and how many ring hops that takes. Arithmetic alone."""

from __future__ import annotations

from functools import cache


@cache
def factorisations(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Every way to write `ranks` as a product of factors of at least 2, each with its factors descending."""

    def split(rest: int, largest: int) -> list[tuple[int, ...]]:
        if rest == 1:
            return [()]
        return [
            (factor, *others)
            for factor in range(min(rest, largest), 1, -1)
            if rest % factor == 0
            for others in split(rest // factor, factor)
        ]

    return tuple(split(ranks, ranks))


def grids(ranks: int) -> list[tuple[int, ...]]:
    """For each number of dimensions from two on the grid with the fewest hops."""
    best: dict[int, tuple[int, ...]] = {}
    for factors in factorisations(ranks):
        if len(factors) > 1 and (len(factors) not in best or sum(factors) < sum(best[len(factors)])):
            best[len(factors)] = factors
    return [best[dimensions] for dimensions in sorted(best)]
