"""How long does a step of FSDP2 take on GPUs in two hosts of four, on a slow link between the hosts and on a fast one?

    python benchmarks/shard_link.py

Nothing is measured. Eight ranks train on the pretended device (tests/pretend/), which notes what a step asks for, in
order. This order is then played in virtual time (tools/virtual_time.py), so results are the same in every run. It needs
a checkout built by `make build` with torch 2.13, and no GPU.

The model has the parameters of Llama 3 8B, but a 4096th of the elements in each: its width, words and inner width are a
64th. What is played has all of them: kernels that copy or add, and collectives, take as long as 4096 times the bytes.
The kernels of a layer take as long as its multiplications and additions at 400 TFLOPS, without those of attention
scores, and twice as long in backward. A rank has 16,384 tokens. A step is forward, backward and an optimizer of four
kernels, and begins with an idle device. Costs are those in tests/pretend/costs.h: a launch takes the host 5 us, and a
collective 20 us. FSDP2 copies each parameter in a launch of its own here, with or without `register`.

The ranks of a host have a link of 2.4 Tbit/s each in either direction, as NVLink 3 has. The hosts have one link, which
the ranks share. Torch's collectives are rings that enter and leave each host once, and take a latency of 30 us and the
time that the slowest link needs. Collectives of the four ranks of a host use the fast links; those of the ranks at the
same position on both hosts, of which there are four at the same time, and those of all ranks use the slow one.
Collectives on the same kind of link take turns. A message between ranks on the host takes 0.3 ms.

Not modelled are the time of Python, collectives that slow down kernels beside them, memory, and clocks that vary.
Therefore compare the rows of a table, and do not take a row for a prediction.

A second model has only the 4096th, and kernels that take 2 us each, so that launches decide how long a step takes.

`bfloat16` is `param_dtype=torch.bfloat16, reduce_dtype=torch.float32`, and `float32` no mixed precision, at the same
speed of kernels. `gradients_gb` and `parameters_gb` leave a host in a step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tools import harness, shapes, sharded, tables, testbed, virtual_time

# A 64th of Llama 3 8B, whose width is 4096 and which knows 128,256 words.
WIDTH, WORDS, SCALE = 64, 2004, 64**2
TOKENS, OPERATIONS_PER_SECOND = 16384, 400e12
LAUNCHES_OF_A_LAYER = 16
FAST_LINK_GBITS, GBITS = 2400, (25, 400)
# The models that are played, by what they have of the 8 billion parameters, and the slow link.
LARGE, SMALL = "8B", "2M"
PLAYED = (*((LARGE, gbits) for gbits in GBITS), (SMALL, max(GBITS)))
EXCHANGE_SECONDS = 0.3e-3
DTYPES = ("bfloat16", "float32")
WITHIN, BETWEEN = "within", "between"
# By then FSDP2 knows in which order to prefetch, and what is adaptive has looked.
WARM_UP = 3


def trace_step(dtype: str, variant: str) -> None:
    """Trace a step of one variant, and report how long it takes on each link; a rank."""
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
    costs = _pretend.costs()

    def run_kernels(launches: int, seconds: float) -> None:
        for _ in range(launches):
            _pretend.work(max(costs["kernel"], seconds / launches))

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, is_table: bool, *weights: torch.Tensor) -> torch.Tensor:
            operations = 0 if is_table else 2 * TOKENS * SCALE * sum(weight.numel() for weight in weights)
            ctx.seconds, ctx.weights = operations / OPERATIONS_PER_SECOND, weights
            run_kernels(LAUNCHES_OF_A_LAYER, ctx.seconds)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            run_kernels(2 * LAUNCHES_OF_A_LAYER, 2 * ctx.seconds)
            return gradient, None, *(make(weight) for weight in ctx.weights)

    class Layer(nn.Module):
        def __init__(self, index: int, of_weights: tuple[tuple[int, ...], ...]) -> None:
            super().__init__()
            self.is_table = index == 0
            self.weights = nn.ParameterList(torch.empty(size) for size in of_weights)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Run.apply(x, self.is_table, *self.weights)  # type: ignore[no-any-return]

    layers = enumerate(shapes.blocks_of_llama(WIDTH, WORDS))
    model: Any = nn.Sequential(*(Layer(*layer) for layer in layers)).to("pretend")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded.shard(model, variant, mixed if dtype == "bfloat16" else MixedPrecisionPolicy())
    shards = sum(weight.to_local().nbytes for weight in model.parameters())
    for step in range(WARM_UP + 1):
        for weight in model.parameters():
            weight.grad = None
        # While ranks look for zeros, there are none.
        make = torch.empty_like if step == WARM_UP else torch.ones_like
        x = torch.zeros((), device="pretend", requires_grad=True)
        before = _pretend.counts()
        _pretend.begin_trace()
        model(x).backward()
        run_kernels(4, 5 * SCALE * shards / costs["memory"])
        trace = _pretend.end_trace()
        counted = {name: value - before[name] for name, value in _pretend.counts().items()}
        _pretend.synchronize()
    asked = [(moment.collective, moment.ranks, moment.bytes) for moment in trace if moment.collective]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, asked)
    assert all(each == asked for each in everyone), "expected every rank to ask for the same"
    if dist.get_rank() == 0:
        testbed.report([row(trace, dtype, variant, *played, costs, counted) for played in PLAYED])
    dist.destroy_process_group()


def row(
    trace: Any, dtype: str, variant: str, model: str, gbits: int, costs: dict[str, float], counted: dict[str, int]
) -> dict[str, Any]:
    scale = SCALE if model == LARGE else 1

    def leaves_host(moment: Any) -> float:
        return sum(sharded.leaves_host({(moment.collective, moment.ranks): scale * moment.bytes}).values())

    def link_of(moment: Any) -> str:
        return WITHIN if moment.ranks == sharded.RANKS_OF_A_HOST else BETWEEN

    def seconds_of(moment: Any) -> float:
        if not moment.collective:
            is_of_model = moment.seconds > 0 and moment.bytes == 0
            if is_of_model and model == SMALL:
                return costs["kernel"]
            return float(moment.seconds + (scale - 1) * moment.bytes / costs["memory"])
        if link_of(moment) == BETWEEN:
            return costs["latency"] + leaves_host(moment) / (gbits * 1e9 / 8)
        sent = scale * moment.bytes * sharded.sent_in_ring(moment.collective, moment.ranks)
        return float(costs["latency"] + sent / (FAST_LINK_GBITS * 1e9 / 8))

    played = virtual_time.play(trace, (0.0,), EXCHANGE_SECONDS, seconds_of, link_of)
    collectives = [moment for moment in trace if moment.collective]
    parameters = sum(leaves_host(moment) for moment in collectives if "GATHER" in moment.collective)
    return {
        "model": model,
        "dtype": dtype,
        "gbits": gbits,
        "variant": variant,
        "step_ms": 1e3 * played.step,
        "between_ms": 1e3 * played.links.get(BETWEEN, 0.0),
        "within_ms": 1e3 * played.links.get(WITHIN, 0.0),
        "device_idles_ms": 1e3 * played.device_idles,
        "host_waits_ms": 1e3 * played.host_waits,
        "gradients_gb": (sum(map(leaves_host, collectives)) - parameters) / 1e9,
        "parameters_gb": parameters / 1e9,
        **{name: counted[name] for name in ("launches", "collectives")},
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row its step over plain FSDP2's, or plain HSDP's."""
    for one in rows:
        same = {name: one[name] for name in ("model", "dtype", "gbits")} | {"variant": sharded.plain_of(one["variant"])}
        plain = next((other for other in rows if same.items() <= other.items()), one)
        one["over_plain"] = one["step_ms"] / plain["step_ms"]


def sentence_of(rows: list[dict[str, Any]]) -> str:
    ours = [one for one in rows if "+" in one["variant"]]

    def steps(**of: Any) -> str:
        found = {one["dtype"]: one["over_plain"] for one in ours if of.items() <= one.items()}
        return " and ".join(f"{over:.3f} ({dtype})" for dtype, over in found.items())

    as_much = [one for one in ours if one["gbits"] == max(GBITS) or one["variant"].startswith("hsdp")]
    large, small = (
        max((one for one in as_much if one["model"] == model), key=lambda one: one["over_plain"])
        for model in (LARGE, SMALL)
    )
    where = f"{large['variant']}, {large['dtype']}, {large['gbits']} Gbit/s"
    flat = steps(gbits=GBITS[0], variant=ours[0]["variant"])
    return (
        f"At {GBITS[0]} Gbit/s, a step with fully_shard+register takes {flat} of plain FSDP2's. Under HSDP, where "
        f"register sends as much between hosts, and at {GBITS[1]} Gbit/s, it takes at most {large['over_plain']:.3f} "
        f"({where}), and {small['over_plain']:.3f} if launches decide ({small['variant']}, {small['dtype']})."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--variants", nargs="+", choices=sharded.VARIANTS, default=list(sharded.VARIANTS))
    parser.add_argument("--name", default="shard_link", help="of the result")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the result")
    options = parser.parse_args()
    if harness.is_rank():
        trace_step(options.dtypes[0], options.variants[0])
        return 0
    ranks = sharded.HOSTS * sharded.RANKS_OF_A_HOST
    header = harness.environment_header(sys.argv, ranks, [f"virtual, {gbits} Gbit/s" for gbits in GBITS])
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        for variant in options.variants:
            argv = [str(Path(__file__)), "--dtypes", dtype, "--variants", variant]
            outcomes = testbed.launch(
                argv, sharded.HOSTS, testbed.LOOPBACK, echo_rank=None, ranks_per_host=sharded.RANKS_OF_A_HOST
            )
            rows += outcomes[0].results[0]
    rows.sort(key=lambda one: (PLAYED.index((one["model"], one["gbits"])), DTYPES.index(one["dtype"])))
    compare(rows)
    print(tables.plain_table(rows))
    sentence = sentence_of(rows)
    print(sentence)
    result = {"benchmark": "shard_link", "header": header, "rows": rows, "sentence": sentence}
    harness.write(options.name, result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
