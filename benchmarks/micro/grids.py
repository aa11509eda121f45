"""Grids along which n ranks can gather: n as a product of extents."""

from __future__ import annotations


def factorisations(ranks: int, largest: int | None = None) -> list[tuple[int, ...]]:
    """Every way to write `ranks` as a product of factors from 2 to `largest`, each with its factors descending."""
    if ranks == 1:
        return [()]
    return [
        (factor, *others)
        for factor in range(min(ranks, largest or ranks), 1, -1)
        if ranks % factor == 0
        for others in factorisations(ranks // factor, factor)
    ]


def grids(ranks: int) -> list[tuple[int, ...]]:
    """For each number of dimensions from two on, the grid with the fewest hops."""
    best: dict[int, tuple[int, ...]] = {}
    for factors in factorisations(ranks):
        if len(factors) > 1 and (len(factors) not in best or sum(factors) < sum(best[len(factors)])):
            best[len(factors)] = factors
    return [best[dimensions] for dimensions in sorted(best)]
