"""What does ddp_hooks.fsdp save under FSDP2, on a slow link and on none?

    python benchmarks/fsdp_link.py                                        # needs root and iproute2
    python benchmarks/fsdp_link.py --links loopback --size tiny --name try
    python benchmarks/fsdp_link.py --ranks-of-a-host 2 --name fsdp_hosts  # against HSDP; what ranks of a host send each
                                                                          # other does not cross the link
    python benchmarks/fsdp_link.py --ranks-of-a-host 2 --over-all-ranks   # against FSDP2 over the ranks of both hosts

Several ways of training one model exist side by side and take turns, one step each, in an order that rotates. Ratios
are taken within a round. A step is forward, backward and SGD, and takes as long as its slowest rank. Afterwards, all
ways train a few more untimed steps, in which gradients are compared bit by bit and bytes on the wire are counted.

gloo implements a reduce-scatter as an all-reduce, which sends twice as much as necessary. The way "all-to-all" shows
what avoiding that saves by itself: each rank sends each owner its part unchanged."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tools import harness, testbed
from tools.fsdp_workloads import WORKLOADS

PLAIN = "plain FSDP2"
SENDS_UNUSED = "plain FSDP2, zeros for unused"
ALL_TO_ALL = "all-to-all, in full"
HSDP = "plain HSDP"
OURS = "ours"
COUNTED_STEPS = 3
IS_ONE_OF_SEVERAL = "DDP_HOOKS_FSDP_LINK_RANK"


class Way:
    """A model, and how it is trained."""

    def __init__(self, name: str, plan: dict[str, Any], mesh: Any) -> None:
        import torch
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        import ddp_hooks.fsdp

        self.name, self.size, self.has_hosts = name, plan["size"], mesh is not None
        self.workload = WORKLOADS[plan["workload"]]
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mixed = mixed if self.workload.is_mixed else MixedPrecisionPolicy()
        over = None if mesh is None else mesh if name == HSDP else mesh["local"]
        self.model: Any = self.workload.build(self.size, lambda module: fully_shard(module, mesh=over, mp_policy=mixed))
        if name != PLAIN:
            self.model.set_reduce_scatter_unused_params(True)
        self.state = ddp_hooks.fsdp.register(self.model, plan["policy"], mesh=mesh) if name == OURS else None
        if name == ALL_TO_ALL:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(all_to_all())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, step: int, rank: int) -> None:
        self.optimizer.zero_grad()
        self.workload.loss(self.model, self.size, step, rank).backward()
        self.optimizer.step()

    def counted(self) -> Any:
        """Statistics of what is to be saved: over hosts, if there is a mesh of them."""
        return self.state.host_stats() if self.has_hosts else self.state.stats()

    def gradients(self) -> list[Any]:
        parameters = self.model.parameters()
        return [None if parameter.grad is None else parameter.grad.to_local() for parameter in parameters]


def all_to_all() -> Any:
    """Make a reduce-scatter in which each rank sends each owner its part, which that one adds up."""
    import torch
    import torch.distributed as dist

    class AllToAll:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            received = torch.empty_like(input_tensor)
            dist.all_to_all_single(received, input_tensor, group=group)
            torch.sum(received.view(group.size(), -1), 0, out=output_tensor)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())

    return AllToAll()


def measure(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: a row for each way."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rank, ranks = dist.get_rank(), dist.get_world_size()
    workload = WORKLOADS[plan["workload"]]
    # Where ranks use different parameters, plain FSDP2 without zeros adds up gradients of different ones, or hangs.
    names = [*([] if workload.sends_unused else [PLAIN]), SENDS_UNUSED, ALL_TO_ALL, OURS]
    mesh = None
    if plan["ranks_of_a_host"] > 1 and not plan["over_all_ranks"]:
        shape = (ranks // plan["ranks_of_a_host"], plan["ranks_of_a_host"])
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "local"))
        names = [HSDP, OURS]
    ways = [Way(name, plan, mesh) for name in names]
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    gc.collect()
    gc.disable()
    for turn in range(-plan["warm_up"], plan["rounds"]):
        for i in range(len(ways)):
            way = ways[(turn + i) % len(ways)]
            dist.barrier()
            start = time.perf_counter()
            way.step(turn + plan["warm_up"], rank)
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 0:
                seconds[way.name].append(float(slowest))
    gc.enable()
    steps = range(plan["warm_up"] + plan["rounds"], plan["warm_up"] + plan["rounds"] + COUNTED_STEPS)
    rows = []
    expected: list[list[Any]] = []
    for way in ways:
        before_stats = way.state and way.counted()
        received: list[list[Any]] = []
        dist.barrier()
        before = testbed.read_counters()
        for step in steps:
            way.step(step, rank)
            received.append([None if gradient is None else gradient.clone() for gradient in way.gradients()])
        dist.barrier()
        after = testbed.read_counters()
        expected = expected or received
        differing = torch.tensor([float(different(received, expected))])
        dist.all_reduce(differing)
        moved = None if before is None or after is None else after - before
        saved = way.state and way.counted() - before_stats
        baseline = seconds[names[0]]
        rows.append(
            {
                "workload": plan["workload"],
                "label": workload.label,
                "size": plan["size"],
                "link": plan["link"],
                "world_size": ranks,
                "ranks_of_a_host": plan["ranks_of_a_host"],
                "over_all_ranks": plan["over_all_ranks"],
                "way": way.name,
                "policy": plan["policy"] if way.state else None,
                "rounds": plan["rounds"],
                "step_seconds": harness.quartiles(seconds[way.name]),
                "baseline": names[0],
                "ratio_to_baseline": harness.quartiles(
                    [a / b for a, b in zip(seconds[way.name], baseline, strict=True)]
                ),
                "wire_bytes": None if moved is None else (moved.shaped_tx_bytes or moved.tx_bytes) / COUNTED_STEPS,
                "dense_bytes": saved.dense_bytes / COUNTED_STEPS if saved else None,
                "payload_bytes": saved.payload_bytes / COUNTED_STEPS if saved else None,
                "mask_bytes": saved.mask_bytes / COUNTED_STEPS if saved else None,
                "elements": sum(parameter.numel() for parameter in way.model.parameters()),
                "differing_gradients": int(differing),
                "statistics": way.counted().to_dict() if way.state else None,
                "samples_seconds": [round(sample, 6) for sample in seconds[way.name]],
            }
        )
    return rows


def different(received: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]]) -> int:
    """Count the gradients that differ in a bit."""
    import torch

    count = 0
    for ours, theirs in zip(received, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            alike = (a is None and b is None) or torch.equal(a.view(torch.int32), b.view(torch.int32))
            count += not alike
    return count


def run_host(plan: dict[str, Any], argv: Sequence[str]) -> None:
    """Run the ranks of this host, each in a process of its own; the first of the first host reports."""
    host, local = int(os.environ["RANK"]), plan["ranks_of_a_host"]
    hosts = int(os.environ["WORLD_SIZE"])
    ranks = []
    for i in range(local):
        numbers = {"RANK": str(host * local + i), "LOCAL_RANK": str(i), "WORLD_SIZE": str(hosts * local)}
        ranks.append(subprocess.Popen([sys.executable, *argv], env={**os.environ, **numbers, IS_ONE_OF_SEVERAL: "1"}))
    if any([rank.wait() for rank in ranks]):
        raise RuntimeError(f"a rank of host {host} failed; its traceback is above")


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    parts = []
    for row in rows:
        if row["way"] == OURS:
            ratio = row["ratio_to_baseline"]["median"]
            part = row["payload_bytes"] / row["dense_bytes"]
            what = "reduce-scatters" if row["ranks_of_a_host"] == 1 or row["over_all_ranks"] else "averages over hosts"
            parts.append(f"{row['label']} at {row['link']}: step {ratio:.2f}, {what} {part:.2f} of the bytes")
    wrong = sum(row["differing_gradients"] for row in rows if row["way"] == OURS)
    against = " or ".join(dict.fromkeys(row["baseline"] for row in rows))
    return f"With ddp_hooks.fsdp, against {against}: {'; '.join(parts)}; {wrong} gradients differ."


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        ratio = row["ratio_to_baseline"]
        wire = "" if row["wire_bytes"] is None else f", {row['wire_bytes'] / 1e6:.2f} MB on the wire"
        payload = ""
        if row["dense_bytes"]:
            part = row["payload_bytes"] / row["dense_bytes"]
            payload = f", sent {part:.3f} of {row['dense_bytes'] / 1e6:.1f} MB"
        print(
            f"{row['label']:<24} {row['link']:<9} {row['way']:<30} {row['step_seconds']['median'] * 1e3:8.1f} ms, "
            f"ratio {ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f}){wire}{payload}, "
            f"{row['differing_gradients']} differ",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options_of_plans(parser, tuple(WORKLOADS), ["1gbit", testbed.LOOPBACK], "fsdp_link")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--ranks-of-a-host", type=int, default=1)
    parser.add_argument("--over-all-ranks", action="store_true", help="shard over the ranks of all hosts")
    options = parser.parse_args()
    if harness.is_rank():
        plan = json.loads(options.plan)
        if plan["ranks_of_a_host"] > 1 and IS_ONE_OF_SEVERAL not in os.environ:
            run_host(plan, sys.argv)
            return 0
        harness.report_rows(lambda: measure(plan))
        return 0
    settings = {
        "rounds": options.rounds,
        "warm_up": options.warm_up,
        "policy": options.policy,
        "ranks_of_a_host": options.ranks_of_a_host,
        "over_all_ranks": options.over_all_ranks,
    }
    return harness.launch_plans(__file__, options, lambda link: settings, print_rows, describe)


if __name__ == "__main__":
    sys.exit(main())
