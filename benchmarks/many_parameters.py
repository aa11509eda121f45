"""What do 100,000 parameters in 1,000 buckets cost? Registration and each part of a step, on two ranks on loopback.

    python benchmarks/many_parameters.py
    python benchmarks/many_parameters.py --parameters 100000 --buckets 1000 --add

Parameters have 32 elements, so times show the cost per parameter and not per byte. The loss has one term for each
parameter, in a single autograd function, so the graph is small and a step consists mostly of DDP. Each row contains
plain DDP's step in the same run, and gradients are compared with it. The exponent between two sizes is log(time ratio)
/ log(parameter ratio): 1 is linear, 2 would be quadratic. The fastest round counts, because other programs share the
cores.

| Column | What |
|---|---|
| ddp | wrapping the module in plain DDP |
| register | `ddp_hooks.register` |
| rebuild | `ddp_hooks.rebuild` after freezing the last parameter |
| forward_done | what the hook does at the end of a forward pass |
| new plan | the hook's time in a step whose mask was never seen, without waiting for other ranks |
| cached | the same with a mask that was seen before |
| wait | for the other ranks' masks |
| step | backward and forward, slowest rank |
| plain | the same without a hook |

Without a search of the graph (`find_unused_parameters=False`), unused parameters are frozen.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tools import harness, testbed

ELEMENTS = 32
USED = (1.0, 0.5, 0.01)
PARTS = ("ddp", "register", "rebuild", "forward_done", "new_plan", "cached_plan", "wait", "step", "plain_step")


def run_rank(plan: dict[str, Any]) -> None:
    """On every rank: measure one number of parameters and buckets; rank 0 reports a row for each usage and search."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _measure(10, 1, 1.0, True, 1)  # whatever is imported, compiled or connected at first use
    for search in (True, False):
        if not search and plan["parameters"] > plan["largest_without_search"]:
            continue
        for used in plan["used"]:
            row = _measure(plan["parameters"], plan["buckets"], used, search, plan["rounds"])
            if dist.get_rank() == 0:
                testbed.report(row)
            gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _slowest(seconds: float) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    result = action()
    return _slowest(time.perf_counter() - start), result


def _measure(parameters: int, buckets: int, used: float, search: bool, rounds: int) -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Sum(torch.autograd.Function):
        """Any number of parameters to a number; each gets a gradient of its own."""

        @staticmethod
        def forward(ctx: Any, seed: Any, *tensors: Any) -> Any:
            ctx.count = len(tensors)
            return seed.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            rows = torch.arange(ctx.count * ELEMENTS, dtype=torch.float32).view(ctx.count, ELEMENTS) * gradient
            return None, *rows.unbind()

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(parameters))

        def forward(self, seed: Any, chosen: Sequence[int]) -> Any:
            tensors = [self.all[i] for i in chosen]
            return Sum.apply(seed, *tensors)

    def make() -> tuple[float, Any]:
        model = Many()
        model.all = list(model.weights)
        return _timed(
            lambda: DistributedDataParallel(
                model,
                find_unused_parameters=search,
                bucket_cap_mb=parameters * ELEMENTS * 4 / buckets / (1 << 20),
                init_sync=False,
            )
        )

    stride = round(1 / used)
    kept = parameters - stride  # the last of these is frozen for `rebuild` at the end

    def chosen(shift: int) -> list[int]:
        return [i for i in range(kept) if (i + shift) % stride == 0]

    def step(ddp: Any, indices: list[int]) -> float:
        model = ddp.module
        if not search:
            inside = set(indices)
            for i, parameter in enumerate(model.all):
                parameter.requires_grad_(i in inside)
        for i in indices:
            model.all[i].grad = None
        return _timed(lambda: ddp(torch.ones(1), indices).backward())[0]

    def measure_plain(indices: list[int]) -> tuple[float, list[Any]]:
        ddp = make()[1]
        seconds = [step(ddp, indices) for _ in range(2 + rounds)]
        return min(seconds[2:]), [parameter.grad for parameter in ddp.module.all]

    same = chosen(0)
    ours, gradients = _measure_hook(make, step, same, rounds)
    # Without a search plain DDP wants a gradient of every parameter.
    comparable = search or stride == 1
    plain_seconds = difference = None
    if comparable:
        plain_seconds, expected = measure_plain(same if search else list(range(parameters)))
        difference = max(float((a - expected[i]).abs().max()) for a, i in zip(gradients, same, strict=True))
    return {
        "parameters": parameters,
        "buckets_asked_for": buckets,
        "used": used,
        "find_unused_parameters": search,
        "rounds": rounds,
        "seconds": {**ours, "plain_step": plain_seconds},
        "gradient_difference": difference,
    }


def _measure_hook(
    make: Callable[[], Any], step: Callable[..., float], same: list[int], rounds: int
) -> tuple[dict[str, float], list[Any]]:
    import ddp_hooks

    ddp_seconds, ddp = make()
    forward_start = forward_seconds = 0.0

    def begin(*arguments: Any) -> None:
        nonlocal forward_start
        forward_start = time.perf_counter()

    def end(*arguments: Any) -> None:
        nonlocal forward_seconds
        forward_seconds += time.perf_counter() - forward_start

    # Forward hooks run in the order in which they were registered, so ours runs between these two.
    ddp.register_forward_hook(begin)
    register_seconds, state = _timed(lambda: ddp_hooks.register(ddp, "skip_unused"))
    ddp.register_forward_hook(end)

    def run(indices: list[int]) -> dict[str, float]:
        nonlocal forward_seconds
        before, forward_seconds = state.stats(), 0.0
        seconds = step(ddp, indices)
        after = state.stats()
        return {
            "step": seconds,
            "hook": after.hook_seconds - before.hook_seconds,
            "wait": after.exchange_wait_seconds - before.exchange_wait_seconds,
            "forward_done": forward_seconds,
            "hits": after.plan_cache_hits - before.plan_cache_hits,
        }

    # The first step of each shape rebuilds DDP's buckets, without a search; the second one reads their layout.
    for _ in range(2):
        run(same)
    # Plans are made anew for masks that differ in one parameter.
    anew = [run([i for i in same if i != same[turn]]) for turn in range(rounds)]
    cached = [run(same) for _ in range(rounds)]
    if any(row["hits"] for row in anew) or not all(row["hits"] for row in cached):
        raise RuntimeError(f"expected new plans and then cached ones, received {anew} and {cached}")
    gradients = [ddp.module.all[i].grad.clone() for i in same]
    for parameter in ddp.module.all:
        parameter.requires_grad_(True)
    ddp.module.all[-1].requires_grad_(False)
    rebuild_seconds, _ = _timed(lambda: ddp_hooks.rebuild(ddp))

    def fastest(name: str, rows: Sequence[dict[str, float]]) -> float:
        return min(row[name] for row in rows)

    parts = {
        "ddp": ddp_seconds,
        "register": register_seconds,
        "rebuild": rebuild_seconds,
        "forward_done": fastest("forward_done", anew + cached),
        "new_plan": fastest("hook", anew),
        "cached_plan": fastest("hook", cached),
        "wait": fastest("wait", cached),
        "step": fastest("step", cached),
    }
    return parts, gradients


def add_exponents(rows: list[dict[str, Any]]) -> None:
    """To each row: the exponent of each part between the next smaller number of parameters and this one."""
    for row in rows:
        smaller = [
            other
            for other in rows
            if other["parameters"] < row["parameters"]
            and all(other[key] == row[key] for key in ("buckets_asked_for", "used", "find_unused_parameters"))
        ]
        if not smaller:
            row["exponent"] = None
            continue
        base = max(smaller, key=lambda other: other["parameters"])
        size = math.log(row["parameters"] / base["parameters"])
        row["exponent"] = {
            part: round(math.log(row["seconds"][part] / base["seconds"][part]) / size, 2)
            for part in PARTS
            if row["seconds"][part] and base["seconds"][part]
        }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    headings = ["parameters", "buckets", "used", "search", *(f"{part} ms" for part in PARTS), "max |d|"]
    lines = [headings]
    for row in rows:
        cells = [row["parameters"], row["buckets_asked_for"], f"{row['used']:.0%}", row["find_unused_parameters"]]
        for part in PARTS:
            seconds = row["seconds"][part]
            text = "-" if seconds is None else f"{seconds * 1e3:.2f}"
            if row["exponent"] and part in row["exponent"]:
                text += f" ^{row['exponent'][part]:.1f}"
            cells.append(text)
        cells.append("-" if row["gradient_difference"] is None else f"{row['gradient_difference']:.0e}")
        lines.append([str(cell) for cell in cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence, losses included."""
    largest = max(row["parameters"] for row in rows)
    at_large = [row for row in rows if row["parameters"] == largest]
    exponents = {
        part: statistics.median(row["exponent"][part] for row in at_large if row["exponent"])
        for part in ("ddp", "register", "rebuild", "forward_done", "new_plan", "cached_plan", "step")
    }
    steep = ", ".join(f"{part} {value:.1f}" for part, value in exponents.items())
    ratios = [row["seconds"]["step"] / row["seconds"]["plain_step"] for row in at_large if row["seconds"]["plain_step"]]
    return (
        f"Up to {largest} parameters the median exponents are: {steep} (DDP's constructor takes quadratic time in the "
        "parameters of a bucket, and rebuild runs it); registering takes at most "
        f"{max(row['seconds']['register'] for row in at_large):.1f} s, the hook at most "
        f"{max(row['seconds']['new_plan'] for row in at_large) * 1e3:.0f} ms a step with a new plan and "
        f"{max(row['seconds']['cached_plan'] for row in at_large) * 1e3:.0f} ms with a cached one, and a step "
        f"{min(ratios):.2f} to {max(ratios):.2f} times plain DDP's (median {statistics.median(ratios):.2f})."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--buckets", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--used", type=float, nargs="+", default=list(USED), help="fractions of the parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--largest-without-search",
        type=int,
        default=10_000,
        help="parameters; DDP's own constructor puts all of them into one bucket then and takes quadratic time for it",
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds, for each number of parameters and buckets")
    parser.add_argument("--name", default="many_parameters", help="of the result")
    parser.add_argument("--add", action="store_true", help="to the rows that the result has, in place of equal ones")
    parser.add_argument("--rank-plan", help=argparse.SUPPRESS)  # how the ranks are told what to do
    options = parser.parse_args()
    if harness.is_rank():
        run_rank(json.loads(options.rank_plan))
        return 0
    header = harness.environment_header(sys.argv, 2, [testbed.LOOPBACK])
    results: dict[str, Any] = {"benchmark": options.name, "header": header, "rows": []}
    if options.add:
        earlier = json.loads((harness.RESULTS / f"{options.name}.json").read_text())
        results["earlier_headers"] = [*earlier.get("earlier_headers", []), earlier["header"]]
        results["rows"] = [
            row
            for row in earlier["rows"]
            if row["parameters"] not in options.parameters or row["buckets_asked_for"] not in options.buckets
        ]
    for parameters in sorted(options.parameters):
        for buckets in options.buckets:
            plan = {"parameters": parameters, "buckets": buckets, "used": options.used, "rounds": options.rounds}
            plan["largest_without_search"] = options.largest_without_search
            argv = [__file__, "--rank-plan", json.dumps(plan)]
            try:
                outcomes = testbed.launch(argv, 2, testbed.LOOPBACK, options.timeout, echo_rank=None)
            except testbed.TestbedUnavailable as error:
                print(f"cannot run here: {error}", file=sys.stderr)
                return 69
            except testbed.RankFailed as error:
                print(error, file=sys.stderr)
                return 1
            results["rows"] += outcomes[0].results
            add_exponents(results["rows"])
            harness.write(options.name, results)
            print_table(results["rows"][-len(outcomes[0].results) :])
    results["sentence"] = describe(results["rows"])
    harness.write(options.name, results)
    print(results["sentence"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
