"""How long does it take to register, beside wrapping the model? On loopback and on shaped links.

    python benchmarks/registration.py

Each rank wraps a small linear layer in DDP, or wraps it and registers, in turns; a time is that of the slowest rank.
Root is needed for links other than loopback.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tools import harness, testbed

WAYS = WRAP, REGISTER = "wrap", "wrap and register"


def measure(rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddp_hooks

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def make(way: str) -> None:
        ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
        if way != WRAP:
            kept.append((ddp, ddp_hooks.register(ddp)))

    kept: list[Any] = []
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-1, rounds):  # the first one imports what is needed
        for way in WAYS:
            dist.barrier()
            started = time.perf_counter()
            make(way)
            slowest = torch.tensor([time.perf_counter() - started])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn >= 0:
                times[way].append(float(slowest))
    kept.clear()
    if dist.get_rank() == 0:
        testbed.report({"times": times})
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit"])
    options = parser.parse_args()
    if harness.is_rank():
        measure(options.rounds)
        return 0
    header = harness.environment_header(sys.argv, max(options.hosts), options.links)
    rows: list[dict[str, Any]] = []
    for link in options.links:
        for ranks in options.hosts:
            argv = [__file__, "--rounds", str(options.rounds)]
            (row,) = testbed.launch(argv, ranks, link, echo_rank=None)[0].results
            wrapping = row["times"][WRAP]
            for way in WAYS:
                more = [a - b for a, b in zip(row["times"][way], wrapping, strict=True)]
                rows.append(
                    {
                        "way": way,
                        "link": link,
                        "world_size": ranks,
                        "seconds": harness.quartiles(row["times"][way]),
                        "baseline": {"way": WRAP, "seconds": harness.quartiles(wrapping)},
                        "more_seconds": harness.quartiles(more),
                    }
                )
                median = rows[-1]["seconds"]["median"], rows[-1]["more_seconds"]["median"]
                print(f"{link:10}{ranks} ranks  {way:36}{1e3 * median[0]:8.1f} ms{1e3 * median[1]:+8.1f} ms")
    registered = [row for row in rows if row["way"] == REGISTER]
    sentence = "; ".join(
        f"on {row['world_size']} ranks, {row['link']}, registering takes {1e3 * row['more_seconds']['median']:.0f} ms "
        f"more than wrapping alone ({1e3 * row['baseline']['seconds']['median']:.0f} ms)"
        for row in registered
    )
    print(sentence + ".")
    harness.write("registration", {"benchmark": "registration", "header": header, "rows": rows, "sentence": sentence})
    return 0


if __name__ == "__main__":
    sys.exit(main())
