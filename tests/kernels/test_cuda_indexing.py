"""The CUDA kernels' indexing, played on the CPU: tables, chunks, lanes and words, with every access checked.

The code that runs here is the code that the kernels run (csrc/kernels/cuda/slice_table.h, lanes.h, units.h,
samples.h, sum_tables.h, sum_lanes.h, coding_lanes.h); what a GPU adds is tested in test_cuda_kernels.py. An access that
is not aligned, out of bounds, or writes a byte twice raises by itself.

Each test runs twice: as a loop over the warps of each launch, and launched as on a GPU, by the host's code and with the
parameters of the compiled kernels, through a stand-in for CUDA's driver (test_cuda_rehearsal.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from cubins import prepare_stand_in
from hypothesis import given, settings
from hypothesis import strategies as st
from test_coding import SECTION, altered_messages, awkward_blocks, complaint_of, like_gradients
from test_coding import encode as encode_on_cpu
from test_nonzero_scan import oracle as oracle_scan
from test_packing import OWN, PACKED, PAIRS, Case, assert_sum, make_case, with_own
from test_slice_copy import (
    DTYPES,
    FACTORS,
    WORDS,
    Ranges,
    all_kinds_of_numbers,
    assert_same_bits,
    assert_same_numbers,
    oracle_gather,
    oracle_scatter,
    random_ranges,
    total,
)
from test_unit_sample import SAMPLED, random_slices, sampled_zeros
from test_unit_scan import FLOAT_UNITS, random_slice, slow_unit_scan
from test_unit_scan import check as check_units

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing


@pytest.fixture(autouse=True, scope="module", params=["emulated", "launched"])
def through_driver(request: pytest.FixtureRequest) -> Iterator[None]:
    """Play kernels directly, or through the driver's functions."""
    if request.param == "launched":
        if not testing.kernels_image():
            pytest.skip("this build has no CUDA kernels, because nvcc was not found")
        testing.rehearse(str(prepare_stand_in().path))
    yield
    testing.rehearse("")


SMALLEST_CHUNK_BYTES = 256
LARGEST_CHUNK_BYTES = 4096
SECTOR_BYTES = 32


def aligned(size: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Return memory that lies `offset` elements after a multiple of 16 bytes."""
    storage = torch.zeros(size + offset + 16, dtype=dtype)
    skip = -storage.data_ptr() % 16 // dtype.itemsize + offset
    return storage[skip : skip + size]


def check_copies(flat: torch.Tensor, ranges: Ranges, factor: float, message_offset: int) -> None:
    message = aligned(total(ranges), flat.dtype, message_offset)
    testing.emulate_gather_scaled(message, flat, ranges, factor)
    expected = oracle_gather(flat, ranges, factor)
    if factor == 1:
        assert_same_bits(message, oracle_gather(flat.view(WORDS[flat.dtype]), ranges, 1).view(flat.dtype))
    else:
        assert_same_numbers(message, expected)
        on_cpu = torch.empty_like(message)
        testing.gather_scaled(on_cpu, flat, ranges, factor)
        assert_same_bits(message, on_cpu)
    result = flat.clone()
    testing.emulate_scatter(message, result, ranges)
    assert_same_bits(result, oracle_scatter(message, flat, ranges))


def emulate_scan(
    flat: torch.Tensor, offset: int, length: int, unit_length: int
) -> tuple[tuple[int, int, int, int], tuple[list[int], list[int]]]:
    """Scan one slice; return what its launch took, and the answer."""
    run, (answer,) = testing.emulate_unit_scan(flat, [(offset, length, unit_length)])
    return run, answer


def check_scan(flat: torch.Tensor, ranges: Ranges) -> None:
    slices = [(offset, length, length) for offset, length in ranges if length > 0]
    (launches, *_), answers = testing.emulate_unit_scan(flat, slices)
    assert launches == -(-len(slices) // testing.SCANS_PER_LAUNCH)
    on_cpu = testing.start_scan(flat, [(offset, length) for offset, length, _ in slices]).wait()
    for (offset, length, _), (nonzero, negative_zeros), cpu in zip(slices, answers, on_cpu, strict=True):
        received = nonzero == [1], negative_zeros == [0]
        assert received == oracle_scan(flat[offset : offset + length]) == cpu


@DTYPES
@FACTORS
@pytest.mark.parametrize("longest", [1, 5, 40, 700, 3000])
def test_random_slices(dtype: torch.dtype, factor: float, longest: int) -> None:
    rng = random.Random(longest)
    for message_offset in range(0, 16 // dtype.itemsize, 3):
        values = all_kinds_of_numbers(dtype, 4000)
        flat = aligned(4000, dtype, rng.randrange(16))
        flat.copy_(values)
        ranges = random_ranges(rng, 4000, longest)
        rng.shuffle(ranges)
        check_copies(flat, ranges, factor, message_offset)


@DTYPES
@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 20), st.integers(0, 3000)), max_size=12),
    gap=st.integers(0, 9),
    flat_offset=st.integers(0, 15),
    message_offset=st.integers(0, 15),
    factor=st.sampled_from([1.0, 1 / 3]),
)
def test_any_length_and_alignment(
    dtype: torch.dtype, lengths: list[int], gap: int, flat_offset: int, message_offset: int, factor: float
) -> None:
    ranges, position = [], 0
    for length in lengths:
        ranges.append((position, length))
        position += length + gap
    flat = aligned(position, dtype, flat_offset)
    flat.copy_(all_kinds_of_numbers(dtype, position))
    check_copies(flat, ranges, factor, message_offset)


@DTYPES
@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 20), st.integers(0, 3000)), min_size=1, max_size=10),
    gap=st.integers(0, 5),
    offset=st.integers(0, 15),
    places=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3)), max_size=5),
)
def test_scan_of_any_length_and_alignment(
    dtype: torch.dtype, lengths: list[int], gap: int, offset: int, places: list[tuple[float, int]]
) -> None:
    # Between the slices lie NaNs: one element too many on either side would be found.
    ranges, position = [], gap
    for length in lengths:
        ranges.append((position, length))
        position += length + gap
    flat = aligned(position, dtype, offset)
    flat.fill_(float("nan"))
    for start, length in ranges:
        flat[start : start + length] = 0
    word = WORDS[dtype]
    sign = torch.iinfo(word).min
    inside = [i for start, length in ranges for i in range(start, start + length)]
    for place, kind in places if inside else []:
        flat.view(word)[inside[int(place * len(inside))]] = [sign, sign, 1, sign + 1][kind]
    check_scan(flat, ranges)


@DTYPES
def test_every_byte_of_a_stretch_is_looked_at(dtype: torch.dtype) -> None:
    word = WORDS[dtype]
    for size in (1, 7, 31, 64, 300):
        flat = aligned(size, dtype, 3)
        for position in range(size):
            for bit in (1, torch.iinfo(word).min, 1 << (8 * dtype.itemsize - 2)):
                flat.view(word)[position] = bit
                check_scan(flat, [(0, size)])
            flat.view(word)[position] = 0


@pytest.mark.parametrize("count", [0, 1, 248, 249, 1999, 2000, 2001, 4100, 5000])
def test_many_slices_take_few_launches(count: int) -> None:
    ranges = [(3 * i, i % 3) for i in range(count)]
    flat = all_kinds_of_numbers(torch.float32, 3 * count)
    message = torch.empty(total(ranges))
    launches, _, _ = testing.emulate_gather_scaled(message, flat, ranges, 0.5)
    if count:
        assert_same_numbers(message, oracle_gather(flat, ranges, 0.5))
    assert launches == (-(-count // testing.SLICES_PER_LAUNCH) if message.numel() else 0)
    zeros = torch.zeros(3 * count)
    zeros[1::3] = -0.0
    check_scan(zeros, ranges)


def test_empty_slices_launch_nothing() -> None:
    flat = torch.ones(4)
    assert testing.emulate_gather_scaled(torch.empty(0), flat, [(0, 0), (4, 0)], 1.0)[0] == 0
    assert testing.emulate_unit_scan(flat, []) == ((0, 0, 0, 0), [])


@DTYPES
def test_words_are_as_wide_as_alignment_allows(dtype: torch.dtype) -> None:
    size = 4096 // dtype.itemsize
    per_word = 16 // dtype.itemsize
    flat = aligned(2 * size, dtype, 0)
    for offset in range(2 * per_word):
        message = aligned(size, dtype, 0)
        _, _, widest = testing.emulate_gather_scaled(message, flat, [(offset, size)], 0.5)
        apart = offset * dtype.itemsize % 16
        assert widest == (16 if apart == 0 else apart & -apart)
        # A scan has one address, so it always uses the widest words.
        assert emulate_scan(flat, offset, size, size)[0][2] == 16


def test_work_is_balanced_by_bytes() -> None:
    # One huge slice among tiny ones gets as many chunks as its bytes are worth.
    ranges = [(0, 10), (10, 500_000), (500_010, 10)]
    flat = torch.zeros(500_020)
    _, chunks, _ = testing.emulate_gather_scaled(torch.empty(500_020), flat, ranges, 1.0)
    assert chunks == -(-500_020 * 4 // LARGEST_CHUNK_BYTES)
    # Tiny slices get small chunks, or one warp would walk hundreds of them.
    ranges = [(i * 8, 8) for i in range(1000)]
    _, chunks, _ = testing.emulate_gather_scaled(torch.empty(8000), flat, ranges, 1.0)
    assert chunks == -(-8000 * 4 // SMALLEST_CHUNK_BYTES)


@DTYPES
def test_in_place(dtype: torch.dtype) -> None:
    flat = all_kinds_of_numbers(dtype, 3000)
    expected = torch.mul(flat, 1 / 3)
    testing.emulate_gather_scaled(flat, flat, [(0, 3000)], 1 / 3)
    assert_same_numbers(flat, expected)


def test_scan_of_many_pieces() -> None:
    # No warp may miss what only one element holds.
    size = 4096 * 2 * 1024 - 3000
    flat = torch.zeros(size)
    for first in (0, 1024, 4096 * 1024 - 1, 4096 * 1024, size - 1):
        flat[first] = 1.0
        half = size // 2
        check_scan(flat, [(0, half), (half, size - half)])
        flat[first] = 0.0


def test_the_emulation_notices_a_wrong_message() -> None:
    # What checks must be able to fail: here the slices overlap, so scattering writes some bytes twice.
    with pytest.raises(RuntimeError, match="written twice"):
        testing.emulate_scatter(torch.zeros(6), torch.zeros(4), [(0, 3), (1, 3)])


def test_scan_of_many_slices_on_the_cpu() -> None:
    flat = torch.tensor([0.0, -0.0, 1.0, 0.0, float("nan")])
    ranges = [(0, 1), (0, 2), (1, 2), (3, 0), (4, 1), (0, 5)]
    pending = testing.start_scan(flat, ranges)
    expected = [(False, False), (False, True), (True, False), (False, False), (True, False), (True, False)]
    assert pending.wait() == expected
    assert pending.wait() == expected
    assert testing.start_scan(flat, []).wait() == []
    with pytest.raises(RuntimeError, match="expected a range within 5 elements"):
        testing.start_scan(flat, [(0, 1), (4, 2)])


def scan_units(flat: torch.Tensor, offset: int, length: int, unit_length: int) -> tuple[list[int], list[int]]:
    return emulate_scan(flat, offset, length, unit_length)[1]


def test_slices_of_all_kinds_in_one_scan() -> None:
    rng = random.Random(7)
    count = testing.SCANS_PER_LAUNCH + 60
    flat = random_slice(torch.float32, rng, 40 * count, 3, 0, (0.0, 0.0, 0.3))
    slices = [(40 * i, rng.randrange(1, 41), rng.randrange(1, 41)) for i in range(count)]
    for some in (slices[:3], slices[:56], slices):
        (launches, *_), answers = testing.emulate_unit_scan(flat, some)
        assert launches == (2 if len(some) == count else 1)
        assert answers == [slow_unit_scan(flat, *each) for each in some]


def loaded_sectors(flat: torch.Tensor, unit_length: int) -> int:
    return emulate_scan(flat, 0, flat.numel(), unit_length)[0][3]


@DTYPES
@pytest.mark.parametrize("unit_length", [*FLOAT_UNITS, 4, 7, 8, 9, 1024, 1025, 5000, 10**6])
def test_units_of_every_length(dtype: torch.dtype, unit_length: int) -> None:
    rng = random.Random(unit_length)
    for _ in range(4):
        length, offset = rng.randrange(1, 8 * min(unit_length, 2000)), rng.randrange(40)
        flat = random_slice(dtype, rng, length, unit_length, offset, (0.0, 0.0, 0.1))
        check_units(flat, offset, length, unit_length, scan_units)


@DTYPES
@settings(deadline=None, max_examples=100)
@given(
    length=st.one_of(st.integers(1, 200), st.integers(1, 6000)),
    unit_length=st.one_of(st.integers(1, 20), st.integers(1, 700), st.integers(1, 7000)),
    offset=st.integers(0, 40),
    seed=st.integers(0, 1 << 30),
)
def test_units_of_any_length_and_alignment(
    dtype: torch.dtype, length: int, unit_length: int, offset: int, seed: int
) -> None:
    flat = random_slice(dtype, random.Random(seed), length, unit_length, offset, (0.0, 0.0, 0.02, 1.0))
    check_units(flat, offset, length, unit_length, scan_units)


@DTYPES
def test_every_element_of_a_unit_is_looked_at(dtype: torch.dtype) -> None:
    word = WORDS[dtype]
    for unit_length in (1, 5, 8, 33, 300):
        flat = aligned(3 * unit_length, dtype, 3)
        for position in range(flat.numel()):
            unit = position // unit_length
            flat.view(word)[position] = 1
            assert scan_units(flat, 0, flat.numel(), unit_length) == ([1 << unit], [])
            flat.view(word)[position] = torch.iinfo(word).min
            assert scan_units(flat, 0, flat.numel(), unit_length) == ([0], [unit])
            flat.view(word)[position] = 0


def test_many_warps_share_a_long_unit() -> None:
    length, units = 300_000, 2  # in 293 pieces each
    flat = aligned(units * length - 1, torch.float32, 1)
    assert emulate_scan(flat, 0, flat.numel(), length)[0][1] == units * -(-length * 4 // LARGEST_CHUNK_BYTES)
    assert scan_units(flat, 0, flat.numel(), length) == ([0], [])
    # A -0.0 counts only where no other piece holds a non-zero, before it or after it.
    for negative_zero, nonzero in ((0, 250_000), (250_000, 0)):
        flat.zero_()
        flat[negative_zero] = flat[length + negative_zero] = -0.0
        flat[nonzero] = 1.0
        assert scan_units(flat, 0, flat.numel(), length) == ([1], [1])


def test_portions_grow_with_the_table() -> None:
    rows, row = 20_000, 130
    flat = aligned(rows * row, torch.float32, 0)  # 10 MB, in portions of 8 KB: eight rows, because 16 are more
    used = sorted(random.Random(0).sample(range(rows), 40))
    flat.view(rows, row)[used, 129] = 1.0
    flat.view(rows, row)[17] = -0.0
    (launches, portions, _, _), (words, negative_zeros) = emulate_scan(flat, 0, flat.numel(), row)
    assert (launches, portions) == (1, rows // 8)
    assert [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1] == used
    assert negative_zeros == [17]


@DTYPES
def test_only_zeros_are_read_in_full(dtype: torch.dtype) -> None:
    for unit_bytes in (2 * SECTOR_BYTES, 256, 1536, 8 * LARGEST_CHUNK_BYTES, 200_000):
        unit_length = unit_bytes // dtype.itemsize
        units = 500_000 // unit_bytes
        flat = torch.zeros(units * unit_length, dtype=dtype)
        assert loaded_sectors(flat, unit_length) == -(-units * unit_bytes // SECTOR_BYTES)
        flat.view(units, unit_length)[:, 0] = 1.0
        assert loaded_sectors(flat, unit_length) == units


@DTYPES
@pytest.mark.parametrize("seed", range(12))
def test_samples_of_units(dtype: torch.dtype, seed: int) -> None:
    flat, slices = random_slices(dtype, random.Random(seed))
    (launches, warps, _, _), zeros = testing.emulate_unit_sample(flat, slices)
    assert zeros == [sampled_zeros(flat, *one)[0] for one in slices]
    assert (launches, warps) == (1, SAMPLED * len(slices))


@DTYPES
def test_every_element_of_a_sampled_unit_is_looked_at(dtype: torch.dtype) -> None:
    word = WORDS[dtype]
    unit_length = LARGEST_CHUNK_BYTES // dtype.itemsize + 40  # a chunk and some
    flat = aligned(3 * unit_length - 5, dtype, 3)
    flat.view(word).fill_(torch.iinfo(word).min)
    units = [(0, flat.numel(), unit_length)]
    assert testing.emulate_unit_sample(flat, units)[1] == [3]
    for position in range(0, flat.numel(), 7):
        flat.view(word)[position] = 1
        assert testing.emulate_unit_sample(flat, units)[1] == [2]
        flat.view(word)[position] = torch.iinfo(word).min


@pytest.mark.parametrize("count", [0, 1, 160, 161, 1300, 1301, 2700])
def test_samples_of_many_gradients_take_few_launches(count: int) -> None:
    # A launch for each gradient, as it used to be, costs the host more than all that is read.
    flat = torch.zeros(3 * count)
    flat[1::9] = 1.0  # of each third slice one unit
    slices = [(3 * i, 3, 1) for i in range(count)]
    (launches, warps, _, _), zeros = testing.emulate_unit_sample(flat, slices)
    assert launches == -(-count // testing.SAMPLES_PER_LAUNCH)
    assert warps == SAMPLED * count
    assert zeros == [2 if i % 3 == 0 else 3 for i in range(count)]


def test_of_dense_gradients_little_is_read() -> None:
    rows, row = 200, 4 * LARGEST_CHUNK_BYTES // 4
    flat = aligned(rows * row, torch.float32, 0)
    everything = SAMPLED * row * 4 // SECTOR_BYTES
    assert testing.emulate_unit_sample(flat, [(0, flat.numel(), row)])[0][3] == everything
    flat.view(rows, row)[:, 0] = 1.0
    assert testing.emulate_unit_sample(flat, [(0, flat.numel(), row)])[0][3] == everything // 4


# --- sums


def check_emulated_sum(case: Case) -> None:
    on_cpu = case.flat.clone()
    testing.sum_contributions(case.buffer, case.sums_on(on_cpu))
    testing.emulate_sum_contributions(case.buffer, case.sums)
    assert_sum(case)
    assert_same_bits(case.flat, on_cpu)


@DTYPES
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
def test_sums_of_two_contributions_of_every_kind(dtype: torch.dtype, divisor: float) -> None:
    plan = [(length, pair) for pair in PAIRS for length in (0, 1, 37, 300)]
    for offset in range(0, 16 // dtype.itemsize, 3):
        check_emulated_sum(make_case(dtype, plan, divisor, offset % 2 == 0, 5, offset, 8))


@DTYPES
@settings(deadline=None, max_examples=50)
@given(
    plan=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 40), st.integers(0, 2500)),
            st.integers(1, 5),
            st.integers(-1, 4),
        ),
        min_size=1,
        max_size=4,
    ),
    divisor=st.sampled_from([1.0, 2.0, 3.0, 8.0]),
    adds_zero=st.booleans(),
    offset=st.integers(0, 9),
    seed=st.integers(0, 1 << 30),
)
def test_sums_of_any_length_and_alignment(
    dtype: torch.dtype,
    plan: list[tuple[int, int, int]],
    divisor: float,
    adds_zero: bool,
    offset: int,
    seed: int,
) -> None:
    check_emulated_sum(make_case(dtype, with_own(plan), divisor, adds_zero, seed, offset, 8))


def test_many_sums_take_few_launches() -> None:
    most_slices, most_terms = testing.SUMS_PER_LAUNCH
    for count, terms, launches in (
        (100, 2, 1),
        (111, 2, 1),
        (most_slices, 2, 1),
        (most_slices + 1, 2, 2),
        (most_slices, 3, 2),
        (most_terms // 4 + 1, 4, 2),
        (3, most_terms, 3),
    ):
        case = make_case(torch.float32, [(2, [OWN, *[PACKED] * (terms - 1)])] * count, 2.0, False, 1, 0, 8)
        assert testing.emulate_sum_contributions(case.buffer, case.sums)[0] == launches
        assert_sum(case)
    case = make_case(torch.float32, [(2, [PACKED] * (most_terms + 1))], 2.0, False, 1, 0, 8)
    with pytest.raises(RuntimeError, match="a slice has more contributions than a launch holds"):
        testing.emulate_sum_contributions(case.buffer, case.sums)


def check_coding(flat: torch.Tensor, offset: int = 0) -> None:
    """Expect the bytes that the CPU makes, and the values back."""
    expected = encode_on_cpu(flat)
    buffer = torch.zeros(_C.most_coded_bytes(flat.numel(), flat) + offset, dtype=torch.uint8)[offset:]
    (launches, _, _), size = testing.emulate_encode(flat, buffer)
    assert launches == 2
    assert torch.equal(buffer[:size], expected)
    result = torch.full_like(flat, 7)
    (launches, _, _), wrong = testing.emulate_decode(buffer[:size], result)
    assert launches == 2
    assert wrong == 0
    assert_same_bits(result, flat)
    before = torch.roll(all_kinds_of_numbers(flat.dtype, flat.numel() + 50), 7)[: flat.numel()].clone()
    summed = before.clone()
    testing.decode(expected, summed, True)
    assert testing.emulate_decode(buffer[:size], before, True)[1] == 0
    assert_same_bits(before, summed)


@DTYPES
@pytest.mark.parametrize("length", [0, 1, 31, 32, 64, 100, SECTION - 1, SECTION, SECTION + 45, 3 * SECTION])
def test_codes_what_the_cpu_codes(dtype: torch.dtype, length: int) -> None:
    check_coding(like_gradients(dtype, length, length, 0.4), length % 3)
    check_coding(all_kinds_of_numbers(dtype, length + 50)[:length].clone())


@DTYPES
def test_codes_awkward_blocks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_coding(awkward_blocks(dtype))


@pytest.mark.parametrize("lower", range(17))
def test_codes_lower_bits(lower: int) -> None:
    for zeros in (0.0, 0.1, 0.5, 0.95):
        check_coding(like_gradients(torch.float32, 100, lower, zeros, lower))


@DTYPES
def test_altered_messages_are_refused_as_on_the_cpu(dtype: torch.dtype) -> None:
    """Nothing outside of a message is read, and of a message that is refused nothing is written."""
    draw = random.Random(0)
    refused = 0
    for length, zeros in ((40, 0.0), (300, 0.5), (SECTION + 40, 0.3)):
        flat = like_gradients(dtype, length, 1, zeros)
        message = bytes(encode_on_cpu(flat).tolist())
        for changed in altered_messages(message, draw, 100):
            coded = torch.tensor(list(changed), dtype=torch.uint8)
            expected, result = torch.full_like(flat, 3), torch.full_like(flat, 3)
            complaint = complaint_of(coded, expected)
            _, wrong = testing.emulate_decode(coded, result)
            assert (wrong != 0) == (complaint is not None)
            assert_same_bits(result, expected)
            refused += wrong != 0
    assert refused > 100
