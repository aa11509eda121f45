"""Reduction plans against an oracle that follows the rules in reduction_plan.h one element at a time.

Layouts are drawn at random; each plan is compared with the oracle's and, apart from it, checked for what must hold of
every plan.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuned import Tuning

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

# A message without its position in the plan: kind, in place or not, slices as (bucket, offset, length).
Packet = tuple[int, bool, tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True)
class Bucket:
    lengths: tuple[int, ...]  # of its parameters' gradients, in elements
    element_bytes: int = 4
    kind: int = 0


@dataclass(frozen=True)
class Case:
    """Everything that goes into a plan; parameters are numbered through, bucket by bucket."""

    buckets: tuple[Bucket, ...]
    used: frozenset[int]
    in_place_bytes: int = 0
    pack_bytes: int = 0
    gap_fraction: float = 0.0
    one_message_per_bucket: bool = False  # on devices

    def slices(self, bucket: int) -> list[tuple[int, int, int]]:
        """Return (parameter, offset, length) for each parameter of the bucket."""
        parameter = sum(len(earlier.lengths) for earlier in self.buckets[:bucket])
        result, offset = [], 0
        for length in self.buckets[bucket].lengths:
            result.append((parameter, offset, length))
            parameter += 1
            offset += length
        return result

    def used_elements(self, bucket: int) -> list[bool]:
        return [parameter in self.used for parameter, _, length in self.slices(bucket) for _ in range(length)]

    def used_bytes(self, bucket: int) -> int:
        elements = sum(length for parameter, _, length in self.slices(bucket) if parameter in self.used)
        return elements * self.buckets[bucket].element_bytes

    def layout(self) -> _C.LayoutOfBuckets:
        buckets = [
            _C.BucketLayout([_C.ParameterSlice(*s) for s in self.slices(b)], bucket.element_bytes, bucket.kind)
            for b, bucket in enumerate(self.buckets)
        ]
        return _C.LayoutOfBuckets(buckets, self.parameter_count)

    @property
    def parameter_count(self) -> int:
        return sum(len(bucket.lengths) for bucket in self.buckets)

    def agreed(self) -> _C.UsageMask:
        mask = _C.UsageMask(self.parameter_count)
        for parameter in self.used:
            mask.set(parameter)
        return mask

    def settings(self) -> _C.PlanSettings:
        return _C.PlanSettings(
            in_place_bytes=self.in_place_bytes,
            pack_bytes=self.pack_bytes,
            one_message_per_bucket=self.one_message_per_bucket,
            gap_fraction=self.gap_fraction,
        )

    def plan(self) -> list[testing.BucketPlan]:
        return testing.make_reduction_plan(self.layout(), self.agreed(), self.settings())

    def plan_bucket_by_bucket(self) -> list[testing.BucketPlan]:
        return testing.plan_bucket_by_bucket(self.layout(), self.agreed(), self.settings())


def with_default_settings(buckets: tuple[Bucket, ...], used: frozenset[int]) -> Case:
    tuning = Tuning()
    return Case(buckets, used, tuning.in_place_bytes, tuning.pack_bytes, tuning.gap_fraction)


# --- the oracle ---


def stretches(case: Case, bucket: int) -> list[tuple[int, int, bool]]:
    """Return what is sent of a bucket as (begin, end, in place): its runs, joined where the gap is small enough.

    Only what then travels in place stays joined: what is gathered anyway gains nothing from its gaps.
    """
    runs: list[tuple[int, int]] = []
    for element, used in enumerate(case.used_elements(bucket)):
        if used and runs and runs[-1][1] == element:
            runs[-1] = (runs[-1][0], element + 1)
        elif used:
            runs.append((element, element + 1))
    groups = [[run] for run in runs[:1]]
    for (left_begin, left_end), (begin, end) in pairwise(runs):
        mean_length = Fraction((left_end - left_begin) + (end - begin), 2)
        if begin - left_end <= Fraction(case.gap_fraction) * mean_length:
            groups[-1].append((begin, end))
        else:
            groups.append([(begin, end)])
    sent: list[tuple[int, int, bool]] = []
    for group in groups:
        begin, end = group[0][0], group[-1][1]
        is_long = (end - begin) * case.buckets[bucket].element_bytes >= case.in_place_bytes
        in_place = is_long and (len(groups) == 1 or not case.one_message_per_bucket)
        sent += [(begin, end, True)] if in_place else [(*run, False) for run in group]
    return sent


def oracle(case: Case, whole_plan: bool) -> list[Counter[Packet]]:
    """Return the messages that leave with each bucket, in any order."""
    leaving: list[Counter[Packet]] = [Counter() for _ in case.buckets]
    open_slices: dict[int, list[tuple[int, int, int]]] = {}
    for b, bucket in enumerate(case.buckets):
        for begin, end, in_place in stretches(case, b):
            part = (b, begin, end - begin)
            if in_place:
                leaving[b][bucket.kind, True, (part,)] += 1
            else:
                open_slices.setdefault(bucket.kind, []).append(part)
        for kind, parts in list(open_slices.items()):
            gathered_bytes = sum(length * case.buckets[owner].element_bytes for owner, _, length in parts)
            if gathered_bytes >= case.pack_bytes:
                leaving[b][kind, len(parts) == 1, tuple(parts)] += 1
                del open_slices[kind]
    for kind, parts in open_slices.items():
        # Nothing more can join them: known at once for a whole plan, at the end when planning bucket by bucket.
        last = parts[-1][0] if whole_plan else len(case.buckets) - 1
        leaving[last][kind, len(parts) == 1, tuple(parts)] += 1
    return leaving


# --- what must hold of every plan ---


def packet(message: testing.Message) -> Packet:
    return message.kind, message.in_place, tuple((s.place, s.offset, s.length) for s in message.stretches)


def packets(plans: list[testing.BucketPlan]) -> list[list[Packet]]:
    return [[packet(message) for message in plan.launches] for plan in plans]


def same_plan(plans: list[testing.BucketPlan]) -> list[tuple[list[Packet], int, int]]:
    """Return all of a plan, in order, in a form that can be compared."""
    return [
        (messages, plan.messages_touching, int(plan.disposition))
        for messages, plan in zip(packets(plans), plans, strict=True)
    ]


def check_coverage(case: Case, plans: list[testing.BucketPlan]) -> None:
    covered = [Counter[int]() for _ in case.buckets]
    gaps = [Counter[int]() for _ in case.buckets]
    for plan in plans:
        for message in plan.launches:
            for s in message.stretches:
                assert s.length > 0
                covered[s.place].update(range(s.offset, s.offset + s.length))
            for s in message.gaps:
                assert message.in_place
                gaps[s.place].update(range(s.offset, s.offset + s.length))
    for b, counts in enumerate(covered):
        used = case.used_elements(b)
        assert all(0 <= element < len(used) for element in counts)
        assert all(count == 1 for count in counts.values()), "sent twice"
        assert all(counts[element] for element, is_used in enumerate(used) if is_used), "not sent"
        gap_elements = [element for element in counts if not used[element]]
        assert Counter(gap_elements) == gaps[b], "a gap that would not come back as it was"
        assert len(gap_elements) <= Fraction(case.gap_fraction) * sum(used)
        if gap_elements:
            # A gap lies between used elements; what lies before the first or after the last is never sent.
            first_used, last_used = used.index(True), len(used) - 1 - used[::-1].index(True)
            assert first_used < min(gap_elements)
            assert max(gap_elements) < last_used
        expected = {0: "SKIPPED", len(used): "WHOLE"}.get(len(counts), "PACKED")
        assert plans[b].disposition.name == ("SKIPPED" if not counts else expected)


def check_messages(case: Case, plans: list[testing.BucketPlan], whole_plan: bool) -> None:
    touching = Counter[int]()
    for b, plan in enumerate(plans):
        for message in plan.launches:
            buckets = [s.place for s in message.stretches]
            assert {case.buckets[source].kind for source in buckets} == {message.kind}
            assert message.numel == sum(s.length for s in message.stretches)
            assert message.in_place == (len(message.stretches) == 1)
            places = [(s.place, s.offset) for s in message.stretches]
            assert places == sorted(places)
            assert b >= max(buckets), "left before its last bucket was ready"
            if whole_plan:
                assert b == max(buckets), "waited for a bucket that adds nothing"
            touching.update(set(buckets))
    assert [plan.messages_touching for plan in plans] == [touching[b] for b in range(len(plans))]


def check(case: Case) -> None:
    whole, stepwise = case.plan(), case.plan_bucket_by_bucket()
    for plans, whole_plan in ((whole, True), (stepwise, False)):
        assert len(plans) == len(case.buckets)
        check_coverage(case, plans)
        check_messages(case, plans, whole_plan)
        assert [Counter(messages) for messages in packets(plans)] == oracle(case, whole_plan)
    # Both send the same messages; only the bucket that a message leaves with may differ.
    assert Counter(chain(*packets(whole))) == Counter(chain(*packets(stepwise)))
    for a, b in zip(whole, stepwise, strict=True):
        assert (a.messages_touching, a.disposition) == (b.messages_touching, b.disposition)
    # The same inputs, made anew, give the same plan in the same order.
    assert same_plan(whole) == same_plan(case.plan())
    assert same_plan(stepwise) == same_plan(case.plan_bucket_by_bucket())


# --- random layouts ---

# Kinds as they occur: a dtype fixes the element size, and two of them share one.
KINDS = ((4, 0), (2, 1), (2, 2), (8, 3))


def random_case(rng: random.Random) -> Case:
    kinds = rng.sample(KINDS, rng.choice([1, 1, 2, 4]))
    longest = rng.choice([1, 4, 30, 200])
    buckets = tuple(
        Bucket(
            tuple(rng.choice([0, 1, rng.randrange(longest + 1)]) for _ in range(rng.randrange(1, 9))),
            *rng.choice(kinds),
        )
        for _ in range(rng.randrange(1, 12))
    )
    parameters = sum(len(bucket.lengths) for bucket in buckets)
    density = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    return Case(
        buckets,
        frozenset(i for i in range(parameters) if rng.random() < density),
        in_place_bytes=rng.choice([0, 1, 64, 400, 1 << 40]),
        pack_bytes=rng.choice([0, 1, 100, 1000, 1 << 40]),
        gap_fraction=rng.choice([0.0, 1 / 128, 1 / 8, 0.5, 1.0]),
        one_message_per_bucket=rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_cases(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        check(random_case(rng))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = st.lists(st.integers(0, 20), min_size=1, max_size=6).map(tuple)
    buckets = draw(
        st.lists(st.builds(lambda n, kind: Bucket(n, *kind), lengths, st.sampled_from(KINDS)), max_size=5).map(tuple)
    )
    parameters = sum(len(bucket.lengths) for bucket in buckets)
    used = draw(st.sets(st.integers(0, parameters - 1))) if parameters else set()
    return Case(
        buckets,
        frozenset(used),
        in_place_bytes=draw(st.integers(0, 100)),
        pack_bytes=draw(st.integers(0, 200)),
        gap_fraction=draw(st.sampled_from([0.0, 1 / 128, 1 / 8, 0.25, 0.5, 1.0])),
        one_message_per_bucket=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=200)
@given(cases())
def test_drawn_cases(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_is_planned_without_looking_ahead(seed: int) -> None:
    # The values detector learns a bucket's usage only when it is ready; ranks must not plan from what comes later.
    rng = random.Random(1000 + seed)
    case = random_case(rng)
    known = rng.randrange(len(case.buckets) + 1)
    first_unknown = sum(len(bucket.lengths) for bucket in case.buckets[:known])
    later = frozenset(i for i in range(first_unknown, case.parameter_count) if rng.random() < 0.5)
    other = Case(
        case.buckets,
        frozenset(i for i in case.used if i < first_unknown) | later,
        case.in_place_bytes,
        case.pack_bytes,
        case.gap_fraction,
        case.one_message_per_bucket,
    )
    assert same_plan(case.plan_bucket_by_bucket())[:known] == same_plan(other.plan_bucket_by_bucket())[:known]


# --- the rules, one at a time ---


def test_nothing_used_sends_nothing() -> None:
    case = with_default_settings((Bucket((5, 0, 7)), Bucket((1 << 12,), 2, 1)), frozenset())
    check(case)
    assert packets(case.plan()) == [[], []]
    assert [plan.disposition for plan in case.plan()] == [testing.Disposition.SKIPPED] * 2
    assert [plan.messages_touching for plan in case.plan()] == [0, 0]


def test_everything_used_sends_whole_buckets_in_place() -> None:
    # As DDP itself: a message a bucket, leaving when the bucket is ready, without a copy.
    case = Case((Bucket((5, 0, 7)), Bucket((9,), 2, 1), Bucket((3, 3))), frozenset(range(6)), in_place_bytes=12)
    check(case)
    for plans in (case.plan(), case.plan_bucket_by_bucket()):
        assert packets(plans) == [[(0, True, ((0, 0, 12),))], [(1, True, ((1, 0, 9),))], [(0, True, ((2, 0, 6),))]]
        assert {plan.disposition for plan in plans} == {testing.Disposition.WHOLE}


@pytest.mark.parametrize("seed", range(10))
def test_on_a_device_there_are_no_more_messages_than_buckets(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        case = replace(random_case(rng), one_message_per_bucket=True)
        check(case)
        for plans in (case.plan(), case.plan_bucket_by_bucket()):
            assert sum(len(plan.launches) for plan in plans) <= len(case.buckets)


def test_on_a_device_several_runs_of_a_bucket_are_a_message() -> None:
    # However long they are; a run that is alone needs no copy.
    buckets = (Bucket((50, 1, 50, 1)), Bucket((1, 90, 1)))
    case = Case(buckets, frozenset({0, 2, 5}), in_place_bytes=40, pack_bytes=40, one_message_per_bucket=True)
    check(case)
    for plans in (case.plan(), case.plan_bucket_by_bucket()):
        assert packets(plans) == [[(0, False, ((0, 0, 50), (0, 51, 50)))], [(0, True, ((1, 1, 90),))]]


def test_small_whole_buckets_share_a_message() -> None:
    case = Case((Bucket((5,)), Bucket((7,))), frozenset({0, 1}), in_place_bytes=1000, pack_bytes=1000)
    check(case)
    assert packets(case.plan()) == [[], [(0, False, ((0, 0, 5), (1, 0, 7)))]]
    assert {plan.disposition for plan in case.plan()} == {testing.Disposition.WHOLE}


def test_no_buckets() -> None:
    check(Case((), frozenset()))


def test_empty_parameters() -> None:
    # Used or not, they neither split a run nor send anything.
    for used in (frozenset({0, 2}), frozenset({0, 1, 2, 3})):
        case = Case((Bucket((4, 0, 4, 0)), Bucket((0, 0))), used, in_place_bytes=0)
        check(case)
        assert packets(case.plan()) == [[(0, True, ((0, 0, 8),))], []]
        assert [plan.disposition.name for plan in case.plan()] == ["WHOLE", "SKIPPED"]


def test_a_gap_is_sent_when_it_is_at_most_the_fraction_of_the_runs_mean_length() -> None:
    for gap, joined in ((0, True), (1, True), (2, True), (3, False)):
        case = Case((Bucket((12, gap, 20)),), frozenset({0, 2}), gap_fraction=1 / 8)
        check(case)
        one = [(0, True, ((0, 0, 32 + gap),))]
        two = [(0, True, ((0, 0, 12),)), (0, True, ((0, 12 + gap, 20),))]
        assert packets(case.plan()) == [one if joined else two]


def test_without_a_gap_fraction_no_gap_is_sent() -> None:
    case = Case((Bucket((10_000, 1, 10_000)),), frozenset({0, 2}), gap_fraction=0.0)
    check(case)
    assert packets(case.plan()) == [[(0, True, ((0, 0, 10_000),)), (0, True, ((0, 10_001, 10_000),))]]


def test_kinds_do_not_share_a_message() -> None:
    # float16 and bfloat16 have elements of the same size, but cannot be summed together.
    buckets = (Bucket((4,), 2, 1), Bucket((4,), 2, 2), Bucket((4,), 2, 1))
    case = Case(buckets, frozenset({0, 1, 2}), in_place_bytes=1000, pack_bytes=1000)
    check(case)
    assert packets(case.plan()) == [[], [(2, True, ((1, 0, 4),))], [(1, False, ((0, 0, 4), (2, 0, 4)))]]


def test_leftovers_leave_when_enough_came_together() -> None:
    case = Case((Bucket((5,)),) * 5, frozenset(range(5)), in_place_bytes=1000, pack_bytes=40)
    check(case)
    pairs = [[], [(0, False, ((0, 0, 5), (1, 0, 5)))], [], [(0, False, ((2, 0, 5), (3, 0, 5)))]]
    assert packets(case.plan()) == [*pairs, [(0, True, ((4, 0, 5),))]]


def test_leftovers_leave_with_the_last_bucket_that_adds_to_them() -> None:
    case = Case((Bucket((5,)), Bucket((5,)), Bucket((5,))), frozenset({0}), in_place_bytes=1000, pack_bytes=1000)
    check(case)
    assert packets(case.plan()) == [[(0, True, ((0, 0, 5),))], [], []]
    assert packets(case.plan_bucket_by_bucket()) == [[], [], [(0, True, ((0, 0, 5),))]]


def test_a_hundred_nearly_empty_buckets_cost_one_message() -> None:
    # 100 buckets of 25 MB with one bias of 4 kB used in each.
    case = with_default_settings((Bucket((6_000_000, 1000, 250_000)),) * 100, frozenset(range(1, 300, 3)))
    for plans in (case.plan(), case.plan_bucket_by_bucket()):
        assert packets(plans) == [[]] * 99 + [[(0, False, tuple((b, 6_000_000, 1000) for b in range(100)))]]
        assert [plan.messages_touching for plan in plans] == [1] * 100
        assert {plan.disposition for plan in plans} == {testing.Disposition.PACKED}


@pytest.mark.parametrize("seed", range(10))
def test_default_settings_on_realistic_layouts(seed: int) -> None:
    # Matrices with a bias each, in buckets of about 25 MB.
    rng = random.Random(seed)
    buckets = []
    for _ in range(rng.randrange(2, 12)):
        lengths: list[int] = []
        while sum(lengths) * 4 < 25 << 20:
            width = rng.choice([64, 256, 768, 1024, 2048])
            lengths += [width, width * rng.choice([256, 768, 1024])]
        buckets.append(Bucket(tuple(lengths)))
    parameters = sum(len(bucket.lengths) for bucket in buckets)
    density = rng.choice([0.02, 0.3, 0.7, 0.98])
    case = with_default_settings(tuple(buckets), frozenset(i for i in range(parameters) if rng.random() < density))
    used_bytes = sum(case.used_bytes(b) for b in range(len(buckets)))
    for plans in (case.plan(), case.plan_bucket_by_bucket()):
        messages = [message for plan in plans for message in plan.launches]
        payload_bytes = sum(message.numel * 4 for message in messages)
        assert used_bytes <= payload_bytes <= 1.01 * used_bytes
        # A message either holds a run that is worth one, or enough leftovers; at most one is left at the end.
        assert len(messages) <= 1 + payload_bytes / min(case.in_place_bytes, case.pack_bytes)


# --- what ranks compare ---

PARAMETERS = ((0, 0, 5), (1, 5, 7), (2, 12, 7))


def layout_hash(buckets: list[tuple[tuple[tuple[int, int, int], ...], int, int]], parameter_count: int = 3) -> int:
    return _C.LayoutOfBuckets(
        [_C.BucketLayout([_C.ParameterSlice(*s) for s in slices], size, kind) for slices, size, kind in buckets],
        parameter_count,
    ).hash()


def test_layout_hash_notices_every_difference() -> None:
    layouts = {
        "as it is": layout_hash([(PARAMETERS, 4, 0)]),
        "two parameters swapped": layout_hash([(((1, 0, 7), (0, 7, 5), (2, 12, 7)), 4, 0)]),
        "two of the same length swapped": layout_hash([(((0, 0, 5), (2, 5, 7), (1, 12, 7)), 4, 0)]),
        "another length": layout_hash([(((0, 0, 5), (1, 5, 7), (2, 12, 8)), 4, 0)]),
        "lengths moved": layout_hash([(((0, 0, 6), (1, 6, 6), (2, 12, 7)), 4, 0)]),
        "smaller elements": layout_hash([(PARAMETERS, 2, 0)]),
        "larger elements": layout_hash([(PARAMETERS, 8, 0)]),
        "one more parameter elsewhere": layout_hash([(PARAMETERS, 4, 0)], parameter_count=4),
        "two buckets": layout_hash([(PARAMETERS[:1], 4, 0), (((1, 0, 7), (2, 7, 7)), 4, 0)]),
        "two buckets, cut elsewhere": layout_hash([(PARAMETERS[:2], 4, 0), (((2, 0, 7),), 4, 0)]),
        "two buckets in the other order": layout_hash([(((1, 0, 7), (2, 7, 7)), 4, 0), (PARAMETERS[:1], 4, 0)]),
        "a bucket less": layout_hash([(PARAMETERS[:2], 4, 0)]),
        "no bucket": layout_hash([]),
    }
    assert len(set(layouts.values())) == len(layouts)
    assert layouts["as it is"] == layout_hash([(PARAMETERS, 4, 0)])


def test_layout_hash_of_the_protocols_example() -> None:
    parameters = tuple((i, i, 1) for i in range(70))
    buckets = [_C.BucketLayout([_C.ParameterSlice(*one, row_length=1) for one in parameters], 4, 6 << 32)]
    assert _C.LayoutOfBuckets(buckets, 70).hash() == 0xCFB89D1581B84073


CPU, CUDA = 0, 1


def on_devices(*devices: tuple[int, int]) -> int:
    """The hash of a layout with a bucket of one parameter on each of the devices, as reducer_view.cpp numbers these."""
    float32 = 6
    buckets = [
        (((i, 0, 7),), 4, float32 << 32 | kind << 16 | index & 0xFFFF) for i, (kind, index) in enumerate(devices)
    ]
    return layout_hash(buckets, len(devices))


def test_layout_hash_ignores_how_a_rank_counts_its_devices() -> None:
    # Ranks on one host have different device indices.
    assert on_devices((CUDA, 0), (CUDA, 0)) == on_devices((CUDA, 1), (CUDA, 1))
    counted_differently = {
        on_devices((CUDA, a), (CUDA, b), (CUDA, a), (CUDA, c)) for a, b, c in permutations((0, 1, 2, 5, 127), 3)
    }
    assert len(counted_differently) == 1


def test_layout_hash_notices_a_model_that_is_placed_differently() -> None:
    """Messages are grouped by device: what shares one on a rank travels together there."""
    placed = [
        on_devices(*((CUDA, device) for device in devices))
        for devices in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2))
    ]
    placed += [on_devices((CPU, -1), (CPU, -1), (CPU, -1)), on_devices((CUDA, 0), (CPU, -1), (CUDA, 0))]
    assert len(set(placed)) == len(placed)


def test_layout_hash_tells_dtypes_of_the_same_size_apart() -> None:
    # As reducer_view.cpp makes kinds: the scalar type stands in the upper half; 5 is float16, 15 is bfloat16.
    assert layout_hash([(PARAMETERS, 2, 5 << 32)]) != layout_hash([(PARAMETERS, 2, 15 << 32)])


@settings(deadline=None, max_examples=200)
@given(cases(), cases())
def test_layout_hash_is_a_function_of_the_layout(a: Case, b: Case) -> None:
    def form(case: Case) -> list[tuple[tuple[int, ...], int, int]]:
        # Kinds are those of devices here, which count by the order in which they appear.
        devices = list(dict.fromkeys(bucket.kind for bucket in case.buckets))
        return [(bucket.lengths, bucket.element_bytes, devices.index(bucket.kind)) for bucket in case.buckets]

    assert (a.layout().hash() == b.layout().hash()) == (form(a) == form(b))
    assert a.layout().hash() == a.layout().hash()


def test_layout_shows_what_it_was_made_of() -> None:
    layout = Case((Bucket((5, 0, 7), 2, 1), Bucket((3,))), frozenset()).layout()
    assert layout.parameter_count == 4
    assert [bucket.numel for bucket in layout.buckets] == [12, 3]
    assert [bucket.element_bytes for bucket in layout.buckets] == [2, 4]
    assert [bucket.sparse for bucket in layout.buckets] == [False, False]
    received = [(s.parameter, s.offset, s.length) for bucket in layout.buckets for s in bucket.slices]
    assert received == [(0, 0, 5), (1, 5, 0), (2, 5, 7), (3, 0, 3)]
