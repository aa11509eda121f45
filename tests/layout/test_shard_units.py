"""What travels of a reduce-scatter's parts, and what owners make of it, against a slow twin; without processes."""

from __future__ import annotations

import random

import pytest
import torch

from ddp_hooks import _C

SPECIAL = [0.0, -0.0, 1.5, 1 / 3, 65520.0, 1e-7, 1e-45, float("inf")]


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()])


def is_sent(unit: torch.Tensor, zeros: bool, known_zero: bool) -> bool:
    """Return whether a unit should be sent."""
    return not known_zero and not (zeros and not bits(unit).any())


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
@pytest.mark.parametrize("zeros", [True, False])
def test_parts_travel_and_are_added_up(dtype: torch.dtype, zeros: bool, instructions: None) -> None:
    for seed in range(25):
        case = Round(seed, dtype)
        ranks, units = case.ranks, case.units
        numel = sum(length for length, _ in case.stretches)
        assert (units.numel, len(units)) == (numel, len(case.ends()))
        messages, all_counts, rows = [], [], []
        for rank, flat in enumerate(case.inputs):
            # Rows that lie apart, as behind headers.
            masks = torch.zeros((ranks, units.mask_bytes + 9), dtype=torch.uint8)[:, 5:-4]
            sent = units.choose(masks, flat, rank, zeros, case.known_zero[rank])
            expected = [
                [
                    to != rank and is_sent(flat[to * numel + begin : to * numel + end], zeros, case.known_zero[rank][i])
                    for i, begin, end in case.ends()
                ]
                for to in range(ranks)
            ]
            received = [[bool(int(masks[to, u // 8]) >> u % 8 & 1) for u in range(len(units))] for to in range(ranks)]
            assert received == expected
            assert sent == sum(map(sum, expected))
            counts = units.sent_elements(masks)
            lengths = [end - begin for _, begin, end in case.ends()]
            assert counts == [sum(n for n, one in zip(lengths, each, strict=True) if one) for each in expected]
            message = torch.empty(sum(counts), dtype=dtype)
            sizes = units.write(message.view(torch.uint8), flat, masks, rank, False)
            assert sizes == [count * dtype.itemsize for count in counts]
            messages.append(message)
            all_counts.append(counts)
            rows.append(masks)
        for rank in range(ranks):
            elements = torch.cat([messages[other].split(all_counts[other])[rank] for other in range(ranks)])
            masks = torch.stack([rows[other][rank] for other in range(ranks)])
            order = case.draw.sample(range(ranks), ranks)
            parts = [flat[rank * numel : (rank + 1) * numel] for flat in case.inputs]
            sums = torch.empty(numel, dtype=dtype)
            units.sum(sums, case.inputs[rank], elements, masks, rank, order)
            plain = parts[order[0]].clone()
            for other in order[1:]:
                plain += parts[other]
            assert bool(((bits(sums) == bits(plain)) | (sums.isnan() & plain.isnan())).all())
            # The parts themselves, too.
            flat = torch.empty(ranks * numel, dtype=dtype)
            units.unpack(flat, elements, masks, rank)
            for other in range(ranks):
                if other != rank:
                    assert torch.equal(bits(flat[other * numel : (other + 1) * numel]), bits(parts[other]))


def test_one_part_for_all() -> None:
    case = Round(3, torch.float32)
    ranks, units, part = case.ranks, case.units, case.inputs[0][: case.units.numel].clone()
    messages = []
    for flat in (part, part.repeat(ranks)):
        masks = torch.zeros(ranks, units.mask_bytes, dtype=torch.uint8)
        sent = units.choose(masks, flat, 1, True, [])
        message = torch.zeros(sum(_C.most_coded_bytes(n, flat) for n in units.sent_elements(masks)), dtype=torch.uint8)
        sizes = units.write(message, flat, masks, 1, True)
        messages.append((sent, masks.tolist(), sizes, message[: sum(sizes)].tolist()))
    assert messages[0] == messages[1]
    # The sum may take the place of the part.
    masks = torch.full((2, units.mask_bytes), 255, dtype=torch.uint8)
    expected = part + part
    units.sum(part, part, part.repeat(2), masks, 0, [1, 0])
    assert torch.equal(bits(part), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_are_coded_one_by_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts = [0, 1, 700, 0, 5000, 33]
    parts = [torch.randn(5000).mul(1e-3).to(dtype) for _ in counts]
    parts[4] = torch.randint(-(1 << 15), 1 << 15, (dtype.itemsize // 2 * 5000,), dtype=torch.int16).view(dtype)
    numbers = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    # Of each part the first few elements, which are a unit each. Those of one part are not next to each other.
    units = _C.ShardUnits([(5000, 1)])
    chosen = torch.arange(5000) < torch.tensor(counts)[:, None]
    parts[2][:1400:2] = parts[2][:700].clone()
    chosen[2] = (torch.arange(5000) % 2 == 0) & (torch.arange(5000) < 1400)
    masks = (chosen.view(6, -1, 8).int() << torch.arange(8)).sum(-1).to(torch.uint8)
    assert units.sent_elements(masks) == counts
    room = torch.empty(sum(_C.most_coded_bytes(count, numbers) for count in counts), dtype=torch.uint8)
    sizes = units.write(room, torch.cat(parts), masks, 0, True)
    # Noise stays as it is.
    assert sizes[4] == 5000 * dtype.itemsize
    assert sizes[0] == sizes[3] == 0
    assert sizes[2] < 700 * dtype.itemsize
    decoded = torch.empty_like(numbers)
    _C.decode_messages(decoded, room[: sum(sizes)], sizes, counts)
    assert torch.equal(bits(decoded), bits(numbers))
    with pytest.raises(RuntimeError, match="from rank 2 of the process group"):
        _C.decode_messages(decoded, room, [0, sizes[1], sizes[2] - 1, *sizes[3:]], counts)


def test_what_ranks_of_a_host_save_by_adding_up() -> None:
    torch.manual_seed(0)
    numel = 1 << 17
    units = _C.ShardUnits([(numel, numel)])
    masks = torch.tensor([[0], [1]], dtype=torch.uint8)
    room = torch.empty(_C.most_coded_bytes(numel, torch.empty(0)), dtype=torch.uint8)
    contributions = [torch.randn(numel).mul(1e-3).bfloat16().float() for _ in range(3)]

    def bits_of(numbers: torch.Tensor) -> float:
        return units.write(room, numbers, masks, 0, True)[1] * 8 / numel

    assert 11 < bits_of(contributions[0]) < 12
    assert 17 < bits_of(contributions[0] + contributions[1]) < 18.5
    assert bits_of(contributions[0] + contributions[1] + contributions[2]) < 20


def test_what_is_refused() -> None:
    units = _C.ShardUnits([(8, 4)])
    masks = torch.zeros(2, 1, dtype=torch.uint8)
    flat = torch.zeros(16)
    with pytest.raises(RuntimeError, match="2 parts of 8 elements or one for all"):
        units.choose(masks, flat[:15], 0, True, [])
    with pytest.raises(RuntimeError, match="rows of at least 1 bytes"):
        units.choose(masks.int(), flat, 0, True, [])
    with pytest.raises(RuntimeError, match="1 flags, received 2"):
        units.choose(masks, flat, 0, True, [True, False])
    with pytest.raises(RuntimeError, match="at least one element"):
        _C.ShardUnits([(0, 4)])
    # More than came.
    with pytest.raises(RuntimeError, match="within 4 bytes"):
        units.sum(flat[:8], flat, torch.zeros(1), masks + 3, 0, [1, 0])
    with pytest.raises(RuntimeError, match="expected a range within 4 elements"):
        _C.decode_messages(flat, torch.zeros(4, dtype=torch.uint8), [5], [2])
