"""The model of the transports against the plans that the extension makes, byte by byte and without processes."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_hooks import _C
from ddp_hooks.control_groups import LARGEST_AXIS, grid
from ddp_hooks_testing import _C as testing
from scaling import cases, model, transports, worth

LINK = model.Link(hop_seconds=1e-4, bytes_per_second=1e8)
SETTINGS = transports.Settings(in_place_bytes=400, pack_bytes=4000, segment_bytes=400, min_direct_bytes=0)
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def plan_of(case: cases.Case, buckets: list, ranks: int, settings: transports.Settings) -> list[_C.BucketPlan]:
    parameters = len(case.sizes)
    masks = [_C.UsageMask(parameters) for _ in range(ranks)]
    agreed = _C.UsageMask(parameters)
    for rank, mask in enumerate(masks):
        for i, who in enumerate(case.contributors):
            if who >> rank & 1:
                mask.set(i)
        agreed.merge(mask)
    layouts = []
    for bucket in buckets:
        offsets = itertools.accumulate((size // 4 for _, size in bucket), initial=0)
        slices = [_C.ParameterSlice(i, offset, size // 4) for (i, size), offset in zip(bucket, offsets, strict=False)]
        layouts.append(_C.BucketLayout(slices, 4))
    direct = _C.DirectSettings(
        allowed=settings.direct,
        world_size=ranks,
        sums=settings.owners,
        least_saving_of_sums=settings.min_owner_saving,
        segment_bytes=settings.segment_bytes,
        min_bytes=settings.min_direct_bytes,
    )
    plan = _C.PlanSettings(
        in_place_bytes=settings.in_place_bytes, pack_bytes=settings.pack_bytes, gap_fraction=0.0, direct=direct
    )
    return _C.make_reduction_plan(_C.LayoutOfBuckets(layouts, parameters), agreed, plan, by_rank=masks)


def check_against_plan(case: cases.Case, buckets: list, ranks: int, settings: transports.Settings) -> None:
    """Count what a plan moves, message by message, and expect the model to say the same."""
    plan = plan_of(case, buckets, ranks, settings)
    sent: Counter[tuple[str, int]] = Counter()
    received: Counter[tuple[str, int]] = Counter()
    messages: Counter[str] = Counter()
    handed: Counter[str] = Counter()

    def move(phase: str, source: int, target: int, numel: int) -> None:
        sent[phase, source] += 4 * numel
        received[phase, target] += 4 * numel

    for launch in itertools.chain.from_iterable(bucket.launches for bucket in plan):
        messages["ring"] += 1
        handed["ring"] += 4 * launch.numel
    for message in itertools.chain.from_iterable(bucket.direct for bucket in plan):
        handed["owner" if message.is_summed else "broadcast"] += 4 * message.numel
        messages["owner" if message.is_summed else "broadcast"] += 1
        owned = dict.fromkeys(range(ranks), 0) | {group.owner: group.numel for group in message.groups}
        if message.is_gathered:  # padded
            owned = dict.fromkeys(owned, max(owned.values()))
        for owner, rank in itertools.permutations(range(ranks), 2):
            move("sums" if message.is_summed else "broadcast", owner, rank, owned[owner])
        for group in message.groups:
            for rank, part in itertools.product(range(ranks), group.parts):
                if rank != group.owner and part.contributors >> rank & 1:
                    move("to_owners", rank, group.owner, part.length)
    told = transports.travel(buckets, case.contributors, ranks, settings)
    assert (told.ring_bytes, told.broadcast_bytes, told.owner_bytes) == tuple(
        handed[k] for k in ("ring", "broadcast", "owner")
    )
    assert (told.ring_messages, told.broadcast.messages) == (messages["ring"], messages["broadcast"])
    assert told.to_owners.messages == told.sums.messages == messages["owner"]
    for name in ("broadcast", "to_owners", "sums"):
        phase = getattr(told, name)
        assert phase.sent == tuple(sent[name, rank] for rank in range(ranks))
        assert phase.received == tuple(received[name, rank] for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_plans_move_exactly_these_bytes(ranks: int) -> None:
    for seed in range(60):
        draw = random.Random(100 * ranks + seed)
        sizes = tuple(4 * draw.choice([0, 1, 7, 100, 1000]) for _ in range(draw.randint(1, 30)))
        contributors = tuple(draw.randrange(2**ranks) for _ in sizes)
        buckets: list[list[tuple[int, int]]] = [[]]
        for i, size in enumerate(sizes):
            if buckets[-1] and draw.random() < 0.2:
                buckets.append([])
            buckets[-1].append((i, size))
        segment, least = draw.choice([1, 40, 400, 10_000]), draw.choice([0, 0, 2000])
        allowed = {
            "direct": draw.random() < 0.9,
            "owners": draw.random() < 0.7,
            "min_owner_saving": draw.choice([0.0, 0.15]),
        }
        settings = transports.Settings(400, 4000, segment, least, **allowed)
        check_against_plan(cases.Case(sizes, contributors), buckets, ranks, settings)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("workload", ["multitask", "layerdrop"])
def test_workloads_move_exactly_these_bytes(workload: str, ranks: int) -> None:
    for pattern in range(2):
        case = cases.CASES[workload](ranks, pattern)
        check_against_plan(case, case.buckets, ranks, cases.settings_of("skip_unused"))


@pytest.mark.parametrize("workload", ["multitask", "layerdrop"])
def test_buckets_are_those_of_ddp(workload: str) -> None:
    case = cases.CASES[workload](2, 0)
    tensors = [torch.empty(size // 4, device="meta") for size in case.sizes]
    limits = [cases.FIRST_BUCKET_BYTES, cases.BUCKET_BYTES]
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == cases.FIRST_BUCKET_BYTES
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
    assert [[i for i, _ in bucket] for bucket in case.buckets] == expected[::-1]


def test_the_number_of_transfers_is_the_extensions() -> None:
    for ranks in (2, 3, 4):
        for contributors in range(2**ranks):
            for owners in (False, True):
                chosen = testing.transport_for(contributors, ranks, owners)
                found = transports.transfers(transports.known(contributors, ranks), ranks, owners)
                assert (found < model.ring_hops(ranks)) == (chosen != testing.Transport.ALL_REDUCE)


def test_beyond_64_ranks_nobody_asks() -> None:
    assert transports.known(0b11, 4) == transports.known(0b11, 6) == transports.known(0b11, 64) == 0b11
    assert transports.known(0b10, 65) == transports.known(0b10, 67) == 0


def test_a_head_each_of_two_ranks_by_hand() -> None:
    # 3 MB that both use and 1 MB of each alone: 3 MB round the ring, 1 MB each way, in two messages of half a megabyte.
    buckets = [[(0, 3_000_000)], [(1, 1_000_000), (2, 1_000_000)]]
    settings = transports.Settings(1 << 20, 4 << 20, 500_000, 0, owners=True)
    told = transports.travel(buckets, (0b11, 0b01, 0b10), 2, settings)
    assert told.busiest_bytes == 4_000_000
    assert (told.ring_messages, told.broadcast.messages) == (1, 2)
    ring = model.all_reduce_seconds(2, 3e6, LINK)
    # Two messages of 5 ms, a hop, and the last one with the links to itself.
    assert told.seconds(LINK) == pytest.approx(ring + 0.01 + 1e-4 + 0.005)
    assert told.seconds(LINK, overlapped=True) == pytest.approx(ring + 0.01)


def test_two_of_four_by_owner_by_hand() -> None:
    # 400 kB of each pair of ranks: each owns half, receives the other's and sends it to three.
    settings = transports.Settings(1 << 20, 4 << 20, 200_000, 0, owners=True)
    told = transports.travel([[(0, 400_000), (1, 400_000)]], (0b0011, 0b1100), 4, settings)
    assert told.to_owners.sent == told.to_owners.received == (200_000,) * 4
    assert told.sums.sent == (600_000,) * 4
    assert told.sums.received == (600_000,) * 4
    assert told.busiest_bytes == 800_000
    assert told.seconds(LINK) == pytest.approx((0.002 + 1e-4 + 0.002) + (0.006 + 1e-4 + 0.006))


def test_where_everybody_contributes_nothing_changes() -> None:
    case = cases.Case((40_000, 80_000), (0b111, 0b111))
    ours = transports.travel(case.buckets, case.contributors, 3, SETTINGS)
    assert ours.broadcast_bytes == ours.owner_bytes == 0
    assert ours.seconds(LINK) == pytest.approx(model.all_reduce_seconds(3, 120_000, LINK))


def test_few_bytes_of_one_of_many_ranks_go_round_the_ring() -> None:
    """A segment that one rank passes on to 62 would take longer than a ring does."""
    alone = transports.travel([[(0, 1 << 20)]], (1,), 64, cases.settings_of("skip_unused"))
    assert alone.busiest_bytes == transports.travel([[(0, 1 << 20)]], (2**64 - 1,), 64, SETTINGS).busiest_bytes


@pytest.mark.parametrize("ranks", range(2, 130))
def test_agreeing_goes_along_the_grid_of_the_extension(ranks: int) -> None:
    assert transports.LARGEST_AXIS == LARGEST_AXIS
    assert transports.axes(ranks) == ([ranks] if ranks <= LARGEST_AXIS else grid(ranks, LARGEST_AXIS))


def test_masks_that_are_kept_apart_by_hand() -> None:
    # 62 parameters: 6 words and 1. Two axes of 4: three hops with one rank's message, three with those of four.
    gather = model.Exchange(call_seconds=0.0, hop_seconds=1e-4)
    seconds, sent = transports.agree_seconds(62, 16, gather, LINK)
    assert sent == 56 * (3 + 3 * 4)
    assert seconds == pytest.approx(6e-4 + sent / LINK.bytes_per_second)
    assert transports.agree_seconds(62, 16, gather, LINK, who=False)[1] == 56 * 6
    assert transports.agree_seconds(62, 128, gather, LINK) == transports.agree_seconds(62, 128, gather, LINK, who=False)


def test_rows_of_two_ranks_at_random_by_hand() -> None:
    # One in ten: 18% of the rows have one contributor (one transfer), 1% has two (a ring's two).
    assert transports.random_transfers(2, 0.1, True) == pytest.approx((0.18 + 0.02, 0.19 * 2))
    # On more ranks next to the least; only a ring has less than its due, in the rare unit that most have.
    least = sum(math.comb(8, k) * 0.1**k * 0.9 ** (8 - k) * (8 + k - 2) for k in range(1, 9))
    assert transports.random_transfers(8, 0.1, True)[0] == pytest.approx(least, rel=1e-3)


def test_measured_steps_moved_exactly_these_bytes() -> None:
    """Messages and bytes by transport of every committed measurement; times within a sixth."""
    rows, _, exposed = worth.compare(worth.Ground.read(RESULTS), RESULTS)
    assert set(exposed) == {"multitask", "layerdrop"}
    for row in rows:
        assert not row.get("counters_not_met")
        if row["world_size"] == 2:
            assert row["predicted_over_measured"] == pytest.approx(1, abs=1 / 6)


def test_counters_that_differ_and_files_that_are_missing_are_told(tmp_path: Path) -> None:
    (tmp_path / "scaling_1gbit.json").write_text((RESULTS / "scaling_1gbit.json").read_text())
    ground = worth.Ground.read(tmp_path)
    assert worth.compare(ground, tmp_path) == ([], [f"{name}.json" for name in worth.MEASURED], {})
    results = json.loads((RESULTS / "who_1gbit.json").read_text())
    for row in results["rows"]:
        if row["statistics"]:
            row["statistics"]["broadcast_bytes"] += 4
    (tmp_path / "who_1gbit.json").write_text(json.dumps(results))
    rows, missing, _ = worth.compare(ground, tmp_path)
    assert [row["counters_not_met"] for row in rows if row["scheme"] == "ours"] == ["broadcast_bytes"] * 2
    assert missing == ["who_3_hosts.json", "who_4_hosts.json"]
    assert "who_4_hosts.json" in worth.describe(rows, missing, [])
