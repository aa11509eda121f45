"""Which share of gradients are numbers of fewer bits? By model, autocast, accumulation, and length of stretch.

    python benchmarks/width_shares.py
    python benchmarks/width_shares.py --workloads gpt2_autocast --dtypes bfloat16 --passes 1

One step's backward passes of each model, without DDP. A gradient is cut into stretches of so many numbers, the last
one shorter, and into units as the policy `auto` cuts it. A stretch is exactly bfloat16 if each of its numbers is that
float32 number to the bit, NaN and both zeros included. Shares are of all numbers, and so of all bytes. Several ranks
are simulated one after another: what all of several ranks have narrow, and what their sum needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tools import harness, width_workloads, workloads

STRETCHES = (256, 1024, 4096, 16_384)  # numbers
UNITS = "units"
PASSES = (1, 2, 8)
# Bits of a number's flags: what it is not.
NOT_BFLOAT16, NOT_FLOAT16, NOT_24_BITS, NOT_ZERO = 1, 2, 4, 8
# The low 16 and 8 bits of a float32 number.
LOW_16, LOW_8 = np.uint32(0xFFFF), np.uint32(0xFF)
KINDS = {
    "bfloat16": (NOT_BFLOAT16,),
    "float16": (NOT_FLOAT16,),
    "16 bits": (NOT_BFLOAT16, NOT_FLOAT16),
    "24 bits": (NOT_BFLOAT16, NOT_FLOAT16, NOT_24_BITS),
    "zero": (NOT_ZERO,),
}
# A heading, whose gradients, what kind, and in what stretches.
COLUMNS = (
    *((f"16 bits, {length:,}", "on_one_rank", "16 bits", str(length)) for length in (256, 1024, 4096, 16_384)),
    ("16 bits, units", "on_one_rank", "16 bits", UNITS),
    ("bfloat16, units", "on_one_rank", "bfloat16", UNITS),
    ("float16, units", "on_one_rank", "float16", UNITS),
    ("zero, units", "on_one_rank", "zero", UNITS),
    ("16 bits on every rank, 1,024", "on_every_rank", "16 bits", "1024"),
    ("16 bits on every rank, units", "on_every_rank", "16 bits", UNITS),
    ("24 bits or fewer, 256", "on_one_rank", "24 bits", "256"),
    ("24 bits or fewer, units", "on_one_rank", "24 bits", UNITS),
    ("sum in 24 bits or fewer, 256", "of_the_sum", "24 bits", "256"),
    ("sum in 24 bits or fewer, units", "of_the_sum", "24 bits", UNITS),
)

Numbers = np.ndarray[Any, np.dtype[np.float32]]
Flags = np.ndarray[Any, np.dtype[np.uint8]]


def flags_of(gradient: Numbers) -> Flags:
    """What each number is not."""
    bits = gradient.view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        back = gradient.astype(np.float16).astype(np.float32).view(np.uint32)
    flags = ((bits & LOW_16) != 0).astype(np.uint8) * np.uint8(NOT_BFLOAT16)
    flags |= (back != bits).astype(np.uint8) * np.uint8(NOT_FLOAT16)
    flags |= ((bits & LOW_8) != 0).astype(np.uint8) * np.uint8(NOT_24_BITS)
    flags |= (gradient != 0).astype(np.uint8) * np.uint8(NOT_ZERO)
    return flags


def unit_length(parameter: torch.Tensor) -> int:
    """How many numbers the units of a parameter have under the policy `auto`."""
    from ddp_hooks import _C, policies
    from ddp_hooks.serving import engine_settings

    settings = engine_settings.unit_settings(policies.resolve("auto", {}))
    row = parameter[0].numel() if parameter.dim() > 0 and len(parameter) else 1
    slice_of_bucket = _C.ParameterSlice(0, 0, parameter.numel(), row)
    return int(_C.units_of(slice_of_bucket, parameter.element_size(), settings).length)


def narrow_numbers(flags: Flags, length: int) -> dict[str, int]:
    """How many of a parameter's numbers lie in stretches of that length whose numbers are all of a kind."""
    starts = np.arange(0, len(flags), length)
    lengths = np.diff(np.append(starts, len(flags)))
    of_stretch = np.bitwise_or.reduceat(flags, starts)
    found = {}
    for kind, missing in KINDS.items():
        is_of_kind = np.zeros(len(starts), dtype=bool)
        for flag in missing:
            is_of_kind |= of_stretch & flag == 0
        found[kind] = int(lengths[is_of_kind].sum())
    return found


def shares_of(model: nn.Module, flags: dict[str, Flags]) -> dict[str, dict[str, float]]:
    """By kind and by stretch, the share of all numbers."""
    counts: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for name, parameter in model.named_parameters():
        for stretch, length in (*zip(map(str, STRETCHES), STRETCHES, strict=True), (UNITS, unit_length(parameter))):
            for kind, count in narrow_numbers(flags[name], length).items():
                counts[kind][stretch] = counts[kind].get(stretch, 0) + count
    total = sum(map(len, flags.values()))
    return {kind: {s: round(count / total, 4) for s, count in found.items()} for kind, found in counts.items()}


def measure(workload: width_workloads.UnderAutocast, ranks: int) -> dict[str, Any]:
    torch.manual_seed(1234)
    model = workload.build()
    first: dict[str, Flags] = {}
    every: dict[str, Flags] = {}
    sums: dict[str, Numbers] = {}
    for rank in range(ranks):
        model.zero_grad(set_to_none=True)
        workload.backward(model, 0, rank)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.contiguous().flatten().numpy()
            flags = flags_of(gradient)
            if rank == 0:
                first[name], every[name], sums[name] = flags, flags.copy(), gradient.copy()
            else:
                every[name] |= flags
                sums[name] += gradient
    return {
        "label": workload.label,
        "dtype": workload.dtype,
        "passes": workload.passes,
        "ranks": ranks,
        "dense_bytes": 4 * sum(map(len, first.values())),
        "on_one_rank": shares_of(model, first),
        "on_every_rank": shares_of(model, every),
        "of_the_sum": shares_of(model, {name: flags_of(total) for name, total in sums.items()}),
    }


def shares_table(rows: Sequence[dict[str, Any]]) -> str:
    """Which share of bytes lies in stretches of exactly so many bits, by model and by length of stretch."""
    headings = ["Gradients", "MB", *(heading for heading, *_ in COLUMNS)]
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    for row in rows:
        cells = [row["label"], f"{row['dense_bytes'] / 1e6:.1f}"]
        cells += [f"{row[whose][kind][stretch]:.3f}" for _, whose, kind, stretch in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: how narrow gradients are by units, with and without accumulation."""

    def extremes(found: list[dict[str, Any]]) -> str:
        shares = sorted((row["on_one_rank"]["16 bits"][UNITS], row["label"]) for row in found)
        return f"{shares[0][0]:.3f} ({shares[0][1]}) to {shares[-1][0]:.3f} ({shares[-1][1]})"

    parts = []
    for text, found in (
        ("after one pass under autocast", [row for row in rows if row["dtype"] != "float32" and row["passes"] == 1]),
        ("after several", [row for row in rows if row["dtype"] != "float32" and row["passes"] > 1]),
        ("without autocast", [row for row in rows if row["dtype"] == "float32"]),
    ):
        if found:
            parts.append(f"{text} {extremes(found)}")
    return "Of the bytes of gradients, in units that are exactly 16 bits: " + "; ".join(parts) + "."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(width_workloads.NAMES))
    parser.add_argument("--dtypes", nargs="+", default=list(width_workloads.DTYPES))
    parser.add_argument("--passes", nargs="+", type=int, default=list(PASSES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="default", help="tiny or default")
    parser.add_argument("--name", default="width_shares", help="of the result")
    parser.add_argument("--folder", type=Path, default=harness.RESULTS, help="where it is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "benchmark": "width_shares",
        "header": harness.environment_header(sys.argv, 1, (), backend="no process group"),
        "rows": [],
    }
    for name in options.workloads:
        for dtype in options.dtypes:
            for passes in options.passes if dtype != "float32" else options.passes[:1]:
                workload = workloads.make(f"{name}:{dtype}:{passes}", options.size)
                assert isinstance(workload, width_workloads.UnderAutocast)
                results["rows"].append({"workload": name, **measure(workload, options.ranks)})
                harness.write(options.name, results, options.folder)
                print(shares_table(results["rows"][-1:]), flush=True)
    results["sentence"] = describe(results["rows"])
    harness.write(options.name, results, options.folder)
    print(results["sentence"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
