"""Is the link as slow as its rate says? Compares gloo's sends and all-reduces with the rate and with the counters.

    python benchmarks/link_check.py --hosts 2 --rate 1gbit

Goodput is the bytes that a host has to send, over time: the payload of a send from rank 0 to rank 1, and 2(n-1)/n times
the payload of an all-reduce. The send shows the link, and the all-reduce shows what gloo's ring achieves on this
machine's cores. On Ethernet with an MTU of 1500 bytes, 1448 of 1514 bytes are payload, so at most 0.956 of the rate is
possible.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

from tools import harness, testbed


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    rate = testbed.Rate.parse(os.environ["DDP_HOOKS_TESTBED_RATE"]).bits_per_second
    for operation, megabytes in itertools.product(("send", "all_reduce"), options.megabytes):
        share = 2 * (ranks - 1) / ranks if operation == "all_reduce" else 1.0
        message = torch.ones(int(megabytes * 1e6) // 4)
        receipt = torch.zeros(1)
        seconds = []
        dist.barrier()
        before = testbed.read_counters()
        for _ in range(options.rounds):
            message.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            if operation == "all_reduce":
                dist.all_reduce(message)
            elif dist.get_rank() == 0:
                dist.send(message, 1)
                dist.recv(receipt, 1)  # a send is over when it is handed to the kernel; wait until it arrived
            elif dist.get_rank() == 1:
                dist.recv(message, 0)
                dist.send(receipt, 0)
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        after = testbed.read_counters()
        ideal = message.nbytes * share * options.rounds
        median = statistics.median(seconds)
        row = {
            "operation": operation,
            "payload_bytes": message.nbytes,
            "median_seconds": median,
            "goodput_gbit": message.nbytes * share * 8 / median / 1e9,
            "goodput_of_rate": message.nbytes * share * 8 / median / rate if rate else None,
        }
        if before is not None and after is not None:
            moved = after - before
            row["interface_over_payload"] = moved.tx_bytes / ideal
            row["wire_over_payload"] = moved.shaped_tx_bytes / ideal if moved.shaped_tx_bytes else None
            row["dropped"] = moved.dropped
        if dist.get_rank() == 0:
            testbed.report(row)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 25, 100])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "DDP_HOOKS_TESTBED_RATE" in os.environ:
        run_rank(options)
        return 0
    try:
        outcomes = testbed.launch(sys.argv, options.hosts, options.rate, timeout_seconds=300)
    except testbed.TestbedUnavailable as error:
        print(f"cannot run here: {error}", file=sys.stderr)
        return 69
    print(f"{options.hosts} hosts, {options.rate}: gloo all-reduce")
    for row in outcomes[0].results:
        print("  " + "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
    if options.json:
        header = harness.environment_header(sys.argv, options.hosts, [options.rate])
        rows = outcomes[0].results
        best = {row["operation"]: row["goodput_of_rate"] for row in rows if row["goodput_of_rate"]}
        sentence = "Of the rate, with the largest message: " + ", ".join(f"{k} {v:.3f}" for k, v in best.items()) + "."
        result = {"benchmark": "link_check", "header": header, "rows": rows, "sentence": sentence}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
