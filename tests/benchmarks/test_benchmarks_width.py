"""Shares of narrow gradients in width_shares.py, against a count of number by number."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_benchmarks_workloads import needs_transformers
from torch import nn

import width_shares

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str) -> str:
    argv = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def kinds_of(bits: int) -> set[str]:
    """What a float32 number with these bits is, one bit pattern after another."""
    kinds = set()
    exponent, digits = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if bits & 0xFFFF == 0:
        kinds |= {"bfloat16", "16 bits", "24 bits"}
    if bits & 0xFF == 0:
        kinds.add("24 bits")
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if exponent == 0xFF:
        is_half = digits == 0
    else:  # a multiple of 2^-24, of at most 11 digits, up to the largest
        scaled = abs(value) * 2.0**24
        is_half = scaled == int(scaled) and abs(value) <= 65504
        while is_half and scaled >= 2048:
            scaled /= 2
            is_half = scaled == int(scaled)
    if is_half:
        kinds |= {"float16", "16 bits", "24 bits"}
    if value == 0:
        kinds.add("zero")
    return kinds


def odd_numbers() -> list[int]:
    """Zeros, infinities, denormals of three dtypes, what is just too large or too small, and anything."""
    values = [0.0, -0.0, math.inf, -math.inf, 1.0, -1.5, 1 + 2**-7, 1 + 2**-10, 1 + 2**-11, 1 + 2**-15, 1 + 2**-23]
    values += [65504.0, 65520.0, 65536.0, 2**-14, 2**-24, 3 * 2**-24, 2**-25, 2**-126, 2**-133, 2**-140, 2**-149, 3e38]
    patterns = [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
    generator = np.random.default_rng(5)
    for kept in (0xFFFFFFFF, 0xFFFFFF00, 0xFFFF0000, 0xFFFFE000):
        patterns += [int(bits) & kept for bits in generator.integers(0, 1 << 32, 300)]
    # A NaN in float16 has a payload of 10 bits, and does not say what it was.
    return [bits for bits in patterns if not (bits >> 23 & 0xFF == 0xFF and bits & 0x7FFFFF)]


def test_numbers_are_what_a_count_by_hand_says() -> None:
    patterns = odd_numbers()
    flags = width_shares.flags_of(np.array(patterns, dtype=np.uint32).view(np.float32))
    for bits, flag in zip(patterns, flags, strict=True):
        found = {kind for kind, missing in width_shares.KINDS.items() if any(flag & one == 0 for one in missing)}
        assert found == kinds_of(bits), hex(bits)


def test_a_nan_is_narrow_to_the_bit_or_not_at_all() -> None:
    quiet, payload, low = 0x7FC00000, 0x7FC1_0000, 0x7FC0_0001
    flags = width_shares.flags_of(np.array([quiet, payload, low], dtype=np.uint32).view(np.float32))
    assert [flag & width_shares.NOT_BFLOAT16 for flag in flags] == [0, 0, width_shares.NOT_BFLOAT16]
    assert flags[2] & width_shares.NOT_24_BITS


def test_stretches_are_of_one_kind_or_not() -> None:
    generator = np.random.default_rng(6)
    for _ in range(50):
        flags = generator.choice([0, 1, 2, 3, 7, 15], int(generator.integers(1, 40))).astype(np.uint8)
        length = int(generator.integers(1, 12))
        found = width_shares.narrow_numbers(flags, length)
        expected = dict.fromkeys(width_shares.KINDS, 0)
        for start in range(0, len(flags), length):
            stretch = flags[start : start + length]
            for kind, missing in width_shares.KINDS.items():
                if any(all(number & flag == 0 for number in stretch) for flag in missing):
                    expected[kind] += len(stretch)
        assert found == expected


def test_units_are_those_of_the_policy() -> None:
    assert width_shares.unit_length(torch.empty(1000, 384)) == 384
    assert width_shares.unit_length(torch.empty(100_000, 8)) == 64  # 256 bytes
    assert width_shares.unit_length(torch.empty(4, 100_000)) * 4 <= 64 << 10
    assert width_shares.unit_length(torch.empty(128, 64)) == 128 * 64  # less than 64 KiB


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(300, 100))
        self.wide = nn.Parameter(torch.zeros(100, 100))


class _Given:
    """Rank r's gradients: of one parameter narrow numbers but for one row, of the other wide ones."""

    label, dtype, passes = "given", "bfloat16", 1

    def build(self) -> nn.Module:
        return _Two()

    def backward(self, model: nn.Module, pattern: int, rank: int) -> None:
        narrow = torch.ones(300, 100)
        narrow[rank] = 1 + 2**-20
        model.narrow.grad = narrow  # type: ignore[union-attr]
        model.wide.grad = torch.full((100, 100), 1 + 2**-20)  # type: ignore[union-attr]


def test_ranks_and_sums() -> None:
    row = width_shares.measure(_Given(), 2)  # type: ignore[arg-type]
    assert row["dense_bytes"] == 160_000
    assert row["on_one_rank"]["16 bits"]["units"] == pytest.approx(299 / 400, abs=1e-4)
    assert row["on_every_rank"]["16 bits"]["units"] == pytest.approx(298 / 400, abs=1e-4)
    assert row["of_the_sum"]["16 bits"]["units"] == pytest.approx(298 / 400, abs=1e-4)
    assert row["on_one_rank"]["16 bits"]["256"] == pytest.approx((30_000 - 256) / 40_000, abs=1e-4)
    assert row["on_one_rank"]["16 bits"]["16384"] == pytest.approx((30_000 - 16_384) / 40_000, abs=1e-4)


@needs_transformers
@pytest.mark.thorough
def test_the_shares_are_written_down(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--passes", "1", "2", "--workloads", "vit_autocast", "resnet_autocast"]
    printed = run("width_shares.py", *options, "--folder", str(tmp_path))
    results = json.loads((tmp_path / "width_shares.json").read_text())
    assert results["sentence"] in printed
    assert width_shares.shares_table(results["rows"]).count("\n") == len(results["rows"]) + 1 == 11
    for row in results["rows"]:
        share = row["on_one_rank"]["16 bits"]["256"]
        assert share > 0.9 if (row["dtype"], row["passes"]) in {("bfloat16", 1), ("float16", 1)} else share < 0.9
