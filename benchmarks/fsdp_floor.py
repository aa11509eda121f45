"""How few bytes could an average over two hosts take, and how many does ddp_hooks.fsdp send?

    python benchmarks/fsdp_floor.py            # no link is needed, nothing is timed

There are two hosts with two ranks each, as for `fsdp_link.py --ranks-of-a-host 2`. The workload's draws of experts and
words decide which rank uses what. A host's average of a gradient is zero if none of its ranks uses the gradient, a
bfloat16 number if one of them does, and a float32 number if both do. Each host has to learn what the other one has;
sending it a sum instead would take at least as many bits. With exact sums and forms of 0, 16 or 32 bits, the least is
therefore what both hosts have together. A ring sends 32 bits in each case.

Then the ranks train these steps, and count the bytes that they send to the other host.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tools import harness, testbed
from tools.fsdp_workloads import WORKLOADS

HOSTS, RANKS_OF_A_HOST = 2, 2
# Those that fsdp_link.py counts after 3 steps of warming up and 8 rounds.
STEPS = range(11, 14)
MODELS = ("llama", "mixtral")


def bits(users: int) -> int:
    """Return what a number takes that so many ranks of a host have a part of."""
    return (0, 16, 32)[users]


def count_least(name: str, size: str) -> dict[str, float]:
    """Return bytes that a rank sends in a step: at least, by an owner that sends sums back, and in a ring."""
    import torch

    workload = WORKLOADS[name]
    with torch.device("meta"):
        model: Any = workload.build(size, lambda module: module)
    shape = workload.sizes[size]
    least = owned = 0.0
    for step in STEPS:
        # By host: how many of its ranks use each expert of each layer, and each word.
        experts = [Counter[tuple[int, int]]() for _ in range(HOSTS)]
        words = [Counter[int]() for _ in range(HOSTS)]
        for rank in range(HOSTS * RANKS_OF_A_HOST):
            chosen, tokens = workload.draw(size, step, rank)
            experts[rank // RANKS_OF_A_HOST].update((i, e) for i, some in enumerate(chosen) for e in some)
            words[rank // RANKS_OF_A_HOST].update(set(tokens[0, :-1].tolist()))
        for parameter_name, parameter in model.named_parameters():
            pieces: list[tuple[int, list[int]]]  # elements, and how many ranks of each host have a part of them
            path = parameter_name.split(".")
            if "experts" in path:
                key = int(path[1]), int(path[path.index("experts") + 1])
                pieces = [(parameter.numel(), [host[key] for host in experts])]
            elif "router" in path:
                width = parameter.shape[1]
                pieces = [(width, [host[int(path[1]), e] for host in experts]) for e in range(shape.experts)]
            elif path[0] == "words":
                pieces = [(shape.width, [host[word] for host in words]) for word in range(shape.words)]
            else:
                pieces = [(parameter.numel(), [RANKS_OF_A_HOST] * HOSTS)]
            for elements, users in pieces:
                sent = [bits(each) for each in users]
                total = 32 if all(users) else max(sent)
                least += elements * sum(sent) / HOSTS / 8
                # Half of it is owned by either: what the other one has comes in, and the sum goes out.
                owned += elements * (sum(sent) / HOSTS + total) / HOSTS / 8
    per_rank = len(STEPS) * RANKS_OF_A_HOST
    elements = sum(parameter.numel() for parameter in model.parameters())
    return {
        "elements": elements,
        "dense_bytes": elements * 4 / RANKS_OF_A_HOST,
        "least_bytes": least / per_rank,
        "by_owner_bytes": owned / per_rank,
    }


def count_sent(name: str, size: str) -> None:
    """On every rank: train, and report what the ranks of both hosts sent to the other, in the mean."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import ddp_hooks.fsdp

    dist.init_process_group("gloo")
    workload = WORKLOADS[name]
    mesh = init_device_mesh("cpu", (HOSTS, RANKS_OF_A_HOST), mesh_dim_names=("hosts", "local"))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = workload.build(size, lambda module: fully_shard(module, mesh=mesh["local"], mp_policy=mixed))
    model.set_reduce_scatter_unused_params(True)
    state = ddp_hooks.fsdp.register(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS.stop):
        if step == STEPS.start:
            state.reset_stats()
        optimizer.zero_grad()
        workload.loss(model, size, step, dist.get_rank()).backward()
        optimizer.step()
    stats = state.host_stats()
    counted = torch.tensor([stats.payload_bytes, stats.mask_bytes], dtype=torch.float64)
    dist.all_reduce(counted)
    counted /= dist.get_world_size() * len(STEPS)
    if dist.get_rank() == 0:
        testbed.report({"payload_bytes": float(counted[0]), "mask_bytes": float(counted[1])})
    dist.destroy_process_group()


def sentence_of(rows: list[dict[str, Any]]) -> str:
    """Say what is sent, beside the least."""
    parts = [
        f"{row['payload_bytes'] / row['dense_bytes']:.2f} where {row['least_bytes'] / row['dense_bytes']:.2f} is the "
        f"least, and an owner would need {row['by_owner_bytes'] / row['dense_bytes']:.2f} ({row['label']})"
        for row in rows
    ]
    return f"Of a ring's bytes over two hosts are sent: {'; '.join(parts)}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "default"), default="default")
    parser.add_argument("--workloads", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--name", default="fsdp_floor", help="of the result")
    options = parser.parse_args()
    if harness.is_rank():
        count_sent(options.workloads[0], options.size)
        return 0
    header = harness.environment_header(sys.argv, HOSTS * RANKS_OF_A_HOST, [testbed.LOOPBACK])
    rows: list[dict[str, Any]] = []
    for name in options.workloads:
        argv = [str(Path(__file__)), "--workloads", name, "--size", options.size]
        sent = testbed.launch(argv, HOSTS * RANKS_OF_A_HOST, testbed.LOOPBACK, echo_rank=None)[0].results[0]
        rows.append({"workload": name, "label": WORKLOADS[name].label, **count_least(name, options.size), **sent})
        print(json.dumps(rows[-1]), flush=True)
    sentence = sentence_of(rows)
    print(sentence)
    harness.write(options.name, {"benchmark": "fsdp_floor", "header": header, "rows": rows, "sentence": sentence})
    return 0


if __name__ == "__main__":
    sys.exit(main())
