"""The part of micro.py about numbers in fewer bits: what it takes to find them, to pack them, and to add them up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tools import harness

BYTES = 192 << 20  # of the wide numbers; fits into no cache of a core's own; a multiple of every unit
UNIT_BYTES = (256, 1536, 64 << 10)
ROW = 64  # elements of a short slice
ROWS = 10_000

Call = Callable[[], Any]


def run_width(rounds: int) -> list[dict[str, Any]]:
    """Scan, pack and add, on one thread, each beside a `copy_` of as many wide bytes in the same round."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return [*_scans(rounds), *_long_slices(rounds), *_rows(rounds)]


def _scans(rounds: int) -> list[dict[str, Any]]:
    import torch

    from ddp_hooks import _C

    rows = []
    kinds = (
        ("bfloat16", torch.float32, torch.bfloat16, 0),
        ("float16", torch.float32, torch.float16, 1),
        ("float32", torch.float64, torch.float32, 0),
        ("no narrow form", torch.float32, torch.float32, None),
        ("zeros", torch.float32, torch.float32, None),
    )
    for name, dtype, form, held in kinds:
        table = _numbers(dtype, form)
        if name == "zeros":
            table.zero_()
        other = torch.empty_like(table)
        for unit_bytes in UNIT_BYTES:
            length = unit_bytes // table.element_size()
            units = BYTES // unit_bytes

            def scan(flat: Any = table, unit_length: int = length, widths: bool = True) -> Any:
                return _C.start_unit_scan(flat, 0, flat.numel(), unit_length, widths=widths)

            answer = scan()
            nonzero = sum(word.bit_count() for word in answer.wait()[0])
            inexact = [sum(word.bit_count() for word in words) for words in answer.inexact()]
            expected = [units if held is None or k != held else 0 for k in range(2)]
            correct = nonzero == (0 if name == "zeros" else units)
            correct &= inexact == ([0, 0] if name == "zeros" else expected)
            rows.append(
                {
                    "operation": f"scan, {name}",
                    "slice_bytes": unit_bytes,
                    "slices": units,
                    **_time(scan, lambda to=other, flat=table: to.copy_(flat), BYTES, rounds),
                    "correct": correct,
                }
            )
    return [{"part": "width", **row} for row in rows]


def _numbers(dtype: Any, form: Any) -> Any:
    """Return numbers of one type that another one holds: as small as gradients are, unless they would be denormals."""
    import torch

    scale = 1.0 if form == torch.float16 else 1e-6
    return torch.randn(BYTES // dtype.itemsize, dtype=torch.float32).mul_(scale).to(form).to(dtype)


def _long_slices(rounds: int) -> list[dict[str, Any]]:
    import torch

    from ddp_hooks import _C
    from ddp_hooks_testing import _C as testing

    rows = []
    for dtype, form, width in (
        (torch.float32, torch.bfloat16, _C.Width.BFLOAT16),
        (torch.float32, torch.float16, _C.Width.FLOAT16),
        (torch.float64, torch.float32, _C.Width.FLOAT32),
    ):
        name = str(form).removeprefix("torch.")
        flat, other = _numbers(dtype, form), torch.empty(BYTES // dtype.itemsize, dtype=dtype)
        numel = flat.numel()
        size = testing.packed_bytes(numel, width, flat.element_size())
        buffer = torch.empty(4 * size, dtype=torch.uint8)

        def copy(to: Any = other, of: Any = flat) -> None:
            to.copy_(of)

        def pack(to: Any = buffer, of: Any = flat, as_width: Any = width) -> None:
            testing.pack(to, of, [(0, of.numel(), as_width)])

        pack()
        correct = torch.equal(buffer[:size].view(form), flat.to(form))
        common = {"slice_bytes": BYTES, "slices": 1}
        rows.append(
            {"operation": f"pack, {name}", **common, **_time(pack, copy, BYTES + size, rounds), "correct": correct}
        )
        for i in range(1, 4):
            buffer[i * size : (i + 1) * size].copy_(buffer[:size])
        own, received = testing.Contribution(own=True), [testing.Contribution(i * size, width) for i in range(4)]
        cases = {"own + packed": [own, received[0]], "packed + own": [received[0], own], "4 packed": received}
        for kinds, contributions in cases.items():
            result = flat.clone()
            sums = [testing.SliceSum(result, 0, numel, contributions, 2.0)]

            def add(of: Any = buffer, what: Any = sums) -> None:
                testing.sum_contributions(of, what)

            add()
            correct = torch.equal(result, flat if len(contributions) == 2 else 2 * flat)
            moved = BYTES + sum(size if each is not own else BYTES for each in contributions)
            operation = f"sum, {kinds}, {name}"
            rows.append({"operation": operation, **common, **_time(add, copy, moved, rounds), "correct": correct})
    return [{"part": "width", **row} for row in rows]


def _rows(rounds: int) -> list[dict[str, Any]]:
    """Many short slices: every other row of a table of bfloat16 numbers."""
    import torch

    from ddp_hooks import _C
    from ddp_hooks_testing import _C as testing

    table = torch.randn(2 * ROWS, ROW).bfloat16().float()
    used = table[::2].clone()
    flat, other = table.view(-1), torch.empty_like(used)
    width = _C.Width.BFLOAT16
    size = testing.packed_bytes(ROW, width, 4)
    buffer = torch.empty(ROWS * size, dtype=torch.uint8)
    begins = [2 * i * ROW for i in range(ROWS)]

    def copy() -> None:
        other.copy_(used)

    def pack(length: int) -> Call:
        slices = [(begin, length, width) for begin in begins]
        return lambda: testing.pack(buffer, flat, slices)

    def add(length: int) -> Call:
        sums = [
            testing.SliceSum(
                flat, begin, length, [testing.Contribution(own=True), testing.Contribution(i * size, width)], 2.0
            )
            for i, begin in enumerate(begins)
        ]
        return lambda: testing.sum_contributions(buffer, sums)

    pack(ROW)()
    packed = torch.equal(buffer.view(torch.bfloat16), used.bfloat16().view(-1))
    add(ROW)()
    added = torch.equal(table[::2], used)
    rows = []
    for operation, make, moved, correct in (
        ("pack, rows, bfloat16", pack, ROWS * (4 * ROW + size), packed),
        ("sum, own + packed, rows, bfloat16", add, ROWS * (8 * ROW + size), added),
    ):
        row = {"operation": operation, "slice_bytes": 4 * ROW, "slices": ROWS}
        row |= _time(make(ROW), copy, moved, 10 * rounds, make(0))
        rows.append({"part": "width", **row, "correct": correct})
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
        "baseline": "copy_ of as many wide bytes",
        "baseline_seconds": harness.quartiles(samples[1]),
        "share_of_copy_bandwidth": harness.quartiles(shares),
        "time_over_copy": harness.quartiles([a / b for a, b in zip(kernel, samples[1], strict=True)]),
        "binding_seconds": harness.quartiles(samples[2]) if binding else None,
        "rounds": rounds,
    }


def describe_width(rows: Sequence[dict[str, Any]]) -> str:
    def cell(operation: str, slice_bytes: int | None = None) -> str:
        share = next(
            row["share_of_copy_bandwidth"]["median"]
            for row in rows
            if row["operation"] == operation and slice_bytes in (None, row["slice_bytes"])
        )
        return f"{share:.2f}"

    scans = ", ".join(f"{cell('scan, bfloat16', size)} ({size:,} B)" for size in UNIT_BYTES)
    in_place = f"{cell('sum, own + packed, bfloat16')} and {cell('sum, packed + own, bfloat16')}"
    short = f"packed {cell('pack, rows, bfloat16')} and added {cell('sum, own + packed, rows, bfloat16')}"
    float16 = f"packed {cell('pack, float16')} and added {cell('sum, own + packed, float16')}"
    dense = next(row for row in rows if row["operation"] == "scan, no narrow form")
    nanoseconds = dense["seconds"]["median"] / dense["slices"] * 1e9
    wrong = sum(not row["correct"] for row in rows)
    return (
        f"In GB/s over those of a copy, {BYTES >> 20} MiB of float32 that hold bfloat16 are scanned for widths at "
        f"{scans}, packed at {cell('pack, bfloat16')}, added to what lies in place at {in_place}, four packed ones "
        f"at {cell('sum, 4 packed, bfloat16')}; {ROWS:,} rows of {4 * ROW} bytes are {short}, float16 is {float16}. "
        f"What has no narrow form is found out in {nanoseconds:.0f} ns a unit of {UNIT_BYTES[0]} bytes. "
        f"{f'{wrong} of {len(rows)} rows gave a wrong result.' if wrong else 'All results were right.'}"
    )
