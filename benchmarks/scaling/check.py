"""The check: the model beside steps and collectives that no constant was fitted to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from scaling import constants, model

PEERS = {"plain": "plain", "ours": "ours:skip_unused:native", "oracle": "oracle"}


def compare(results: dict[str, Any], validation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of model beside measurement: whole steps, and the exchange where it was not used to fit."""
    link, exchanges, steps = constants.read(results)
    message_bytes = model.mask_bytes(results["fit"]["parameters"])
    rows = []
    for row in validation:
        scheme = next(scheme for scheme, peer in PEERS.items() if peer == row["peer"])
        ranks, unused = row["world_size"], row["fraction_unused"]
        exchange = model.exchange_seconds(results["exchange"], ranks, message_bytes, exchanges, link)
        search = scheme != "oracle"
        told = model.predict(scheme, ranks, unused, steps[ranks], link, exchange, search)
        plain = model.predict("plain", ranks, unused, steps[ranks], link)
        measured = row["step_seconds"]
        rows.append(
            {
                "what": "step",
                "source": row.get("source", "this run"),
                "link": row["link"],
                "world_size": ranks,
                "fraction_unused": unused,
                "scheme": scheme,
                "rounds": row["rounds"],
                "measured_seconds": measured,
                "predicted_seconds": told.step_seconds,
                "predicted_over_measured": told.step_seconds / measured["median"],
                "measured_ratio_to_plain": row["ratio_to_baseline"],
                "predicted_ratio_to_plain": told.step_seconds / plain.step_seconds,
                "measured_wait_seconds": row["exchange_wait_seconds"],
                "predicted_wait_seconds": told.mask_wait_seconds if scheme == "ours" else None,
                "predicted_wire_bytes": told.wire_bytes,
                "measured_wire_bytes": row["wire_bytes"],
                "correct": row["gradient_difference"] == 0 or (ranks > 2 and row["gradient_difference"] < 1e-5),
            }
        )
    for ranks, raw in results["fit"]["raw"].items():
        for row in (r for r in constants.of_part(raw, "all_reduce") if r["bytes"] in constants.MIDDLE_BYTES):
            told = model.all_reduce_seconds(int(ranks), row["bytes"], link)
            rows.append(_beside(f"all-reduce of {row['bytes'] >> 10} KiB", ranks, row, told, row["seconds"]["median"]))
        for row in (r for r in constants.of_part(raw, "exchange") if r["method"].startswith("grid")):
            grid = [int(extent) for extent in row["method"].partition(" ")[2].split("x")]
            told = model.grid_seconds(grid, row["mask_bytes"], exchanges["all_gather"], link)
            what = f"exchange by {row['method']}, {row['mask_bytes']:,} bytes, fastest tenth"
            rows.append(_beside(what, ranks, row, told, row["fastest_tenth_seconds"]))
    return rows


def _beside(what: str, ranks: str, row: dict[str, Any], told: float, measured: float) -> dict[str, Any]:
    return {
        "what": what,
        "world_size": int(ranks),
        "rounds": row["rounds"],
        "measured_seconds": measured,
        "predicted_seconds": told,
        "predicted_over_measured": told / measured,
        "correct": row.get("correct"),
    }


def describe(rows: Sequence[dict[str, Any]]) -> str:
    steps = [row for row in rows if row["what"] == "step"]
    if not steps:
        return "The constants are fitted; the model is not checked yet."

    def name(row: dict[str, Any]) -> str:
        return f"{row['scheme']}, {row['world_size']} ranks, {row['fraction_unused']:.0%} unused"

    errors = [abs(row["predicted_over_measured"] - 1) for row in steps]
    worst = steps[errors.index(max(errors))]
    ours = [row for row in steps if row["scheme"] == "ours"]
    gaps = [abs(row["predicted_ratio_to_plain"] - row["measured_ratio_to_plain"]["median"]) for row in ours]
    off = [
        f"{name(row)} ({row['predicted_over_measured'] - 1:+.0%})"
        for row, e in zip(steps, errors, strict=True)
        if e > 0.15
    ]
    text = (
        f"Of {len(steps)} steps not used to fit, the model misses the median by {statistics.median(errors):.1%} in the "
        f"median and by {max(errors):.1%} at most ({name(worst)})"
    )
    if gaps:
        text += f"; the ratio of ddp_hooks to plain DDP it misses by at most {max(gaps):.3f}"
    text += f". It is off by more than 15% at: {'; '.join(off)}." if off else "; nowhere is it off by more than 15%."
    wrong = sum(row["correct"] is False for row in rows)
    return text + (f" {wrong} rows have wrong gradients or masks." if wrong else "")
