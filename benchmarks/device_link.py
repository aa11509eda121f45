"""How long does a step take on GPUs in two hosts, if the mask exchange takes 0.3 ms and one host is 0.2 ms late?

    python benchmarks/device_link.py

Nothing is measured. Two ranks train on the pretended device (tests/pretend/), which notes what a step of the real
engine asks for, in order: kernels, collectives, waits of streams and of the host, mask exchanges. This order is then
played in virtual time on two hosts that share a link (tools/virtual_time.py), so results are the same in every run. It
needs a checkout built by `make build` with torch 2.13, and no GPU.

The costs are those in tests/pretend/costs.h: a launch takes the host 5 us, and a collective 20 us. A kernel of the hook
or of DDP takes as long as its bytes. An all-reduce takes a latency and what a ring over the hosts needs for its bytes;
the ranks of a host share them, so a host counts as one rank, whether it has 1 or 8. The model has the layers of GPT-2
or ResNet-50. Each puts its kernels on the stream, which take as long as their operations at the rate below, and twice
as long in backward, and returns gradients. A step is forward, backward and an optimizer of four kernels. It begins with
an idle device, as after a program has read its loss, and ends with the last kernel.

Not modelled are the time of Python, collectives that slow down kernels beside them, a search of the graph, and clocks
that vary. Therefore compare the rows of a table, and do not take a row for a prediction.

In rows bound by `gpu`, there are so many samples that kernels take longer than launches, and by `launch`, so few that
they do not. In `frozen`, every other layer is frozen after DDP has laid out its buckets; `oracle` is plain DDP, wrapped
after freezing. In `opens at once`, the engine waits for masks with the first bucket; otherwise, it waits with the one
that completes 8 MiB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tools import harness, shaped_model, shapes, tables, testbed, virtual_time

PLAIN, ORACLE = "plain", "oracle"
AT_ONCE = "opens at once"
VARIANTS = (
    PLAIN,
    "skip_unused",
    f"skip_unused, {AT_ONCE}",
    "auto",
    f"{PLAIN}:frozen",
    f"{ORACLE}:frozen",
    "skip_unused:frozen",
    "auto:frozen",
)
GBITS = (100, 400)
EXCHANGE_SECONDS, LATE_SECONDS = 0.3e-3, 0.2e-3
# By then DDP has rebuilt its buckets. And what is adaptive has looked at samples, and not yet at values.
FROZEN_FROM, WARM_UP = 2, 8


def trace_steps(shape: str, variant: str) -> None:
    """Trace one variant's step in both sizes, and report how long it takes; a rank."""
    sys.path[1:1] = [str(harness.ROOT / "tests"), str(harness.ROOT / "tests" / "tools")]
    import pretend  # noqa: F401, makes torch know the device
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from tuned import with_settings

    import ddp_hooks
    from ddp_hooks_testing import _pretend

    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,pretend:pretend")
    _pretend.seed(dist.get_rank(), 0.0)
    _pretend.leave_out_copies()
    costs = _pretend.costs()

    def run_kernels(launches: int, seconds: float) -> None:
        for _ in range(launches):
            _pretend.work(max(costs["kernel"], seconds / launches))

    name, _, case = variant.partition(":")
    policy, _, opening = name.partition(", ")
    model = shaped_model.Model(shape, run_kernels).to("pretend")
    if policy == ORACLE:
        model.freeze()
    is_plain = policy in (PLAIN, ORACLE)
    searches = policy == PLAIN and case == "frozen"  # plain DDP cannot freeze without a search
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=searches)
    if not is_plain:
        ddp_hooks.register(ddp, with_settings(policy, opening_bytes=0) if opening else policy)
    x = torch.zeros((), device="pretend", requires_grad=True)
    sizes = shaped_model.SAMPLES[shape]
    rows = []
    for step in range(WARM_UP + len(sizes)):
        if case == "frozen" and step == FROZEN_FROM:
            model.freeze()
        for weight in model.parameters():
            weight.grad = None
        before = _pretend.counts()
        size = list(sizes)[max(0, step - WARM_UP)]
        _pretend.begin_trace()
        ddp(x, sizes[size]).backward(torch.zeros((), device="pretend"))
        trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        run_kernels(4, 5 * trained / costs["memory"])
        trace = _pretend.end_trace()
        counted = {name: value - before[name] for name, value in _pretend.counts().items()}
        _pretend.synchronize()
        if step >= WARM_UP:
            # Plain DDP fills in zeros for what is unused, in the order of addresses.
            asked = sorted((moment.what, moment.stream, moment.seconds, moment.host_seconds) for moment in trace)
            everyone: list[Any] = [None, None]
            dist.all_gather_object(everyone, asked)
            assert everyone[0] == everyone[1], "expected every rank to ask for the same"
            rows += [row(trace, shape, variant, size, gbits, costs, counted) for gbits in GBITS]
    if dist.get_rank() == 0:
        testbed.report(rows)
    dist.destroy_process_group()


def row(
    trace: Any, shape: str, variant: str, size: str, gbits: int, costs: dict[str, float], counted: dict[str, int]
) -> dict[str, Any]:
    slower = costs["link"] / (gbits * 1e9 / 8)
    played = virtual_time.play(
        trace,
        (0.0, LATE_SECONDS),
        EXCHANGE_SECONDS,
        lambda moment: (
            costs["latency"] + slower * (moment.seconds - costs["latency"]) if moment.collective else moment.seconds
        ),
    )
    return {
        "shape": shape,
        "bound by": size,
        "gbits": gbits,
        "variant": variant,
        "step_ms": 1e3 * played.step,
        "host_waits_ms": 1e3 * played.host_waits,
        "device_idles_ms": 1e3 * played.device_idles,
        "link_ms": 1e3 * sum(played.links.values()),
        **{name: counted[name] for name in ("launches", "collectives", "collective_bytes")},
    }


def compared(rows: list[dict[str, Any]]) -> None:
    """Add to each row how it compares with plain DDP; half frozen, which part of the link's time it saves."""
    for one in rows:
        case = ":frozen" if one["variant"].endswith(":frozen") else ""

        def other(name: str, one: dict[str, Any] = one, case: str = case) -> dict[str, Any]:
            same = ("shape", "bound by", "gbits")
            return next(r for r in rows if r["variant"] == name + case and all(r[key] == one[key] for key in same))

        one["over_plain"] = one["step_ms"] / other(PLAIN)["step_ms"]
        if case:
            most = other(PLAIN)["link_ms"] - other(ORACLE)["link_ms"]
            one["saved_of_oracle"] = (other(PLAIN)["link_ms"] - one["link_ms"]) / most


def sentence_of(rows: list[dict[str, Any]]) -> str:
    def worst(size: str, variant: str) -> float:
        return float(max(r["over_plain"] for r in rows if r["bound by"] == size and r["variant"] == variant))

    parts = []
    for name in ("skip_unused", f"skip_unused, {AT_ONCE}", "auto"):
        parts.append(f"{worst('gpu', name):.3f} (GPU-bound) and {worst('launch', name):.3f} (launch-bound) with {name}")
    saved = min(r["saved_of_oracle"] for r in rows if r["variant"] in ("skip_unused:frozen", "auto:frozen"))
    return (
        f"With nothing to skip, a step takes at most this part of plain DDP's: {', '.join(parts)}. Half frozen, the "
        f"hook saves at least {100 * saved:.1f}% of the link's time that the oracle saves."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=shapes.LAYERS, default=list(shapes.LAYERS))
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="device_link", help="of the result")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the result")
    options = parser.parse_args()
    if harness.is_rank():
        trace_steps(options.shapes[0], options.variant)
        return 0
    header = harness.environment_header(sys.argv, 2, [f"virtual, {gbits} Gbit/s" for gbits in GBITS])
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        for variant in VARIANTS:
            argv = [str(Path(__file__)), "--shapes", shape, "--variant", variant]
            rows += testbed.launch(argv, 2, testbed.LOOPBACK, echo_rank=None)[0].results[0]
    rows.sort(key=lambda r: (r["shape"], r["gbits"], r["bound by"], VARIANTS.index(r["variant"])))
    compared(rows)
    print(tables.plain_table(rows))
    sentence = sentence_of(rows)
    print(sentence)
    harness.write(
        options.name, {"benchmark": "device_link", "header": header, "rows": rows, "sentence": sentence}, options.out
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
