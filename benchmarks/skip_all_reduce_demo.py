"""What does DDP's own skip_all_reduce_unused_params do where ranks differ? It hangs or goes wrong; this shows it.

    python benchmarks/skip_all_reduce_demo.py

DDP decides on each rank, from that rank's own unused parameters, which buckets to skip; where ranks differ they
disagree about which all-reduces there are. Two ways to differ: each rank trains a layer of its own (as many all-reduces
on each, of different parameters), or rank 0 trains a layer more. Every case runs in ranks of its own, under a timeout;
the gradients are compared with plain DDP's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from tools import harness, testbed

PEERS = ("skip_all_reduce", "plain", "ours")
WIDTH = 512
STEPS = 3
CASES = {"own_layer": "each rank trains a layer of its own", "one_more": "rank 0 trains a layer more"}


def run_rank(peer: str, case: str, collective_timeout: float) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from tools.peers import max_difference

    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=collective_timeout)
    # Made here, because what `init_process_group` makes for itself is not to be had from it.
    store = dist.TCPStore(host, port, ranks, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank))
    used = (rank,) if case == "own_layer" else ((0, 1) if rank == 0 else (1,))

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in used:
                x = self.layers[i](x)
            return x.square().mean()

    def gradients(**settings: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        # A layer is 1 MiB and fills a bucket: DDP skips whole buckets only.
        ddp = DistributedDataParallel(Layers(), find_unused_parameters=True, bucket_cap_mb=1, **settings)
        if peer == "ours" and not settings:
            import ddp_hooks

            ddp_hooks.register(ddp, policy="skip_unused")
        for _ in range(STEPS):
            ddp.zero_grad()
            ddp(inputs).backward()
        return {name: p.grad for name, p in ddp.module.named_parameters() if p.grad is not None}

    expected = gradients(skip_all_reduce_unused_params=False)
    mine = gradients(skip_all_reduce_unused_params=True) if peer == "skip_all_reduce" else gradients()
    testbed.report({"gradient_difference": max_difference(mine, expected)})
    # Leave together, but not through the process group: its pairing may be what just broke.
    store.set(f"done{rank}", "1")
    store.wait([f"done{other}" for other in range(ranks)])
    if rank == 0:
        time.sleep(0.5)  # rank 0 holds the store
    sys.stdout.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds until a run counts as hung")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if harness.is_rank():
        # Longer than the run's own timeout: a collective that waits for ever should be seen to wait.
        run_rank(options.peer, options.case, collective_timeout=10 * options.timeout)
        return 0
    rows = []
    for case, peer in itertools.product(CASES, PEERS):
        argv = [__file__, "--peer", peer, "--case", case, "--timeout", str(options.timeout)]
        row: dict[str, Any] = {"case": case, "peer": peer}
        try:
            outcomes = testbed.launch(argv, options.hosts, testbed.LOOPBACK, options.timeout, echo_rank=None)
            gap = max(o.results[0]["gradient_difference"] for o in outcomes)
            outcome = "gives the gradients of plain DDP" if gap == 0 else "gives wrong gradients without an error"
            row |= {"outcome": outcome, "gradient_difference": gap}
        except testbed.RankFailed as error:
            text = str(error)
            hangs = text.startswith("not done")
            row |= {"outcome": "hangs" if hangs else "fails", "detail": None if hangs else _why(text)}
        rows.append(row)
        print(f"{CASES[case]:36} {peer:16} {row['outcome']}  {row.get('detail') or ''}")
    sentence = describe(rows)
    header = harness.environment_header(sys.argv, options.hosts, [testbed.LOOPBACK])
    header["timeout_seconds"] = options.timeout
    harness.write(
        "skip_all_reduce_demo",
        {"benchmark": "skip_all_reduce_demo", "header": header, "rows": rows, "sentence": sentence},
    )
    print(sentence)
    return 0


def describe(rows: Sequence[dict[str, Any]]) -> str:
    found = [f"it {row['outcome']} when {CASES[row['case']]}" for row in rows if row["peer"] == "skip_all_reduce"]
    ours = dict.fromkeys(row["outcome"] for row in rows if row["peer"] == "ours")
    return (
        f"skip_all_reduce_unused_params where ranks differ: {', and '.join(found)}; ddp_hooks there {', '.join(ours)}."
    )


def _why(text: str) -> str:
    """The error that came first is gloo's; the other ranks' are about the connection that it tore down."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "enforce fail" in line]
    first = [line for line in lines if "enforce fail" in line] or lines
    return first[0].rpartition("gloo/transport/")[2].partition(" Is there ")[0][:160] if first else text.strip()[-160:]


if __name__ == "__main__":
    sys.exit(main())
