"""What the transports are worth: the model beside measured steps, and then on as many ranks as nobody here has."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaling import cases, check, constants, model, transports

POLICY = "skip_unused"
MEASURED = ("who_1gbit", "who_3_hosts", "who_4_hosts")
# Hop and hook come from here; 1 Gbit/s, as everything on this page.
FIT = "scaling_1gbit"
# What ddp_hooks cut into before, which some measurements were made with; the number of messages tells them apart.
SEGMENTS = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
RANKS = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512)
PATTERNS = 16
SCHEMES = ("plain", "oracle", "union", "ours")
TABLE_BYTES = (1 << 20, 10 << 20, 100 << 20)
TABLE_CONTRIBUTORS = {2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 3, 4), 8: (1, 2, 8), 64: (1, 2, 64), 512: (1, 512)}
MASK_PARAMETERS = (100, 10_000, 100_000)
ROW_DENSITIES = (0.01, 0.1, 0.5)
EXACT = ("messages", "payload_bytes", "broadcast_bytes", "owner_bytes")


@dataclass(frozen=True, slots=True)
class Ground:
    """The constants: the fit of scaling.py measure, and the least that a step takes beside its links."""

    link: model.Link
    gather: model.Exchange
    hook: transports.Host
    settings: transports.Settings

    @classmethod
    def read(cls, results: Path) -> Ground:
        link, exchanges, steps = constants.read(json.loads((results / f"{FIT}.json").read_text()))
        step = steps[min(steps)]
        hook = transports.Host(0.0, step.hook_seconds_per_byte, step.hook_seconds)
        return cls(link, exchanges["all_gather"], hook, cases.settings_of(POLICY))

    def traffic(self, scheme: str, case: cases.Case, ranks: int, segment: int | None = None) -> transports.Traffic:
        """What a scheme hands over: DDP and the oracle whole buckets; `union` is ddp_hooks without transports."""
        if scheme in ("plain", "oracle"):
            whole = replace(self.settings, in_place_bytes=0, direct=False)
            buckets = case.buckets if scheme == "plain" else case.buckets_of_used
            return transports.travel(buckets, [1] * len(case.sizes), ranks, whole)
        settings = replace(self.settings, direct=scheme == "ours")
        settings = replace(settings, segment_bytes=segment or settings.segment_bytes)
        return transports.travel(case.buckets, case.contributors, ranks, settings)

    def seconds(
        self,
        scheme: str,
        case: cases.Case,
        ranks: int,
        exposed: float,
        segment: int | None = None,
        overlapped: bool = False,
    ) -> float:
        host = replace(self.hook, exposed_seconds=exposed)
        agree, _ = transports.agree_seconds(len(case.sizes), ranks, self.gather, self.link, who=scheme == "ours")
        kind = "ours" if scheme == "union" else scheme
        traffic = self.traffic(scheme, case, ranks, segment)
        agree = agree if kind == "ours" else 0.0
        return transports.step_seconds(kind, traffic, host, self.link, agree, overlapped)


def compare(ground: Ground, results: Path) -> tuple[list[dict[str, Any]], list[str], dict[str, float]]:
    """The model beside measured steps.

    Returns:
        Rows; the names of files that are not there; and, by workload, the exposed seconds on the fewest hosts.
    """
    rows: list[dict[str, Any]] = []
    missing, exposed = [], {}
    for name in MEASURED:
        path = results / f"{name}.json"
        if not path.exists():
            missing.append(path.name)
            continue
        measured = json.loads(path.read_text())["rows"]
        for workload in ("multitask", "layerdrop"):
            here = {
                scheme: row
                for row in measured
                for scheme, peer in check.PEERS.items()
                if (row["workload"], row["link"], row["size"], row["peer"]) == (workload, "1gbit", "default", peer)
            }
            if len(here) < len(check.PEERS):
                missing.append(f"{workload} in {path.name}")
                continue
            found, seconds = _compare_steps(ground, workload, here, path.name)
            rows += found
            exposed.setdefault(workload, seconds)
    return rows, missing, exposed


def _compare_steps(
    ground: Ground, workload: str, measured: dict[str, dict[str, Any]], source: str
) -> tuple[list[dict[str, Any]], float]:
    ranks = measured["plain"]["world_size"]
    steps = [cases.CASES[workload](ranks, pattern) for pattern in range(_patterns())]
    taken = {scheme: _mean_of_patterns(measured[scheme]["samples_seconds"]) for scheme in measured}

    def tell(scheme: str, exposed: float, overlapped: bool = False) -> float:
        return statistics.fmean(ground.seconds(scheme, step, ranks, exposed, segment, overlapped) for step in steps)

    segment = _segment_of(ground, steps, ranks, measured["ours"])
    exposed = max(0.0, taken["plain"] - tell("plain", 0.0))
    oracle = tell("oracle", exposed)
    rows = []
    for scheme, told in (("oracle", oracle), ("ours", tell("ours", exposed))):
        row = {
            "source": source,
            "workload": workload,
            "world_size": ranks,
            "scheme": scheme,
            "segment_bytes": segment if scheme == "ours" else None,
            "busiest_bytes": statistics.fmean(ground.traffic(scheme, s, ranks, segment).busiest_bytes for s in steps),
            "measured_seconds": taken[scheme],
            "predicted_seconds": told,
            "predicted_over_measured": told / taken[scheme],
            "overlapped_seconds": tell(scheme, exposed, overlapped=True),
            "measured_over_plain": taken[scheme] / taken["plain"],
            "predicted_over_plain": told / taken["plain"],
            "measured_over_oracle": taken[scheme] / taken["oracle"],
            "predicted_over_oracle": told / oracle,
            "exposed_seconds": exposed,
        }
        if scheme == "ours":
            row["counters_not_met"] = ", ".join(counters_not_met(ground, steps, ranks, measured["ours"], segment))
        rows.append(row)
    return rows, exposed


def _mean_of_patterns(samples: Sequence[float]) -> float:
    """The mean over the step's patterns, which move different numbers of bytes, of each one's median."""
    patterns = _patterns()
    return statistics.fmean(statistics.median(samples[pattern::patterns]) for pattern in range(patterns))


def _patterns() -> int:
    from tools.workload import Workload

    return Workload.patterns


def count(ground: Ground, steps: Sequence[cases.Case], ranks: int, segment: int | None) -> dict[str, float]:
    """What the statistics of rank 0 say of one step, on average."""
    told = [ground.traffic("ours", step, ranks, segment) for step in steps]
    found = {name: statistics.fmean(getattr(traffic, name) for traffic in told) for name in EXACT}
    return {**found, "sent_bytes": statistics.fmean(traffic.sent[0] for traffic in told)}


def counters_not_met(
    ground: Ground, steps: Sequence[cases.Case], ranks: int, row: dict[str, Any], segment: int | None
) -> list[str]:
    """Which counters of a measured run are not exactly what the model says.

    What a rank sends of an all-reduce is counted in whole bytes, rounded down.
    """
    seen = row["statistics"]
    told = count(ground, steps, ranks, segment)
    slack = {"sent_bytes": told["messages"] * seen["steps"]}
    return [name for name, n in told.items() if abs(n * seen["steps"] - seen.get(name, 0)) > slack.get(name, 0.5)]


def _segment_of(ground: Ground, steps: Sequence[cases.Case], ranks: int, row: dict[str, Any]) -> int:
    """The length of segments with which the run's number of messages comes out; the policy's if none does."""
    for segment in (ground.settings.segment_bytes, *SEGMENTS):
        if "messages" not in counters_not_met(ground, steps, ranks, row, segment):
            return segment
    return ground.settings.segment_bytes


def predict(ground: Ground, exposed: dict[str, float]) -> list[dict[str, Any]]:
    """Every workload on every number of ranks: means over random steps."""
    rows = []
    for name, make in cases.CASES.items():
        beside = exposed.get(name.partition(",")[0])
        if beside is None:
            continue
        for ranks in RANKS:
            steps = [make(ranks, pattern) for pattern in range(PATTERNS)]
            told = {s: [ground.traffic(s, step, ranks) for step in steps] for s in SCHEMES}
            seconds = {s: statistics.fmean(ground.seconds(s, step, ranks, beside) for step in steps) for s in SCHEMES}
            used = sum(t.payload_bytes for t in told["ours"])
            direct = sum(t.broadcast_bytes + t.owner_bytes for t in told["ours"])
            rows.append(
                {
                    "workload": name,
                    "world_size": ranks,
                    "dense_bytes": sum(steps[0].sizes),
                    "used_bytes": used / PATTERNS,
                    "not_all_reduced": direct / used,
                    **{f"{s}_busiest_bytes": statistics.fmean(t.busiest_bytes for t in told[s]) for s in SCHEMES},
                    **{f"{s}_seconds": value for s, value in seconds.items()},
                    "ours_overlapped_seconds": statistics.fmean(
                        ground.seconds("ours", step, ranks, beside, overlapped=True) for step in steps
                    ),
                    "ours_over_plain": seconds["ours"] / seconds["plain"],
                    "ours_over_oracle": seconds["ours"] / seconds["oracle"],
                    "ours_over_union": seconds["ours"] / seconds["union"],
                }
            )
    return rows


def weigh(ground: Ground) -> list[dict[str, Any]]:
    """One transport at a time: bytes that k ranks contribute to, each rank to its share of them, or one to all."""
    rows = []
    for ranks, counts in TABLE_CONTRIBUTORS.items():
        for number in counts:
            for size in TABLE_BYTES:
                for shares in ("alike", "one has all") if number == 1 else ("alike",):
                    firsts = range(ranks) if shares == "alike" else (0,)
                    who = [sum(1 << (first + i) % ranks for i in range(number)) for first in firsts]
                    part = max(1, size // len(who) // cases.ELEMENT_BYTES) * cases.ELEMENT_BYTES
                    buckets = [[(i, part) for i in range(len(who))]]
                    told = transports.travel(buckets, who, ranks, ground.settings)
                    union = transports.travel(buckets, who, ranks, replace(ground.settings, direct=False))
                    rows.append(
                        {
                            "world_size": ranks,
                            "contributors": number,
                            "shares": shares,
                            "bytes": part * len(who),
                            "transport": transport_of(told),
                            "messages": told.messages,
                            "busiest_bytes": told.busiest_bytes,
                            "ring_busiest_bytes": union.busiest_bytes,
                            "wire_seconds": told.seconds(ground.link),
                            "ring_seconds": union.seconds(ground.link),
                            "over_ring": told.seconds(ground.link) / union.seconds(ground.link),
                            "overlapped_over_ring": told.seconds(ground.link, overlapped=True)
                            / union.seconds(ground.link),
                        }
                    )
    return rows


def transport_of(traffic: transports.Traffic) -> str:
    named = {"all-reduce": traffic.ring_bytes, "broadcast": traffic.broadcast_bytes, "by owner": traffic.owner_bytes}
    return " and ".join(name for name, size in named.items() if size)


def weigh_masks(ground: Ground) -> list[dict[str, Any]]:
    """What asking who costs: masks that are handed on and not ORed on the way."""
    rows = []
    for parameters in MASK_PARAMETERS:
        for ranks in RANKS:
            asking, sent = transports.agree_seconds(parameters, ranks, ground.gather, ground.link)
            plain, sent_plain = transports.agree_seconds(parameters, ranks, ground.gather, ground.link, who=False)
            rows.append(
                {
                    "parameters": parameters,
                    "world_size": ranks,
                    "grid": "x".join(map(str, transports.axes(ranks))),
                    "message_bytes": transports.mask_bytes(parameters),
                    "sent_bytes": sent,
                    "sent_bytes_without": sent_plain,
                    "agree_seconds": asking,
                    "agree_seconds_without": plain,
                }
            )
    return rows


def weigh_rows() -> list[dict[str, Any]]:
    """Units to which each rank contributes at random: bytes on each link, of plain DDP's."""
    rows = []
    for density in ROW_DENSITIES:
        for ranks in RANKS[:4]:
            ours, union = transports.random_transfers(ranks, density, owners=True)
            ring = model.ring_hops(ranks)
            rows.append(
                {
                    "density": density,
                    "world_size": ranks,
                    "ours_over_plain": ours / ring,
                    "union_over_plain": union / ring,
                }
            )
    return rows


def describe(rows: Sequence[dict[str, Any]], missing: Sequence[str], predictions: Sequence[dict[str, Any]]) -> str:
    """What was found, losses included."""
    parts = [f"Not there: {', '.join(missing)}."] if missing else []
    if not rows:
        return " ".join(["No measured steps are there, so nothing is checked and nothing predicted.", *parts])
    errors = [abs(row["predicted_over_measured"] - 1) for row in rows]
    worst = rows[errors.index(max(errors))]
    wrong = [f"{row['workload']} in {row['source']}" for row in rows if row.get("counters_not_met")]
    exact = "All messages and bytes are exactly those counted"
    parts = [
        f"Of {len(rows)} kinds of steps that no constant was fitted to, the model misses the time by "
        f"{statistics.median(errors):.1%} in the median and by {max(errors):.1%} at most ({worst['scheme']}, "
        f"{worst['workload']}, {worst['world_size']} ranks).",
        f"Messages or bytes are not those counted: {', '.join(wrong)}." if wrong else f"{exact}.",
        *parts,
    ]
    for name in dict.fromkeys(row["workload"] for row in predictions):
        here = [row for row in predictions if row["workload"] == name]
        gains = [_ratio(row) for row in here if row["ours_over_union"] < 0.99]
        losses = [_ratio(row) for row in here if row["ours_over_union"] > 1.01]
        text = f"{name}: against all-reducing the union a step is shorter on {', '.join(gains) or 'no'} ranks"
        parts.append(text + (f" and longer on {', '.join(losses)}." if losses else "."))
    return " ".join(parts)


def _ratio(row: dict[str, Any]) -> str:
    """A number of ranks and the ratio; with a second one where it matters whether the sums overlap with the rest."""
    least = row["ours_overlapped_seconds"] / row["union_seconds"]
    overlapped = f", {least:.2f} if phases overlapped" if least < 0.9 * row["ours_over_union"] else ""
    return f"{row['world_size']} ({row['ours_over_union']:.2f}{overlapped})"


def weigh_everything(results: Path) -> dict[str, Any]:
    """All that `scaling.py transports` writes, but for the header."""
    ground = Ground.read(results)
    rows, missing, exposed = compare(ground, results)
    predictions = predict(ground, exposed)
    return {
        "settings": {"policy": POLICY, "segment_bytes": ground.settings.segment_bytes, "link": "1gbit", "fit": FIT},
        "rows": rows,
        "missing": missing,
        "predictions": predictions,
        "transports": weigh(ground),
        "masks": weigh_masks(ground),
        "random_rows": weigh_rows(),
        "sentence": describe(rows, missing, predictions),
    }
