"""What is skipping worth on thousands of ranks? Constants measured on a few, a model, and its check against steps.

    python benchmarks/scaling.py measure --hosts 2 3 4 --link 1gbit --only fit         # constants; needs root
    python benchmarks/scaling.py measure --hosts 2 3 4 --link 1gbit --only validate    # steps, beside the model's
    python benchmarks/scaling.py predict     # arithmetic alone: figures/SCALING.md and figures/scaling_*.svg
    python benchmarks/scaling.py transports  # arithmetic alone: results/scaling_transports.json

`measure` writes results/scaling_<link>.json. The fit times collectives alone, steps of DDP on groups of one rank
(nothing is sent; as many ranks at once as in the check, so that they share the cores alike), and the hook at a quarter
and at nine tenths frozen. The check times whole steps at 0 and 0.75 frozen: no step of it goes into the fit.
docs/internals/scaling.md has the formulas and what they leave out; scaling/model.py is the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from scaling import check, constants, model, tables, worth
from scaling.ranks import fit_rank
from tools import harness, testbed
from tools.tables import plain_cell

VALIDATION_FRACTIONS = (0.0, 0.75)


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
            results["fit"] |= {
                "raw": {str(hosts): rows for hosts, rows in raw.items()},
                "constants": constants.fit(raw),
            }
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
                    wanted = {
                        "workload": f"frozen:{fraction:g}",
                        "size": options.size,
                        "peers": list(check.PEERS.values()),
                    }
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
    results["rows"] = check.compare(results, [*results.get("validation", []), *_steps_of_others(results, options.link)])
    results["sentence"] = check.describe(results["rows"])
    harness.write(name, results)
    print(json.dumps(results["fit"]["constants"]["link"]), json.dumps(results["fit"]["constants"]["exchanges"]))
    for row in results["rows"]:
        print("  ".join(f"{k}={plain_cell(k, v)}" for k, v in row.items() if v is not None))
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
        and row["peer"] in check.PEERS.values()
        and str(row["world_size"]) in measured
    ]


def weigh_transports(options: argparse.Namespace) -> int:
    """Write what the transports are worth, from results that are there."""
    if not (harness.RESULTS / f"{worth.FIT}.json").exists():
        print(f"no {worth.FIT}.json; run scaling.py measure first", file=sys.stderr)
        return 1
    name = options.name or "scaling_transports"
    header = harness.environment_header(sys.argv, max(worth.RANKS), ["1gbit"])
    results = {"benchmark": name, "header": header, **worth.weigh_everything(harness.RESULTS)}
    harness.write(name, results)
    for row in [*results["rows"], *results["predictions"]]:
        print("  ".join(f"{k}={plain_cell(k, v)}" for k, v in row.items() if v not in (None, "")))
    print(results["sentence"])
    return 0


def _launch(plan: dict[str, Any], hosts: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    argv = [__file__, "measure", "--rank-plan", json.dumps(plan)]
    return testbed.launch(argv, hosts, options.link, options.timeout, echo_rank=None)[0].results


def _parameters(size: str) -> int:
    from tools import workloads

    return sum(1 for _ in workloads.make("frozen:0", size).build().parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "predict", "transports"])
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
        return tables.write(options.name or f"scaling_{options.link}")
    if options.command == "transports":
        return weigh_transports(options)
    if len(set(options.hosts)) < 2 and options.only != "validate":
        parser.error("a hop cannot be told from a call at one world size: give two or more --hosts")
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
