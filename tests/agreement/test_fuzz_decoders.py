"""What arrives from a file or from another rank may hold anything: it is taken, or refused with what was expected.

Every decoder is given what it should get with one or two parts exchanged for something else, taken away or added. It
may return a value that can be used, or raise a ValueError, TypeError or RuntimeError that says what was expected, and
then nothing has changed. Any other exception, and a loop without an end, is a defect.
"""

from __future__ import annotations

import copy
import json
import math
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp_hooks
from ddp_hooks import _C
from ddp_hooks.serving import agreement
from ddp_hooks_testing import _C as testing

JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    7,
    10**12,
    2**64,
    -(2**63) - 1,
    0.5,
    math.nan,
    math.inf,
    "",
    "x",
    "\0" * 3,
    b"bytes",
    [],
    [1, "a"],
    {},
    {"x": {}},
    (),
    {1, 2},
    object(),
    1 + 2j,
    torch.ones(2),
]
CLEAR = (ValueError, TypeError, RuntimeError)
# Python's own words for arguments that a constructor does not have or is not given.
WORDS = ("expected", "unexpected keyword argument", "required positional argument", "cannot be served: rank 1: ")
STATE = {
    "version": 2,
    "policy": ddp_hooks.policies.resolve("auto").to_dict(),
    "statistics": ddp_hooks.statistics.Statistics(steps=3, dense_bytes=100, payload_bytes=50).to_dict(),
}


TUNING = ddp_hooks.Tuning()


# The same as version 1 wrote it.
def mutations(good: Any) -> Iterator[Any]:
    """Yield the value with parts exchanged, taken away or added; the same ones in each run."""
    yield from copy.deepcopy([junk for junk in JUNK if type(junk) is not object])
    draw = random.Random(0)
    for path in paths(good):
        for junk in JUNK:
            changed = copy.deepcopy(good)
            part = changed
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = junk
            yield changed
    for _ in range(300):
        changed = copy.deepcopy(good)
        for _ in range(draw.randint(1, 3)):
            mutate(changed, draw)
        yield changed


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (key,)
            for path in paths(value[key]):
                yield (key, *path)


def mutate(value: Any, draw: random.Random) -> None:
    everywhere = list(paths(value))
    if not everywhere:
        return
    *place, key = draw.choice(everywhere)
    part = value
    for step in place:
        part = part[step]
    what = draw.randrange(3)
    junk = copy.deepcopy(draw.choice(JUNK))  # which may be changed in turn
    if what == 0:
        part[key] = junk
    elif what == 1:
        del part[key]
    elif isinstance(part, dict):
        part[draw.choice(["", "x", "steps", "policy", 3])] = junk
    else:
        part.append(junk)


class TooLong(BaseException):
    pass


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    # Of the processor: on a busy machine what ends at once can take long by the clock.
    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def complaint(decode: Callable[[Any], None], value: Any) -> str | None:
    """Say what is wrong with how a value is decoded."""
    try:
        with at_most(0.5):
            decode(value)
    except TooLong:
        return "does not end"
    except CLEAR as error:
        return None if any(word in str(error) for word in WORDS) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def assert_clear(decode: Callable[[Any], None], values: Iterator[Any]) -> None:
    complaints: dict[str, Any] = {}
    decoded = 0
    for value in values:
        decoded += 1
        found = complaint(decode, value)
        if found is not None:
            complaints.setdefault(found[:60], value)
    assert decoded > 20
    assert not complaints, "\n".join(f"{found}, of {value!r:.200}" for found, value in complaints.items())


# --- files


def use_policy(policy: ddp_hooks.Policy) -> None:
    assert ddp_hooks.Policy.from_dict(policy.to_dict()) == policy
    assert repr(policy)


def use_statistics(statistics: ddp_hooks.statistics.Statistics) -> None:
    """Do all that is done with statistics: counters are finite numbers, or this fails."""
    assert str(statistics)
    assert math.isfinite(statistics.saved_fraction)
    assert (statistics + ddp_hooks.statistics.Statistics(steps=1)).steps == statistics.steps + 1
    json.dumps(statistics.to_dict())


def arguments(value: Any) -> dict[str, Any]:
    """Return a value if it may stand behind two stars."""
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else {"name": value}


def test_policy() -> None:
    auto = STATE["policy"]
    tuning = auto["tuning"]
    assert_clear(lambda value: use_policy(ddp_hooks.Policy.from_dict(value)), mutations(auto))
    assert_clear(lambda value: use_policy(ddp_hooks.Policy(**arguments(value))), mutations({**auto, "tuning": TUNING}))
    assert_clear(lambda value: ddp_hooks.Tuning(**arguments(value)), mutations(tuning))
    assert_clear(lambda value: use_policy(ddp_hooks.policies.resolve(value)), mutations("auto"))
    changed = mutations({**auto, **tuning, "tuning": TUNING})
    assert_clear(lambda value: use_policy(ddp_hooks.policies.resolve("auto", arguments(value))), changed)


def test_statistics() -> None:
    def decode(value: Any) -> None:
        use_statistics(ddp_hooks.statistics.Statistics.from_dict(value))

    assert_clear(decode, mutations(STATE["statistics"]))


def detached(value: Any = STATE) -> ddp_hooks.SkipUnusedState:
    """Return a state as pickle makes one."""
    state = ddp_hooks.SkipUnusedState.__new__(ddp_hooks.SkipUnusedState)
    state.__setstate__(value)
    return state


def use_state(state: ddp_hooks.SkipUnusedState) -> None:
    assert repr(state)
    use_policy(state.policy)
    use_statistics(state.stats())
    detached(json.loads(json.dumps(state.state_dict())))


def test_what_a_state_saves_can_be_loaded() -> None:
    use_state(detached())
    assert detached().state_dict() == STATE


def test_load_state_dict() -> None:
    def decode(value: Any) -> None:
        state = detached()
        try:
            state.load_state_dict(value)
        except BaseException:
            assert state.state_dict() == STATE, "refused, and changed all the same"
            raise
        use_state(state)

    assert_clear(decode, mutations(STATE))


def test_pickled_state() -> None:
    assert_clear(lambda value: use_state(detached(value)), mutations(STATE))


def test_freeze_schedule() -> None:
    def decode(value: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        schedule = ddp_hooks.FreezeSchedule(model, {1: "0", 3: "1"}, {2: "0"})
        schedule.load_state_dict(value)
        schedule.step()
        assert schedule.state_dict()["next_step"] >= 1

    assert_clear(decode, mutations({"next_step": 2}))


# --- other ranks


class Ranks:
    """Stands in for the other ranks: what they send is what they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records: Any = None
        self.objects: Any = None
        monkeypatch.setattr(agreement, "gather_tensor", lambda group, own: torch.stack([own, self.record(own)]))
        monkeypatch.setattr(agreement, "gather_objects", lambda group, own: [own, self.objects])
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "all_gather_object", self.all_gather_object)

    def record(self, own: torch.Tensor) -> torch.Tensor:
        return own if self.records is None else torch.tensor(self.records, dtype=own.dtype)

    def all_gather_object(self, into: list[Any], own: Any, group: Any = None) -> None:
        into[:] = [own, self.objects]


LAYOUT = {"parameter 'a'": "float32 [2] on cpu", "parameter 'b'": "float32 [3] on cpu"}


def sent(layout: dict[str, str]) -> dict[str, Any]:
    """Return what a rank sends that calls the same function."""
    return agreement.Proposal(("broadcast_parameters", "src=0"), layout).to_dict()


def agree(words: tuple[int, ...] = ()) -> None:
    agreement.agree(None, "broadcast_parameters", {"src": 0}, LAYOUT, words=words)  # type: ignore[arg-type]


def test_words_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are the caller's own mean anything; the others are compared, and everybody's reasons are asked for."""
    ranks = Ranks(monkeypatch)
    agree()
    ranks.objects = sent({"parameter 'a'": "float32 [2] on cpu"})
    draw = random.Random(1)
    for _ in range(200):
        ranks.records = [draw.choice([0, 1, -1, 2**62, -(2**63)]) for _ in range(agreement.RECORD_BYTES // 8)]
        assert complaint(lambda _: agree(), None) is None
        with pytest.raises(agreement.RanksDisagreeError, match="expected the same call"):
            agree()


def test_records_that_contradict_the_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.objects = sent(LAYOUT)
    ranks.records = [0] * (agreement.RECORD_BYTES // 8)
    assert complaint(lambda _: agree(), None) is None


def test_descriptions_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.records = [0] * (agreement.RECORD_BYTES // 8)

    def decode(value: Any) -> None:
        ranks.objects = value
        agree()

    assert_clear(decode, mutations(sent({"parameter 'a'": "float32 [2] on cpu"})))


def test_registrations_of_other_ranks() -> None:
    description = {"ddp_hooks": "1.0", "torch": "2.13.0", "policy": "Policy('auto')", "world size": "2"}
    own = agreement.Proposal(("register",), description)

    def decode(value: Any) -> None:
        try:
            agreement.settle("register", [own, agreement.Proposal.read("register", 1, value)])
        except RuntimeError as error:
            # What another rank gives as its problem is shown in its own words.
            if not str(error).startswith("register: refused on every rank. rank 1: "):
                raise

    assert_clear(decode, mutations(own.to_dict()))


# --- mask words


def test_masks() -> None:
    """What is not in a mask is refused, and what is merged has as many bits."""

    def decode(value: Any) -> None:
        mask = _C.UsageMask(70)
        for use in (mask.test, mask.set, mask.clear):
            complaints.append(complaint(use, value))
        assert mask.count() <= 1
        assert all(0 <= word < 2**64 for word in mask.words())
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 200:
            complaints.append(complaint(lambda size: mask.merge(_C.UsageMask(size)), value))

    complaints: list[str | None] = []
    for value in [*JUNK, *range(-3, 80)]:
        decode(value)
    # Of an index Python expects an IndexError; a value of another type is refused by the binding, by its own words.
    said = ("IndexError: usage mask of 70 parameters: received index ", "TypeError: ")
    unclear = {found for found in complaints if found is not None and not found.startswith(said)}
    assert any(found is not None and "IndexError" in found for found in complaints)
    assert not unclear, unclear


def test_compressed_masks() -> None:
    """What is no mask is refused and changes nothing; test_mask_codec.py says which of both each is."""
    draw = random.Random(2)
    before = _C.UsageMask(300)
    before.set(7)

    def decode(words: list[int]) -> None:
        mask = _C.UsageMask(300)
        mask.merge(before)
        try:
            testing.merge_compressed(words, mask)
        except BaseException:
            assert mask == before, "refused, and changed all the same"
            raise
        assert mask.test(7)
        assert len(mask.words()) == 5

    def sent() -> Iterator[list[int]]:
        yield []
        for _ in range(2000):
            mask = _C.UsageMask(300, draw.random() < 0.2)
            for _ in range(draw.choice([0, 1, 5, 100])):
                draw.choice([mask.set, mask.clear])(draw.randrange(300))
            words = testing.compress(mask)
            for _ in range(draw.randint(0, 3)):
                words[draw.randrange(len(words))] ^= 1 << draw.randrange(64)
            yield words[: draw.choice([1, len(words)])] + [0] * draw.choice([0, 0, 3])

    assert_clear(decode, sent())
