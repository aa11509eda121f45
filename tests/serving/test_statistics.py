"""Statistics: sums, summaries, and the same counters as the engine's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tuned import with_settings

import ddp_hooks
from ddp_hooks import _C, SkipUnusedState, statistics
from ddp_hooks.cli.run_report import RunReport
from ddp_hooks.enabling import MadeModule
from ddp_hooks.integrations.hook_of_trainer import HookOfTrainer
from ddp_hooks.serving import engine_settings
from ddp_hooks.serving.topology import Topology
from ddp_hooks.statistics import ParameterUsage, Statistics

FIELDS = [field.name for field in dataclasses.fields(Statistics) if field.name != "why_uncoded"]


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


def test_subtraction_leaves_a_stretch_of_a_run() -> None:
    assert numbered(100) + numbered(1) - numbered(1) == numbered(100)
    assert numbered(5) - numbered(5) == Statistics()
    with pytest.raises(TypeError):
        numbered(5) - 3


def test_metrics_are_numbers_of_a_step() -> None:
    first = Statistics(steps=4, dense_bytes=4000, payload_bytes=900, mask_bytes=100, messages=8, hook_seconds=2.0)
    then = first + Statistics(steps=1, dense_bytes=1000, payload_bytes=40, mask_bytes=10, rebuilt_bytes=1000)
    assert first.to_metrics() == {
        "ddp_hooks/saved_fraction": 0.75,
        "ddp_hooks/payload_bytes_per_step": 225,
        "ddp_hooks/overhead_seconds_per_step": 0.5,
    }
    everything = first.to_metrics(everything=True)
    assert everything.items() >= first.to_metrics().items()
    assert everything["ddp_hooks/messages_per_step"] == 2
    for name in ("dense", "mask", "broadcast", "owner", "coded", "sent", "rebuilt"):
        assert f"ddp_hooks/{name}_bytes_per_step" in everything
    assert (then - first).to_metrics()["ddp_hooks/saved_fraction"] == 0.975
    assert set(Statistics().to_metrics(everything=True).values()) == {0}


def test_read_copies_every_counter() -> None:
    source = SimpleNamespace(**numbered(7).to_dict())
    expected = dataclasses.replace(numbered(7), **dict.fromkeys(statistics.NOT_OF_AN_ENGINE, 0))
    copy = Statistics.read(source)
    assert copy == expected
    source.steps += 1
    assert copy == expected


@pytest.mark.parametrize(
    ("dense", "reduced", "removed", "rebuilt"),
    [
        (1000, 100, 0, 0),
        (1000, 100, 50, 500),
        (1200, 100, 50, 300),  # what was removed had a gradient in four of ten steps
        (1500, 100, 50, 0),
        (1700, 100, 50, 0),  # so had what was never in the Reducer
        (400, 100, 50, 500),  # sparse gradients
    ],
)
def test_what_rebuilds_have_spared(dense: int, reduced: int, removed: int, rebuilt: int) -> None:
    source = SimpleNamespace(**Statistics(steps=10, dense_bytes=dense, payload_bytes=60, mask_bytes=15).to_dict())
    statistics = Statistics.read(source, reduced, removed)
    assert statistics.rebuilt_bytes == rebuilt
    assert statistics.wrapped_bytes == dense + rebuilt
    assert statistics.saved_fraction == pytest.approx(1 - 75 / (dense + rebuilt))


def test_the_engine_has_the_same_counters() -> None:
    engine_counters = {name for name in vars(_C.Statistics) if not name.startswith("_")}
    assert engine_counters == set(FIELDS) - set(statistics.NOT_OF_AN_ENGINE)


def test_every_counter_is_described() -> None:
    for name in (*FIELDS, "why_uncoded"):
        assert f"        {name}: " in (Statistics.__doc__ or ""), name


def test_round_trip_through_a_dict() -> None:
    assert list(numbered(3).to_dict()) == FIELDS
    assert Statistics(**numbered(3).to_dict()) == Statistics.from_dict(numbered(3).to_dict()) == numbered(3)


def test_an_older_checkpoint_is_read_with_new_counters_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    # As 0.1.0 wrote them, before units and rebuilds were counted.
    first = {name: value for name, value in numbered(3).to_dict().items() if name in statistics._FIRST_FIELDS}
    read = Statistics.from_dict(first)
    assert (read.skip_zero_rows_steps, read.units_agreed_on, read.units_sent, read.rebuilt_bytes) == (0, 0, 0, 0)
    assert read.to_dict() | first == read.to_dict()
    older = dict(first)
    del older["hook_seconds"]
    with pytest.raises(ValueError, match="without hook_seconds"):
        Statistics.from_dict(older)
    monkeypatch.setattr(statistics, "_FIRST_FIELDS", tuple(older))  # as if the counter were a newer one
    assert Statistics.from_dict(older) == dataclasses.replace(read, hook_seconds=0.0)


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
        "10 steps: sent 500 MB instead of 2.00 GB (75.0% saved)",
        "per step: 50.0 MB of gradients in 2.5 messages, 128 B of usage masks",
        "per step: 100 us waiting for masks, 250 us other hook time",
        "gradient buckets: 20 sent whole, 30 in part, 40 not at all",
    ]

    def more(**counters: Any) -> list[str]:
        text = str(dataclasses.replace(statistics, **counters))
        return " ".join(text.split()).partition("not at all ")[2].splitlines()

    assert str(dataclasses.replace(statistics, rebuilt_bytes=3_000_000_000)).startswith(
        "10 steps: sent 500 MB instead of 5.00 GB (90.0% saved)"
    )
    assert more(rebuilt_bytes=3_000_000_000) == [
        "rebuild: DDP's buckets were 300 MB smaller per step than the model as it was wrapped"
    ]
    assert more(skip_zeros_steps=4) == ["skip_zeros: looked for all-zero gradients in 4 of 10 steps"]
    assert more(skip_zero_rows_steps=4, units_agreed_on=100, units_sent=20) == [
        "skip_zero_rows: sent 20 of 100 rows in 4 of 10 steps"
    ]
    assert more(coded_bytes=130_000_000, uncoded_bytes=150_000_000, coded_steps=9, why_uncoded="it rains") == [
        "coded: sent 130 MB instead of 150 MB in 9 of 10 steps; it rains"
    ]
    assert more(why_uncoded="it rains") == ["coded: nothing, because it rains"]


def test_summary_before_the_first_step() -> None:
    assert str(Statistics()).startswith("0 steps: sent 0 B instead of 0 B (0.0% saved)")


def test_a_small_model_has_numbers_too() -> None:
    text = str(Statistics(steps=20, messages=20, dense_bytes=5760, payload_bytes=5760, mask_bytes=900))
    assert text.startswith("20 steps: sent 6.66 kB instead of 5.76 kB (15.6% more, because of masks)")


def test_a_summary_fits_in_a_terminal() -> None:
    large = Statistics(**{name: type(getattr(Statistics(), name))(10**15 + 1) for name in FIELDS})
    rained = dataclasses.replace(large, why_uncoded="several words " * 20)
    for counters in (
        Statistics(),
        numbered(10**6),
        large,
        rained,
        dataclasses.replace(rained, coded_bytes=0),
    ):
        lines = str(counters).splitlines()
        assert max(map(len, lines)) <= 80, lines
    assert "2.00 PB" in str(large)


def test_what_rounds_to_nothing_has_no_sign() -> None:
    nothing = Statistics(steps=1, messages=1, dense_bytes=10**6, payload_bytes=10**6, mask_bytes=40, rebuilt_bytes=1)
    assert nothing.saved_fraction < 0
    assert "(0.0% saved)" in str(nothing)
    assert "(0.1% more, because of masks)" in str(dataclasses.replace(nothing, mask_bytes=1000))


@on_ranks(1)
def test_one_rank_saves_nothing(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    state = ddp_hooks.register(ddp)
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
    statistics = state.stats()
    assert (statistics.payload_bytes, statistics.saved_fraction) == (0, 0)
    assert str(statistics).startswith("2 steps on one rank, which has nobody to send to; per step: ")
    assert max(map(len, str(statistics).splitlines())) <= 80
    report = RunReport(ddp_hooks.policies.PRESETS["auto"], ["train.py"])
    report.add(MadeModule("Linear", 0, 1, state, None))
    lines = report.describe().splitlines()
    assert "1 rank;" in lines[0]
    assert lines[2].split()[-1] == "0.0%"
    assert lines[-1] == "  A single rank has nobody to send to, with or without the hook."


@on_ranks(2)
def test_ranks_that_send_nothing_save_it(rank: int) -> None:
    """Several ranks that send nothing have saved everything but the masks."""

    class Neither(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(64, 64)
            self.used = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    ddp = DistributedDataParallel(Neither(), find_unused_parameters=True)
    state = ddp_hooks.register(ddp, "skip_zeros")
    ddp(torch.zeros(2, 8)).mul(0).sum().backward()
    assert state.stats().payload_bytes == 0
    assert 0.9 < state.stats().saved_fraction < 1


def test_equal_counters_are_equal_statistics() -> None:
    assert numbered(1) == numbered(1)
    assert len({numbered(1), numbered(1), numbered(2)}) == 2


@on_ranks(2)
def test_savings_against_the_model_as_it_was_wrapped(rank: int) -> None:
    """Savings count against the model as it was wrapped, also over a checkpoint."""

    def bytes_of(module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    def wrap() -> tuple[DistributedDataParallel, SkipUnusedState]:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)))
        return ddp, ddp_hooks.register(ddp, "skip_unused")

    def train(ddp: DistributedDataParallel, steps: int) -> None:
        for _ in range(steps):
            ddp(torch.ones(2, 64)).sum().backward()

    ddp, state = wrap()
    whole, trunk = bytes_of(ddp.module), bytes_of(ddp.module[0])
    train(ddp, 2)
    ddp_hooks.freeze(ddp, "0")
    train(ddp, 2)
    assert state.stats().rebuilt_bytes == 0
    assert ddp_hooks.rebuild(ddp)
    train(ddp, 3)
    rebuilt = state.stats()
    assert (rebuilt.dense_bytes, rebuilt.rebuilt_bytes) == (7 * whole - 3 * trunk, 3 * trunk)
    assert rebuilt.wrapped_bytes == 7 * whole
    assert rebuilt.payload_bytes == 7 * whole - 5 * trunk
    expected = 1 - (rebuilt.payload_bytes + rebuilt.mask_bytes) / (7 * whole)
    assert rebuilt.saved_fraction == pytest.approx(expected)
    # Late: what was taken out has a gradient again, which counts as dense.
    ddp_hooks.unfreeze(ddp, "0")
    train(ddp, 1)
    assert state.stats().wrapped_bytes == 8 * whole
    assert state.stats().rebuilt_bytes == 3 * trunk
    ddp_hooks.rebuild(ddp)
    train(ddp, 1)
    assert (state.stats().wrapped_bytes, state.stats().rebuilt_bytes) == (9 * whole, 3 * trunk)

    # A resumed run wraps the whole model: what was taken out is back, until it is frozen and rebuilt again.
    resumed, other = wrap()
    other.load_state_dict(state.state_dict())
    assert other.stats() == state.stats()
    ddp_hooks.freeze(resumed, "0")
    train(resumed, 1)
    assert other.stats().dense_bytes == state.stats().dense_bytes + whole
    ddp_hooks.rebuild(resumed)
    train(resumed, 1)
    assert other.stats().dense_bytes == state.stats().dense_bytes + 2 * whole - trunk
    assert (other.stats().wrapped_bytes, other.stats().rebuilt_bytes) == (11 * whole, 4 * trunk)
    other.reset_stats()
    train(resumed, 1)
    assert (other.stats().wrapped_bytes, other.stats().rebuilt_bytes) == (whole, trunk)
    other.close()
    assert (other.stats().wrapped_bytes, other.stats().rebuilt_bytes) == (whole, trunk)


@on_ranks(2)
def test_what_is_logged_after_a_reset(rank: int) -> None:
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    hook = HookOfTrainer("skip_unused", {}, log=True)
    hook.register(ddp)
    state = hook.state
    assert state is not None

    def run(steps: int) -> None:
        for _ in range(steps):
            ddp(torch.ones(1, 2)).sum().backward()

    def assert_taken(expected: Statistics) -> None:
        assert hook.take_metrics() == expected.to_metrics()
        assert hook.take_metrics() == {}

    run(3)
    assert_taken(state.stats())
    # As many steps as were told of before, more, and fewer.
    for steps in (3, 5, 1):
        state.reset_stats()
        run(steps)
        assert state.stats().steps == steps
        assert_taken(state.stats())
    # The steps of a checkpoint were told of by the run that made it.
    checkpoint, before = state.state_dict(), state.stats()
    run(2)
    assert_taken(state.stats() - before)

    def resume(saved: dict[str, Any]) -> None:
        hook.load_state_dict(saved)
        hook.register(ddp)

    # Of several hosts, each with a folder of its own, only the first one's has read it.
    for load in (state.load_state_dict, resume, lambda saved: resume(saved if rank == 0 else {})):
        load(checkpoint)
        loaded = state.stats()
        assert loaded.steps == before.steps
        run(2)
        assert_taken(state.stats() - loaded)
    # What another version has written does not keep anybody from a checkpoint.
    before = state.stats()
    with pytest.warns(UserWarning, match="the statistics in the checkpoint were ignored"):
        resume({**checkpoint, "version": 99} if rank == 0 else {})
    assert state.stats() == before
    # Another module goes on where this one ended.
    before = state.stats()
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    hook.register(ddp)
    assert hook.state is not None
    state = hook.state
    run(2)
    assert_taken(state.stats() - before)


@on_ranks(2)
def test_as_much_is_logged_as_was_asked_for(rank: int) -> None:
    for log, logged in ((True, 3), ("everything", 14), (False, 0)):
        ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
        hook = HookOfTrainer("skip_unused", {}, log=log)  # type: ignore[arg-type]
        hook.register(ddp)
        ddp(torch.ones(1, 2)).sum().backward()
        metrics = hook.take_metrics()
        assert len(metrics) == logged, sorted(metrics)
        assert hook.state is not None
        assert metrics.items() <= hook.state.stats().to_metrics(everything=True).items()
    with pytest.raises(TypeError, match="expected log to be True, False or 'everything', received 1"):
        HookOfTrainer("skip_unused", {}, log=1)  # type: ignore[arg-type]


def test_transports_that_carried_nothing_are_left_out() -> None:
    carried = {"steps": 2, "messages": 3, "dense_bytes": 9 * 10**6, "payload_bytes": 8 * 10**6}
    broadcast, owners = {"broadcast_bytes": 3 * 10**6}, {"owner_bytes": 2 * 10**6}
    shown = " ".join(str(Statistics(**carried, **broadcast)).split())
    assert "transports: 3.00 MB sent directly by the ranks that used them; the rest all-reduced" in shown
    assert "summed" not in shown
    shown = " ".join(str(Statistics(**carried, **owners)).split())
    assert "transports: 2.00 MB summed by one of the ranks that used them; the rest all-reduced" in shown
    assert "directly" not in shown
    shown = " ".join(str(Statistics(**carried, **broadcast, **owners)).split())
    assert "3.00 MB sent directly by the ranks that used them, 2.00 MB summed by one of the ranks" in shown
    assert "transports" not in str(Statistics(**carried))


# --- why gradients are not coded: values, see also tests/transport/test_coded.py


LITTLE = "coding the others would have saved too little"


@on_ranks(2)
def test_why_is_told_of_the_policy_in_force(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(512, 512))
    state = ddp_hooks.register(ddp, "skip_unused")

    def run(steps: int) -> str:
        for _ in range(steps):
            ddp.zero_grad()
            ddp(torch.randn(8, 512)).square().mean().backward()
        return state.stats().why_uncoded

    assert run(4) == ""
    state.set_policy("auto")  # the speed of the loopback interface is unknown, and 14% too little on a fast one
    assert run(2) == ""
    assert run(1) == LITTLE
    assert state.stats().steps == 7
    assert f"in 1 of 7 steps; {LITTLE}" in " ".join(str(state.stats()).split())
    saved = state.state_dict()
    state.reset_stats()
    assert run(0) == ""
    run(2)
    # Local, and not a part of what is saved or compared.
    assert "why_uncoded" not in saved["statistics"]
    assert dataclasses.replace(state.stats(), why_uncoded="") == state.stats()
    state.set_policy("skip_unused")
    assert run(2) == ""
    # A forward pass under `no_sync` without a backward pass leaves nothing to sum.
    with ddp.no_sync():
        ddp(torch.randn(8, 512))
    run(1)
    assert state.stats().accumulated_steps == 0
    # Closed, it stays what it was.
    state.set_policy("auto", direct=False)
    state.close()
    assert state.stats().why_uncoded == "coded gradients need direct=True"


class Group:
    """As much of a process group as the reasons need."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


@pytest.mark.parametrize(
    ("settings", "hosts", "mbits", "reason"),
    [
        ({"coded": "off"}, [(0, 1)], 1000, ""),
        ({}, [(0,)], 1000, ""),
        ({}, [(0,), (1,)], 1000, ""),
        ({}, [(0, 1)], 1000, "several ranks share a host"),
        ({"coded": "on"}, [(0, 1)], 1000, "several ranks share a host"),
        ({}, [(0, 2), (1, 3)], 1000, ""),
        ({}, [(0, 1), (2,)], 1000, "hosts have different numbers of ranks"),
        ({}, [(0,), (1,)], 100_000, "the network (100,000 Mbit/s) is faster than coding"),
        ({"coded": "on"}, [(0,), (1,)], 100_000, ""),
        ({}, [(rank,) for rank in range(65)], 1000, "coded gradients need at most 64 hosts, and there are 65"),
    ],
)
def test_what_keeps_gradients_from_being_coded(
    settings: dict[str, Any], hosts: list[tuple[int, ...]], mbits: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_settings._C, "can_code", lambda group, device, hosts: True)
    policy = with_settings("auto", **settings)
    group, device = Group(sum(map(len, hosts))), torch.device("cpu")
    topology = Topology(tuple(hosts), link_mbits=mbits, can_add_up=True)

    def told(parameters: list[torch.Tensor]) -> str:
        return engine_settings.why_nothing_is_coded(policy, topology, group, device, parameters)  # type: ignore[arg-type]

    large = torch.zeros(512, 512)
    assert told([large]).startswith(reason) if reason else told([large]) == ""
    if not reason and policy.coded != "off" and len(hosts) > 1:
        assert told([large.double(), large.to(torch.complex128)]) == "numbers of 64 bits are not coded"
        assert told([large.to(torch.complex64), large.double()]) == told([large.half()]) == ""
        monkeypatch.setattr(engine_settings._C, "can_code", lambda group, device, hosts: False)
        assert told([large]) == "only gradients on the CPU are coded, over gloo"
