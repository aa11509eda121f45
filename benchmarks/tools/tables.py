"""How numbers, rows and headers are written in tables and on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)


def median_of(quartiles: dict[str, float] | None) -> float | None:
    return quartiles["median"] if quartiles else None


def describe_header(header: dict[str, Any]) -> str:
    dirty = " with uncommitted changes" if header["has_uncommitted_changes"] else ""
    return (
        f"`{header['command']}`, commit {header['commit']}{dirty}, torch {header['torch']}, Python {header['python']}, "
        f"{header['backend']}, {header['cores']} cores of {header['cpu']}, {header['date']}."
    )


def describe_gradients(row: dict[str, Any]) -> str:
    """How much there is to send, and what the best that skips rows would take, where that was measured."""
    text = f"{row['dense_bytes'] / 1e6:.1f} MB of gradients, {row['fraction_unused']:.0%} unused"
    if row.get("row_oracle_seconds") is not None:
        rate = row["all_reduce_bytes_per_second"] * 8e-9
        text += (
            f", {row['used_row_bytes'] / 1e6:.1f} MB in rows that some rank uses; row oracle "
            f"{row['row_oracle_seconds'] * 1e3:.1f} ms at {rate:.3g} Gbit/s measured"
        )
    return text


def plain_table(rows: Sequence[dict[str, Any]]) -> str:
    """Any rows, with a column for each field; of quartiles the median comes first. Nested fields are left out."""
    fields = ((key, value) for row in rows for key, value in row.items())
    keys = list(dict.fromkeys(key for key, value in fields if not is_nested(value)))
    lines = ["| " + " | ".join(key.replace("_", " ") for key in keys) + " |", "|" + "---|" * len(keys)]
    lines += ["| " + " | ".join(plain_cell(key, row.get(key)) for key in keys) + " |" for row in rows]
    return "\n".join(lines)


def is_nested(value: Any) -> bool:
    return isinstance(value, list | dict) and "median" not in value


def plain_cell(key: str, value: Any) -> str:
    """Seconds, told by the field's name, in the unit that suits them; other numbers as they are."""
    if isinstance(value, dict) and "median" in value:
        values = [value["median"], value["q1"], value["q3"]]
    elif isinstance(value, float):
        values = [value]
    else:
        return "" if value is None else str(value).replace("|", "/")
    unit, scale = "", 1.0
    if "seconds" in key:
        size = max(map(abs, values))
        unit, scale = (" ns", 1e9) if size < 1e-6 else (" us", 1e6) if size < 1e-2 else (" ms", 1e3)
    median, *ends = (f"{float(f'{v * scale:.4g}'):g}" for v in values)
    return f"{median}{unit} ({' to '.join(ends)})" if ends else f"{median}{unit}"
