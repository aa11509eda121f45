"""What travels of a reduce-scatter's parts, and what owners make of it, against a slow twin; without processes."""

from __future__ import annotations

import random

import pytest
import torch

from ddp_hooks import _C

FORMS = {torch.float32: [torch.bfloat16, torch.float16], torch.float64: [torch.float32]}
SPECIAL = [0.0, -0.0, 1.5, 1 / 3, 65520.0, 1e-7, 1e-45, float("inf")]


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()])


def code_of(unit: torch.Tensor, zeros: bool, widths: bool, known_zero: bool) -> int:
    """Return the code that a unit should have."""
    if known_zero or (zeros and not bits(unit).any()):
        return 0
    if widths:
        for code, form in enumerate(FORMS.get(unit.dtype, []), 1):
            if torch.equal(bits(unit.to(form).to(unit.dtype)), bits(unit)):
                return code
    return 3


class Round:
    """What several ranks hold for each other, in stretches and units as a seed says."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.ranks = self.draw.choice([2, 3, 4])
        self.stretches = [
            (self.draw.randint(1, 70), self.draw.choice([1, 3, 8, 100])) for _ in range(self.draw.randint(1, 6))
        ]
        self.units = _C.ShardUnits(self.stretches)
        self.known_zero = [[self.draw.random() < 0.2 for _ in self.stretches] for _ in range(self.ranks)]
        self.inputs = [self._input(dtype, self.known_zero[rank]) for rank in range(self.ranks)]

    def _input(self, dtype: torch.dtype, known_zero: list[bool]) -> torch.Tensor:
        parts = []
        for _ in range(self.ranks):
            for (length, unit_length), is_zero in zip(self.stretches, known_zero, strict=True):
                stretch = torch.zeros(length, dtype=torch.float64)
                for begin in range(0, 0 if is_zero else length, unit_length):
                    numbers = stretch[begin : begin + unit_length]
                    kind = self.draw.choice(["random", "bfloat16", "special", "zero"])
                    if kind in ("random", "bfloat16"):
                        numbers.normal_()
                    if kind == "bfloat16":
                        numbers.copy_(numbers.bfloat16())
                    if kind == "special":
                        numbers.fill_(self.draw.choice(SPECIAL))
                parts.append(stretch)
        return torch.cat(parts).to(dtype)

    def ends(self) -> list[tuple[int, int, int]]:
        """Return of each unit which stretch it is of, and where it begins and ends."""
        found, offset = [], 0
        for i, (length, unit_length) in enumerate(self.stretches):
            for begin in range(0, length, unit_length):
                found.append((i, offset + begin, offset + min(length, begin + unit_length)))
            offset += length
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("zeros", "widths"), [(True, True), (True, False), (False, True), (False, False)])
def test_parts_travel_and_are_added_up(dtype: torch.dtype, zeros: bool, widths: bool, instructions: None) -> None:
    for seed in range(25):
        case = Round(seed, dtype)
        ranks, units = case.ranks, case.units
        numel = sum(length for length, _ in case.stretches)
        assert (units.numel, len(units)) == (numel, len(case.ends()))
        messages, all_sizes, rows = [], [], []
        for rank, flat in enumerate(case.inputs):
            # Rows that lie apart, as behind headers.
            codes = torch.full((ranks, units.code_bytes + 9), 255, dtype=torch.uint8)[:, 5:-4]
            sizes, narrow, sent, narrow_units = units.choose(codes, flat, rank, zeros, widths, case.known_zero[rank])
            expected = [
                [
                    code_of(flat[to * numel + begin : to * numel + end], zeros, widths, case.known_zero[rank][i])
                    for i, begin, end in case.ends()
                ]
                for to in range(ranks)
                if to != rank
            ]
            received = [
                [int(codes[to, u // 4]) >> u % 4 * 2 & 3 for u in range(len(units))]
                for to in range(ranks)
                if to != rank
            ]
            assert received == expected
            together = [code for part in expected for code in part]
            assert (sent, narrow_units) == (sum(c > 0 for c in together), sum(c in (1, 2) for c in together))
            assert sizes[rank] == 0
            assert sizes == units.packed_bytes(codes, rank, flat)
            assert (narrow == 0) == (narrow_units == 0)
            message = torch.empty(sum(sizes), dtype=torch.uint8)
            units.pack(message, flat, codes, rank)
            messages.append(message)
            all_sizes.append(sizes)
            rows.append(codes)
        for rank in range(ranks):
            received_sizes = [all_sizes[other][rank] for other in range(ranks)]
            received_bytes = torch.cat([messages[other].split(all_sizes[other])[rank] for other in range(ranks)])
            codes = torch.stack([rows[other][rank] for other in range(ranks)])
            order = case.draw.sample(range(ranks), ranks)
            parts = [flat[rank * numel : (rank + 1) * numel] for flat in case.inputs]
            sums = torch.empty(numel, dtype=dtype)
            units.sum(sums, case.inputs[rank], received_bytes, codes, rank, received_sizes, order)
            plain = parts[order[0]].clone()
            for other in order[1:]:
                plain += parts[other]
            assert bool(((bits(sums) == bits(plain)) | (sums.isnan() & plain.isnan())).all())
            # The parts themselves, too.
            flat = torch.empty(ranks * numel, dtype=dtype)
            units.unpack(flat, received_bytes, codes, rank, received_sizes)
            for other in range(ranks):
                if other != rank:
                    assert torch.equal(bits(flat[other * numel : (other + 1) * numel]), bits(parts[other]))


def test_what_is_refused() -> None:
    units = _C.ShardUnits([(8, 4)])
    codes = torch.zeros(2, 1, dtype=torch.uint8)
    flat = torch.zeros(16)
    with pytest.raises(RuntimeError, match="2 parts of 8"):
        units.choose(codes, flat[:15], 0, True, True, [])
    with pytest.raises(RuntimeError, match="rows of at least 1 bytes"):
        units.choose(codes.int(), flat, 0, True, True, [])
    with pytest.raises(RuntimeError, match="1 flags, received 2"):
        units.choose(codes, flat, 0, True, True, [True, False])
    with pytest.raises(RuntimeError, match="at least one element"):
        _C.ShardUnits([(0, 4)])
    # A narrow code where the type has no narrow form; more bytes than came.
    with pytest.raises(RuntimeError, match="is corrupted"):
        units.packed_bytes(codes + 1, 0, flat.bfloat16())
    with pytest.raises(RuntimeError, match="within 3 bytes"):
        units.sum(flat[:8], flat, torch.zeros(3, dtype=torch.uint8), codes + 15, 0, [0, 3], [1, 0])
