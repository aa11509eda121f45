"""The model's constants: fitted to what `ranks` has measured, written as JSON and read back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scaling import model

# Hops are fitted to the small messages, the link's rate to the large ones, and the middle is there to check both.
SMALL_BYTES = (1 << 10, 4 << 10)
MIDDLE_BYTES = (256 << 10, 1 << 20)
LARGE_BYTES = (8 << 20, 25 << 20)
METHODS = ("all_reduce_bor", "all_gather")


def fit(raw: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """From what was measured, by world size, to the model's constants."""
    small, large = (
        [(ranks, row) for ranks, rows in raw.items() for row in of_part(rows, "all_reduce") if row["bytes"] in sizes]
        for sizes in (SMALL_BYTES, LARGE_BYTES)
    )
    hop_seconds, _ = model.fit_plane([(model.ring_hops(n), 0.0, row["fastest_tenth_seconds"]) for n, row in small])
    points = []
    for ranks, row in large:
        hops = model.ring_hops(ranks)
        points.append((0.0, hops / ranks * row["bytes"], row["seconds"]["median"] - hops * hop_seconds))
    link = model.Link(hop_seconds, 1 / model.fit_plane(points)[1])
    exchanges = {}
    for method in METHODS:
        points = []
        for ranks, rows in raw.items():
            for row in (r for r in of_part(rows, "exchange") if r["method"] == method):
                on_the_wire = row["hops"] * row["mask_bytes"] / link.bytes_per_second
                on_the_wire /= ranks if method == "all_reduce_bor" else 1
                points.append((1.0, float(row["hops"]), row["fastest_tenth_seconds"] - on_the_wire))
        exchanges[method] = model.Exchange(*model.fit_plane(points))
    steps = {str(ranks): asdict(_step(rows)) for ranks, rows in raw.items()}
    return {"link": asdict(link), "exchanges": {m: asdict(e) for m, e in exchanges.items()}, "steps": steps}


def read(results: dict[str, Any]) -> tuple[model.Link, dict[str, model.Exchange], dict[int, model.Step]]:
    """Read the fit back from JSON."""
    fitted = results["fit"]["constants"]
    steps = {}
    for ranks, raw in fitted["steps"].items():
        lists = {"ready": tuple(map(tuple, raw["ready"])), "bucket_bytes": tuple(raw["bucket_bytes"])}
        steps[int(ranks)] = model.Step(**{**raw, **lists})
    return model.Link(**fitted["link"]), {m: model.Exchange(**e) for m, e in fitted["exchanges"].items()}, steps


def of_part(rows: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["part"] == part]


def _step(rows: Sequence[dict[str, Any]]) -> model.Step:
    full, frozen = sorted(of_part(rows, "alone"), key=lambda row: row["fraction_unused"])
    passed, ready = 0.0, [(0.0, 0.0)]
    for size, seconds in zip(full["bucket_bytes"], full["ready_seconds"], strict=True):
        passed += size
        ready.append((passed, max(seconds, ready[-1][1])))
    finish = max(0.0, full["backward_seconds"] - ready[-1][1]) / passed
    hook, hook_per_byte = model.fit_plane(
        [(1.0, row["payload_bytes"], row["seconds"]) for row in of_part(rows, "hook")]
    )
    bare = model.Step(
        full["forward_seconds"], tuple(ready), tuple(full["bucket_bytes"]), finish, 0.0, hook, hook_per_byte
    )
    used = (1 - frozen["fraction_unused"]) * passed
    without = bare.forward_seconds + bare.seconds_until(used) + finish * used
    surplus = frozen["forward_seconds"] + frozen["backward_seconds"] - without
    return dataclasses.replace(bare, unused_seconds_per_byte=max(0.0, surplus) / (passed - used))
