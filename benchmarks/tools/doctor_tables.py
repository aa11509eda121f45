"""The tables of docs/internals/doctor.md, made from results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
