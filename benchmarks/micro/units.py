"""The part of micro.py about units: what it takes to find out which rows of a table hold a non-zero."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tools import harness

UNIT_BYTES = (256, 1536, 64 << 10)
TABLE_BYTES = 384 << 20  # fits into no cache; a multiple of every unit


def run_unit_scan(rounds: int) -> list[dict[str, Any]]:
    """Scan a table of float32, all zero and dense, on one thread, each beside a read of all of it in the same round."""
    import torch

    from ddp_hooks import _C

    torch.set_num_threads(1)
    table = torch.zeros(TABLE_BYTES // 4)
    rows = []
    for operation in ("zero", "dense"):
        table.fill_(1.0 if operation == "dense" else 0.0)
        for unit_bytes in UNIT_BYTES:
            units = TABLE_BYTES // unit_bytes

            def scan(unit_length: int = unit_bytes // 4) -> Any:
                return _C.start_unit_scan(table, 0, table.numel(), unit_length)

            words, negative_zeros = scan().wait()
            found = sum(word.bit_count() for word in words)
            correct = found == (units if operation == "dense" else 0) and negative_zeros == []
            samples, base = _take_turns([scan, table.amax], rounds)
            rows.append(
                {
                    "part": "unit_scan",
                    "operation": operation,
                    "bytes": TABLE_BYTES,
                    "unit_bytes": unit_bytes,
                    "units": units,
                    "seconds": harness.quartiles(samples),
                    "seconds_per_unit": harness.quartiles([sample / units for sample in samples]),
                    "baseline": "amax of as many bytes, torch's fastest read",
                    "baseline_seconds": harness.quartiles(base),
                    "share_of_read": harness.quartiles([b / a for a, b in zip(samples, base, strict=True)]),
                    "correct": correct,
                    "rounds": rounds,
                }
            )
    return rows


def _take_turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, samples, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return samples


def describe_unit_scan(rows: Sequence[dict[str, Any]]) -> str:
    def name(unit_bytes: int) -> str:
        return f"{unit_bytes:,} B"

    zero = [row for row in rows if row["operation"] == "zero"]
    dense = [row for row in rows if row["operation"] == "dense"]
    shares = ", ".join(f"{row['share_of_read']['median']:.2f} ({name(row['unit_bytes'])})" for row in zero)
    nanoseconds = ", ".join(
        f"{row['seconds_per_unit']['median'] * 1e9:.1f} ns ({name(row['unit_bytes'])})" for row in dense
    )
    parts = [f"{1 / row['share_of_read']['median']:.1%}" for row in dense]
    wrong = sum(not row["correct"] for row in rows)
    return (
        f"A table of {TABLE_BYTES >> 20} MiB: of zeros it is scanned at {shares} of the speed at which it is read; a "
        f"dense one takes {nanoseconds} a unit, which is {', '.join(parts)} of the time in which it is read. "
        f"{f'{wrong} of {len(rows)} rows gave a wrong result.' if wrong else 'All results were right.'}"
    )
