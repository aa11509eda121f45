"""The CUDA kernels against the CPU's, bit for bit, and what they promise about streams and waiting."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from test_coding import encode, like_gradients
from test_nonzero_scan import nonzero_words
from test_packing import OWN, PACKED, make_case
from test_slice_copy import (
    DTYPES,
    FACTORS,
    WORDS,
    Ranges,
    all_kinds_of_numbers,
    assert_same_bits,
    assert_same_numbers,
    random_ranges,
    total,
)
from test_unit_sample import random_slices, sampled_zeros
from test_unit_scan import FLOAT_UNITS, random_slice

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

pytestmark = pytest.mark.cuda

# About a quarter of a second on any GPU of today: long beside a launch, short beside a test's patience.
LONG_SLEEP_CYCLES = 400_000_000
GUARD = 3.0


@pytest.fixture(params=[False, True], ids=["default stream", "side stream"])
def stream(request: pytest.FixtureRequest) -> Iterator[torch.cuda.Stream]:
    """Run the test on either kind of stream."""
    side = torch.cuda.Stream() if request.param else torch.cuda.default_stream()
    with torch.cuda.stream(side):
        yield side


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Make torch raise wherever the host would wait for a stream."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def numbers(dtype: torch.dtype, size: int, offset: int = 0) -> torch.Tensor:
    """Return all kinds of numbers, `offset` elements after a multiple of 256 bytes."""
    storage = torch.zeros(size + offset, dtype=dtype)
    storage[offset:] = all_kinds_of_numbers(dtype, size)
    return storage.cuda()[offset:]


def check_copies(flat: torch.Tensor, ranges: Ranges, factor: float, message_offset: int = 0) -> None:
    on_cpu = flat.cpu()
    size = total(ranges)
    expected = torch.empty(size, dtype=flat.dtype)
    testing.gather_scaled(expected, on_cpu, ranges, factor)
    storage = torch.full((message_offset + size + 9,), GUARD, dtype=flat.dtype, device="cuda")
    message = storage[message_offset : message_offset + size]
    testing.gather_scaled(message, flat, ranges, factor)
    if factor == 1:
        # A plain copy: even the payload of a NaN, which the CPU multiplies, stays.
        index = torch.tensor([i for start, n in ranges for i in range(start, start + n)], dtype=torch.int64)
        assert_same_bits(message.cpu(), on_cpu.view(WORDS[flat.dtype])[index].view(flat.dtype))
    else:
        assert_same_numbers(message.cpu(), expected)
    assert bool((storage[:message_offset] == GUARD).all())
    assert bool((storage[message_offset + size :] == GUARD).all())
    assert_same_bits(flat.cpu(), on_cpu)

    incoming = all_kinds_of_numbers(flat.dtype, size + message_offset)
    result, expected = flat.clone(), on_cpu.clone()
    testing.scatter(incoming.cuda()[message_offset:], result, ranges)
    testing.scatter(incoming[message_offset:], expected, ranges)
    assert_same_bits(result.cpu(), expected)


def check_scan(flat: torch.Tensor, ranges: Ranges) -> None:
    expected = testing.start_scan(flat.cpu(), ranges).wait()
    pending = testing.start_scan(flat, ranges)
    assert pending.wait() == expected
    assert pending.wait() == expected


@DTYPES
@FACTORS
@pytest.mark.parametrize("longest", [3, 100, 5000])
def test_random_slices(dtype: torch.dtype, factor: float, longest: int, stream: torch.cuda.Stream) -> None:
    rng = random.Random(longest)
    for message_offset in range(0, 16 // dtype.itemsize + 1, 2 if dtype.itemsize < 4 else 1):
        flat = numbers(dtype, 20_000, rng.randrange(17))
        ranges = random_ranges(rng, 20_000, longest)
        rng.shuffle(ranges)
        check_copies(flat, ranges, factor, message_offset)


@DTYPES
def test_every_alignment(dtype: torch.dtype) -> None:
    per_word = 16 // dtype.itemsize
    for flat_offset in range(per_word):
        flat = numbers(dtype, 3000, flat_offset)
        for message_offset in range(per_word):
            check_copies(flat, [(0, 1), (1, 2500), (2600, 400)], 1 / 3, message_offset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@FACTORS
def test_every_number_of_sixteen_bits(dtype: torch.dtype, factor: float) -> None:
    flat = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).cuda()
    check_copies(flat, [(0, flat.numel())], factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@FACTORS
def test_wide_numbers_of_every_size(dtype: torch.dtype, factor: float) -> None:
    check_copies(numbers(dtype, 500_001), [(0, 500_001)], factor)


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 248, 249, 2000, 2001, 5000])
def test_many_slices(dtype: torch.dtype, count: int, stream: torch.cuda.Stream) -> None:
    ranges = [(7 * i, i % 7) for i in range(count)]
    flat = numbers(dtype, 7 * count)
    check_copies(flat, ranges, 0.5)
    check_scan(flat, ranges)
    check_scan(torch.zeros_like(flat), ranges)
    check_scan(torch.full_like(flat, -0.0), ranges)


def test_empty_slices() -> None:
    flat = numbers(torch.float32, 50)
    for ranges in ([], [(0, 0)], [(50, 0)], [(0, 0), (7, 3), (10, 0), (10, 1), (50, 0)]):
        check_copies(flat, ranges, 0.5)
        check_scan(flat, ranges)


@DTYPES
def test_in_place(dtype: torch.dtype) -> None:
    flat = numbers(dtype, 100_003)
    expected = torch.mul(flat.cpu(), 1 / 3)
    testing.gather_scaled(flat, flat, [(0, 100_003)], 1 / 3)
    assert_same_numbers(flat.cpu(), expected)


def test_more_elements_than_an_int_counts() -> None:
    size = (1 << 31) + 1001
    if torch.cuda.mem_get_info()[0] < 7 * size:
        pytest.skip(f"needs {7 * size / 1e9:.0f} GB of GPU memory")
    flat = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    flat[-5:] = 3.0
    message = torch.zeros(size - 3, dtype=torch.bfloat16, device="cuda")
    ranges = [(3, 10), (13, size - 13)]
    testing.gather_scaled(message, flat, ranges, 0.5)
    assert torch.equal(message, flat[3:] * 0.5)
    flat.zero_()
    testing.scatter(message, flat, ranges)
    assert torch.equal(message, flat[3:])
    flat.zero_()
    flat[-1] = -0.0
    assert testing.start_scan(flat, ranges).wait() == [(False, False), (False, True)]
    flat[-1] = 1.0
    assert testing.start_scan(flat, ranges).wait() == [(False, False), (True, False)]


@DTYPES
@pytest.mark.parametrize("background", [0.0, -0.0], ids=["zeros", "negative zeros"])
def test_a_single_nonzero_is_found_anywhere(dtype: torch.dtype, background: float) -> None:
    word = WORDS[dtype]
    for size in (1, 5, 33, 4096, 100_000):
        flat = torch.full((size + 3,), background, dtype=dtype, device="cuda")[3:]
        for position in sorted({0, 1 % size, size // 2, size - 1}):
            before = flat.view(word)[position].item()
            for name, bits in nonzero_words(dtype).items():
                flat.view(word)[position] = bits
                assert testing.start_scan(flat, [(0, size)]).wait()[0][0], f"{name} at {position} of {size}"
            flat.view(word)[position] = before
        check_scan(flat, [(0, size)])


@DTYPES
@pytest.mark.parametrize("seed", range(4))
def test_scan_of_random_slices(dtype: torch.dtype, seed: int, stream: torch.cuda.Stream) -> None:
    rng = random.Random(seed)
    # What lies between the slices is NaN: one element too many on either side would be found.
    flat = torch.full((60_000,), float("nan"), dtype=dtype)
    ranges = random_ranges(rng, 59_990, [10, 100, 1000, 20_000][seed])
    for offset, length in ranges:
        flat[offset : offset + length] = 0.0
        kind = rng.randrange(4)
        if length and kind:
            flat.view(WORDS[dtype])[offset + rng.randrange(length)] = [0, 1, torch.iinfo(WORDS[dtype]).min, 5][kind]
    check_scan(flat.cuda(), ranges)
    rng.shuffle(ranges)
    check_scan(flat.cuda(), ranges)


def check_units(flat: torch.Tensor, offset: int, length: int, unit_length: int) -> None:
    expected = _C.start_unit_scan(flat.cpu(), offset, length, unit_length).wait()
    pending = _C.start_unit_scan(flat, offset, length, unit_length)
    assert pending.wait() == expected
    assert pending.wait() == expected


@DTYPES
@pytest.mark.parametrize("unit_length", [*FLOAT_UNITS, 4, 7, 8, 9, 1024, 1025, 5000, 100_000, 1 << 62])
def test_units_of_every_length(dtype: torch.dtype, unit_length: int, stream: torch.cuda.Stream) -> None:
    rng = random.Random(unit_length)
    for _ in range(6):
        length, offset = rng.randrange(1, 8 * min(unit_length, 20_000)), rng.randrange(40)
        flat = random_slice(dtype, rng, length, unit_length, offset, (0.0, 0.0, 0.1))
        check_units(flat.cuda(), offset, length, unit_length)


@pytest.mark.parametrize("row", [1, 7, 64, 384, 16_384, 1_000_001])
def test_units_of_a_large_table(row: int) -> None:
    # In portions of every size, and many more warps than run at once.
    for megabytes in (4, 16, 150):
        rows = max(3, megabytes * 1_000_000 // 4 // row)
        flat = torch.zeros(rows * row, device="cuda")
        table = flat.view(rows, row)
        check_units(flat, 0, flat.numel(), row)
        chosen = torch.randperm(rows, device="cuda")
        table[chosen[: rows // 3], torch.randint(row, (rows // 3,), device="cuda")] = -0.0
        check_units(flat, 0, flat.numel(), row)
        table[chosen[rows // 4 : rows // 2], row - 1] = 1.0
        check_units(flat, 0, flat.numel(), row)
        flat.fill_(1.0)
        check_units(flat, 0, flat.numel(), row)


def test_units_of_more_elements_than_an_int_counts() -> None:
    size = (1 << 31) + 1001
    if torch.cuda.mem_get_info()[0] < 3 * size:
        pytest.skip(f"needs {3 * size / 1e9:.0f} GB of GPU memory")
    flat = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    flat[-1], flat[-1001] = -0.0, 1.0
    assert _C.start_unit_scan(flat, 0, size, 1 << 30).wait() == ([0b100], [])
    words, negative_zeros = _C.start_unit_scan(flat, 0, size, 1000).wait()
    last = (size - 1) // 1000
    assert negative_zeros == [last]
    assert [i for i, word in enumerate(words) if word] == [(size - 1001) // 1000 // 64]


@DTYPES
@pytest.mark.parametrize("seed", range(6))
def test_samples_of_units(dtype: torch.dtype, seed: int, stream: torch.cuda.Stream) -> None:
    flat, slices = random_slices(dtype, random.Random(seed))
    expected = [zeros / taken for zeros, taken in (sampled_zeros(flat, *one) for one in slices)]
    assert testing.sample_units(flat.cuda(), slices) == expected


def test_samples_of_more_gradients_than_a_launch_holds() -> None:
    count = 2 * testing.SAMPLES_PER_LAUNCH + 5
    flat = torch.zeros(100 * count, device="cuda")
    flat[3::200] = 1.0
    slices = [(100 * i, 100, 10) for i in range(count)]
    assert testing.sample_units(flat, slices) == [0.9 if i % 2 == 0 else 1.0 for i in range(count)]


@DTYPES
@pytest.mark.parametrize("longest", [3, 100, 5000])
def test_packs_random_slices(dtype: torch.dtype, longest: int, stream: torch.cuda.Stream) -> None:
    rng = random.Random(longest)
    for flat_offset in range(16 // dtype.itemsize):
        flat = all_kinds_of_numbers(dtype, 20_000 + flat_offset)[flat_offset:]
        on_device = flat.cuda()
        slices = random_ranges(rng, 20_000, longest)
        rng.shuffle(slices)
        size = total(slices) * dtype.itemsize
        skip = flat_offset * dtype.itemsize * 3 % 16  # what the buffer begins at
        expected = torch.full((size + 32,), 0xA5, dtype=torch.uint8)
        received = expected.cuda()
        testing.pack(expected[skip:], flat, slices)
        testing.pack(received[skip:], on_device, slices)
        assert torch.equal(received.cpu(), expected)
        divisors = [rng.choice([1.0, 2.0, 3.0])] * len(slices)
        divisors[len(slices) // 2 :] = [7.0] * (len(slices) - len(slices) // 2)
        testing.pack(expected[skip:], flat, slices, divisors)
        testing.pack(received[skip:], on_device, slices, divisors)
        end = skip + size
        assert_same_numbers(received.cpu()[skip:end].view(dtype), expected[skip:end].view(dtype))
        assert torch.equal(received.cpu()[end:], expected[end:])


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 248, 249, 2000, 2001, 4100])
def test_packs_many_slices(dtype: torch.dtype, count: int) -> None:
    flat = (torch.arange(7 * count) % 64).to(dtype)
    slices = [(7 * i, i % 7) for i in range(count)]
    expected = torch.zeros(56 * count, dtype=torch.uint8)
    received = expected.cuda()
    testing.pack(expected, flat, slices)
    testing.pack(received, flat.cuda(), slices)
    assert torch.equal(received.cpu(), expected)


@DTYPES
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 7.0])
@pytest.mark.parametrize("terms", [1, 2, 3, 8])
def test_sums_of_contributions(dtype: torch.dtype, divisor: float, terms: int, stream: torch.cuda.Stream) -> None:
    rng = random.Random(terms)
    for offset in range(16 // dtype.itemsize):
        plan = []
        for _ in range(rng.choice([1, 5, 900])):
            kinds = [PACKED] * terms
            kinds[rng.randrange(terms)] = rng.choice([OWN, PACKED])
            plan.append((rng.choice([0, 1, 3, 64, 257, rng.randrange(3000)]), kinds))
        case = make_case(dtype, plan, divisor, offset % 2 == 0, offset, offset, 8)
        flat = torch.zeros(case.flat.numel() + offset, dtype=dtype, device="cuda")[offset:]
        flat.view(WORDS[dtype]).copy_(case.flat.view(WORDS[dtype]))
        testing.sum_contributions(case.buffer.cuda(), case.sums_on(flat))
        testing.sum_contributions(case.buffer, case.sums)
        # Of several terms the NaN is the same everywhere, too.
        (assert_same_numbers if terms == 1 else assert_same_bits)(flat.cpu(), case.flat)


def test_sums_wait_for_nothing(no_waiting: None) -> None:
    flat, buffer = torch.ones(1000, device="cuda"), torch.zeros(4000, dtype=torch.uint8, device="cuda")
    for _ in range(2):  # the first launch of a kernel loads it, which may wait
        torch.cuda._sleep(LONG_SLEEP_CYCLES)
        testing.pack(buffer, flat, [(0, 1000)])
        contributions = [testing.Contribution(own=True), testing.Contribution(0)]
        testing.sum_contributions(buffer, [testing.SliceSum(flat, 0, 1000, contributions, 4.0)])
        done = torch.cuda.Event()
        done.record()
        was_ahead = not done.query()
    assert was_ahead, "the host waited for the stream"
    torch.cuda.set_sync_debug_mode("default")
    assert bool((flat == 0.25).all())


@DTYPES
@pytest.mark.parametrize("length", [1, 31, 32, 4096, 100_000, 3_000_001])
def test_codes(dtype: torch.dtype, length: int, stream: torch.cuda.Stream) -> None:
    for flat in (
        like_gradients(dtype, length, 0),
        like_gradients(dtype, length, 1, 0.7),
        all_kinds_of_numbers(dtype, length + 50)[:length],
    ):
        expected = encode(flat)
        buffer = torch.empty(_C.most_coded_bytes(length, flat), dtype=torch.uint8, device="cuda")
        size = testing.encode(flat.cuda(), buffer)
        assert torch.equal(buffer[:size].cpu(), expected)
        result = torch.empty_like(flat, device="cuda")
        testing.decode(buffer[:size], result)
        assert_same_bits(result.cpu(), flat)
        summed = torch.roll(flat, 3)
        on_device = summed.cuda()
        testing.decode(expected, summed, True)
        testing.decode(buffer[:size], on_device, True)
        assert_same_bits(on_device.cpu(), summed)


def test_refuses_altered_messages() -> None:
    flat = like_gradients(torch.float32, 5000, 0)
    coded = encode(flat)
    for place, value in ((3, 0x77), (3, 0xF0), (0, 0xFF)):
        altered, result = coded.clone(), torch.zeros(5000, device="cuda")
        altered[place] = value
        with pytest.raises(RuntimeError, match="received one with flaws"):
            testing.decode(altered.cuda(), result)
        assert not result.any()


def test_refuses_packed_numbers_that_are_not_aligned() -> None:
    flat, buffer = torch.ones(8, device="cuda"), torch.zeros(64, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="expected packed numbers of 4 bytes at multiples of that"):
        testing.pack(buffer[2:], flat, [(0, 8)])
    with pytest.raises(RuntimeError, match="expected packed numbers of 4 bytes at multiples of that"):
        testing.sum_contributions(buffer, [testing.SliceSum(flat, 0, 8, [testing.Contribution(2)])])


def test_a_unit_scan_is_like_any_other(no_waiting: None) -> None:
    side = torch.cuda.Stream()
    flat = torch.zeros(100_000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _C.start_unit_scan(flat, 0, 100_000, 1000).wait()  # makes the memory that the next one reuses
        torch.cuda._sleep(LONG_SLEEP_CYCLES)
        flat[1000:].fill_(6.0)
        done = torch.cuda.Event()
        done.record()
        pending = _C.start_unit_scan(flat, 0, 100_000, 1000)
        assert not done.query(), "starting a scan waited for the stream"
        torch.cuda._sleep(LONG_SLEEP_CYCLES)
        later = torch.cuda.Event()
        later.record()
    del flat  # the scan keeps it
    assert pending.wait() == ([(1 << 64) - 2, (1 << 36) - 1], [])
    assert not later.query(), "the answer waited for what came after the scan"


def test_unit_scans_that_nobody_waits_for() -> None:
    flat = torch.ones(1000, device="cuda")
    for _ in range(100):
        _C.start_unit_scan(flat, 0, 1000, 10)
    assert _C.start_unit_scan(flat, 0, 10, 5).wait() == ([0b11], [])
    assert _C.start_unit_scan(flat, 10, 0, 5).wait() == ([], [])


def test_work_goes_to_the_current_stream_and_nothing_waits(no_waiting: None) -> None:
    side = torch.cuda.Stream()
    flat = torch.zeros(10_000, device="cuda")
    message, returned = torch.empty(5000, device="cuda"), torch.empty(10_000, device="cuda")
    ranges = [(2 * i, 1) for i in range(5000)]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # The first scan of a size makes the page-locked memory that later ones reuse, the first launch of a kernel
        # loads it, and a stream has memory of its own; all of it may wait the first time.
        flat.fill_(0.0)
        testing.start_scan(flat, ranges).wait()
        testing.gather_scaled(message, flat, ranges, 0.5)
        testing.scatter(message, returned, ranges)
        torch.cuda._sleep(LONG_SLEEP_CYCLES)
        flat.fill_(6.0)
        testing.gather_scaled(message, flat, ranges, 0.5)
        testing.scatter(message, returned, ranges)
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the host waited for the stream"
        pending = testing.start_scan(flat, ranges)
        assert not done.query(), "starting a scan waited for the stream"
    assert pending.wait() == [(True, False)] * 5000
    assert done.query()
    torch.cuda.set_sync_debug_mode("default")
    assert bool((message == 3.0).all())
    assert bool((returned[::2] == 3.0).all())


def test_a_scan_waits_for_itself_only(no_waiting: None) -> None:
    flat = torch.zeros(1000, device="cuda")
    testing.start_scan(flat, [(0, 1000)]).wait()  # makes the page-locked memory that the next one reuses
    pending = testing.start_scan(flat, [(0, 1000)])
    torch.cuda._sleep(LONG_SLEEP_CYCLES)
    later = torch.cuda.Event()
    later.record()
    assert pending.wait() == [(False, False)]
    assert not later.query(), "the answer waited for what came after the scan"


def test_scans_under_way_do_not_mix() -> None:
    flats = [torch.full((1000,), float(i % 2), device="cuda") for i in range(50)]
    pending = [testing.start_scan(flat, [(0, 500), (500, 500)]) for flat in flats]
    for i, scan in reversed(list(enumerate(pending))):
        assert scan.wait() == [(bool(i % 2), False)] * 2


def test_a_scan_that_nobody_waits_for() -> None:
    flat = torch.ones(1000, device="cuda")
    for _ in range(100):
        testing.start_scan(flat, [(0, 1000)])
    assert testing.start_scan(flat, [(0, 10)]).wait() == [(True, False)]


def test_capture_is_noticed() -> None:
    tensor = torch.zeros(1, device="cuda")
    assert not testing.is_capturing(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert testing.is_capturing(tensor)
        tensor += 1
    assert not testing.is_capturing(tensor)
    assert not testing.is_capturing(tensor.cpu())


def test_copies_can_be_captured() -> None:
    # Tables travel with the launch, so that a replay finds them.
    flat, message = torch.zeros(100, device="cuda"), torch.zeros(50, device="cuda")
    testing.gather_scaled(message, flat, [(0, 50)], 0.5)  # the first launch loads the kernel, which no capture allows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        testing.gather_scaled(message, flat, [(10, 20), (60, 30)], 0.5)
    flat.copy_(torch.arange(100.0))
    graph.replay()
    assert torch.equal(message, torch.cat([flat[10:30], flat[60:90]]) * 0.5)


def test_refuses_two_devices() -> None:
    with pytest.raises(RuntimeError, match="expected slices on cuda:0, received cpu"):
        testing.gather_scaled(torch.zeros(3, device="cuda"), torch.zeros(3), [(0, 3)], 1.0)
    with pytest.raises(RuntimeError, match="expected slices on cpu, received cuda:0"):
        testing.scatter(torch.zeros(3), torch.zeros(3, device="cuda"), [(0, 3)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_refuses_what_a_gradient_cannot_be(dtype: torch.dtype) -> None:
    flat = torch.zeros(3, dtype=dtype, device="cuda")
    with pytest.raises(RuntimeError, match="expected gradients of float32, float64, float16 or bfloat16"):
        testing.gather_scaled(flat, flat, [(0, 3)], 1.0)
    with pytest.raises(RuntimeError, match="expected gradients of float32, float64, float16 or bfloat16"):
        testing.start_scan(flat, [(0, 3)])
    with pytest.raises(RuntimeError, match="expected gradients of float32, float64, float16 or bfloat16"):
        _C.start_unit_scan(flat, 0, 3, 1)
