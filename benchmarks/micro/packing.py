"""The part of micro.py about what owners sum: what it takes to pack contributions and to add them up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tools import harness

BYTES = 192 << 20  # fits into no cache of a core's own
ROW = 64  # elements of a short slice
ROWS = 10_000

Call = Callable[[], Any]


def run_packing(rounds: int) -> list[dict[str, Any]]:
    """Pack and add, on one thread, each beside a `copy_` of as many bytes in the same round."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return [*_long_slices(rounds), *_rows(rounds)]


def _long_slices(rounds: int) -> list[dict[str, Any]]:
    import torch

    from ddp_hooks_testing import _C as testing

    flat = torch.randn(BYTES // 4)
    other, numel = torch.empty_like(flat), flat.numel()
    buffer = torch.empty(4 * BYTES, dtype=torch.uint8)

    def copy() -> None:
        other.copy_(flat)

    def pack() -> None:
        testing.pack(buffer, flat, [(0, numel)])

    pack()
    correct = torch.equal(buffer[:BYTES].view(torch.float32), flat)
    common = {"slice_bytes": BYTES, "slices": 1}
    rows = [{"operation": "pack", **common, **_time(pack, copy, 2 * BYTES, rounds), "correct": correct}]
    for i in range(1, 4):
        buffer[i * BYTES : (i + 1) * BYTES].copy_(buffer[:BYTES])
    own, received = testing.Contribution(own=True), [testing.Contribution(i * BYTES) for i in range(4)]
    cases = {"own + packed": [own, received[0]], "packed + own": [received[0], own], "4 packed": received}
    for kinds, contributions in cases.items():
        result = flat.clone()
        sums = [testing.SliceSum(result, 0, numel, contributions, 2.0)]

        def add(what: Any = sums) -> None:
            testing.sum_contributions(buffer, what)

        add()
        correct = torch.equal(result, flat if len(contributions) == 2 else 2 * flat)
        moved = BYTES * (1 + len(contributions))
        rows.append({"operation": f"sum, {kinds}", **common, **_time(add, copy, moved, rounds), "correct": correct})
    return [{"part": "packing", **row} for row in rows]


def _rows(rounds: int) -> list[dict[str, Any]]:
    """Many short slices: every other row of a table."""
    import torch

    from ddp_hooks_testing import _C as testing

    table = torch.randn(2 * ROWS, ROW)
    used = table[::2].clone()
    flat, other = table.view(-1), torch.empty_like(used)
    size = 4 * ROW
    buffer = torch.empty(ROWS * size, dtype=torch.uint8)
    begins = [2 * i * ROW for i in range(ROWS)]

    def copy() -> None:
        other.copy_(used)

    def pack(length: int) -> Call:
        slices = [(begin, length) for begin in begins]
        return lambda: testing.pack(buffer, flat, slices)

    def add(length: int) -> Call:
        sums = [
            testing.SliceSum(flat, begin, length, [testing.Contribution(own=True), testing.Contribution(i * size)], 2.0)
            for i, begin in enumerate(begins)
        ]
        return lambda: testing.sum_contributions(buffer, sums)

    pack(ROW)()
    packed = torch.equal(buffer.view(torch.float32), used.view(-1))
    add(ROW)()
    added = torch.equal(table[::2], used)
    rows = []
    for operation, make, moved, correct in (
        ("pack, rows", pack, 2 * ROWS * size, packed),
        ("sum, own + packed, rows", add, 3 * ROWS * size, added),
    ):
        row = {"operation": operation, "slice_bytes": size, "slices": ROWS}
        row |= _time(make(ROW), copy, moved, 10 * rounds, make(0))
        rows.append({"part": "packing", **row, "correct": correct})
    return rows


def _time(call: Call, copy: Call, moved: int, rounds: int, binding: Call | None = None) -> dict[str, Any]:
    """Time a call that moves so many bytes, a copy, and the same call of slices without an element, in turns."""
    calls = [call, copy, *([binding] if binding else [])]
    samples: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for each, times in zip(calls, samples, strict=True):
            start = time.perf_counter()
            each()
            if turn > 0:  # the first one touches memory for the first time
                times.append(time.perf_counter() - start)
    # A copy reads and writes. Bindings make Python's lists into slices, which is no kernel's work.
    kernel = [a - (samples[2][i] if binding else 0.0) for i, a in enumerate(samples[0])]
    copied = ROWS * ROW * 4 if binding else BYTES
    shares = [(moved / a) / (2 * copied / b) for a, b in zip(kernel, samples[1], strict=True)]
    return {
        "moved_bytes": moved,
        "seconds": harness.quartiles(kernel),
        "baseline": "copy_ of as many bytes",
        "baseline_seconds": harness.quartiles(samples[1]),
        "share_of_copy_bandwidth": harness.quartiles(shares),
        "time_over_copy": harness.quartiles([a / b for a, b in zip(kernel, samples[1], strict=True)]),
        "binding_seconds": harness.quartiles(samples[2]) if binding else None,
        "rounds": rounds,
    }


def describe_packing(rows: Sequence[dict[str, Any]]) -> str:
    def cell(operation: str) -> str:
        share = next(row["share_of_copy_bandwidth"]["median"] for row in rows if row["operation"] == operation)
        return f"{share:.2f}"

    in_place = f"{cell('sum, own + packed')} and {cell('sum, packed + own')}"
    short = f"packed at {cell('pack, rows')} and added at {cell('sum, own + packed, rows')}"
    wrong = sum(not row["correct"] for row in rows)
    return (
        f"In GB/s over those of a copy, {BYTES >> 20} MiB of float32 are packed at {cell('pack')}, added to what lies "
        f"in place at {in_place}, four packed ones at {cell('sum, 4 packed')}; {ROWS:,} rows of {4 * ROW} bytes are "
        f"{short}. "
        f"{f'{wrong} of {len(rows)} rows gave a wrong result.' if wrong else 'All results were right.'}"
    )
