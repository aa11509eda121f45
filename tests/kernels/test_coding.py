"""Coded messages against the values that went in, bit for bit, and against a decoder in Python that follows the page.

`read_message` is the twin: it reads a message as docs/internals/protocol.md describes it, with whole numbers only.
"""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import from_unsigned, unsigned
from test_slice_copy import DTYPES, WORDS, all_kinds_of_numbers, assert_same_bits

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

BLOCK, SECTION = 32, 32 * 128
LOWER_BITS = (0, 3, 5, 6, 8, 10, 16)
# Bits of the exponent, of the mantissa in the upper byte, and of the mantissa below.
SHAPES = {torch.float32: (8, 7, 16), torch.bfloat16: (8, 7, 0), torch.float16: (5, 7, 3)}
LENGTHS = [0, 1, 31, 32, 33, 64, 95, SECTION - 1, SECTION, SECTION + 1, 2 * SECTION + 45]


def each_kind_of_instructions() -> Iterator[str]:
    """Let the kernels use one kind of instructions after the other."""
    try:
        for leaves_out in (False, True):
            testing.leave_out_avx2(leaves_out)
            yield "baseline" if leaves_out else "avx2"
    finally:
        testing.leave_out_avx2(False)


def encode(flat: torch.Tensor) -> torch.Tensor:
    """Return the message; fail if it is longer than the most, or if anything behind the most changes."""
    most = _C.most_coded_bytes(flat.numel(), flat)
    buffer = torch.full((most + 64,), 0xA5, dtype=torch.uint8)
    size = testing.encode(flat, buffer)
    assert size <= most
    assert (buffer[most:] == 0xA5).all()
    return buffer[:size].clone()


def decode(message: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a message, decoded from memory that ends where it ends."""
    result = torch.full_like(like, 7)
    testing.decode(message, result)
    return result


def assert_round_trip(flat: torch.Tensor) -> None:
    messages = []
    for _ in each_kind_of_instructions():
        message = encode(flat)
        assert_same_bits(decode(message, flat), flat)
        messages.append(bytes(message.tolist()))
    assert len(set(messages)) == 1, "the bytes depend on the instructions"
    assert unsigned(flat) == read_message(messages[0], flat.numel(), flat.dtype)


def read_message(message: bytes, count: int, dtype: torch.dtype) -> list[int]:
    """Return the bits of each value."""
    size = dtype.itemsize
    blocks = count // BLOCK
    sections = -(-blocks // 128)
    sizes = struct.unpack_from(f"<{sections}H", message)
    position, values = 2 * sections, []
    for i, section_bytes in enumerate(sizes):
        values += read_section(message[position : position + section_bytes], min(128, blocks - 128 * i), dtype)
        position += section_bytes
    rest = message[position:]
    assert len(rest) == count % BLOCK * size
    return values + [int.from_bytes(rest[i : i + size], "little") for i in range(0, len(rest), size)]


def read_section(section: bytes, blocks: int, dtype: torch.dtype) -> list[int]:
    heads = [(section[2 * i], section[2 * i + 1]) for i in range(blocks)]
    with_bitmap = [form & 0x80 != 0 and form != 0xF0 for _, form in heads]
    bitmaps = list(struct.unpack(f"<{sum(with_bitmap)}I", section[len(section) - 4 * sum(with_bitmap) :]))
    position, values = 2 * blocks, []

    def take(length: int) -> bytes:
        nonlocal position
        position += length
        return section[position - length : position]

    for (largest, form), has_bitmap in zip(heads, with_bitmap, strict=True):
        if form == 0xF0:
            values += [0] * BLOCK
        elif form == 0x70:
            raw = take(BLOCK * dtype.itemsize)
            values += [
                int.from_bytes(raw[i : i + dtype.itemsize], "little") for i in range(0, len(raw), dtype.itemsize)
            ]
        else:
            bitmap = bitmaps.pop() if has_bitmap else 0xFFFFFFFF
            stored = iter(read_block(largest, form, bitmap.bit_count(), take, dtype))
            values += [next(stored) if bitmap >> i & 1 else 0 for i in range(BLOCK)]
    assert position + 4 * sum(with_bitmap) == len(section)
    return values


def read_block(largest: int, form: int, count: int, take: Callable[[int], bytes], dtype: torch.dtype) -> list[int]:
    planes, lower = form & 7, LOWER_BITS[form >> 4 & 7]

    def take_planes(number: int) -> list[list[int]]:
        words = [int.from_bytes(take(-(-count // 8)), "little") for _ in range(number)]
        assert all(word >> count == 0 for word in words)
        return [[word >> i & 1 for word in words] for i in range(count)]

    upper = take(count)
    distances = [sum(bit << j for j, bit in enumerate(bits)) for bits in take_planes(planes)]
    rows = [take(count) for _ in range(lower // 8)]
    low_planes = take_planes(lower % 8)
    values = []
    for i in range(count):
        exponent = largest - distances[i]
        if form & 8 and distances[i] == (1 << planes) - 1:
            exponent = 0
        low = sum(row[i] << 8 * (1 - j) for j, row in enumerate(rows))
        low |= sum(bit << 15 - lower // 8 * 8 - j for j, bit in enumerate(low_planes[i]))
        values.append(join(upper[i] >> 7, exponent, upper[i] & 0x7F, low, dtype))
    return values


def join(sign: int, exponent: int, upper: int, low: int, dtype: torch.dtype) -> int:
    if dtype == torch.float64:
        wide = torch.tensor([join(sign, exponent, upper, low, torch.float32)]).to(torch.int32).view(torch.float32)
        return unsigned(wide.double())[0]
    exponent_bits, upper_bits, low_bits = SHAPES[dtype]
    bits = sign << exponent_bits | exponent
    return (bits << upper_bits | upper) << low_bits | low >> 16 - low_bits


# --- golden bytes

FRACTIONS = torch.arange(1, 33) / 64
WITH_NEGATIVE_ZERO = torch.where(torch.arange(32) == 3, -0.0, FRACTIONS)
SPARSE = torch.zeros(33)
SPARSE[[0, 5, 9, 32]] = torch.tensor([1.0, -0.375, 2.5, 3.0])
OF_SPARSE = "0b 00 80 82 00 c0 20 03 02 21 02 00 00 00 00 40 40"
OF_FRACTIONS = """
    2e 00 7e 03
    00 00 40 00 20 40 60 00 10 20 30 40 50 60 70 00 08 10 18 20 28 30 38 40 48 50 58 60 68 70 78 00
    79 80 ff 7f f8 7f 00 00 07 00 00 00"""
OF_NEGATIVE_ZERO = OF_FRACTIONS.replace("7e 03", "7e 0b").replace("40 00 20", "40 80 20").replace("07 00", "0f 00")


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (SPARSE, OF_SPARSE),
        (FRACTIONS, OF_FRACTIONS),
        (FRACTIONS.double(), OF_FRACTIONS),
        (FRACTIONS.bfloat16(), OF_FRACTIONS),
        (FRACTIONS.half(), OF_FRACTIONS.replace("7e 03", "0e 03")),
        (WITH_NEGATIVE_ZERO, OF_NEGATIVE_ZERO),
        *((torch.zeros(64, dtype=dtype), "04 00 00 f0 00 f0") for dtype in WORDS),
    ],
)
def test_golden_bytes(flat: torch.Tensor, message: str) -> None:
    for _ in each_kind_of_instructions():
        assert bytes(encode(flat).tolist()) == bytes.fromhex(message)
    assert_round_trip(flat)


def test_the_page_has_these_bytes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "internals" / "protocol.md").read_text()
    # Bytes at the beginning of a line, up to an explanation.
    examples = ["".join(re.match(r"(?:[0-9a-f]{2}(?: {1,2}|$))*", line)[0].split()) for line in page.splitlines()]
    for message in (OF_SPARSE, OF_FRACTIONS):
        assert "".join(message.split()) in "".join(examples)


# --- what a test codes


def like_gradients(dtype: torch.dtype, size: int, seed: int, zeros: float = 0.0, lower: int = 16) -> torch.Tensor:
    """Return numbers of similar exponents, some of them zero, with so many lower bits."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(size, generator=generator) * 1e-3
    bits = flat.view(torch.int32) >> 16 - lower << 16 - lower
    flat = bits.view(torch.float32)
    flat[torch.rand(size, generator=generator) < zeros] = 0.0
    return flat.to(dtype)


def awkward_blocks(dtype: torch.dtype) -> torch.Tensor:
    """Return blocks of one bit pattern, of two, and with one number among others that is special."""
    info = torch.finfo(dtype)
    inf = float("inf")
    nan = from_unsigned([unsigned(torch.tensor([inf], dtype=dtype))[0] + 1], dtype)  # a signalling one
    special = torch.cat(
        [torch.tensor([0.0, -0.0, 1.0, inf, -inf, info.tiny, info.tiny / 2, info.max], dtype=dtype), nan]
    )
    special = torch.cat([special, all_kinds_of_numbers(dtype, 64)[:16]])
    blocks = [each.repeat(BLOCK) for each in special]
    for i, each in enumerate(special):
        for background in (torch.zeros(BLOCK), torch.full((BLOCK,), -0.0), torch.randn(BLOCK)):
            block = background.to(dtype)
            block[7 * i % BLOCK] = each
            blocks.append(block)
    for zeros in range(BLOCK + 1):
        block = torch.randn(BLOCK).to(dtype)
        block[torch.randperm(BLOCK)[:zeros]] = 0.0
        blocks.append(block)
    # Every distance between two exponents.
    words = (1 << 8) if dtype != torch.float16 else (1 << 5)
    shift = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}[dtype]
    for exponent in range(words):
        blocks.append(from_unsigned([exponent << shift, (words - 1) << shift] * 16, dtype))
        blocks.append(from_unsigned([exponent << shift] * 31 + [3 << shift], dtype))
    return torch.cat(blocks)


@DTYPES
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(dtype: torch.dtype, length: int) -> None:
    assert_round_trip(all_kinds_of_numbers(dtype, max(length, 64))[:length])
    assert_round_trip(like_gradients(dtype, length, length))
    assert_round_trip(torch.zeros(length, dtype=dtype))


@DTYPES
def test_awkward_blocks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_round_trip(awkward_blocks(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_every_number_of_16_bits(dtype: torch.dtype) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    assert_round_trip(every.view(dtype))
    generator = torch.Generator().manual_seed(0)
    assert_round_trip(every[torch.randperm(1 << 16, generator=generator)].view(dtype))
    # Widened, each has the same blocks, with as few lower bits.
    wide = every.view(dtype).float()
    numbers = ~wide.isnan()
    assert_round_trip(torch.where(numbers, wide, 0.0))


@pytest.mark.parametrize("lower", range(17))
@pytest.mark.parametrize("zeros", [0.0, 0.1, 0.7, 0.97])
def test_lower_bits(lower: int, zeros: float) -> None:
    flat = like_gradients(torch.float32, 4 * BLOCK + 5, lower, zeros, lower)
    assert_round_trip(flat)
    assert_round_trip(flat.double())


def around_float32() -> torch.Tensor:
    """Return float64s that a float32 just holds and just does not: at its limits, and one bit further."""
    mantissas = {0, 1, 3 << 28} | {1 << bit for bit in range(52)} | {(1 << 52) - (1 << bit) for bit in range(52)}
    mantissas |= {(1 << 29) - 1}
    smallest_normal, too_large = 1023 - 126, 1023 + 128
    exponents = {0, 1, 2046, 2047, *range(smallest_normal - 27, smallest_normal + 3)}
    exponents |= set(range(too_large - 3, too_large + 3))
    signs = (0, 1 << 63)
    return from_unsigned(
        [sign | exponent << 52 | mantissa for sign in signs for exponent in exponents for mantissa in mantissas],
        torch.float64,
    )


@pytest.mark.parametrize("flushes", [False, True], ids=["denormals", "flush to zero"])
def test_which_float64s_are_coded_as_float32s(flushes: bool) -> None:
    numbers = torch.cat([around_float32(), all_kinds_of_numbers(torch.float64, 3000)])
    bits = numbers.view(torch.int64)
    comes_back = numbers.float().double().view(torch.int64) == bits
    held = torch.where(numbers.isnan(), bits & ((1 << 29) - 1) == 0, comes_back).tolist()
    assert 1000 < sum(held) < len(held) - 1000
    if not torch.set_flush_denormal(flushes):
        pytest.skip("this CPU cannot flush denormals to zero")
    try:
        for number, is_held in zip(numbers, held, strict=True):
            block = number.repeat(BLOCK)
            message = encode(block)
            assert (len(message) < 8 * BLOCK) == is_held
            assert_same_bits(decode(message, block), block)
    finally:
        torch.set_flush_denormal(False)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_any_bits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(WORDS)))
    bits = data.draw(st.lists(st.integers(0, (1 << 8 * dtype.itemsize) - 1), min_size=1, max_size=8))
    length = data.draw(st.integers(0, 100))
    draw = random.Random(data.draw(st.integers(0, 1 << 30)))
    assert_round_trip(from_unsigned([draw.choice([0, *bits]) for _ in range(length)], dtype))


@DTYPES
@pytest.mark.parametrize("kind", ["any", "gradients", "zeros"])
def test_adds(dtype: torch.dtype, kind: str) -> None:
    size = SECTION + 77
    flat = all_kinds_of_numbers(dtype, size)
    if kind != "any":
        flat = like_gradients(dtype, size, 1, 1.0 if kind == "zeros" else 0.5)
    before = all_kinds_of_numbers(dtype, size + 1)[1:]
    expected = before + flat
    expected[expected.isnan()] = torch.tensor(float("nan"), dtype=dtype)
    for _ in each_kind_of_instructions():
        result = before.clone()
        testing.decode(encode(flat), result, True)
        assert_same_bits(result, expected)


@DTYPES
def test_addresses_need_no_alignment(dtype: torch.dtype) -> None:
    flat = all_kinds_of_numbers(dtype, 500)
    message = torch.zeros(4 * 5000, dtype=torch.uint8)[1:]
    message = message[: testing.encode(flat, message)]
    assert_same_bits(decode(message, flat), flat)


def test_bytes_of_kinds() -> None:
    """What the format is for, in bits a value."""

    def bits(flat: torch.Tensor) -> float:
        return 8 * len(encode(flat)) / flat.numel()

    size = 64 * SECTION
    sparse = like_gradients(torch.float32, size, 0, 0.7)
    assert bits(like_gradients(torch.float32, size, 0)) < 27.9
    assert bits(like_gradients(torch.float32, size, 0, lower=0)) < 11.9
    assert bits(like_gradients(torch.float16, size, 0)) < 14.8
    assert bits(like_gradients(torch.bfloat16, size, 0)) < 11.9
    assert bits(sparse) < 10.5
    assert bits(torch.zeros(size)) < 0.51
    assert bits(torch.full((size,), -0.0)) < 8.51
    assert bits(like_gradients(torch.float32, size, 0).double()) < 27.9
    assert bits(all_kinds_of_numbers(torch.float32, size)) <= 32.51
    assert bits(torch.randn(size, dtype=torch.float64)) <= 64.51


# --- bad messages


def altered_messages(message: bytes, draw: random.Random, count: int) -> Iterator[bytes]:
    """Yield a message with bits flipped, bytes replaced, cut, extended or moved; or something else altogether."""
    for _ in range(count):
        changed = bytearray(message)
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            place = draw.randrange(len(changed)) if changed else 0
            # Sizes and heads come first, so that is where an altered byte does most.
            place = draw.choice([place, min(place, draw.randrange(80))])
            what = draw.randrange(7)
            if what == 0 and changed:
                changed[place] ^= 1 << draw.randrange(8)
            elif what == 1 and changed:
                changed[place] = draw.choice([0, 0x70, 0xF0, 0x80, 0xFF, draw.randrange(256)])
            elif what == 2:
                del changed[draw.randrange(len(changed) + 1) :]
            elif what == 3:
                changed += draw.randbytes(draw.choice([1, 2, 32, 130]))
            elif what == 4:
                del changed[place : place + draw.choice([1, 2, 4, 32])]
            elif what == 5:
                changed[place:place] = draw.randbytes(draw.choice([1, 2, 4, 32]))
            else:
                changed = bytearray(draw.randbytes(draw.choice([len(changed), draw.randrange(200)])))
        yield bytes(changed)


def complaint_of(coded: torch.Tensor, result: torch.Tensor) -> str | None:
    try:
        testing.decode(coded, result)
    except RuntimeError as error:
        return str(error)
    return None


def decode_altered(count: int, seed: int) -> tuple[int, int]:
    """Decode so many altered messages; return how many were refused, and how many decoded to something.

    A refused message must not have written anything, and one that decodes must decode to the same each time.
    """
    draw = random.Random(seed)
    refused = decoded = 0
    while refused + decoded < count:
        dtype = draw.choice(list(WORDS))
        length = draw.choice([0, 5, 32, 64, 100, SECTION + 40])
        zeros = draw.choice([0.0, 0.3, 0.9])
        flat = like_gradients(dtype, length, draw.randrange(1 << 30), zeros, draw.choice([0, 3, 7, 16]))
        message = bytes(encode(flat).tolist())
        for changed in altered_messages(message, draw, 50):
            # In memory of its own, so that a sanitizer sees where it ends.
            coded = torch.frombuffer(bytearray(changed), dtype=torch.uint8).clone() if changed else torch.empty(0)
            result = torch.full_like(flat, 3)
            complaint = complaint_of(coded, result)
            if complaint is None:
                for _ in each_kind_of_instructions():
                    assert_same_bits(decode(coded, flat), result)
                decoded += 1
            else:
                assert "expected" in complaint
                assert "received" in complaint
                assert (result == 3).all()
                refused += 1
    return refused, decoded


def test_altered_messages() -> None:
    refused, decoded = decode_altered(2000, 0)
    assert refused > 500
    assert decoded > 100


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m[:-1], "expected sections"),
        (lambda m: m + b"x", "expected a coded message of"),
        (lambda m: m[:2], "expected a coded message of at least"),
        (lambda m: m[:3] + b"\x75" + m[4:], "expected known forms"),
        (lambda m: m[:3] + b"\xf0" + m[4:], "bytes for the blocks in section 0"),
        (lambda m: m[:1] + b"\xff" + m[2:], "expected sections"),
    ],
)
def test_says_what_is_wrong(change: Callable[[bytes], bytes], complaint: str) -> None:
    flat = like_gradients(torch.float32, 70, 0)
    message = torch.tensor(list(change(bytes(encode(flat).tolist()))), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=complaint):
        testing.decode(message, flat)
