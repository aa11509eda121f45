"""What does a hook ask of a device in a step, with nothing to skip, half frozen, or with one table used in part?

    python benchmarks/device_counts.py
    python benchmarks/device_counts.py --shapes llama --name shard_counts    # FSDP2

It runs on the pretended device of the tests (tests/pretend/), with two ranks. It therefore needs a checkout built by
`make build` with torch 2.13, and no GPU. On rank 0, it counts per step: launches (kernels and copies), allocations,
recorded events, waits of streams for events, waits of the host for the device, and collectives. Torch's
`allreduce_hook` runs the same step, so the difference from its counts is the price of our hook. All counts are calls of
the host; no time is measured.

The modules have the parameters of GPT-2 (124M) and ResNet-50 in their order and shapes. Each gradient is dense and
has no zero. In `frozen`, every other layer is frozen after two steps, so that buckets have gaps. In `table`, the
gradient of the largest parameter is zero but for a sixteenth of its rows. `allreduce_hook` always has dense gradients
and nothing frozen. An adaptive policy is counted after 40 steps, when it has settled. It looks again in one of the
ten counted steps, and pauses twice as long each time, so the median shows a usual step, and the mean includes a
look.

With `--shapes llama`, it counts FSDP2 on 2 hosts of 4 ranks, for a model with the blocks of Llama, narrower.
Parameters are float32, gradients bfloat16, and sums float32. `reduce_scatter_mb` are the bytes that a rank sends in
reduce-scatters or instead, to any rank. `link_mb` are the bytes of gradients that leave a host, if torch's collectives
are rings that enter and leave each host once, and `gathered_mb` those of parameters. `least_link_mb` is the least for
sums in float32: each host sends the other one its sums of half of the parameters, or of all under HSDP."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tools import harness, shapes, sharded, testbed

COUNTS = ("launches", "allocations", "events", "stream_waits", "host_waits", "collectives")
ALLREDUCE = "allreduce_hook"
# Presets, and single settings that are on in every step.
VARIANTS = (
    ALLREDUCE,
    "allreduce",
    "skip_unused",
    "skip_unused:frozen",
    "auto",
    "auto:table",
    "skip_zeros=on",
    "skip_zero_rows=on",
)
# What is adaptive settles, and looks again now and then; all other steps are alike from the fourth on.
WARM_UP, STEPS = 40, 10
WARM_UP_ALIKE, STEPS_ALIKE = 4, 1
# By then DDP has rebuilt its buckets, in which frozen parameters therefore lie between others.
FROZEN_FROM = 2
LLAMA = "llama"
WIDTH, WORDS = 64, 1024
BYTES = ("reduce_scatter_mb", "link_mb", "gathered_mb")


def measure(shape: str, variant: str) -> None:
    """Count one variant's steps; a rank."""
    sys.path.insert(1, str(harness.ROOT / "tests"))
    import pretend  # noqa: F401, makes torch know the device
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    import ddp_hooks
    from ddp_hooks_testing import _pretend

    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,pretend:pretend")
    _pretend.seed(dist.get_rank(), 0.0)
    _pretend.leave_out_copies()  # of buckets; the gradients that this counts with are not looked at
    policy, _, case = variant.partition(":")
    layers = list(shapes.LAYERS[shape]())
    frozen = [
        is_frozen for layer, is_frozen in zip(layers, shapes.half_frozen(layers), strict=True) for _ in layer.parameters
    ]
    warm_up, steps = (WARM_UP, STEPS) if policy == "auto" else (WARM_UP_ALIKE, STEPS_ALIKE)

    class Weights(nn.Module):
        """The gradient of each parameter, or of the used rows of a table, is the factor that it is multiplied with."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.zeros(size) for layer in layers for size in layer.parameters)
            largest = max(range(len(self.weights)), key=lambda index: self.weights[index].numel())
            self.table = largest if case == "table" else None

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            used = [
                weight[: len(weight) // 16] if index == self.table else weight
                for index, weight in enumerate(self.weights)
                if weight.requires_grad
            ]
            return torch.stack([(part * factor).sum() for part in used]).sum()

    model = Weights().to("pretend")
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    setting, _, value = policy.partition("=")
    if policy == ALLREDUCE:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif value:
        ddp_hooks.register(ddp, ddp_hooks.Policy(policy, **{setting: value}))
    else:
        ddp_hooks.register(ddp, policy)
    counted: list[dict[str, int]] = []
    for step in range(warm_up + steps):
        for weight, is_frozen in (
            zip(model.weights, frozen, strict=True) if case == "frozen" and step == FROZEN_FROM else ()
        ):
            weight.requires_grad_(not is_frozen)
        factor = torch.tensor(0.1 * (step + 1), device="pretend")
        for weight in model.parameters():
            weight.grad = None
        loss = ddp(factor)
        before = _pretend.counts()
        loss.backward()
        after = _pretend.counts()
        if step >= warm_up:
            counted.append({name: after[name] - before[name] for name in COUNTS})
        _pretend.synchronize()
    if dist.get_rank() == 0:
        means = {name: sum(one[name] for one in counted) / len(counted) for name in COUNTS}
        medians = {name: statistics.median(one[name] for one in counted) for name in COUNTS}
        row = {"shape": shape, "variant": variant, "parameters": len(model.weights), **medians, "means": means}
        testbed.report(row)
    dist.destroy_process_group()


def measure_shards(variant: str) -> None:
    """Count one variant of FSDP2; a rank."""
    sys.path.insert(1, str(harness.ROOT / "tests"))
    import pretend  # noqa: F401, makes torch know the device
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from ddp_hooks_testing import _pretend

    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,pretend:pretend")
    _pretend.seed(dist.get_rank(), 0.0)
    _pretend.end_memory_late(True)

    class Block(nn.Module):
        def __init__(self, shapes_of_weights: tuple[tuple[int, ...], ...]) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.zeros(size) for size in shapes_of_weights)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.stack([weight.sum() for weight in self.weights]).sum()

    model: Any = nn.Sequential(*(Block(each) for each in shapes.blocks_of_llama(WIDTH, WORDS))).to("pretend")
    sharded.shard(model, variant, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for _ in range(WARM_UP_ALIKE):
        x = torch.zeros((), device="pretend", requires_grad=True)
        before, groups_before = _pretend.counts(), Counter(_pretend.bytes_by_group())
        model(x).backward()
        after, groups = _pretend.counts(), Counter(_pretend.bytes_by_group())
        for weight in model.parameters():
            weight.grad = None
        _pretend.synchronize()
    if dist.get_rank() == 0:
        sent = sharded.leaves_host(groups - groups_before)
        # HSDP returns the sums of everything to both hosts, and FSDP2 those of half to each.
        numel = sum(weight.numel() for weight in model.parameters()) * (2 if variant.startswith("hsdp") else 1)
        reduced = {
            key: size for key, size in (groups - groups_before).items() if "REDUCE_" in key[0] or "TOALL" in key[0]
        }
        row = {
            "shape": LLAMA,
            "variant": variant,
            "parameters": len(list(model.parameters())),
            **{name: after[name] - before[name] for name in COUNTS},
            "reduce_scatter_mb": sum(size * (ranks - 1) / ranks for (_, ranks), size in reduced.items()) / 1e6,
            "link_mb": sum(size for name, size in sent.items() if "GATHER" not in name) / 1e6,
            "gathered_mb": sum(size for name, size in sent.items() if "GATHER" in name) / 1e6,
            "least_link_mb": numel * torch.float32.itemsize * (sharded.HOSTS - 1) / sharded.HOSTS / 1e6,
        }
        testbed.report(row)
    dist.destroy_process_group()


def sentence_of(rows: list[dict[str, Any]]) -> str:
    """Say what rows ask for beyond plain: a settled `auto`, a model that is half frozen, and FSDP2."""
    parts = []
    for row in rows:
        if row["variant"].startswith("auto"):
            more = row["over_plain"]
            what = row["shape"] + (", rows of one table" if "table" in row["variant"] else "")
            parts.append(
                f"{more['launches']:+.0f} launches and {more['host_waits']:+.0f} host waits a step, and "
                f"{row['means']['host_waits']:.1f} waits in the mean of steps with a look ({what})"
            )
        elif row["variant"].endswith(":frozen"):
            parts.append(f"{row['over_plain']['collectives']:+.0f} collectives ({row['shape']}, half frozen)")
    sentences = [f"Against torch's allreduce_hook a step asks for {', '.join(parts)}."] if parts else []
    for row in rows:
        if "+" in row["variant"]:
            more = row["over_plain"]
            part = {name: row[name] / (row[name] - more[name]) for name in ("link_mb", "reduce_scatter_mb")}
            sentences.append(
                f"With {row['variant']}, {part['link_mb']:.3f} of the bytes of gradients leave a host, "
                f"{row['link_mb'] / row['least_link_mb']:.3f} of the least, and a rank sends "
                f"{part['reduce_scatter_mb']:.3f} in reduce-scatters, for {more['launches']:+.0f} launches, "
                f"{more['collectives']:+.0f} collectives and {more['host_waits']:+.0f} host waits a step."
            )
    return " ".join(sentences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*shapes.LAYERS, LLAMA], default=list(shapes.LAYERS))
    every = [*VARIANTS, *sharded.VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=every, default=every)
    parser.add_argument("--name", default="device_counts", help="of the result")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the result")
    options = parser.parse_args()
    if harness.is_rank():
        shape, variant = options.shapes[0], options.variants[0]
        measure_shards(variant) if shape == LLAMA else measure(shape, variant)
        return 0
    world_size = sharded.HOSTS * sharded.RANKS_OF_A_HOST if LLAMA in options.shapes else 2
    header = harness.environment_header(sys.argv, world_size, [testbed.LOOPBACK])
    rows: list[dict[str, Any]] = []
    print(f"{'':34}" + "".join(f"{name:>14}" for name in COUNTS))
    for shape in options.shapes:
        hosts, ranks_of_a_host = (sharded.HOSTS, sharded.RANKS_OF_A_HOST) if shape == LLAMA else (2, 1)
        variants = sharded.VARIANTS if shape == LLAMA else VARIANTS
        for variant in (each for each in options.variants if each in variants):
            argv = [str(Path(__file__)), "--shapes", shape, "--variants", variant]
            outcomes = testbed.launch(argv, hosts, testbed.LOOPBACK, echo_rank=None, ranks_per_host=ranks_of_a_host)
            row = outcomes[0].results[0]
            plain = sharded.plain_of(variant) if shape == LLAMA else ALLREDUCE
            base = next((one for one in rows if one["shape"] == shape and one["variant"] == plain), row)
            row["over_plain"] = {name: row[name] - base[name] for name in (*COUNTS, *BYTES) if name in row}
            rows.append(row)
            print(f"{shape:12}{variant:22}" + "".join(f"{row[name]:14.1f}" for name in COUNTS), flush=True)
    sentence = sentence_of(rows)
    print(sentence)
    result = {"benchmark": "device_counts", "header": header, "rows": rows, "sentence": sentence}
    harness.write(options.name, result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
