"""pack and sum_contributions against torch's conversions, products and sums, bit for bit.

`narrow` and `widen` are the twins: the value of a number, read from its bits, is looked for among those of the form.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_slice_copy import DTYPES, WORDS, all_kinds_of_numbers, assert_same_bits, assert_same_numbers

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing
from ddp_hooks_testing._C import Contribution, SliceSum, sum_contributions

pytestmark = pytest.mark.usefixtures("instructions")

FULL, BFLOAT16, FLOAT16, FLOAT32 = _C.Width.FULL, _C.Width.BFLOAT16, _C.Width.FLOAT16, _C.Width.FLOAT32
WIDTHS = {torch.float32: (BFLOAT16, FLOAT16), torch.float64: (FLOAT32,)}
NARROW = pytest.mark.parametrize(
    ("dtype", "width"),
    [(dtype, width) for dtype, widths in WIDTHS.items() for width in widths],
    ids=["bfloat16", "float16", "float32"],
)
FORMS = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16, FLOAT32: torch.float32}
# Bits of the exponent and of the mantissa.
SHAPES = {torch.float32: (8, 23), torch.float64: (11, 52), torch.bfloat16: (8, 7), torch.float16: (5, 10)}


@pytest.fixture(params=[False, True], ids=["denormals", "flush to zero"])
def floating_point_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    for width in (BFLOAT16, FLOAT16):
        widening_table(width, torch.float32)  # made by arithmetic, which would flush
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this CPU cannot flush denormals to zero")
    yield
    torch.set_flush_denormal(False)


def fields(bits: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return sign, exponent and mantissa."""
    exponent_bits, mantissa_bits = SHAPES[dtype]
    return (
        bits >> (exponent_bits + mantissa_bits) & 1,
        bits >> mantissa_bits & ((1 << exponent_bits) - 1),
        bits & ((1 << mantissa_bits) - 1),
    )


def narrow(bits: int, dtype: torch.dtype, width: _C.Width) -> int | None:
    """Return the bits of the form, or None if it does not hold the number: with whole numbers only."""
    form = FORMS[width]
    exponent_bits, mantissa_bits = SHAPES[form]
    sign, exponent, mantissa = fields(bits, dtype)
    wide_exponent_bits, wide_mantissa_bits = SHAPES[dtype]
    sign <<= exponent_bits + mantissa_bits
    dropped = wide_mantissa_bits - mantissa_bits
    infinity = (1 << exponent_bits) - 1
    if exponent == (1 << wide_exponent_bits) - 1:
        held = mantissa >> dropped
        return None if mantissa != held << dropped else sign | infinity << mantissa_bits | held
    # |number| = significand * 2^power.
    significand = mantissa if exponent == 0 else mantissa | 1 << wide_mantissa_bits
    power = max(exponent, 1) - ((1 << (wide_exponent_bits - 1)) - 1) - wide_mantissa_bits
    if significand == 0:
        return sign
    smallest = 2 - (1 << (exponent_bits - 1)) - mantissa_bits  # the power of two of the form's smallest number
    # As an odd significand, then with as many zeros as the form's own last place asks for.
    zeros = (significand & -significand).bit_length() - 1
    significand, power = significand >> zeros, power + zeros
    last_place = max(power + significand.bit_length() - 1 - mantissa_bits, smallest)
    if last_place > power:
        return None
    significand <<= power - last_place
    if significand < 1 << mantissa_bits:
        return sign | significand
    form_exponent = last_place - smallest + 1
    return (
        None
        if form_exponent >= infinity
        else sign | form_exponent << mantissa_bits | (significand - (1 << mantissa_bits))
    )


def unsigned(flat: torch.Tensor) -> list[int]:
    word = WORDS[flat.dtype]
    return [bits & ((1 << torch.iinfo(word).bits) - 1) for bits in flat.view(word).tolist()]


def from_unsigned(bits: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    word = WORDS[dtype]
    sign = 1 << (torch.iinfo(word).bits - 1)
    return torch.tensor([each - 2 * sign if each & sign else each for each in bits], dtype=word).view(dtype)


def all_of(width: _C.Width) -> torch.Tensor:
    """Return every number of a form of 16 bits, or all kinds of those of 32."""
    if width == FLOAT32:
        return all_kinds_of_numbers(torch.float32, 20_000)
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(FORMS[width])


@functools.cache
def widening_table(width: _C.Width, dtype: torch.dtype) -> torch.Tensor:
    """Return the wide bits of every number of a form of 16 bits, by the value of its fields."""
    exponent_bits, mantissa_bits = SHAPES[FORMS[width]]
    wide_exponent_bits, wide_mantissa_bits = SHAPES[dtype]
    wide = []
    for bits in range(1 << 16):
        sign, exponent, mantissa = fields(bits, FORMS[width])
        if exponent == (1 << exponent_bits) - 1:
            exponent = (1 << wide_exponent_bits) - 1
            mantissa <<= wide_mantissa_bits - mantissa_bits
            wide.append(sign << 31 | exponent << wide_mantissa_bits | mantissa)
            continue
        significand = mantissa + ((1 << mantissa_bits) if exponent else 0)
        value = significand * 2.0 ** (max(exponent, 1) - (1 << (exponent_bits - 1)) + 1 - mantissa_bits)
        magnitude = int(torch.tensor([value], dtype=torch.float64).to(dtype).view(WORDS[dtype]))
        wide.append(sign << 31 | magnitude)
    return from_unsigned(wide, dtype)


def widen(narrow_numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers in the wide type, NaNs with their payload."""
    if narrow_numbers.dtype == torch.float32:
        bits = narrow_numbers.view(torch.int32).long()
        mantissas, signs = bits & 0x7FFFFF, (bits >> 31 & 1) << 63
        nans = mantissas << 29 | 0x7FF << 52 | signs
        denormals = (mantissas.double() * 2.0**-149).view(torch.int64) | signs  # whole numbers are never flushed
        wide = torch.where(narrow_numbers.isnan(), nans, narrow_numbers.double().view(torch.int64))
        return torch.where(bits >> 23 & 0xFF == 0, denormals, wide).view(torch.float64)
    width = next(width for width, form in FORMS.items() if form == narrow_numbers.dtype)
    return widening_table(width, dtype)[narrow_numbers.view(torch.int16).long() & 0xFFFF]


def some_of(width: _C.Width, dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    """Return `size` numbers of the wide type that the width holds, all kinds of them."""
    if width == FULL:
        return all_kinds_of_numbers(dtype, size)
    numbers = all_of(width)
    generator = torch.Generator().manual_seed(seed)
    return widen(numbers[torch.randint(len(numbers), (size,), generator=generator)], dtype)


def is_held(flat: torch.Tensor, width: _C.Width) -> bool:
    words, _ = _C.start_unit_scan(flat, 0, flat.numel(), flat.numel()).wait()
    inexact = _C.start_unit_scan(flat, 0, flat.numel(), flat.numel(), widths=True).inexact()
    return words == [1] and inexact[WIDTHS[flat.dtype].index(width)] == [0]


def packed(flat: torch.Tensor, slices: Sequence[tuple[int, int, _C.Width]], offset: int = 0) -> torch.Tensor:
    """Pack at an offset of a buffer; what surrounds it must not change."""
    size = sum(testing.packed_bytes(length, width, flat.element_size()) for _, length, width in slices)
    buffer = torch.full((offset + size + 5,), 0xA5, dtype=torch.uint8)
    testing.pack(buffer[offset:], flat, slices)
    assert buffer[:offset].tolist() == [0xA5] * offset
    assert buffer[offset + size :].tolist() == [0xA5] * 5
    return buffer[offset : offset + size]


def slow_pack(flat: torch.Tensor, slices: Sequence[tuple[int, int, _C.Width]]) -> list[int]:
    """The twin: number after number, byte after byte."""
    packed_numbers = []
    for offset, length, width in slices:
        each = flat.element_size() if width == FULL else FORMS[width].itemsize
        part = []
        for bits in unsigned(flat[offset : offset + length]):
            held = bits if width == FULL else narrow(bits, flat.dtype, width)
            assert held is not None
            part += held.to_bytes(each, "little")
        packed_numbers += part + [0] * (-len(part) % flat.element_size())
    return packed_numbers


# --- forms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_the_twins_are_torchs_conversions(dtype: torch.dtype) -> None:
    width = next(width for width, form in FORMS.items() if form == dtype)
    numbers = all_of(width)
    wide = widen(numbers, torch.float32)
    assert_same_numbers(wide, numbers.float())
    assert [narrow(bits, torch.float32, width) for bits in unsigned(wide)] == unsigned(numbers)
    others = all_kinds_of_numbers(torch.float32, 3000)
    exact = [narrow(bits, torch.float32, width) is not None for bits in unsigned(others)]
    by_torch = others.to(dtype).float().view(torch.int32) == others.view(torch.int32)
    assert [held for held, nan in zip(exact, others.isnan().tolist(), strict=True) if not nan] == (
        by_torch[~others.isnan()].tolist()
    )


@NARROW
def test_every_number_of_a_form_comes_back(dtype: torch.dtype, width: _C.Width, floating_point_mode: None) -> None:
    numbers = all_of(width)
    wide = widen(numbers, dtype)
    assert is_held(wide, width)
    buffer = packed(wide, [(0, wide.numel(), width)])
    assert_same_bits(buffer.view(FORMS[width]), numbers)
    # Unpacked as a sum of one, which quiets signalling NaNs and flushes denormals, as a product does.
    result = torch.empty_like(wide)
    sum_contributions(buffer, [SliceSum(result, 0, wide.numel(), [Contribution(0, width)])])
    quiet = wide * 1.0
    assert torch.equal(result.view(WORDS[dtype]), quiet.view(WORDS[dtype]))


def around_a_form(dtype: torch.dtype, width: _C.Width) -> list[int]:
    """Return bits of numbers that a form just holds and just does not: at its limits, and one bit further."""
    exponent_bits, mantissa_bits = SHAPES[dtype]
    _, form_mantissa_bits = SHAPES[FORMS[width]]
    dropped = mantissa_bits - form_mantissa_bits
    mantissas = {0, 1, 1 << dropped, (1 << dropped) - 1, 1 << (dropped - 1), 3 << (dropped - 1)}
    mantissas |= {1 << bit for bit in range(mantissa_bits)} | {
        ((1 << mantissa_bits) - 1) >> bit << bit for bit in range(mantissa_bits)
    }
    form_exponents, bias = (
        1 << SHAPES[FORMS[width]][0],
        (1 << (exponent_bits - 1)) - (1 << (SHAPES[FORMS[width]][0] - 1)),
    )
    near = range(-form_mantissa_bits - 3, 3)
    exponents = {bias + distance for distance in near} | {bias + form_exponents + distance for distance in range(-3, 3)}
    exponents |= {0, 1, (1 << exponent_bits) - 2, (1 << exponent_bits) - 1}
    bits = [
        sign << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa
        for sign, exponent, mantissa in itertools.product((0, 1), sorted(exponents), sorted(mantissas))
        if 0 <= exponent < 1 << exponent_bits
    ]
    return list(dict.fromkeys(bits))


@NARROW
def test_what_a_form_holds(dtype: torch.dtype, width: _C.Width, floating_point_mode: None) -> None:
    bits = around_a_form(dtype, width) + unsigned(all_kinds_of_numbers(dtype, 3000))
    numbers = from_unsigned(bits, dtype)
    expected = [narrow(each, dtype, width) for each in bits]
    inexact = _C.start_unit_scan(numbers, 0, len(bits), 1, widths=True).inexact()[WIDTHS[dtype].index(width)]
    received = [not inexact[i // 64] >> i % 64 & 1 for i in range(len(bits))]
    assert received == [held is not None for held in expected]
    held = [each for each, held in zip(bits, expected, strict=True) if held is not None]
    assert 50 < len(held) < len(bits)
    buffer = packed(from_unsigned(held, dtype), [(0, len(held), width)])
    assert unsigned(buffer[: len(held) * FORMS[width].itemsize].view(FORMS[width])) == [
        each for each in expected if each is not None
    ]


def test_widths_of_a_type() -> None:
    assert list(testing.narrow_widths(torch.zeros(1))) == [BFLOAT16, FLOAT16]
    assert list(testing.narrow_widths(torch.zeros(1, dtype=torch.float64))) == [FLOAT32, FULL]
    for dtype in (torch.float16, torch.bfloat16):
        assert list(testing.narrow_widths(torch.zeros(1, dtype=dtype))) == [FULL, FULL]


def test_packed_bytes() -> None:
    for numel in (0, 1, 2, 3, 4, 5, 1000, 1 << 40):
        for width, each in ((BFLOAT16, 4), (FLOAT16, 4), (FLOAT32, 8)):
            assert testing.packed_bytes(numel, width, each) == -(-numel // 2) * each
        for each in (2, 4, 8):
            assert testing.packed_bytes(numel, FULL, each) == numel * each


# --- pack


@DTYPES
@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 400)), st.integers(0, 2)), max_size=6),
    gap=st.integers(0, 3),
    offset=st.integers(0, 9),
    seed=st.integers(0, 1 << 30),
)
def test_packs_slices_of_any_length(
    dtype: torch.dtype, lengths: list[tuple[int, int]], gap: int, offset: int, seed: int
) -> None:
    choices = [FULL, *WIDTHS.get(dtype, ())]
    parts, slices, position = [], [], 0
    for length, choice in lengths:
        width = choices[choice % len(choices)]
        parts += [some_of(width, dtype, length, seed + position), torch.full((gap,), float("nan"), dtype=dtype)]
        slices.append((position, length, width))
        position += length + gap
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
    before = flat.clone()
    random.Random(seed).shuffle(slices)
    assert packed(flat, slices, offset).tolist() == slow_pack(flat, slices)
    assert_same_bits(flat, before)


@NARROW
def test_packs_memory_that_is_not_aligned(dtype: torch.dtype, width: _C.Width) -> None:
    numbers = some_of(width, dtype, 101, 1)
    memory = bytearray(101 * dtype.itemsize + 2)
    flat = torch.frombuffer(memory, dtype=dtype, offset=1, count=101)
    flat.copy_(numbers)
    assert flat.data_ptr() % dtype.itemsize != 0
    flat.view(WORDS[dtype]).copy_(numbers.view(WORDS[dtype]))
    assert packed(flat, [(3, 98, width)], 3).tolist() == slow_pack(numbers, [(3, 98, width)])


@DTYPES
@pytest.mark.parametrize("divides", [False, True], ids=["times", "over"])
def test_full_width_is_scaled_on_the_way(dtype: torch.dtype, divides: bool) -> None:
    flat = all_kinds_of_numbers(dtype, 300)
    narrow = WIDTHS.get(dtype, (FULL,))[0]
    flat[100:107] = 1.5
    slices = [(7, 93, FULL), (100, 7, narrow), (107, 50, FULL), (200, 0, FULL), (201, 99, FULL)]
    divisors = [3.0, 1.0, 2.0, 5.0, 1.0]
    parts = [
        packed(flat if divisor == 1 else scaled(flat, divisor, divides), [one])
        for one, divisor in zip(slices, divisors, strict=True)
    ]
    buffer = torch.full((sum(part.numel() for part in parts),), 0xA5, dtype=torch.uint8)
    testing.pack(buffer, flat, slices, divisors, divides)
    position = 0
    for (_, _, width), part in zip(slices, parts, strict=True):
        received = buffer[position : position + part.numel()]
        position += part.numel()
        if width == FULL:
            assert_same_numbers(received.clone().view(dtype), part.clone().view(dtype))
        else:
            assert torch.equal(received, part)


def test_refuses_to_pack_what_does_not_fit() -> None:
    flat, buffer = torch.zeros(9), torch.zeros(15, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="expected a buffer of at least 20 bytes, received 15"):
        testing.pack(buffer, flat, [(0, 9, BFLOAT16)])
    with pytest.raises(RuntimeError, match="expected a range within 9 elements"):
        testing.pack(buffer, flat, [(7, 3, BFLOAT16)])
    with pytest.raises(RuntimeError, match="expected a buffer of uint8, received"):
        testing.pack(flat, flat, [(0, 1, FULL)])
    with pytest.raises(RuntimeError, match="expected a width for elements of 4 bytes, received form 3"):
        testing.pack(buffer, flat, [(0, 2, FLOAT32)])
    with pytest.raises(RuntimeError, match="expected a width for elements of 2 bytes, received form 1"):
        testing.pack(buffer, flat.half(), [(0, 2, BFLOAT16)])
    with pytest.raises(RuntimeError, match=r"expected gradients on the CPU.*, received meta"):
        testing.pack(buffer.to("meta"), flat, [(0, 1, FULL)])
    with pytest.raises(RuntimeError, match="expected gradients of float32"):
        testing.pack(buffer, flat.int(), [(0, 1, FULL)])
    with pytest.raises(RuntimeError, match="expected narrow numbers undivided, received divisor 2"):
        testing.pack(buffer, flat, [(0, 2, BFLOAT16)], [2.0])
    testing.pack(buffer[:0], flat, [])


# --- sums


@dataclass
class Case:
    """Contributions to slices of one tensor, as the owner has received them."""

    flat: torch.Tensor
    buffer: torch.Tensor
    slices: list[tuple[int, int, list[Contribution], float, bool, bool]] = field(default_factory=list)
    expected: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    received: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # what the buffer held, and has to hold

    def sums_on(self, flat: torch.Tensor) -> list[SliceSum]:
        return [SliceSum(flat, *each) for each in self.slices]

    @property
    def sums(self) -> list[SliceSum]:
        return self.sums_on(self.flat)


def scaled(numbers: torch.Tensor, divisor: float, divides: bool) -> torch.Tensor:
    return numbers / divisor if divides else numbers * (1 / divisor)


def slow_sum(contributions: Sequence[torch.Tensor], divisor: float, divides: bool, adds_zero: bool) -> torch.Tensor:
    """The twin: torch's own operations, one after the other; a sum that is no number is always the same NaN."""
    result = scaled(contributions[0], divisor, divides)
    for numbers in contributions[1:]:
        result = result + scaled(numbers, divisor, divides)
        result = torch.where(result.isnan(), torch.tensor(torch.nan, dtype=result.dtype), result)
    return result + 0.0 if adds_zero else result


def make_case(
    dtype: torch.dtype,
    plan: Sequence[tuple[int, Sequence[int]]],
    divisor: float,
    divides: bool,
    adds_zero: bool,
    seed: int,
    offset: int = 0,
    alignment: int = 1,
) -> Case:
    """Make slices of the lengths in `plan`, each of the contributions next to it: -1 is its own, others are widths."""
    rng = random.Random(seed)
    choices = [FULL, *WIDTHS.get(dtype, ())]
    total = sum(length for length, _ in plan)
    storage = all_kinds_of_numbers(dtype, total + 5 * len(plan) + offset)
    case = Case(storage[offset:], torch.empty(0, dtype=torch.uint8))
    case.expected = case.flat.clone()
    bytes_before = 3 if alignment == 1 else 8
    parts, position = [torch.full((bytes_before,), 0x5A, dtype=torch.uint8)], 0
    for length, kinds in plan:
        position += rng.randrange(5)
        terms, contributions = [], []
        for kind in kinds:
            if kind < 0:
                terms.append(case.flat[position : position + length].clone())
                contributions.append(Contribution(own=True))
                continue
            width = choices[kind % len(choices)]
            numbers = some_of(width, dtype, length, rng.randrange(1 << 30))
            contributions.append(Contribution(bytes_before, width))
            parts.append(packed(numbers, [(0, length, width)]))
            bytes_before += parts[-1].numel()
            terms.append(numbers)
        case.slices.append((position, length, contributions, divisor, divides, adds_zero))
        case.expected[position : position + length] = slow_sum(terms, divisor, divides, adds_zero)
        position += length
    storage = torch.empty(bytes_before + alignment, dtype=torch.uint8)
    skip = -storage.data_ptr() % alignment
    case.buffer = storage[skip : skip + bytes_before]
    torch.cat(parts, out=case.buffer)
    case.received = case.buffer.clone()
    return case


def assert_sum(case: Case) -> None:
    assert_same_numbers(case.flat, case.expected)
    assert torch.equal(case.buffer, case.received)


def check_sum(case: Case) -> None:
    sum_contributions(case.buffer, case.sums)
    assert_sum(case)


DIVISORS = pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 4.0, 7.0])
DIVIDES = pytest.mark.parametrize("divides", [False, True], ids=["times", "over"])


@DTYPES
@DIVISORS
@DIVIDES
def test_two_contributions_of_every_kind(dtype: torch.dtype, divisor: float, divides: bool) -> None:
    kinds = (-1, 0, 1, 2)
    plan = [
        (length, pair) for pair in itertools.product(kinds, kinds) if pair != (-1, -1) for length in (0, 1, 37, 300)
    ]
    for adds_zero in (False, True):
        check_sum(make_case(dtype, plan, divisor, divides, adds_zero, 5))


@DTYPES
@DIVIDES
@settings(deadline=None, max_examples=60)
@given(
    plan=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 40), st.integers(0, 400), st.integers(2040, 2060)),
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
            st.integers(-1, 4),
        ),
        max_size=4,
    ),
    divisor=st.sampled_from([1.0, 2.0, 3.0, 8.0]),
    adds_zero=st.booleans(),
    offset=st.integers(0, 3),
    seed=st.integers(0, 1 << 30),
)
def test_any_number_of_contributions(
    dtype: torch.dtype,
    divides: bool,
    plan: list[tuple[int, list[int], int]],
    divisor: float,
    adds_zero: bool,
    offset: int,
    seed: int,
) -> None:
    with_own = [
        (length, [-1 if i == own else kind for i, kind in enumerate(kinds)] if own >= 0 else kinds)
        for length, kinds, own in plan
    ]
    check_sum(make_case(dtype, with_own, divisor, divides, adds_zero, seed, offset))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_the_order_of_ranks_decides(count: int) -> None:
    # Sums of three and more depend on the order: each is another one here.
    received = set()
    rng = random.Random(count)
    for _ in range(24):
        order = rng.sample(range(count), count)
        values = [torch.full((1500,), [1.0, 1e8, -1e8, 3.0, 5.0, 2.0**24, 1e-8, 7.0, -3.0][i]) for i in order]
        buffer = packed(torch.cat(values), [(0, 1500 * count, FULL)])
        result = torch.empty(1500)
        sum_contributions(buffer, [SliceSum(result, 0, 1500, [Contribution(6000 * i, FULL) for i in range(count)])])
        assert_same_bits(result, slow_sum(values, 1.0, False, False))
        received.add(float(result[0]))
    assert len(received) > 1 or count < 3


@DTYPES
def test_zeros_of_either_sign(dtype: torch.dtype) -> None:
    choices = [FULL, *WIDTHS.get(dtype, ())]
    for width in choices:
        for signs in itertools.product((0.0, -0.0), repeat=2):
            numbers = [torch.full((21,), sign, dtype=dtype) for sign in signs]
            buffer = packed(numbers[1], [(0, 21, width)])
            for adds_zero in (False, True):
                for count in (1, 2):
                    result = numbers[0].clone()
                    contributions = [Contribution(own=True), Contribution(0, width)][:count]
                    sum_contributions(buffer, [SliceSum(result, 0, 21, contributions, 2.0, adds_zero=adds_zero)])
                    negative = all(sign == 0.0 and str(sign) == "-0.0" for sign in signs[:count]) and not adds_zero
                    assert_same_bits(result, torch.full((21,), -0.0 if negative else 0.0, dtype=dtype))


def test_flushes_what_torch_flushes(floating_point_mode: None) -> None:
    for dtype, widths in WIDTHS.items():
        tiny = torch.finfo(dtype).tiny
        numbers = torch.tensor([tiny, tiny / 2, 3 * tiny, -tiny], dtype=dtype)
        buffer = packed(numbers, [(0, 4, FULL)])
        result = numbers.clone()
        sum_contributions(buffer, [SliceSum(result, 0, 4, [Contribution(own=True), Contribution(0, FULL)], 3.0)])
        assert_same_bits(result, slow_sum([numbers, numbers], 3.0, False, False))
        for width in widths:
            numbers = some_of(width, dtype, 500, 3)
            buffer = packed(numbers, [(0, 500, width)])
            result = numbers.clone()
            sum_contributions(buffer, [SliceSum(result, 0, 500, [Contribution(0, width), Contribution(own=True)], 2.0)])
            assert_same_numbers(result, slow_sum([numbers, numbers], 2.0, False, False))


def test_both_ranks_of_two_make_the_same() -> None:
    # Each has its own number in place and the other one's packed; the order is that of ranks on both.
    numbers = [some_of(BFLOAT16, torch.float32, 5000, seed) for seed in (1, 2)]
    results = []
    for rank in (0, 1):
        result = numbers[rank].clone()
        buffer = packed(numbers[1 - rank], [(0, 5000, BFLOAT16)])
        contributions = [Contribution(own=i == rank, width=FULL if i == rank else BFLOAT16) for i in (0, 1)]
        sum_contributions(buffer, [SliceSum(result, 0, 5000, contributions, 2.0)])
        results.append(result)
    assert_same_numbers(results[0], results[1])


def test_own_contributions_need_nothing_received() -> None:
    flat = torch.tensor([2.0, -0.0, 6.0])
    sum_contributions(None, [SliceSum(flat, 0, 3, [Contribution(own=True)], 2.0, adds_zero=True)])
    assert_same_bits(flat, torch.tensor([1.0, 0.0, 3.0]))
    sum_contributions(None, [])


def test_refuses_sums_that_do_not_fit() -> None:
    flat, buffer = torch.zeros(9), torch.zeros(16, dtype=torch.uint8)

    def add(length: int, contributions: Sequence[Contribution], received: torch.Tensor | None = buffer) -> None:
        sum_contributions(received, [SliceSum(flat, 0, length, contributions)])

    add(8, [Contribution(0, BFLOAT16)])
    with pytest.raises(RuntimeError, match="expected contributions within 16 bytes, received offset 2 and 16 bytes"):
        add(8, [Contribution(2, BFLOAT16)])
    with pytest.raises(RuntimeError, match="expected contributions within 16 bytes, received offset -2 and 2 bytes"):
        add(1, [Contribution(-2, BFLOAT16)])
    with pytest.raises(RuntimeError, match="expected contributions within 0 bytes"):
        add(1, [Contribution(0, BFLOAT16)], None)
    with pytest.raises(RuntimeError, match="expected at least one contribution, received none"):
        add(1, [])
    with pytest.raises(RuntimeError, match="expected one contribution that lies in the slice itself, received 2"):
        add(1, [Contribution(own=True), Contribution(own=True)])
    with pytest.raises(RuntimeError, match="expected a width for elements of 4 bytes, received form 3"):
        add(1, [Contribution(0, FLOAT32)])
    with pytest.raises(RuntimeError, match="expected a range within 9 elements"):
        add(10, [Contribution(own=True)])
    with pytest.raises(RuntimeError, match="expected received data of uint8, received"):
        add(1, [Contribution(own=True)], flat)
