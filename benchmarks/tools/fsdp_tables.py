"""The table of what ddp_hooks.fsdp is worth, made from results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.tables import number


def fsdp_table(rows: Sequence[dict[str, Any]]) -> str:
    """A step, and what was sent in it, by model, link and way."""
    headings = [
        "Model",
        "Link",
        "Way",
        "Step, ms",
        "/ plain (quartiles)",
        "MB on the wire",
        "Sent of dense MB",
        "Differ",
    ]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|---" + "|---:" * (len(headings) - 3) + "|"]
    for row in rows:
        ratio = row["ratio_to_baseline"]
        sent = ""
        if row["dense_bytes"]:
            sent = f"{row['payload_bytes'] / 1e6:.1f} of {row['dense_bytes'] / 1e6:.1f}"
        cells = [
            row["label"],
            row["link"],
            row["way"],
            f"{row['step_seconds']['median'] * 1e3:.0f}",
            f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})",
            number(row["wire_bytes"], ".1f", 1e-6),
            sent,
            str(row["differing_gradients"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
