"""The scaling model's arithmetic: by hand on two ranks, at its limits, and where its curves cross."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scaling import model
from tools.grids import factorisations, grids

LINK = model.Link(hop_seconds=1e-4, bytes_per_second=1e8)
EXCHANGES = {"all_reduce_bor": model.Exchange(1e-4, 1e-4), "all_gather": model.Exchange(1e-4, 1e-4)}
RANKS = (2, 3, 4, 8, 64, 512, 4096)
# Four buckets of 10 MB; backward takes 80 ms and fills one every 20.
STEP = model.Step(
    forward_seconds=0.03,
    ready=((0.0, 0.0), (10e6, 0.02), (20e6, 0.04), (30e6, 0.06), (40e6, 0.08)),
    bucket_bytes=(10e6, 10e6, 10e6, 10e6),
    finish_seconds_per_byte=1e-10,
    unused_seconds_per_byte=2e-10,
    hook_seconds=1e-4,
    hook_seconds_per_byte=1e-11,
)
# Nothing but computing and sending.
BARE = replace(STEP, finish_seconds_per_byte=0, unused_seconds_per_byte=0, hook_seconds=0, hook_seconds_per_byte=0)


def step_seconds(scheme: str, ranks: int, unused: float, step: model.Step = STEP, exchange: float = 1e-3) -> float:
    return model.predict(scheme, ranks, unused, step, LINK, exchange).step_seconds


def test_an_all_reduce_of_two_ranks_by_hand() -> None:
    # Two hops, each with half of 1 MB at 100 MB/s.
    assert model.all_reduce_seconds(2, 1e6, LINK) == pytest.approx(2 * (1e-4 + 0.5e6 / 1e8))


def test_a_rank_alone_sends_nothing() -> None:
    assert model.all_reduce_seconds(1, 1e9, LINK) == 0
    assert all(model.exchange_seconds(method, 1, 100, EXCHANGES, LINK) == 0 for method in model.EXCHANGES)
    assert model.predict("plain", 1, 0.0, BARE, LINK).step_seconds == pytest.approx(0.03 + 0.08)


def test_a_step_of_two_ranks_by_hand() -> None:
    # The first bucket is ready at 50 ms; each takes 100.2 ms on the link, which never rests again; the map of used
    # parameters follows with two hops.
    bucket = 2 * 1e-4 + 10e6 / 1e8
    told = model.predict("plain", 2, 0.0, BARE, LINK)
    assert told.step_seconds == pytest.approx(0.03 + 0.02 + 4 * bucket + 2e-4)
    assert told.wire_bytes == pytest.approx(40e6)
    # Half of it frozen: ddp_hooks sends two buckets.
    told = model.predict("ours", 2, 0.5, BARE, LINK, exchange=0.005)
    assert told.step_seconds == pytest.approx(0.03 + 0.02 + 2 * bucket + 2e-4)
    assert told.mask_wait_seconds == 0
    assert told.wire_bytes == pytest.approx(20e6)


def test_copying_back_overlaps_with_sending_but_for_the_last_bucket() -> None:
    slow = replace(BARE, finish_seconds_per_byte=1e-9)  # 10 ms a bucket, which takes 100 ms to send
    oracle = model.predict("oracle", 2, 0.0, slow, LINK).step_seconds
    assert oracle == pytest.approx(model.predict("oracle", 2, 0.0, BARE, LINK).step_seconds + 0.01)


def test_backward_waits_for_what_it_did_not_hide_of_the_exchange() -> None:
    told = model.predict("ours", 2, 0.5, BARE, LINK, exchange=0.05)
    assert told.mask_wait_seconds == pytest.approx(0.03)
    hidden = model.predict("ours", 2, 0.5, BARE, LINK, exchange=0.02)
    assert hidden.mask_wait_seconds == 0
    assert told.step_seconds - hidden.step_seconds == pytest.approx(0.03)


def test_a_fast_link_leaves_computing_alone() -> None:
    fast = model.Link(0.0, 1e18)
    for scheme in model.SCHEMES:
        assert model.predict(scheme, 64, 0.0, BARE, fast).step_seconds == pytest.approx(0.11)
    # Freezing the half next to the input stops backward half way.
    assert model.predict("plain", 64, 0.5, BARE, fast).step_seconds == pytest.approx(0.07)


def test_with_nothing_unused_ddp_hooks_costs_its_hook_and_no_more() -> None:
    for ranks in RANKS:
        ours, plain = step_seconds("ours", ranks, 0.0), step_seconds("plain", ranks, 0.0)
        assert 0 <= ours - plain <= STEP.hook_seconds + STEP.hook_seconds_per_byte * STEP.dense_bytes + 1e-12


@pytest.mark.parametrize("ranks", RANKS)
def test_the_more_is_unused_the_less_a_step_takes(ranks: int) -> None:
    for scheme in ("ours", "oracle"):
        times = [step_seconds(scheme, ranks, tenth / 10, BARE) for tenth in range(11)]
        assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("scheme", model.SCHEMES)
def test_the_more_ranks_the_longer_a_step(scheme: str) -> None:
    times = [step_seconds(scheme, ranks, 0.5) for ranks in RANKS]
    assert times == sorted(times)


@pytest.mark.parametrize("unused", [0.0, 0.3, 0.75, 0.95])
def test_nothing_beats_the_oracle(unused: float) -> None:
    for ranks in RANKS:
        assert step_seconds("oracle", ranks, unused) <= step_seconds("ours", ranks, unused)


def test_used_bytes_come_from_the_first_buckets() -> None:
    assert model.used_by_bucket((10, 20, 30), 0.75) == [10, 5, 0]
    assert model.used_by_bucket((10, 20, 30), 0.0) == [10, 20, 30]
    assert model.used_by_bucket((10, 20, 30), 1.0) == [0, 0, 0]


def test_backward_is_interpolated_between_buckets() -> None:
    assert STEP.seconds_until(0) == 0
    assert STEP.seconds_until(5e6) == pytest.approx(0.01)
    assert STEP.seconds_until(40e6) == STEP.seconds_until(1e9) == 0.08


def test_a_mask_is_a_bit_a_parameter_in_words_and_a_header() -> None:
    assert model.mask_bytes(63) == 48 + 8
    assert model.mask_bytes(64) == 48 + 16  # the bit that says "joined" needs a word more


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


def test_factorisations_multiply_to_the_number() -> None:
    for ranks in range(2, 200):
        found = factorisations(ranks)
        assert all(math.prod(factors) == ranks for factors in found)
        assert len(set(found)) == len(found)
        assert (ranks,) in found


def test_exchanges_of_two_ranks_by_hand() -> None:
    seconds = {m: model.exchange_seconds(m, 2, 1000, EXCHANGES, LINK) for m in model.EXCHANGES}
    assert seconds["all_reduce_bor"] == pytest.approx(1e-4 + 2 * (1e-4 + 500 / 1e8))
    assert seconds["all_gather"] == seconds["grid"] == pytest.approx(1e-4 + 1e-4 + 1000 / 1e8)


def test_a_grid_is_never_slower_than_one_all_gather_and_far_faster_with_many_ranks() -> None:
    for ranks in RANKS:
        one, grid = (model.exchange_seconds(m, ranks, 1000, EXCHANGES, LINK) for m in ("all_gather", "grid"))
        assert grid <= one
    assert one > 100 * grid
    assert sum(extent - 1 for extent in model.best_grid(4096, 1000, EXCHANGES["all_gather"], LINK)) < 40


def test_a_prime_number_of_ranks_has_no_grid() -> None:
    assert model.best_grid(4093, 1000, EXCHANGES["all_gather"], LINK) == (4093,)


def test_gathering_large_masks_loses_to_the_all_reduce_where_bytes_outweigh_hops() -> None:
    # n masks of bytes against two masks and twice the hops: they cross where (n - 1) hops take as long as n - 3 masks.
    def gap(mask_bytes: float) -> float:
        gather, bor = (
            model.exchange_seconds(m, 64, mask_bytes, EXCHANGES, LINK) for m in ("all_gather", "all_reduce_bor")
        )
        return gather - bor

    crossing = 63 * LINK.hop_seconds * LINK.bytes_per_second / (63 - 2 * 63 / 64)
    assert gap(0.99 * crossing) < 0 < gap(1.01 * crossing)


def test_what_a_rank_sends_to_agree() -> None:
    def sent(method: str) -> float:
        return model.exchange_wire_bytes(method, 16, 100, EXCHANGES, LINK)

    assert sent("all_gather") == 1500
    assert sent("all_reduce_bor") == pytest.approx(2 * 15 * 100 / 16)
    assert sent("grid") < sent("all_gather")


def test_skipping_pays_from_the_crossing_on() -> None:
    def gap(unused: float, exchange: float) -> float:
        return step_seconds("plain", 8, unused) - step_seconds("ours", 8, unused, exchange=exchange)

    for exchange in (0.001, 0.05, 0.1):
        fraction = model.smallest_that_pays(8, STEP, LINK, exchange)
        assert fraction is not None
        assert gap(fraction, exchange) > 0
        assert fraction == 0 or gap(fraction - 0.005, exchange) <= 0


def test_the_slower_the_exchange_the_later_skipping_pays() -> None:
    found = [model.smallest_that_pays(8, STEP, LINK, exchange) for exchange in (0.0, 0.05, 0.1, 0.2)]
    assert all(fraction is not None for fraction in found)
    assert found == sorted(found, key=lambda fraction: fraction or 0.0)
    assert model.smallest_that_pays(8, STEP, LINK, exchange=10.0) is None


def test_skipping_never_pays_where_nothing_waits_for_the_link() -> None:
    assert model.smallest_that_pays(8, STEP, model.Link(0.0, 1e18), 0.0, tolerance=0.01) is None


def test_the_plane_is_found_again() -> None:
    points = [(x, y, 3e-4 * x + 2e-8 * y) for x, y in ((2, 1e6), (2, 1e7), (4, 2e6), (6, 4e7))]
    assert model.fit_plane(points) == pytest.approx((3e-4, 2e-8))


def test_the_plane_has_no_negative_slope() -> None:
    assert model.fit_plane([(1.0, 1.0, 1.0), (1.0, 2.0, 0.9)])[1] == 0
    assert model.fit_plane([(0.0, 2.0, 1.0)]) == pytest.approx((0.0, 0.5))
