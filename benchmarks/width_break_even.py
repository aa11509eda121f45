"""Up to which link rate is a peer faster than plain DDP? Computed from rows of slow_link.py; measures nothing.

    python benchmarks/width_break_even.py --results width_1gbit width_10gbit
    python benchmarks/width_break_even.py --results width_1gbit width_10gbit --peers fp16_compress

A step takes fixed seconds and seconds for the bytes it sends: time = fixed + bytes / rate. Both are found from the
slowest and the fastest link that a workload was run on, where the rate is the one that an all-reduce had there, so the
runs need the peer `nothing`. The peer's step is plain DDP's times the ratio of the same rounds. Where its line meets
plain DDP's, it breaks even. Links in between say how well the lines hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import harness, peers, width_tables


@dataclass(frozen=True, slots=True)
class Line:
    """A step's time by the link's rate."""

    fixed_seconds: float
    sent_bytes: float

    @classmethod
    def through(cls, slow: tuple[float, float], fast: tuple[float, float]) -> Line:
        """The line through two points: bytes per second, seconds."""
        (slow_rate, slow_seconds), (fast_rate, fast_seconds) = slow, fast
        sent = (slow_seconds - fast_seconds) / (1 / slow_rate - 1 / fast_rate)
        return cls(fast_seconds - sent / fast_rate, sent)

    def seconds(self, bytes_per_second: float) -> float:
        return self.fixed_seconds + self.sent_bytes / bytes_per_second


def break_even(plain: Line, peer: Line) -> tuple[str, float | None]:
    """Where the peer is faster: at "every rate", at "no rate", "up to" or "from" so many bytes per second."""
    saved_bytes = plain.sent_bytes - peer.sent_bytes
    lost_seconds = peer.fixed_seconds - plain.fixed_seconds
    if saved_bytes * lost_seconds <= 0:
        return ("every rate" if saved_bytes > 0 or lost_seconds < 0 else "no rate"), None
    return ("up to" if saved_bytes > 0 else "from"), saved_bytes / lost_seconds


def find_all(rows: Sequence[dict[str, Any]], names: Iterable[str]) -> list[dict[str, Any]]:
    """One row for each workload, world size and peer that was run on two links or more."""
    found = []
    for workload, ranks in dict.fromkeys((row["workload"], row["world_size"]) for row in harness.select(rows)):
        plain = harness.select(rows, workload=workload, world_size=ranks, peer=peers.BASELINE)
        for name in names:
            theirs = {row["link"]: row for row in harness.select(rows, workload=workload, world_size=ranks, peer=name)}
            both = [(row, theirs[row["link"]]) for row in plain if row["link"] in theirs]
            both = [pair for pair in both if pair[0]["all_reduce_bytes_per_second"]]
            if len(both) > 1:
                found.append(find_one(sorted(both, key=lambda pair: pair[0]["all_reduce_bytes_per_second"])))
    return found


def find_one(both: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Rows of plain DDP and of the peer, by link, the slowest first."""
    links = []
    for plain, peer in both:
        seconds = plain["step_seconds"]["median"]
        ratio = peer["ratio_to_baseline"]["median"]
        links.append((plain["all_reduce_bytes_per_second"], seconds, seconds * ratio))
    plain_line = Line.through(links[0][:2], links[-1][:2])
    peer_line = Line.through((links[0][0], links[0][2]), (links[-1][0], links[-1][2]))
    faster, rate = break_even(plain_line, peer_line)
    first_plain, first_peer = both[0]
    ranks = first_plain["world_size"]
    share = 2 * (ranks - 1) / ranks
    within = [
        line.seconds(link[0]) / link[column] - 1
        for link in links[1:-1]
        for column, line in ((1, plain_line), (2, peer_line))
    ]
    return {
        "label": first_plain["label"],
        "workload": first_plain["workload"],
        "world_size": ranks,
        "peer": first_peer["peer"],
        "plain": {
            "fixed_seconds": plain_line.fixed_seconds,
            "sent_bytes": plain_line.sent_bytes,
            "ring_bytes": first_plain["dense_bytes"] * share,
        },
        "this": {
            "fixed_seconds": peer_line.fixed_seconds,
            "sent_bytes": peer_line.sent_bytes,
            "ring_bytes": None if first_peer["payload_bytes"] is None else first_peer["payload_bytes"] * share,
        },
        "links": [
            {
                "link": plain["link"],
                "bytes_per_second": plain["all_reduce_bytes_per_second"],
                "plain_seconds": plain["step_seconds"]["median"],
                "ratio_to_plain": peer["ratio_to_baseline"]["median"],
                "gradient_difference": peer["gradient_difference"],
            }
            for plain, peer in both
        ],
        "faster": faster,
        "break_even_bytes_per_second": rate,
        "is_extrapolated": rate is not None and not links[0][0] <= rate <= links[-1][0],
        "largest_error_between": max(map(abs, within)) if within else None,
    }


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    parts = [f"{row['peer']} on {row['label']}, {row['world_size']} hosts: {width_tables.where(row)}" for row in rows]
    return "Faster than plain DDP: " + "; ".join(parts) + "." if parts else "No workload was run on two links."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", nargs="+", required=True, help="names of JSON files of slow_link.py")
    parser.add_argument("--peers", nargs="+", default=["ours:auto:native", "fp16_compress"])
    parser.add_argument("--folder", type=Path, default=harness.RESULTS, help="where they are, and this is written")
    parser.add_argument("--name", default="width_break_even", help="of the result")
    options = parser.parse_args()
    try:
        runs = {name: json.loads((options.folder / f"{name}.json").read_text()) for name in options.results}
    except OSError as error:
        parser.error(str(error))
    rows = find_all([row for run in runs.values() for row in run["rows"]], options.peers)
    results = {
        "benchmark": "width_break_even",
        "header": harness.environment_header(sys.argv, 1, (), backend="nothing measured"),
        "from": {name: run["header"] for name, run in runs.items()},
        "rows": rows,
        "sentence": describe(rows),
    }
    harness.write(options.name, results, options.folder)
    print(width_tables.break_even_table(rows))
    print(results["sentence"])
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
