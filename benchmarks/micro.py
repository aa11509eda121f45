"""Microbenchmarks: what the parts of a step cost by themselves. One JSON for each part, `micro_<part>.json`.

    python benchmarks/micro.py all
    python benchmarks/micro.py exchange --hosts 2 3 4 --links loopback 1gbit
    python benchmarks/micro.py exchange --hosts 8 16 --links loopback

| Part | Measures | Baseline in the same run |
|---|---|---|
| mask | set, merge, count, encode, decode; compiled without Python | memcpy of the words |
| mask_codec | bytes of a compressed mask, encode, decode, by density; compiled without Python | the bitmap |
| plan | making a reduction plan, and finding it in the cache; compiled without Python | a walk over the slices |
| copy | scans of whole slices, gather_scaled, scatter; through the binding, whose own cost is beside it | `copy_` |
| unit_scan | start_unit_scan over a table of zeros and a dense one | reading all of it (`amax`) |
| packing | pack and sum_contributions, of long slices and of rows | `copy_` |
| coding | bits per value of gradients of small models; encode, decode, decode and add | `copy_` |
| exchange | an OR over all ranks by all-reduce, all_gather, grids of small all_gathers; not hidden | all-reduce |
| transports | bringing everybody what one rank alone has, or two: all_to_alls, broadcasts, all_gather | all-reduce |
| registration | backward over 200 tiny buckets, with `register` and with `ddp.register_comm_hook` | plain DDP |

A grid arranges n ranks as r1 x r2 x ...: an all_gather in each dimension, masks ORed in between, makes the sum of
(r - 1) ring hops where one all_gather makes n - 1 and the all-reduce 2 (n - 1).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from micro import coding, local, packing, ranks, transports, units
from tools import harness, testbed
from tools.tables import plain_cell

PARTS = (
    *("mask", "mask_codec", "plan", "copy", "unit_scan", "packing", "coding", "exchange", "transports"),
    "registration",
)
COMPILED = {"mask": local.describe_mask, "mask_codec": local.describe_mask_codec, "plan": local.describe_plan}
CROWD = 8  # from this many ranks on, fewer rounds


def run_rank(plan: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if plan["part"] == "exchange":
        ranks.exchange_rank(plan["rounds"])
    elif plan["part"] == "transports":
        transports.transports_rank(plan["rounds"])
    else:
        ranks.registration_rank(plan["rounds"])
    dist.barrier()
    dist.destroy_process_group()


def launch(part: str, hosts: int, link: str, rounds: int, timeout: float) -> list[dict[str, Any]]:
    argv = [__file__, part, "--rank-plan", json.dumps({"part": part, "rounds": rounds})]
    return testbed.launch(argv, hosts, link, timeout, echo_rank=None)[0].results


def run_part(part: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of one part and the sentence that says what they show."""
    if part in COMPILED:
        rows = local.run_compiled(part, options.rounds or 31)
        return rows, COMPILED[part](rows)
    if part == "copy":
        rows = local.run_copy(options.rounds or 15, options.max_mib << 20)
        return rows, local.describe_copy(rows)
    if part == "unit_scan":
        rows = units.run_unit_scan(options.rounds or 15)
        return rows, units.describe_unit_scan(rows)
    if part == "packing":
        rows = packing.run_packing(options.rounds or 9)
        return rows, packing.describe_packing(rows)
    if part == "coding":
        rows = coding.run_coding(options.rounds or 9)
        return rows, coding.describe_coding(rows)
    if part == "registration":
        rows = launch(part, 2, testbed.LOOPBACK, options.rounds or 100, options.timeout)
        return rows, ranks.describe_registration(rows)
    rows = []
    for link in options.links:
        for hosts in options.hosts:
            rounds = 8 if part == "transports" else 200 if hosts < CROWD else 60
            rows += launch(part, hosts, link, options.rounds or rounds, options.timeout)
    return rows, transports.describe_transports(rows) if part == "transports" else ranks.describe_exchange(rows)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        cells = (f"{key}={plain_cell(key, value)}" for key, value in row.items() if key not in ("part", "rounds"))
        print("  " + "  ".join(cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4], help="for exchange and transports")
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit"], help="for exchange and transports")
    parser.add_argument("--rounds", type=int, help="default: what gives steady medians, by part")
    parser.add_argument("--max-mib", type=int, default=256, help="for copy: the largest message")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds, for each set of ranks")
    parser.add_argument("--name", help="of the result, for a single part; default: micro_<part>")
    parser.add_argument("--rank-plan", help=argparse.SUPPRESS)  # how the ranks are told what to do
    options = parser.parse_args()
    if harness.is_rank():
        run_rank(json.loads(options.rank_plan))
        return 0
    if options.part == "all" and options.name:
        parser.error("--name names the result of one part")
    failed = False
    for part in PARTS if options.part == "all" else [options.part]:
        name = options.name or f"micro_{part}"
        over_links = (max(options.hosts), options.links)
        by_part = {"exchange": over_links, "transports": over_links, "registration": (2, [testbed.LOOPBACK])}
        world_size, links = by_part.get(part, (1, []))
        header = harness.environment_header(sys.argv, world_size, links)
        try:
            rows, sentence = run_part(part, options)
        except testbed.TestbedUnavailable as error:
            print(f"{part} cannot run here: {error}", file=sys.stderr)
            return 69
        except (testbed.RankFailed, RuntimeError) as error:
            print(f"{part}: {error}", file=sys.stderr)
            failed = True
            continue
        harness.write(name, {"benchmark": name, "header": header, "rows": rows, "sentence": sentence})
        print(f"\n{part}, {os.cpu_count()} cores")
        print_rows(rows)
        print(sentence)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
