"""Compressed masks against a slow twin that reads bit by bit, as protocol.md says, and against golden words."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hooks import _C
from ddp_hooks_testing import _C as testing

BITMAP, RUNS = FORMS = (1, 2)
MOST_K = 40
PROTOCOL = Path(__file__).parents[2] / "docs" / "internals" / "protocol.md"

# --- the twin


def read_bits(words: list[int]) -> Iterator[int]:
    for word in words:
        for bit in range(64):
            yield word >> bit & 1


def read_number(bits: Iterator[int], k: int, most: int) -> int:
    """Read a Rice code; ValueError if it is more than `most` or the bits end within it."""
    quotient = 0
    for bit in bits:
        if bit == 1:
            break
        quotient += 1
        if quotient << k > most:
            raise ValueError("too far")
    else:
        raise ValueError("ends too soon")
    remainder = 0
    for place in range(k):
        bit = next(bits, None)
        if bit is None:
            raise ValueError("ends too soon")
        remainder |= bit << place
    number = quotient << k | remainder
    if number > most:
        raise ValueError("too far")
    return number


def decode(words: list[int], size: int) -> set[int]:
    """Return the indices of the set bits; ValueError if the words are no mask of that size."""
    if not words:
        raise ValueError("no header")
    form, k_distances, k_lengths, runs = words[0] & 255, words[0] >> 8 & 255, words[0] >> 16 & 255, words[0] >> 24
    if form not in FORMS or max(k_distances, k_lengths) > MOST_K or runs > size:
        raise ValueError("no header")
    if form == BITMAP and (k_distances or k_lengths or runs):
        raise ValueError("fields that the form does not have")
    bits = read_bits(words[1:])
    found: set[int] = set()
    if form == BITMAP:
        if len(words) - 1 < (size + 63) // 64:
            raise ValueError("ends too soon")
        found = {index for index in range(size) if next(bits)}
    else:
        at = 0
        for _ in range(runs):
            begin = at + read_number(bits, k_distances, size - 1 - at)
            end = begin + 1 + read_number(bits, k_lengths, size - 1 - begin)
            found.update(range(begin, end))
            at = end + 1
    if any(bits):
        raise ValueError("something is left")
    return found


def runs_of(size: int, indices: set[int]) -> list[tuple[int, int]]:
    """Return begin and end of each run."""
    edges = [i for i in range(size + 1) if (i in indices) != (i - 1 in indices)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def least_bits(numbers: list[int]) -> int:
    """Return the bits of Rice codes with the best k."""
    return min(sum((number >> k) + k + 1 for number in numbers) for k in range(26))


def words_of_forms(size: int, indices: set[int]) -> list[int]:
    """Return the number of words of each form, headers included, with the best k."""
    runs = runs_of(size, indices)
    starts = [begin - (runs[i - 1][1] + 1 if i else 0) for i, (begin, _) in enumerate(runs)]
    bits = [
        64 * ((size + 63) // 64),
        least_bits(starts) + least_bits([end - begin - 1 for begin, end in runs]),
    ]
    return [1 + (of_form + 63) // 64 for of_form in bits]


# --- masks


def mask_of(size: int, indices: set[int]) -> _C.UsageMask:
    mask = _C.UsageMask(size)
    for index in indices:
        mask.set(index)
    return mask


def scattered(rng: random.Random, size: int, density: float) -> set[int]:
    return {i for i in range(size) if rng.random() < density}


def clustered(rng: random.Random, size: int, clusters: int) -> set[int]:
    indices: set[int] = set()
    for _ in range(clusters if size else 0):
        begin = rng.randrange(size)
        indices.update(range(begin, min(size, begin + rng.choice([1, 2, 10, 100]))))
    return indices


def check(size: int, indices: set[int]) -> list[int]:
    """Send a mask there and back, and compare all that is known of it with the twin; return its words."""
    words = testing.compress(mask_of(size, indices))
    assert decode(words, size) == indices
    of_forms = words_of_forms(size, indices)
    assert len(words) == min(of_forms) <= 1 + (size + 63) // 64
    assert words[0] & 255 == FORMS[of_forms.index(min(of_forms))]  # a bitmap if it is not longer
    received = _C.UsageMask(size)
    testing.merge_compressed(words, received)
    assert received == mask_of(size, indices)
    return words


# --- tests

FEW = {5, 9, 190, 191, 999}
RANGES = {*range(10, 30), *range(300, 450), 999}


@pytest.mark.parametrize(
    ("size", "indices", "words"),
    [
        (70, set(range(0, 70, 3)), [0x0000000000000001, 0x9249249249249249, 0x0000000000000024]),
        (1000, FEW, [0x0000000004000702, 0x00000A68133A0B0B]),
        (1000, set(range(1000)) - FEW, [0x0000000004070002, 0x000004D026741613]),
        (1000, RANGES, [0x0000000003050702, 0x00005242B01B2715]),
        (1000, set(), [0x0000000000000002]),
        (1000, set(range(1000)), [0x0000000001090002, 0x0000000000000F3D]),
        (0, set(), [0x0000000000000001]),
    ],
    ids=["bitmap", "few", "all but few", "runs", "empty", "full", "nothing"],
)
def test_golden_words(size: int, indices: set[int], words: list[int]) -> None:
    assert check(size, indices) == words
    assert f"| {' '.join(f'`{word:016x}`' for word in words)} |" in PROTOCOL.read_text()


@pytest.mark.parametrize("size", range(301))
def test_every_size_at_every_density(size: int) -> None:
    rng = random.Random(size)
    check(size, set())
    check(size, set(range(size)))
    for density in (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99):
        check(size, scattered(rng, size, density))
    for clusters in (1, 2, 5):
        indices = clustered(rng, size, clusters)
        check(size, indices)
        check(size, set(range(size)) - indices)


@pytest.mark.parametrize("size", [4096, 5000, 20_000])
@pytest.mark.parametrize("seed", range(2))
def test_longer_masks(size: int, seed: int) -> None:
    rng = random.Random(seed)
    for density in (0.001, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        check(size, scattered(rng, size, density))
    for clusters in (1, 10, 100):
        indices = clustered(rng, size, clusters)
        check(size, indices)
        check(size, set(range(size)) - indices)
    # Distances of very different lengths, for which the mean says little about the best k.
    check(size, {size - 1 - 2 * i for i in range(size // 20)})
    check(size, {int(size * rng.random() ** 8) for _ in range(size // 10)})
    check(size, {2**i for i in range(12)})


@pytest.mark.parametrize(
    ("size", "count", "most_bytes"),
    [(250_037, 1_000, 1_500), (1_000_000, 1_000, 1_800), (10_000_000, 10_000, 16_500)],
)
def test_few_rows_of_a_large_table(size: int, count: int, most_bytes: int) -> None:
    rng = random.Random(count)
    few = set(rng.sample(range(size), count))
    words = testing.compress(mask_of(size, few))
    assert 8 * len(words) < most_bytes
    assert decode(words, size) == few
    received = _C.UsageMask(size)
    testing.merge_compressed(words, received)
    assert received == mask_of(size, few)
    # And all but these.
    rest = _C.UsageMask(size, True)
    for index in few:
        rest.clear(index)
    others = testing.compress(rest)
    assert abs(len(others) - len(words)) <= 1
    testing.merge_compressed(others, received)
    assert received.count() == size


def test_ranges_of_a_large_table() -> None:
    size = 1_000_000
    rng = random.Random(0)
    indices = {i for begin in rng.sample(range(size - 1000), 100) for i in range(begin, begin + rng.randrange(1, 1000))}
    words = testing.compress(mask_of(size, indices))
    assert (words[0] & 255, 8 * len(words) < 500) == (RUNS, True)
    received = _C.UsageMask(size)
    testing.merge_compressed(words, received)
    assert received == mask_of(size, indices)


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000, 20_000])
def test_merging_is_a_union(size: int) -> None:
    rng = random.Random(size)
    received, twin = _C.UsageMask(size), set()
    for density in (0.001, 0.4, 0.02, 0.99, 1.0):
        indices = scattered(rng, size, density)
        words = testing.compress(mask_of(size, indices))
        # As they arrive: beside longer ones, with zeros after them.
        testing.merge_compressed(words + [0] * rng.randrange(5), received)
        twin |= indices
        assert received == mask_of(size, twin)


def damaged(rng: random.Random, words: list[int]) -> list[int]:
    words = list(words)
    for _ in range(rng.randint(1, 3)):
        place = rng.choice([0, rng.randrange(len(words))]) if words else 0
        match rng.randrange(6):
            case 0 if words:
                del words[place]
            case 1:
                words.insert(place, rng.choice([0, 1, rng.getrandbits(64), 2**64 - 1]))
            case 2 if words:
                words[place] = rng.choice([0, 2**63, rng.getrandbits(64), 2**64 - 1])
            case 3 if words:  # another form, or another k
                shift = rng.choice([0, 8, 16])
                words[0] = words[0] & ~(255 << shift) | rng.choice([0, 1, 2, 3, 4, 5, 7, 40, 41, 64, 255]) << shift
            case 4 if words:
                words[0] = words[0] & 0xFFFFFF | rng.choice([0, 1, (words[0] >> 24) + 1, 2**40 - 1]) % 2**40 << 24
            case _ if words:
                words[place] ^= 1 << rng.randrange(64)
    return words


def check_as_the_twin_does(words: list[int], size: int, before: set[int]) -> bool:
    """Merge what may be no mask: the twin and the codec take it, or both refuse it and nothing changes."""
    received = mask_of(size, before)
    try:
        indices = decode(words, size)
    except ValueError:
        with pytest.raises(ValueError, match=f"compressed mask of {size} units: expected .* received "):
            testing.merge_compressed(words, received)
        assert received == mask_of(size, before)
        return False
    testing.merge_compressed(words, received)
    assert received == mask_of(size, before | indices)
    return True


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 300, 2000])
def test_damaged_masks(size: int) -> None:
    rng = random.Random(size)
    taken = 0
    for _ in range(600):
        indices = rng.choice([scattered, clustered])(rng, size, rng.choice([0, 1, 3]))
        if rng.random() < 0.5:
            indices = scattered(rng, size, rng.choice([0.01, 0.1, 0.3, 0.9, 0.99]))
        words = damaged(rng, testing.compress(mask_of(size, indices)))
        taken += check_as_the_twin_does(words, size, scattered(rng, size, 0.1))
    assert 0 < taken < 600


@pytest.mark.parametrize("size", [0, 1, 64, 100, 1000])
def test_random_words(size: int) -> None:
    rng = random.Random(size)
    for _ in range(600):
        k, second_k = rng.choice([0, 1, 5, 40]), rng.choice([0, 1, 5, 40])
        header = rng.choice(FORMS) | k << 8 | second_k << 16 | rng.choice([0, 1, 3, size]) << 24
        words = [rng.choice([header, header, rng.getrandbits(64)])]
        sparse = rng.random() < 0.5
        words += [rng.getrandbits(64) & (rng.getrandbits(64) if sparse else -1) for _ in range(rng.randrange(20))]
        check_as_the_twin_does(words, size, scattered(rng, size, 0.1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("filling", [0, 1, 1 << 63, 2**64 - 1])
def test_what_is_sent_to_waste_time(form: int, filling: int) -> None:
    """The time of decoding is bounded by the size of the mask, whatever is said and however long it is."""
    size = 100_000
    received = _C.UsageMask(size)
    for k in (0, 1, 17, 40):
        for count in (1, size, 2**40 - 1):
            words = [form | k << 8 | k << 16 | count << 24] + [filling] * 200_000
            start = time.thread_time()
            try:
                testing.merge_compressed(words, received)
            except ValueError:
                assert received.count() == 0
            assert time.thread_time() - start < 0.5
            received = _C.UsageMask(size)
