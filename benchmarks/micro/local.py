"""The parts of micro.py that need one process: usage masks, reduction plans, and the kernels that touch gradients."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools import harness

# Bytes of a message; from what fits into the first cache to what fits into none.
COPY_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
SLICES = (1, 10, 100, 1_000, 10_000)
SMALLEST_SLICE_BYTES = 256
BATCH_SECONDS = 200e-6


def run_compiled(part: str, rounds: int) -> list[dict[str, Any]]:
    """Compile `mask_and_plan.cpp` with the extension's optimisation and run it; `part` is mask, mask_codec or plan.

    Raises:
        RuntimeError: there is no C++ compiler, it refused the program, or the program failed.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("expected a C++ compiler, the one that builds the extension: g++, clang++ or $CXX")
    csrc = harness.ROOT / "csrc"
    sources = [
        Path(__file__).parent / "mask_and_plan.cpp",
        *(
            csrc / f"{name}.cpp"
            for name in (
                "agreement/mask_codec",
                "layout/bucket_layout",
                "layout/contributors",
                "layout/transports",
                "layout/units",
                "layout/usage_mask",
                "plan/direct_plan",
                "plan/reduction_plan",
                "plan/plan_cache",
            )
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "mask_and_plan"
        for argv in (
            [compiler, "-std=c++20", "-O3", f"-I{csrc}", *map(str, sources), "-o", str(program)],
            [str(program), part, str(rounds)],
        ):
            done = subprocess.run(argv, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"`{argv[0]}` failed: {done.stderr[-2000:]}")
    rows = []
    for line in done.stdout.splitlines():
        raw = json.loads(line)
        samples, base = raw.pop("samples"), raw.pop("baseline_samples")
        rows.append({"part": part, **raw, **_against(samples, base), "rounds": len(samples)})
    return rows


def _against(samples: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    return {
        "seconds": harness.quartiles(samples),
        "baseline_seconds": harness.quartiles(base),
        "ratio_to_baseline": harness.quartiles([a / b for a, b in zip(samples, base, strict=True)]),
    }


def describe_mask(rows: Sequence[dict[str, Any]]) -> str:
    def microseconds(operation: str, parameters: int) -> float:
        (row,) = (r for r in rows if r["operation"] == operation and r["parameters"] == parameters)
        return float(row["seconds"]["median"] * 1e6)

    least, most = min(r["parameters"] for r in rows), max(r["parameters"] for r in rows)
    names = list(dict.fromkeys(row["operation"] for row in rows))
    parts = [f"{name} {_two(microseconds(name, least))} and {_two(microseconds(name, most))} us" for name in names]
    slowest = max(row["ratio_to_baseline"]["median"] for row in rows)
    return (
        f"A mask of {least:,} and of {most:,} parameters takes: {', '.join(parts)}; "
        f"that is up to {slowest:.0f} times a memcpy of its words. {_correctness(rows)}"
    )


def describe_mask_codec(rows: Sequence[dict[str, Any]]) -> str:
    units = max(row["units"] for row in rows)
    parts = []
    for encode in (row for row in rows if row["operation"] == "encode" and row["units"] == units):
        (decode,) = (
            row
            for row in rows
            if (row["operation"], row["units"], row["pattern"]) == ("decode", units, encode["pattern"])
        )
        microseconds = [_two(row["seconds"]["median"] * 1e6) for row in (encode, decode)]
        parts.append(f"{encode['pattern']} {encode['bytes']:,} bytes, {microseconds[0]} and {microseconds[1]} us")
    return (
        f"A mask of {units:,} units, {max(row['bitmap_bytes'] for row in rows):,} bytes as a bitmap, takes by its "
        f"density, to encode and to decode: {'; '.join(parts)}. {_correctness(rows)}"
    )


def describe_plan(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for parameters in sorted({row["parameters"] for row in rows}):
        here = [row for row in rows if row["parameters"] == parameters]
        made = [row["seconds"]["median"] * 1e6 for row in here if row["operation"] == "make"]
        hits = [row["seconds"]["median"] * 1e6 for row in here if row["operation"] == "cache hit"]
        parts.append(
            f"{parameters:,} parameters {_two(min(made))} to {_two(max(made))} us (a hit {_two(max(hits))} us)"
        )
    return f"Making a reduction plan takes for {', '.join(parts)}. {_correctness(rows)}"


def run_copy(rounds: int, max_bytes: int) -> list[dict[str, Any]]:
    """Scan, gather and scatter float32, on one thread, each beside a `copy_` of as many bytes in the same round."""
    import torch

    from ddp_hooks_testing import _C as testing

    torch.set_num_threads(1)
    factor = 0.5  # exact, so that results compare bitwise
    rows = []
    for total_bytes in (size for size in COPY_BYTES if size <= max_bytes):
        numel = total_bytes // 4
        flat = torch.randn(2 * numel)  # every other stretch is a slice
        message = torch.empty(numel)
        zeros = torch.zeros(numel)
        late = torch.zeros(numel)
        late[-1] = 1.0
        few = max(3, rounds * (16 << 20) // max(total_bytes, 16 << 20))

        def copy(message: Any = message, flat: Any = flat, numel: int = numel) -> None:
            message.copy_(flat[:numel])

        def scan(data: Any) -> Callable[[], Any]:
            return lambda: testing.start_scan(data, [(0, data.numel())]).wait()[0]

        calls: list[tuple[str, int, Callable[[], Any], Callable[[], Any] | None, Callable[[], bool]]] = []
        for name, data, found in (("all zero", zeros, False), ("last one not", late, True), ("dense", flat, True)):
            look = scan(data[:numel])
            calls.append((f"scan, {name}", 1, look, None, lambda look=look, found=found: look() == (found, False)))
        for slices in SLICES:
            length = numel // slices
            if 4 * length < SMALLEST_SLICE_BYTES:
                continue
            ranges = [(2 * i * length, length) for i in range(slices)]
            empty = [(2 * i * length, 0) for i in range(slices)]
            calls += _copies(testing, factor, flat, message[: slices * length], ranges, empty)
        for operation, slices, call, overhead, check in calls:
            rows.append(
                {
                    "part": "copy",
                    "operation": operation,
                    "bytes": total_bytes,
                    "slices": slices,
                    **_time_copy(call, copy, overhead, few),
                    "correct": check(),
                    "rounds": few,
                }
            )
    return rows


def _copies(
    extension: Any,
    factor: float,
    flat: Any,
    message: Any,
    ranges: list[tuple[int, int]],
    empty: list[tuple[int, int]],
) -> list[tuple[str, int, Callable[[], Any], Callable[[], Any], Callable[[], bool]]]:
    import torch

    count, length = len(ranges), ranges[0][1]

    def slices_of(data: Any) -> Any:
        return data[: 2 * count * length].view(count, 2, length)[:, 0]

    def gathered() -> bool:
        extension.gather_scaled(message, flat, ranges, factor)
        return torch.equal(message.view(count, length), slices_of(flat) * factor)

    def scattered() -> bool:
        before = flat.clone()
        message.copy_(torch.randn_like(message))
        extension.scatter(message, flat, ranges)
        landed = torch.equal(slices_of(flat), message.view(count, length))
        slices_of(flat).copy_(slices_of(before))
        return landed and torch.equal(flat, before)  # and nothing else was touched

    nothing = message[:0]
    return [
        (
            "gather",
            count,
            lambda: extension.gather_scaled(message, flat, ranges, factor),
            lambda: extension.gather_scaled(nothing, flat, empty, factor),
            gathered,
        ),
        (
            "scatter",
            count,
            lambda: extension.scatter(message, flat, ranges),
            lambda: extension.scatter(nothing, flat, empty),
            scattered,
        ),
    ]


def _time_copy(
    call: Callable[[], Any], copy: Callable[[], Any], overhead: Callable[[], Any] | None, rounds: int
) -> dict[str, Any]:
    functions = [call, copy] + ([overhead] if overhead else [])
    batches = [_batch_size(function) for function in functions]
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, calls, times in zip(functions, batches, samples, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - start) / calls)
    shares = [b / a for a, b in zip(samples[0], samples[1], strict=True)]
    return {
        "seconds": harness.quartiles(samples[0]),
        "baseline": "copy_ of as many bytes",
        "baseline_seconds": harness.quartiles(samples[1]),
        "share_of_copy": harness.quartiles(shares),
        # The same call with as many slices of no length: the binding, which makes a list of Python pairs into slices.
        "binding_seconds": harness.quartiles(samples[2]) if overhead else None,
    }


def _batch_size(function: Callable[[], Any]) -> int:
    calls = 1
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if time.perf_counter() - start > BATCH_SECONDS or calls >= 1 << 14:
            return calls
        calls *= 2


def describe_copy(rows: Sequence[dict[str, Any]]) -> str:
    largest = max(row["bytes"] for row in rows)
    parts = []
    for operation in ("scan, all zero", "gather", "scatter"):
        here = [row for row in rows if row["operation"] == operation]
        one = next(row for row in here if row["bytes"] == largest and row["slices"] == 1)
        worst = min(here, key=lambda row: row["share_of_copy"]["median"])
        parts.append(
            f"{operation.partition(',')[0]} {one['share_of_copy']['median']:.2f} (least: "
            f"{worst['share_of_copy']['median']:.2f}, {worst['bytes'] >> 10:,} KiB in {worst['slices']:,} slice(s))"
        )
    return (
        f"As a share of copy_'s bandwidth, with {largest >> 20} MiB in one slice: {', '.join(parts)}; "
        f"the binding is included. {_correctness(rows)}"
    )


def _two(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{float(f'{value:.2g}'):,g}"


def _correctness(rows: Sequence[dict[str, Any]]) -> str:
    wrong = sum(not row["correct"] for row in rows)
    return f"{wrong} of {len(rows)} rows gave a wrong result." if wrong else "All results were right."
