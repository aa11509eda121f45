"""AdaptiveRule, with the settings of `skip_zeros`: rare without zeros, on with them, and alike on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks import _C
from ddp_hooks.policies import PRESETS
from ddp_hooks.serving.engine_settings import adaptive_settings

USED_BYTES = 1000
MIN_ZERO_FRACTION = 0.05
HOLD = 8
FIRST = 4
LONGEST = 50


def make_rule(hold: int = HOLD, first: int = FIRST, longest: int = LONGEST) -> _C.AdaptiveRule:
    settings = _C.AdaptiveSettings(
        min_zero_fraction=MIN_ZERO_FRACTION, first_pause_steps=first, longest_pause_steps=longest
    )
    return _C.AdaptiveRule(settings, looks_after_pay=hold, starts_paused=True)


def simulate(rule: _C.AdaptiveRule, zero_bytes: Callable[[int], int], steps: int) -> list[int]:
    """Run the rule as the engine does: it observes exactly the steps in which a look was due."""
    on = []
    for step in range(steps):
        if rule.is_due(step):
            on.append(step)
            rule.observe(step, zero_bytes(step), USED_BYTES)
    return on


class Oracle:
    """The documented rules, one flag and one countdown at a time."""

    def __init__(self, hold: int, first: int, longest: int) -> None:
        self.hold, self.first, self.longest = hold, first, longest
        self.held = 0  # steps for which the detector stays on
        self.pause = first
        self.off_left = first  # steps off before the next rule

    def step(self, pays: bool) -> bool:
        """Return whether the detector is on in this step; `pays` is looked at only if it is."""
        held = self.held > 0
        if not held and self.off_left > 0:
            self.off_left -= 1
            return False
        if held:
            self.held -= 1
        if pays:
            self.held = self.hold
            self.pause = self.first
        elif not held:
            self.pause = min(2 * self.pause, self.longest)
        self.off_left = self.pause
        return True


def test_without_zeros_probes_get_rarer_up_to_the_longest_pause() -> None:
    on = simulate(make_rule(), lambda step: 0, 500)
    assert on[0] == FIRST
    pauses = [later - earlier - 1 for earlier, later in pairwise(on)]
    assert pauses[:4] == [8, 16, 32, LONGEST]
    assert set(pauses[3:]) == {LONGEST}


def test_the_preset_costs_less_than_one_step_in_a_hundred() -> None:
    settings = adaptive_settings(PRESETS["auto"], is_on_device=False)
    rule = _C.AdaptiveRule(settings, looks_after_pay=settings.hold_steps, starts_paused=True)
    assert len(simulate(rule, lambda step: 0, 10_000)) < 100


def test_with_zeros_in_every_step_it_stays_on() -> None:
    on = simulate(make_rule(), lambda step: USED_BYTES, 300)
    assert on == list(range(FIRST, 300))


def test_zeros_that_come_late_and_go_again() -> None:
    first_zero, last_zero = 100, 199
    on = simulate(make_rule(), lambda step: USED_BYTES // 2 if first_zero <= step <= last_zero else 0, 600)
    noticed = next(step for step in on if step >= first_zero)
    assert noticed - first_zero <= LONGEST
    assert [step for step in on if noticed <= step <= last_zero] == list(range(noticed, last_zero + 1))
    # It holds on for a while, then goes back to probing from the first pause.
    off = last_zero + HOLD + 1
    assert [step for step in on if last_zero < step < off + FIRST] == list(range(last_zero + 1, off))
    probes = [step for step in on if step >= off]
    assert probes[0] == off + FIRST
    assert [later - earlier - 1 for earlier, later in pairwise(probes)][:3] == [8, 16, 32]


def test_one_paying_step_holds_for_exactly_the_hold_steps() -> None:
    on = simulate(make_rule(), lambda step: USED_BYTES if step == FIRST else 0, FIRST + HOLD + FIRST + 2)
    assert on == [*range(FIRST, FIRST + HOLD + 1), FIRST + HOLD + 1 + FIRST]


@pytest.mark.parametrize(
    ("used_bytes", "zero_bytes", "pays"),
    [(1000, 50, True), (1000, 49, False), (1000, 1000, True), (1000, 0, False), (0, 0, False)],
)
def test_what_pays(used_bytes: int, zero_bytes: int, pays: bool) -> None:
    rule = make_rule()
    assert rule.observe(FIRST, zero_bytes, used_bytes) == pays
    assert rule.is_on() == rule.is_due(FIRST + 1) == pays


@settings(deadline=None, max_examples=100)
@given(
    hold=st.integers(0, 10),
    first=st.integers(1, 6),
    extra=st.integers(0, 30),
    seed=st.integers(0, 2**32),
    density=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
)
def test_random_runs(hold: int, first: int, extra: int, seed: int, density: float) -> None:
    rng = random.Random(seed)
    rule, twin = make_rule(hold, first, first + extra), make_rule(hold, first, first + extra)
    oracle = Oracle(hold, first, first + extra)
    for step in range(300):
        pays = rng.random() < density
        wants = rule.is_due(step)
        assert wants == rule.is_due(step), "asking must not change the answer"
        assert wants == oracle.step(pays)
        # Another rank that observes the same bytes decides the same.
        assert wants == twin.is_due(step)
        if wants:
            for rank in (rule, twin):
                rank.observe(step, USED_BYTES if pays else 0, USED_BYTES)


def test_holding_on_for_ever() -> None:
    rule = make_rule(hold=2**63 - 1)
    rule.observe(FIRST, USED_BYTES, USED_BYTES)
    assert rule.is_due(FIRST + 1)


def test_without_a_pause_the_first_look_is_in_the_first_step() -> None:
    settings = _C.AdaptiveSettings(min_zero_fraction=MIN_ZERO_FRACTION, first_pause_steps=FIRST)
    rule = _C.AdaptiveRule(settings, looks_after_pay=HOLD, starts_paused=False)
    on = simulate(rule, lambda step: 0, 30)
    assert on == [0, 1 + FIRST, 2 + 3 * FIRST]
