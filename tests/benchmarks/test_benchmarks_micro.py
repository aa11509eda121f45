"""The microbenchmarks whose end nothing else here would notice: what is compiled by itself, and the transports."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from spawn import on_ranks

from micro import local, transports
from micro.grids import grids


@pytest.mark.thorough
def test_compiles_by_itself() -> None:
    """Without the extension and without torch, so that it says at once what of csrc/ it needs."""
    rows = local.run_compiled("mask", 1)
    assert rows
    assert all(row["correct"] for row in rows)
    assert {row["rounds"] for row in rows} == {1}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (2, []),
        (7, []),
        (4, [(2, 2)]),
        (8, [(4, 2), (2, 2, 2)]),
        (12, [(4, 3), (3, 2, 2)]),
        (16, [(4, 4), (4, 2, 2), (2, 2, 2, 2)]),
    ],
)
def test_grids_have_the_fewest_hops_of_their_dimensions(ranks: int, expected: list[tuple[int, ...]]) -> None:
    assert grids(ranks) == expected


@on_ranks(3)
def test_transports_bring_everything(rank: int) -> None:
    rows: list[dict[str, Any]] = []
    with (
        mock.patch.dict("os.environ", {"DDP_HOOKS_TESTBED_RATE": "loopback"}),
        mock.patch.object(transports.testbed, "report", rows.append),
        mock.patch.object(transports, "SEGMENT_BYTES", (4 << 10, 1 << 20)),
    ):
        transports.transports_rank(1, numel=5000)
    assert len(rows) == (9 if rank == 0 else 0)
    assert all(row["correct"] for row in rows), [row["method"] for row in rows if not row["correct"]]
