"""Statistics: sums, summaries, and the same counters as the engine's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from ddp_hooks import _C, ParameterUsage, Statistics, statistics

FIELDS = [field.name for field in dataclasses.fields(Statistics)]


def numbered(first: int) -> Statistics:
    """Give every counter another value, so that two mixed up ones are noticed."""
    return Statistics(**{name: type(getattr(Statistics(), name))(first + i) for i, name in enumerate(FIELDS)})


def test_starts_at_zero() -> None:
    assert all(getattr(Statistics(), name) == 0 for name in FIELDS)


def test_addition_sums_every_counter() -> None:
    total = numbered(1) + numbered(100)
    for i, name in enumerate(FIELDS):
        assert getattr(total, name) == 101 + 2 * i, name
        assert type(getattr(total, name)) is type(getattr(Statistics(), name)), name
    assert numbered(1) + Statistics() == numbered(1)
    assert numbered(1) + numbered(100) == numbered(100) + numbered(1)


def test_read_copies_every_counter() -> None:
    source = SimpleNamespace(**numbered(7).to_dict())
    copy = Statistics.read(source)
    assert copy == numbered(7)
    source.steps += 1
    assert copy == numbered(7)


def test_the_engine_has_the_same_counters() -> None:
    engine_counters = {name for name in vars(_C.Statistics) if not name.startswith("_")}
    assert engine_counters == set(FIELDS)


def test_every_counter_is_described() -> None:
    for name in FIELDS:
        assert f"        {name}: " in (Statistics.__doc__ or ""), name


def test_round_trip_through_a_dict() -> None:
    assert list(numbered(3).to_dict()) == FIELDS
    assert Statistics(**numbered(3).to_dict()) == Statistics.from_dict(numbered(3).to_dict()) == numbered(3)


def test_an_older_checkpoint_is_read_with_new_counters_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    older = numbered(3).to_dict()
    del older["hook_seconds"]
    with pytest.raises(ValueError, match="without hook_seconds"):
        Statistics.from_dict(older)
    monkeypatch.setattr(statistics, "_FIRST_FIELDS", tuple(older))  # as if the counter were a newer one
    assert Statistics.from_dict(older) == dataclasses.replace(numbered(3), hook_seconds=0.0)


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Statistics().steps = 1  # type: ignore[misc]
    assert not hasattr(Statistics(), "__dict__")
    assert not hasattr(ParameterUsage("weight", 3, True, True, False), "__dict__")


@pytest.mark.parametrize(
    ("dense", "payload", "mask", "saved"),
    [
        (0, 0, 0, 0.0),
        (0, 0, 48, 0.0),  # nothing to save from
        (1000, 1000, 0, 0.0),
        (1000, 0, 0, 1.0),
        (1000, 240, 10, 0.75),
        (1000, 1000, 50, -0.05),  # masks count against us
    ],
)
def test_saved_fraction(dense: int, payload: int, mask: int, saved: float) -> None:
    statistics = Statistics(dense_bytes=dense, payload_bytes=payload, mask_bytes=mask)
    assert statistics.saved_fraction == pytest.approx(saved, abs=1e-12)


def test_summary_of_a_run() -> None:
    statistics = Statistics(
        steps=10,
        buckets_whole=20,
        buckets_packed=30,
        buckets_skipped=40,
        messages=25,
        dense_bytes=2_000_000_000,
        payload_bytes=500_000_000,
        mask_bytes=1_280,
        exchanges=10,
        plan_cache_hits=7,
        plan_cache_misses=3,
        exchange_wait_seconds=0.001,
        hook_seconds=0.0025,
    )
    assert str(statistics).splitlines() == [
        "10 steps: sent 500.00 MB of 2,000.00 MB (75.0% saved), 50.00 MB a step in 2.5 messages",
        "buckets: 20 whole, 30 in part, 40 skipped; wire plans: 7 from the cache, 3 made",
        "masks: 10 exchanges, 1,280 bytes, waited 100 us a step; hook: 250 us a step besides",
    ]
    with_values = dataclasses.replace(statistics, values_steps=4)
    assert str(with_values).splitlines()[3:] == ["values detector: on in 4 of 10 steps"]


def test_summary_before_the_first_step() -> None:
    assert str(Statistics()).startswith("0 steps: sent 0.00 MB of 0.00 MB (0.0% saved)")


def test_equal_counters_are_equal_statistics() -> None:
    assert numbered(1) == numbered(1)
    assert len({numbered(1), numbered(1), numbered(2)}) == 2
