"""Turns of collectives that completions start."""

from __future__ import annotations

import itertools

import pytest
import torch  # noqa: F401  # whose libraries the extension needs

from ddp_hooks_testing import _C as testing


class Turns:
    """Notes what an ordered group does with some turns."""

    def __init__(self, number: int) -> None:
        self.group = testing.OrderedGroup()
        self.turns = [self.group.take_turn() for _ in range(number)]
        self.started: list[int] = []
        self.told: dict[int, list[str | None]] = {}

    def start(self, turn: int, problem: str | None = None) -> None:
        def begin() -> None:
            if problem is not None:
                raise ValueError(problem)
            self.started.append(turn)

        def then(error: str | None) -> None:
            self.group.has_failed()  # no lock is held
            self.told.setdefault(turn, []).append(error)

        self.group.start(turn, begin, then)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_in_the_order_of_turns(order: tuple[int, ...]) -> None:
    turns = Turns(4)
    for count, turn in enumerate(order):
        turns.start(turn)
        ready = set(order[: count + 1])
        assert turns.started == list(itertools.takewhile(ready.__contains__, range(4)))
        assert turns.told == {started: [None] for started in turns.started}


@pytest.mark.parametrize("started_first", [False, True])
def test_nothing_starts_behind_a_turn_that_is_not_used(started_first: bool) -> None:
    turns = Turns(4)
    if started_first:
        turns.start(0)
    turns.start(2)
    turns.group.fail("lost")
    assert turns.started == [0] * started_first
    turns.start(3)
    assert turns.started == [0] * started_first
    for waited in (2, 3):
        (error,) = turns.told.pop(waited)
        assert error is not None
        assert error.endswith("register(ddp) on every rank. The step's error: lost")
    # The first reason stands, also for what comes later.
    turns.group.fail("again")
    turn = turns.group.take_turn()
    turns.start(turn)
    (error,) = turns.told.pop(turn)
    assert error is not None
    assert error.endswith("register(ddp) on every rank. The step's error: lost")


def test_one_that_cannot_be_started() -> None:
    turns = Turns(3)
    turns.start(2)
    turns.start(1, "not here")
    assert not turns.group.has_failed()
    turns.start(0)
    assert turns.started == [0]
    for turn in (1, 2):
        (error,) = turns.told[turn]
        assert error is not None
        assert "not here" in error
