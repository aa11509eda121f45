"""How close do the CUDA kernels come to the memory's own speed?

    python benchmarks/cuda_kernels.py                 # needs a GPU and a build with the CUDA kernels

Each kernel moves messages of several sizes, made of one to ten thousand slices with gaps between them. Kernels take
turns with `tensor.copy_` of the same size and with an empty kernel. Buffers rotate, so that those of a few megabytes do
not stay in the cache. Bytes are those that are read plus those that are written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools import harness

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
SLICES = (1, 10, 100, 1_000, 10_000)
# What the rotating buffers of one measurement hold together: several times any GPU's cache.
ROTATION_BYTES = 512 * MIB
MOST_BUFFERS = 32
FACTOR = 1 / 3
# The sum first, while the numbers are as they were made; zeros last, because they stay.
KERNELS = ("sum", "gather", "gather_by_one", "scatter", "scan_nonzeros", "scan_zeros")


@dataclass
class Case:
    """Messages of one shape: `slices` equal slices, each followed by a gap as long."""

    dtype: torch.dtype
    message_bytes: int
    slices: int
    aligned: bool

    def __post_init__(self) -> None:
        length = self.message_bytes // self.dtype.itemsize // self.slices
        per_word = 16 // self.dtype.itemsize
        # An odd length moves every slice to another alignment than its place in the message has.
        self.length = max(length // per_word * per_word, per_word) if self.aligned else length // 2 * 2 + 1
        gap = self.length + (0 if self.aligned else 2)
        self.stride = self.length + gap
        self.numel = self.length * self.slices
        self.ranges = [(i * self.stride, self.length) for i in range(self.slices)]
        self.bytes = self.numel * self.dtype.itemsize
        self.buffers = max(1, min(MOST_BUFFERS, ROTATION_BYTES // (3 * self.bytes)))
        shape = (self.stride * self.slices,)
        self.flats = [torch.randn(shape, device="cuda", dtype=self.dtype) for _ in range(self.buffers)]
        self.messages = [torch.empty(self.numel, device="cuda", dtype=self.dtype) for _ in range(self.buffers)]
        self.others = [torch.empty_like(message) for message in self.messages]

    def used(self, flat: torch.Tensor) -> torch.Tensor:
        """The slices of a flat tensor, by torch's own means."""
        return flat.view(self.slices, self.stride)[:, : self.length].reshape(-1)


def device_seconds(call: Callable[[int], Any], buffers: int, calls: int) -> tuple[float, bool]:
    """Device time of one call, and whether the host was ahead all the while, so that launching was not what was timed.

    The device sleeps until the host has launched everything. Its queue is finite, so that may take fewer calls.
    """
    while True:
        start_host = time.perf_counter()
        kept = [call(i % buffers) for i in range(calls)]
        torch.cuda.synchronize()
        host_seconds = time.perf_counter() - start_host
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int((1.5 * host_seconds + 0.001) * 2e9))
        start.record()
        kept = [call(i % buffers) for i in range(calls)]
        end.record()
        was_ahead = not start.query()
        end.synchronize()
        del kept
        if was_ahead or calls == 1:
            return start.elapsed_time(end) / 1e3 / calls, was_ahead
        calls //= 2


def measure(case: Case, kernel: str, rounds: int) -> dict[str, Any]:
    from ddp_hooks_testing import _C as testing

    def gather(factor: float) -> Callable[[int], None]:
        return lambda i: testing.gather_scaled(case.messages[i], case.flats[i], case.ranges, factor)

    calls: dict[str, Callable[[int], Any]] = {
        "gather": gather(FACTOR),
        "gather_by_one": gather(1.0),
        "scatter": lambda i: testing.scatter(case.messages[i], case.flats[i], case.ranges),
        "scan_zeros": lambda i: testing.start_scan(case.flats[i], case.ranges),
        "scan_nonzeros": lambda i: testing.start_scan(case.flats[i], case.ranges),
    }
    call = sum_call(case) if kernel == "sum" else calls[kernel]
    if kernel == "scan_zeros":
        for flat in case.flats:
            flat.zero_()
    correct = is_correct(case, kernel, call)
    count = 20 if case.bytes <= 16 * MIB else 5
    timed: dict[str, tuple[Callable[[int], Any], int]] = {
        "kernel": (call, case.buffers),
        "copy": (lambda i: case.others[i].copy_(case.messages[i]), case.buffers),
        "empty": (lambda i: torch.cuda._sleep(0), 1),
    }
    times: dict[str, list[float]] = {name: [] for name in timed}
    host_was_ahead = True
    for _ in range(rounds):
        for name, (function, buffers) in timed.items():
            seconds, was_ahead = device_seconds(function, buffers, count)
            times[name].append(seconds)
            host_was_ahead &= was_ahead
    moved = moved_bytes(case, kernel)
    shares = [
        (moved / mine) / (2 * case.bytes / copy) for mine, copy in zip(times["kernel"], times["copy"], strict=True)
    ]
    over = [mine - empty for mine, empty in zip(times["kernel"], times["empty"], strict=True)]
    return {
        "kernel": kernel,
        "dtype": str(case.dtype).removeprefix("torch."),
        "message_bytes": case.bytes,
        "slices": case.slices,
        "aligned": case.aligned,
        "moved_bytes": moved,
        "seconds": harness.quartiles(times["kernel"]),
        "baseline": {"what": "tensor.copy_", "seconds": harness.quartiles(times["copy"])},
        "empty_launch_seconds": harness.quartiles(times["empty"]),
        "over_empty_launch_seconds": harness.quartiles(over),
        "bytes_per_second": moved / harness.quartiles(times["kernel"])["median"],
        "share_of_copy_bandwidth": harness.quartiles(shares),
        "buffers": case.buffers,
        "host_was_ahead": host_was_ahead,
        "rounds": rounds,
        "correct": correct,
    }


def sum_call(case: Case) -> Callable[[int], Any]:
    """Add to what lies in place as much again, and halve it."""
    from ddp_hooks_testing import _C as testing

    own, each = testing.Contribution(own=True), case.length * case.dtype.itemsize
    packed = [torch.empty(case.bytes, device="cuda", dtype=torch.uint8) for _ in range(case.buffers)]
    for buffer, flat in zip(packed, case.flats, strict=True):
        testing.pack(buffer, flat, case.ranges)
    sums = [
        [
            testing.SliceSum(flat, offset, length, [own, testing.Contribution(i * each)], 2.0)
            for i, (offset, length) in enumerate(case.ranges)
        ]
        for flat in case.flats
    ]
    return lambda i: testing.sum_contributions(packed[i], sums[i])


def moved_bytes(case: Case, kernel: str) -> int:
    if kernel == "sum":
        return 3 * case.bytes
    return case.bytes * (1 if kernel.startswith("scan") else 2)


def is_correct(case: Case, kernel: str, call: Callable[[int], Any]) -> bool:
    flat, message = case.flats[0], case.messages[0]
    if kernel == "sum":
        before = flat.clone()
        call(0)
        return torch.equal(flat, before)
    if kernel.startswith("scan"):
        return bool(call(0).wait() == [(kernel == "scan_nonzeros", False)] * case.slices)
    if kernel == "scatter":
        message.normal_()
        gaps = flat.view(case.slices, case.stride)[:, case.length :].clone()
        call(0)
        kept = torch.equal(flat.view(case.slices, case.stride)[:, case.length :], gaps)
        return kept and torch.equal(case.used(flat), message)
    message.fill_(float("nan"))
    call(0)
    return torch.equal(message, case.used(flat) * (FACTOR if kernel == "gather" else 1.0))


def cases(options: argparse.Namespace) -> list[tuple[torch.dtype, int, int, bool]]:
    """dtype, bytes, slices, aligned."""
    chosen = [(torch.float32, size, slices, True) for size in options.sizes for slices in options.slices]
    for size in options.sizes:
        if size >= 64 * MIB:
            chosen += [(torch.float32, size, 1_000, False), (torch.bfloat16, size, 1_000, False)]
            chosen += [(torch.bfloat16, size, 1_000, True), (torch.float64, size, 1_000, True)]
    return [case for case in chosen if case[1] // case[2] >= 64]


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    parts = []
    for kernel in ("sum", "gather", "scatter", "scan_zeros"):
        mine = [row for row in rows if row["kernel"] == kernel]
        large = [row for row in mine if row["message_bytes"] > 60 * MIB]
        small = [row for row in mine if 0.9 * MIB < row["message_bytes"] < 1.1 * MIB]
        if large:
            worst = min(large, key=lambda row: row["share_of_copy_bandwidth"]["median"])
            parts.append(
                f"{kernel} reaches at least {worst['share_of_copy_bandwidth']['median']:.0%} of the copy bandwidth "
                f"from 64 MiB on (worst: {worst['dtype']}, {worst['slices']:,} slices"
                f"{'' if worst['aligned'] else ', unaligned'})"
            )
        if small:
            worst = max(small, key=lambda row: row["over_empty_launch_seconds"]["median"])
            parts.append(
                f"at 1 MiB it takes up to {worst['over_empty_launch_seconds']['median'] * 1e6:.1f} us more than an "
                f"empty launch ({worst['slices']:,} slices)"
            )
    behind = sum(not row["host_was_ahead"] for row in rows)
    wrong = sum(not row["correct"] for row in rows)
    parts.append(f"{wrong} of {len(rows)} results were wrong, and in {behind} launching was timed, too")
    return "; ".join(parts) + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--slices", type=int, nargs="+", default=list(SLICES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    from ddp_hooks import _C

    if not torch.cuda.is_available() or _C.why_unserved(torch.device("cuda")):
        print("cannot run here: needs a GPU and a build with the CUDA kernels (DDP_HOOKS_CUDA=1)", file=sys.stderr)
        return 69
    header = harness.environment_header(sys.argv, 1, [], backend="none")
    rows: list[dict[str, Any]] = []
    print(
        f"{'kernel':14}{'dtype':>9}{'KiB':>9}{'slices':>8}{'us':>10}{'q1..q3':>18}{'- empty':>9}{'GB/s':>8}"
        f"{'/ copy':>8}  ok"
    )
    for dtype, message_bytes, slices, aligned in cases(options):
        case = Case(dtype, message_bytes, slices, aligned)
        for kernel in KERNELS:
            row = measure(case, kernel, options.rounds)
            rows.append(row)
            s = row["seconds"]
            print(
                f"{kernel:14}{row['dtype']:>9}{row['message_bytes'] / KIB:>9.0f}{slices:>7,}{' ' if aligned else 'u'}"
                f"{s['median'] * 1e6:>10.1f}{s['q1'] * 1e6:>9.1f}..{s['q3'] * 1e6:<7.1f}"
                f"{row['over_empty_launch_seconds']['median'] * 1e6:>9.1f}{row['bytes_per_second'] / 1e9:>8.0f}"
                f"{row['share_of_copy_bandwidth']['median']:>8.2f}  {row['correct']}",
                flush=True,
            )
        # After each case, so that an interrupted run leaves what it has measured.
        result = {"benchmark": "cuda_kernels", "header": header, "rows": rows, "sentence": describe(rows)}
        harness.write("cuda_kernels", result, options.out)
    print(describe(rows))
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
