"""The tables of what narrow gradients are and what they are worth, made from results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.tables import number

UNITS = "units"
# A heading, whose gradients, what kind, and in what stretches.
_COLUMNS = (
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


def shares_table(rows: Sequence[dict[str, Any]]) -> str:
    """Which share of bytes lies in stretches of exactly so many bits, by model and by length of stretch."""
    headings = ["Gradients", "MB", *(heading for heading, *_ in _COLUMNS)]
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    for row in rows:
        cells = [row["label"], f"{row['dense_bytes'] / 1e6:.1f}"]
        cells += [f"{row[whose][kind][stretch]:.3f}" for _, whose, kind, stretch in _COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def break_even_table(rows: Sequence[dict[str, Any]]) -> str:
    """Both lines of each peer, the ratios they come from, and up to which rate the peer is faster."""
    headings = ["Gradients", "Hosts", "Peer", "Plain, ms + MB sent (ring)", "Peer, ms + MB sent (ring)", "/ plain"]
    headings += ["Faster than plain", "Largest error of the lines in between"]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for row in rows:
        ratios = (f"{link['ratio_to_plain']:.3f} at {link['link']}" for link in row["links"])
        cells = [row["label"], str(row["world_size"]), f"`{row['peer']}`", _line(row["plain"]), _line(row["this"])]
        cells += [", ".join(ratios), where(row), number(row["largest_error_between"], ".1%")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _line(line: dict[str, Any]) -> str:
    text = f"{line['fixed_seconds'] * 1e3:.0f} + {line['sent_bytes'] / 1e6:.1f}"
    return text if line["ring_bytes"] is None else f"{text} ({line['ring_bytes'] / 1e6:.1f})"


def where(row: dict[str, Any]) -> str:
    """At which rates, of an all-reduce, a peer is faster."""
    rate = row["break_even_bytes_per_second"]
    if rate is None:
        return f"at {row['faster']}"
    return f"{row['faster']} {rate * 8e-9:.3g} Gbit/s" + (" (extrapolated)" if row["is_extrapolated"] else "")


TABLES = {"width_shares": shares_table, "width_break_even": break_even_table}
