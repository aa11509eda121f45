"""The tables of docs/internals/doctor.md, made from results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

POLICIES = ("skip_unused", "skip_zeros", "auto")


def estimate_table(rows: Sequence[dict[str, Any]]) -> str:
    """Plain DDP's step, and for each policy the estimated and the measured step with their ratio, by workload."""
    by_workload: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_workload.setdefault((row["label"], row["link"]), {})[row["policy"]] = row
    headings = ["Workload", "Plain DDP, ms", *(f"`{policy}`, ms" for policy in POLICIES)]
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    for (label, _), found in by_workload.items():
        cells = [label, f"{found['plain DDP']['measured_seconds']['median'] * 1e3:.0f}"]
        for policy in POLICIES:
            row = found[policy]
            measured = row["measured_seconds"]["median"]
            cells.append(f"{row['estimated_seconds'] * 1e3:.0f} / {measured * 1e3:.0f} = {row['ratio']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def watching_table(rows: Sequence[dict[str, Any]]) -> str:
    """What a step takes, and how many times as long it takes watched."""
    lines = ["| Workload | Link | A step, ms | Watched over not watched (quartiles) |", "|---|---|---:|---:|"]
    for row in rows:
        ratio = row["ratio"]
        lines.append(
            f"| {row['label']} | {row['link']} | {row['step_seconds']['median'] * 1e3:.1f} | {ratio['median']:.3f} "
            f"({ratio['q1']:.3f} to {ratio['q3']:.3f}) |"
        )
    return "\n".join(lines)
