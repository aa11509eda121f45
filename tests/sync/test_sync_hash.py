"""The tensor hash against a slow, obvious twin in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

MASK64 = (1 << 64) - 1
PRIME = (1 << 127) - 1
BLOCK_BYTES = 4096


def make_keys():
    state = 0

    def next_key():
        nonlocal state
        state = (state + 0x9E3779B97F4A7C15) & MASK64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return z ^ (z >> 31)

    block = [next_key() >> 32 for _ in range(BLOCK_BYTES // 4 + 24)]
    high = next_key()
    return block, ((high << 64) | next_key()) >> 1


KEYS, POINT = make_keys()


def hash_slowly(data: bytes) -> tuple[int, int]:
    value = 0
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0")
        words = [int.from_bytes(block[i : i + 4], "little") for i in range(0, BLOCK_BYTES, 4)]
        for p in range(4):
            keyed = [(word + key) % 2**32 for word, key in zip(words, KEYS[8 * p :], strict=False)]
            total = sum(a * b for a, b in zip(keyed[::2], keyed[1::2], strict=True)) & MASK64
            value = (value * POINT + total) % PRIME
    value = (value * POINT + len(data)) % PRIME
    return value & MASK64, value >> 64


KERNELS = [kernel for kernel in testing.HashKernel.__members__.values() if testing.hash_kernel_is_supported(kernel)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("length", [0, 1, 3, 8, 4095, 4096, 4097, 8192, 30011])
def test_every_kernel_matches_the_twin(kernel, length):
    data = torch.randint(0, 256, (length,), dtype=torch.uint8).numpy().tobytes()
    assert testing.hash_bytes(data, kernel) == hash_slowly(data)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=9000))
def test_random_bytes_match_the_twin(data):
    assert testing.hash_bytes(data) == hash_slowly(data)


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_extreme_words_do_not_overflow(byte):
    data = byte * (3 * BLOCK_BYTES + 5)
    for kernel in KERNELS:
        assert testing.hash_bytes(data, kernel) == hash_slowly(data)


def test_golden_digests_never_change():
    assert testing.hash_bytes(b"") == (0, 0)
    assert testing.hash_bytes(b"abc") == (7147468103871075630, 2877643304049182449)
    assert testing.hash_bytes(bytes(range(256)) * 20) == hash_slowly(bytes(range(256)) * 20)


def test_order_position_and_length_count():
    block_a, block_b = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    variants = [b"", b"\0", b"\0\0", block_a, block_a + b"\0", block_a + block_b, block_b + block_a, b"\0" + block_a]
    assert len({testing.hash_bytes(data) for data in variants}) == len(variants)


def test_every_single_bit_counts():
    data = bytearray(torch.randint(0, 256, (600,), dtype=torch.uint8).numpy().tobytes())
    digests = {testing.hash_bytes(bytes(data))}
    for i in range(len(data) * 8):
        data[i // 8] ^= 1 << (i % 8)
        digests.add(testing.hash_bytes(bytes(data)))
        data[i // 8] ^= 1 << (i % 8)
    assert len(digests) == len(data) * 8 + 1
    # Half of a digest is compared alone, so each half has to tell them apart.
    assert len({low for low, _ in digests}) == len({high for _, high in digests}) == len(digests)


def test_an_unsupported_kernel_is_refused_rather_than_run():
    for kernel in testing.HashKernel.__members__.values():
        if not testing.hash_kernel_is_supported(kernel):
            with pytest.raises(RuntimeError, match="expected a kernel"):
                testing.hash_bytes(b"abc", kernel)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint8]
)
def test_tensors_hash_as_the_bytes_of_their_elements(dtype):
    tensor = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    raw = tensor.view(torch.uint8).numpy().tobytes()
    (digest,) = _C.hash_tensors([tensor]).tolist()
    assert [word & MASK64 for word in digest] == list(hash_slowly(raw))


def test_layout_in_memory_does_not_count():
    plain = torch.randn(2, 3, 4, 5)
    variants = [
        plain,
        plain.to(memory_format=torch.channels_last),
        plain.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([torch.zeros(1, 3, 4, 5), plain])[1:],
        plain.neg()._neg_view(),
    ]
    digests = _C.hash_tensors(variants)
    assert torch.equal(digests, digests[:1].expand_as(digests))
    z = torch.randn(6, dtype=torch.complex64)
    assert torch.equal(*_C.hash_tensors([z.conj(), z.conj().resolve_conj()]))


def test_bits_count_not_values():
    digests = _C.hash_tensors([torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(float("nan"))])
    assert len({tuple(row) for row in digests.tolist()}) == 3


def test_no_tensors_and_empty_tensors():
    assert _C.hash_tensors([]).shape == (0, 2)
    assert _C.hash_tensors([torch.empty(0, 3)]).tolist() == [[0, 0]]


def test_sparse_tensors_are_refused():
    with pytest.raises(RuntimeError, match="expected strided tensors"):
        _C.hash_tensors([torch.zeros(3, 3).to_sparse()])
