"""What is skipping worth on thousands of ranks? Constants measured on a few, a model, and its check against steps.

    python benchmarks/scaling.py measure --hosts 2 3 4 --link 1gbit --only fit         # constants; needs root
    python benchmarks/scaling.py measure --hosts 2 3 4 --link 1gbit --only validate    # steps, beside the model's
    python benchmarks/scaling.py predict     # arithmetic alone: figures/SCALING.md and figures/scaling_*.svg

`measure` writes results/scaling_<link>.json. The fit times collectives alone, steps of DDP on groups of one rank
(nothing is sent; as many ranks at once as in the check, so that they share the cores alike), and the hook at a quarter
and at nine tenths frozen. The check times whole steps at 0 and 0.75 frozen: no step of it goes into the fit.
docs/scaling.md has the formulas and what they leave out; scaling_model.py is the arithmetic.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import figures
import micro_ranks
import scaling_model as model
from tools import harness, testbed

# Hops are fitted to the small messages, the link's rate to the large ones, and the middle is there to check both.
SMALL_BYTES = (1 << 10, 4 << 10)
MIDDLE_BYTES = (256 << 10, 1 << 20)
LARGE_BYTES = (8 << 20, 25 << 20)
MASK_PARAMETERS = (100, 10_000)
HOOK_FRACTIONS = (0.25, 0.9)
UNUSED_FRACTION = 0.9  # at which the price of an unused byte is measured
VALIDATION_FRACTIONS = (0.0, 0.75)
PEERS = {"plain": "plain", "ours": "ours:skip_unused:native", "oracle": "oracle"}
METHODS = ("all_reduce_bor", "all_gather")


def fit_rank(plan: dict[str, Any]) -> None:
    """On every rank: what the model needs to know about this many ranks; rank 0 reports it in parts."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    micro_ranks.exchange_rank(plan["exchange_rounds"], MASK_PARAMETERS)
    _time_all_reduces(plan["rounds"])
    _time_alone(plan["size"], plan["rounds"])
    _time_hook(plan["size"], max(plan["rounds"] // 2, 2))
    dist.barrier()
    dist.destroy_process_group()


def _slowest(samples: Any) -> list[float] | None:
    """The largest over ranks of each sample, on rank 0."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return [max(times) for times in zip(*everyone, strict=True)] if dist.get_rank() == 0 else None


def _time_all_reduces(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    for message_bytes in (*SMALL_BYTES, *MIDDLE_BYTES, *LARGE_BYTES):
        message = torch.zeros(message_bytes // 4)
        seconds = []
        few = rounds if message_bytes in LARGE_BYTES else 3 * rounds if message_bytes in MIDDLE_BYTES else 100
        for turn in range(-1, few):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message)
            if turn >= 0:
                seconds.append(time.perf_counter() - start)
        slowest = _slowest(seconds)
        if slowest:
            testbed.report(
                {
                    "part": "all_reduce",
                    "bytes": message_bytes,
                    "seconds": harness.quartiles(slowest),
                    "fastest_tenth_seconds": micro_ranks.fastest_tenth(slowest),
                    "rounds": few,
                }
            )


def _time_alone(size: str, rounds: int) -> None:
    """DDP on a group of this rank alone: computing, copying into buckets and back, and nothing sent."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ddp_hooks import _C
    from tools import workloads

    rank = dist.get_rank()
    alone = [dist.new_group([other], backend="gloo") for other in range(dist.get_world_size())][rank]
    for fraction in (0.0, UNUSED_FRACTION):
        workload = workloads.make(f"frozen:{fraction:g}", size)
        torch.manual_seed(1234)
        ddp = DistributedDataParallel(workload.build(), process_group=alone, find_unused_parameters=True)
        workload.after_wrapping(ddp.module)
        marks: list[float] = []

        def mark(state, bucket, marks=marks):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            marks.append(time.perf_counter())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, mark)
        steps = []
        gc.collect()
        gc.disable()
        for turn in range(-2, rounds):
            ddp.zero_grad(set_to_none=True)
            marks.clear()
            dist.barrier()
            start = time.perf_counter()
            loss = workload.loss(ddp, 0, rank)
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            if turn >= 0:
                steps.append([middle - start, *(at - middle for at in marks), end - middle])
        gc.enable()
        # Of the moments of a step the median over rounds; of ranks the slowest.
        medians = _slowest([statistics.median(times) for times in zip(*steps, strict=True)])
        buckets = _C.reducer_layout(ddp.reducer).buckets
        unused = sum(p.numel() for p in ddp.module.parameters() if not p.requires_grad)
        if medians:
            testbed.report(
                {
                    "part": "alone",
                    "fraction_unused": unused / sum(p.numel() for p in ddp.module.parameters()),
                    "bucket_bytes": [bucket.numel * bucket.element_bytes for bucket in buckets],
                    "forward_seconds": medians[0],
                    "ready_seconds": medians[1:-1],
                    "backward_seconds": medians[-1],
                    "rounds": rounds,
                }
            )


def _time_hook(size: str, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddp_hooks
    from tools import workloads

    for fraction in HOOK_FRACTIONS:
        workload = workloads.make(f"frozen:{fraction:g}", size)
        torch.manual_seed(1234)
        ddp = DistributedDataParallel(workload.build(), find_unused_parameters=True)
        workload.after_wrapping(ddp.module)
        state = ddp_hooks.register(ddp, policy="skip_unused")
        for turn in range(-2, rounds):
            if turn == 0:
                state.reset_stats()
            ddp.zero_grad(set_to_none=True)
            dist.barrier()
            workload.loss(ddp, 0, dist.get_rank()).backward()
        counters = state.stats()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, counters.hook_seconds / rounds)
        if dist.get_rank() == 0:
            payload = counters.payload_bytes / rounds
            row = {"part": "hook", "payload_bytes": payload, "seconds": statistics.fmean(everyone), "rounds": rounds}
            testbed.report(row)


def fit(raw: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """From what was measured, by world size, to the model's constants."""
    small, large = (
        [(ranks, row) for ranks, rows in raw.items() for row in _of(rows, "all_reduce") if row["bytes"] in sizes]
        for sizes in (SMALL_BYTES, LARGE_BYTES)
    )
    hop_seconds, _ = model.fit_plane([(model.ring_hops(n), 0.0, row["fastest_tenth_seconds"]) for n, row in small])
    points = []
    for ranks, row in large:
        hops = model.ring_hops(ranks)
        points.append((0.0, hops / ranks * row["bytes"], row["seconds"]["median"] - hops * hop_seconds))
    link = model.Link(hop_seconds, 1 / model.fit_plane(points)[1])
    exchanges = {}
    for method in METHODS:
        points = []
        for ranks, rows in raw.items():
            for row in (r for r in _of(rows, "exchange") if r["method"] == method):
                on_the_wire = row["hops"] * row["mask_bytes"] / link.bytes_per_second
                on_the_wire /= ranks if method == "all_reduce_bor" else 1
                points.append((1.0, float(row["hops"]), row["fastest_tenth_seconds"] - on_the_wire))
        exchanges[method] = model.Exchange(*model.fit_plane(points))
    steps = {str(ranks): asdict(_step(rows)) for ranks, rows in raw.items()}
    return {"link": asdict(link), "exchanges": {m: asdict(e) for m, e in exchanges.items()}, "steps": steps}


def _of(rows: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["part"] == part]


def _step(rows: Sequence[dict[str, Any]]) -> model.Step:
    full, frozen = sorted(_of(rows, "alone"), key=lambda row: row["fraction_unused"])
    passed, ready = 0.0, [(0.0, 0.0)]
    for size, seconds in zip(full["bucket_bytes"], full["ready_seconds"], strict=True):
        passed += size
        ready.append((passed, max(seconds, ready[-1][1])))
    finish = max(0.0, full["backward_seconds"] - ready[-1][1]) / passed
    hook, hook_per_byte = model.fit_plane([(1.0, row["payload_bytes"], row["seconds"]) for row in _of(rows, "hook")])
    bare = model.Step(
        full["forward_seconds"], tuple(ready), tuple(full["bucket_bytes"]), finish, 0.0, hook, hook_per_byte
    )
    used = (1 - frozen["fraction_unused"]) * passed
    without = bare.forward_seconds + bare.seconds_until(used) + finish * used
    surplus = frozen["forward_seconds"] + frozen["backward_seconds"] - without
    return model.replace(bare, unused_seconds_per_byte=max(0.0, surplus) / (passed - used))


def constants(results: dict[str, Any]) -> tuple[model.Link, dict[str, model.Exchange], dict[int, model.Step]]:
    """Read the fit back from JSON."""
    fitted = results["fit"]["constants"]
    steps = {}
    for ranks, raw in fitted["steps"].items():
        lists = {"ready": tuple(map(tuple, raw["ready"])), "bucket_bytes": tuple(raw["bucket_bytes"])}
        steps[int(ranks)] = model.Step(**{**raw, **lists})
    return model.Link(**fitted["link"]), {m: model.Exchange(**e) for m, e in fitted["exchanges"].items()}, steps


def compare(results: dict[str, Any], validation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of model beside measurement: whole steps, and the exchange where it was not used to fit."""
    link, exchanges, steps = constants(results)
    message_bytes = model.mask_bytes(results["fit"]["parameters"])
    rows = []
    for row in validation:
        scheme = next(scheme for scheme, peer in PEERS.items() if peer == row["peer"])
        ranks, unused = row["world_size"], row["fraction_unused"]
        exchange = model.exchange_seconds(results["exchange"], ranks, message_bytes, exchanges, link)
        search = scheme != "oracle"
        told = model.predict(scheme, ranks, unused, steps[ranks], link, exchange, search)
        plain = model.predict("plain", ranks, unused, steps[ranks], link)
        measured = row["step_seconds"]
        rows.append(
            {
                "what": "step",
                "source": row.get("source", "this run"),
                "link": row["link"],
                "world_size": ranks,
                "fraction_unused": unused,
                "scheme": scheme,
                "rounds": row["rounds"],
                "measured_seconds": measured,
                "predicted_seconds": told.step_seconds,
                "predicted_over_measured": told.step_seconds / measured["median"],
                "measured_ratio_to_plain": row["ratio_to_baseline"],
                "predicted_ratio_to_plain": told.step_seconds / plain.step_seconds,
                "measured_wait_seconds": row["exchange_wait_seconds"],
                "predicted_wait_seconds": told.mask_wait_seconds if scheme == "ours" else None,
                "predicted_wire_bytes": told.wire_bytes,
                "measured_wire_bytes": row["wire_bytes"],
                "correct": row["gradient_difference"] == 0 or (ranks > 2 and row["gradient_difference"] < 1e-5),
            }
        )
    for ranks, raw in results["fit"]["raw"].items():
        for row in (r for r in _of(raw, "all_reduce") if r["bytes"] in MIDDLE_BYTES):
            told = model.all_reduce_seconds(int(ranks), row["bytes"], link)
            rows.append(_beside(f"all-reduce of {row['bytes'] >> 10} KiB", ranks, row, told, row["seconds"]["median"]))
        for row in (r for r in _of(raw, "exchange") if r["method"].startswith("grid")):
            grid = [int(extent) for extent in row["method"].partition(" ")[2].split("x")]
            told = model.grid_seconds(grid, row["mask_bytes"], exchanges["all_gather"], link)
            what = f"exchange by {row['method']}, {row['mask_bytes']:,} bytes, fastest tenth"
            rows.append(_beside(what, ranks, row, told, row["fastest_tenth_seconds"]))
    return rows


def _beside(what: str, ranks: str, row: dict[str, Any], told: float, measured: float) -> dict[str, Any]:
    return {
        "what": what,
        "world_size": int(ranks),
        "rounds": row["rounds"],
        "measured_seconds": measured,
        "predicted_seconds": told,
        "predicted_over_measured": told / measured,
        "correct": row.get("correct"),
    }


def describe(rows: Sequence[dict[str, Any]]) -> str:
    steps = [row for row in rows if row["what"] == "step"]
    if not steps:
        return "The constants are fitted; the model is not checked yet."

    def name(row: dict[str, Any]) -> str:
        return f"{row['scheme']}, {row['world_size']} ranks, {row['fraction_unused']:.0%} unused"

    errors = [abs(row["predicted_over_measured"] - 1) for row in steps]
    worst = steps[errors.index(max(errors))]
    ours = [row for row in steps if row["scheme"] == "ours"]
    gaps = [abs(row["predicted_ratio_to_plain"] - row["measured_ratio_to_plain"]["median"]) for row in ours]
    off = [
        f"{name(row)} ({row['predicted_over_measured'] - 1:+.0%})"
        for row, e in zip(steps, errors, strict=True)
        if e > 0.15
    ]
    text = (
        f"Of {len(steps)} steps not used to fit, the model misses the median by {statistics.median(errors):.1%} in the "
        f"median and by {max(errors):.1%} at most ({name(worst)})"
    )
    if gaps:
        text += f"; the ratio of ddp_hooks to plain DDP it misses by at most {max(gaps):.3f}"
    text += f". It is off by more than 15% at: {'; '.join(off)}." if off else "; nowhere is it off by more than 15%."
    wrong = sum(row["correct"] is False for row in rows)
    return text + (f" {wrong} rows have wrong gradients or masks." if wrong else "")


def measure(options: argparse.Namespace) -> int:
    name = options.name or f"scaling_{options.link}"
    path = harness.RESULTS / f"{name}.json"
    header = harness.environment_header(sys.argv, max(options.hosts), [options.link])
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results |= {"benchmark": name, "header": header, "exchange": options.exchange}
    try:
        if options.only != "validate":
            raw = {}
            for hosts in options.hosts:
                plan = {"kind": "fit", "size": options.size, "rounds": options.rounds, "exchange_rounds": 100}
                raw[hosts] = _launch(plan, hosts, options)
                print(f"measured {hosts} ranks", file=sys.stderr)
            results["fit"] = {"header": header, "parameters": _parameters(options.size), "size": options.size}
            results["fit"] |= {"raw": {str(hosts): rows for hosts, rows in raw.items()}, "constants": fit(raw)}
        if options.only != "fit":
            if "fit" not in results or results["fit"]["size"] != options.size:
                print(f"no fit of size {options.size} in {path.name}: run with --only fit first", file=sys.stderr)
                return 1
            missing = [hosts for hosts in options.hosts if str(hosts) not in results["fit"]["constants"]["steps"]]
            if missing:
                print(f"no fit for {missing} ranks; run --only fit with the same --hosts", file=sys.stderr)
                return 1
            earlier = results.get("validation", []) if options.only else []
            validation = [row for row in earlier if row["world_size"] not in options.hosts]
            for hosts in options.hosts:
                for fraction in VALIDATION_FRACTIONS:
                    wanted = {"workload": f"frozen:{fraction:g}", "size": options.size, "peers": list(PEERS.values())}
                    plan = {"kind": "step", **wanted, "rounds": options.rounds, "warm_up": 1}
                    rows = _launch(plan, hosts, options)
                    validation += [{k: v for k, v in row.items() if k != "samples_seconds"} for row in rows]
                print(f"checked {hosts} ranks", file=sys.stderr)
            results["validation"] = validation
    except testbed.TestbedUnavailable as error:
        print(f"cannot run here: {error}", file=sys.stderr)
        return 69
    except testbed.RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    results["rows"] = compare(results, [*results.get("validation", []), *_steps_of_others(results, options.link)])
    results["sentence"] = describe(results["rows"])
    harness.write(name, results)
    print(json.dumps(results["fit"]["constants"]["link"]), json.dumps(results["fit"]["constants"]["exchanges"]))
    for row in results["rows"]:
        print("  ".join(f"{k}={figures.plain_cell(k, v)}" for k, v in row.items() if v is not None))
    print(results["sentence"])
    return 0


def _steps_of_others(results: dict[str, Any], link: str) -> list[dict[str, Any]]:
    """The steps that slow_link.py has measured on this link, of the same model on as many ranks."""
    path = harness.RESULTS / f"slow_link_{link}.json"
    if not path.exists():
        return []
    measured = results["fit"]["constants"]["steps"]
    return [
        {**row, "source": path.name}
        for row in harness.select(json.loads(path.read_text())["rows"], size=results["fit"]["size"], link=link)
        if row["workload"].startswith("frozen:")
        and row["peer"] in PEERS.values()
        and str(row["world_size"]) in measured
    ]


def _launch(plan: dict[str, Any], hosts: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    argv = [__file__, "measure", "--rank-plan", json.dumps(plan)]
    return testbed.launch(argv, hosts, options.link, options.timeout, echo_rank=None)[0].results


def _parameters(size: str) -> int:
    from tools import workloads

    return sum(1 for _ in workloads.make("frozen:0", size).build().parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "predict"])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--link", default="1gbit")
    parser.add_argument(
        "--only",
        choices=["fit", "validate"],
        help="measure: one half; the other is kept, as are steps of other --hosts",
    )
    parser.add_argument(
        "--exchange", choices=model.EXCHANGES, default="all_gather", help="measure: how the installed hook agrees"
    )
    parser.add_argument("--size", default="default", help="tiny, small or default")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds, for each set of ranks")
    parser.add_argument("--name", help="of the result; default: scaling_<link>")
    parser.add_argument("--rank-plan", help=argparse.SUPPRESS)  # how the ranks are told what to do
    options = parser.parse_args()
    if harness.is_rank():
        plan = json.loads(options.rank_plan)
        if plan.pop("kind") == "fit":
            fit_rank(plan)
        else:
            harness.run_ranks(harness.Plan(**{**plan, "peers": tuple(plan["peers"])}))
        return 0
    if options.command == "predict":
        import scaling_tables

        return scaling_tables.write(options.name or f"scaling_{options.link}")
    if len(set(options.hosts)) < 2 and options.only != "validate":
        parser.error("a hop cannot be told from a call at one world size: give two or more --hosts")
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
