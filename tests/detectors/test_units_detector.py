"""In which steps a parameter's gradient is sampled, and when ranks agree on its units, against a slow twin."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

CPU, CUDA = 0, 1
FIRST_PAUSE, LONGEST_PAUSE = 16, 128
LEAST = 0.25
ROWS, ROW = 64, 8


def make_detector(device: int, parameters: int = 1) -> testing.UnitsDetector:
    """A detector of parameters with a unit a row, a bucket each, the last one without rows."""
    detector = testing.UnitsDetector(
        skip_zero_rows=_C.When.ADAPTIVE,
        units=_C.UnitSettings(min_divided_bytes=0, min_unit_bytes=1, max_unit_bytes=1 << 20),
        adaptive=_C.AdaptiveSettings(
            min_zero_fraction=LEAST, first_pause_steps=FIRST_PAUSE, longest_pause_steps=LONGEST_PAUSE
        ),
    )
    slices = [_C.ParameterSlice(i, 0, ROWS * ROW, ROW) for i in range(parameters)]
    slices.append(_C.ParameterSlice(parameters, 0, 5, 0))
    kind = 6 << 32 | device << 16
    detector.use_layout(_C.LayoutOfBuckets([_C.BucketLayout([one], 4, kind) for one in slices], parameters + 1))
    return detector


def mask(bits: list[bool]) -> _C.UsageMask:
    made = _C.UsageMask(len(bits))
    for i, bit in enumerate(bits):
        if bit:
            made.set(i)
    return made


def looks(device: int, steps: int, sparse_from: int | None = None) -> tuple[list[int], list[int]]:
    """Return the steps in which one gradient is sampled, and those in which its units are agreed on.

    It is dense at first; from `sparse_from` on nearly all of it is zero.
    """
    detector = make_detector(device)
    objects, sampled, chosen = True, [], []
    for step in range(steps):
        is_chosen = detector.choose(mask([True, True]), mask([objects]), step).test(0)
        is_sparse = sparse_from is not None and step >= sparse_from
        if is_chosen:
            chosen.append(step)
            detector.observe(0, step, ROWS * ROW, ROW if is_sparse else ROWS * ROW)
        elif detector.is_due(0, step + 1):
            sampled.append(step)
            objects = not is_sparse
    return sampled, chosen


def test_the_cpu_looks_at_a_dense_gradient_in_every_step() -> None:
    assert looks(CPU, 300) == (list(range(300)), [])


def test_a_device_looks_at_a_dense_gradient_ever_more_seldom() -> None:
    sampled, chosen = looks(CUDA, 1000)
    assert chosen == []
    # In the first step; then in the step before the end of each pause, which follows the objection's step.
    expected, pause = [0], FIRST_PAUSE
    while (step := expected[-1] + 1 + pause) < 1000:
        expected.append(step)
        pause = min(2 * pause, LONGEST_PAUSE)
    assert sampled == expected
    assert len(sampled) < 12


@pytest.mark.parametrize(("device", "latest"), [(CPU, 1), (CUDA, 1 + LONGEST_PAUSE + 1)])
@pytest.mark.parametrize("sparse_from", [0, 1, 40, 500])
def test_what_becomes_sparse_is_found(device: int, latest: int, sparse_from: int) -> None:
    sampled, chosen = looks(device, 1000, sparse_from)
    assert chosen == list(range(chosen[0], 1000))
    assert sparse_from < chosen[0] <= sparse_from + latest
    assert sampled[-1] == chosen[0] - 1
    if sparse_from == 0:
        assert chosen[0] == 1  # on a device, too, from the second step on


def test_what_nobody_has_looked_at_is_not_left_alone() -> None:
    """A parameter that is first used in some later step is looked at in that one."""
    detector = make_detector(CUDA)
    for step in range(20):
        detector.choose(mask([False, True]), mask([True]), step)
    assert not detector.choose(mask([True, True]), mask([True]), 20).test(0)
    assert detector.is_due(0, 21)
    assert detector.choose(mask([True, True]), mask([False]), 21).test(0)


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("every", [2, 3, 17])
def test_what_is_used_now_and_then_is_looked_at_before_it_is_left_alone_again(first: int, every: int) -> None:
    """An old objection says nothing of what a gradient has become since."""
    detector = make_detector(CUDA)
    steps = range(first, 2000, every)
    objects = True
    for step in range(2000):
        used = step in steps
        if detector.choose(mask([used, True]), mask([objects]), step).test(0):
            break
        if used and detector.is_due(0, step + 1):
            objects = step < 300
    else:
        raise AssertionError("never looked at again")
    assert step <= 300 + LONGEST_PAUSE + 2 * every + 1


@dataclass
class Twin:
    """One parameter on a device, by the rule as it is written down, with all that was ever agreed on at hand."""

    next_step: int = 0
    pause: int = FIRST_PAUSE
    pays: bool = False
    looked: list[int] = field(default_factory=list)  # steps
    left_alone: int = -1  # the last step in which it was

    def leave_alone(self, step: int) -> None:
        self.left_alone = step
        self.next_step = step + 1 + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)

    def is_chosen(self, step: int, used: bool, objected: bool) -> bool:
        if not used:
            return False
        if self.pays or (step >= self.next_step and not objected):
            self.looked.clear()
            return True
        if step >= self.next_step and any(look > self.left_alone for look in self.looked):
            self.leave_alone(step)
        if step + 1 >= self.next_step:
            self.looked.append(step)
        return False

    def observe(self, step: int, pays: bool) -> None:
        self.pays = pays
        if pays:
            self.pause = FIRST_PAUSE
        else:
            self.leave_alone(step)


@pytest.mark.parametrize("seed", range(30))
def test_every_rank_comes_to_the_same_from_what_was_agreed(seed: int) -> None:
    """Two ranks' detectors and the twin are told of the same agreed masks, and nothing else."""
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    ranks = [make_detector(CUDA, count) for _ in range(2)]
    twins = [Twin() for _ in range(count)]
    density, objecting, paying = rng.choice([0.2, 0.9, 1.0]), rng.choice([0.5, 0.95]), rng.choice([0.3, 0.95])
    for step in range(400):
        if rng.random() < 0.02:
            continue  # a rank has joined: nobody is asked
        used = [rng.random() < density for _ in range(count)]
        objected = [rng.random() < objecting for _ in range(count)]
        pays = [rng.random() < paying for _ in range(count)]
        expected = [twin.is_chosen(step, u, o) for twin, u, o in zip(twins, used, objected, strict=True)]
        for detector in ranks:
            chosen = detector.choose(mask([*used, True]), mask(objected), step)
            assert [chosen.test(i) for i in range(count)] == expected
            for i in range(count):
                if expected[i]:
                    detector.observe(i, step, ROWS * ROW, ROW if pays[i] else ROWS * ROW)
        for i, twin in enumerate(twins):
            if expected[i]:
                twin.observe(step, pays[i])
            assert [detector.is_due(i, step + 1) for detector in ranks] == [step + 1 >= twin.next_step] * 2
