"""Runs benchmarks: it times variants in turn, counts bytes, compares gradients, and writes the results.

Variants of one workload exist side by side in one process group and take turns. Each round runs every variant once,
with the same step pattern, in an order that rotates. Ratios are taken within a round, so that anything that slows the
machine down affects both sides; medians and quartiles are over these ratios. A step takes as long as its slowest rank.
After the timing, an untimed pass compares gradients with the baseline's and counts what crossed the link.

benchmarks/README.md contains the formula of every column.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools import testbed
from tools.tables import describe_gradients, median_of, number

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
FIGURES = BENCHMARKS / "figures"
# What earlier benchmarks wrote says nothing about the code that is measured.
_MADE_BY_BENCHMARKS = (":!benchmarks/results", ":!benchmarks/figures")
sys.path.append(str(ROOT))  # an extension built in place is found; an installed one goes first


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run of the skeleton measures."""

    workload: str
    size: str
    peers: tuple[str, ...]
    rounds: int
    warm_up: int


def environment_header(
    command: Sequence[str], world_size: int, links: Sequence[str], backend: str = "gloo"
) -> dict[str, Any]:
    """Everything about this run that a reader needs to place its numbers."""
    import torch

    def git(*argv: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *argv], capture_output=True, text=True)
        except FileNotFoundError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    script = Path(command[0]).resolve()
    if not script.is_relative_to(ROOT):
        script = ROOT / "benchmarks" / script.name
    # Where a working tree was copied to, its git may be missing or another: this says what was copied.
    copied = os.environ.get("DDP_HOOKS_COMMIT")
    changes = "" if copied else git("status", "--porcelain", "--untracked-files=no", "--", ".", *_MADE_BY_BENCHMARKS)
    gpu = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "gpu": properties.name,
            "gpu_multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": copied or git("rev-parse", "--short=12", "HEAD") or None,
        "has_uncommitted_changes": bool(changes),
        "command": " ".join(["python", script.relative_to(ROOT).as_posix(), *command[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": backend,
        "world_size": world_size,
        "links": list(links),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release().split("-")[0],
        "threads_per_rank": 1,
        **gpu,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def quartiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if len(ordered) == 1:
        return {"median": ordered[0], "q1": ordered[0], "q3": ordered[0]}
    q1, median, q3 = statistics.quantiles(ordered, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def run_block(variant: Any, patterns: int, steps: int) -> tuple[float, float]:
    """Run steps one after the other; return the median of a step, seconds, and what this host sent in one, bytes."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    before = testbed.read_counters(with_shaper=False)
    ends = [time.perf_counter()]
    for step in range(steps):
        variant.step(step % patterns)
        variant.clear(step % patterns)
        ends.append(time.perf_counter())
    after = testbed.read_counters(with_shaper=False)
    everyone = torch.tensor([b - a for a, b in itertools.pairwise(ends)], dtype=torch.float64)
    dist.all_reduce(everyone)
    moved = 0.0 if before is None or after is None else (after - before).tx_bytes / steps
    return float((everyone / dist.get_world_size()).median()), moved


def run_ranks(plan: Plan) -> None:
    """On every rank: time the plan's peers against each other; rank 0 reports one row for each."""
    report_rows(lambda: _Measurement(plan).run())


def report_rows(measure: Callable[[], Sequence[dict[str, Any]]]) -> None:
    """On every rank: measure in a process group of its own; rank 0 reports what it gets."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        rows = measure()
        if dist.get_rank() == 0:
            for row in rows:
                testbed.report(row)
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Measurement:
    def __init__(self, plan: Plan) -> None:
        import torch
        import torch.distributed as dist

        from tools import peers, usage, workloads

        self._dist = dist
        self._peers = peers
        self._plan = plan
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
        self._workload = workloads.make(plan.workload, plan.size)
        patterns = self._workload.patterns
        self._rounds = -(-plan.rounds // patterns) * patterns  # every pattern as often as every other
        torch.manual_seed(1234)
        master = self._workload.build()
        found = usage.find_usage(self._workload, master, self._ranks, self._ranks_per_host)
        self._context = peers.Context(self._workload, master, self._rank, found)
        self._variants: dict[str, Any] = {}
        self._left_out: dict[str, str] = {}
        for name in dict.fromkeys((peers.BASELINE, *plan.peers)):
            # Whether a peer applies follows from the workload and the installation, so ranks agree about it.
            try:
                self._variants[name] = peers.find(name).build(self._context)
            except peers.NotApplicable as why:
                self._left_out[name] = str(why)

    def run(self) -> list[dict[str, Any]]:
        patterns = self._workload.patterns
        for step in range(max(self._plan.warm_up, 1) * patterns):
            for variant in self._variants.values():
                variant.clear(step % patterns)
                variant.step(step % patterns)
                variant.clear(step % patterns)
        all_reduces = self._time_all_reduces() if self._peers.NOTHING in self._variants else []
        seconds = self._time()
        checks = self._check()
        everyone: list[Any] = [None] * self._ranks
        self._dist.all_gather_object(everyone, (seconds, checks, all_reduces))
        slowest = {
            name: [max(times) for times in zip(*(theirs[0][name] for theirs in everyone), strict=True)]
            for name in self._variants
        }
        # Gradients: the worst rank. Wire bytes, which are the host's: the mean, since gloo's ring sends about the same
        # from every host.
        merged = {}
        for name in self._variants:
            rows = [theirs[1][name] for theirs in everyone]
            wires = [row["wire_bytes"] for row in rows]
            merged[name] = {
                **rows[0],
                "gradient_difference": max(row["gradient_difference"] for row in rows),
                "wire_bytes": None if None in wires else statistics.fmean(wires),
            }
        slowest_all_reduces = [max(times) for times in zip(*(theirs[2] for theirs in everyone), strict=True)]
        return self._rows(slowest, merged, _bytes_per_second(slowest_all_reduces, self._ranks))

    def _time_all_reduces(self) -> list[float]:
        """What the row oracle takes the link's rate from: seconds of one all-reduce of as much as a bucket holds."""
        import torch

        message = torch.ones(ALL_REDUCE_BYTES // 4)
        seconds = []
        for _ in range(8):
            message.fill_(1.0)
            self._dist.barrier()
            start = time.perf_counter()
            self._dist.all_reduce(message)
            seconds.append(time.perf_counter() - start)
        return seconds

    def _time(self) -> dict[str, list[float]]:
        names = list(self._variants)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for variant in self._variants.values():
            variant.reset_statistics()
        gc.collect()
        gc.disable()
        for turn in range(self._rounds):
            pattern = turn % self._workload.patterns
            # There and back, so that nobody always comes after the same one: a long step leaves caches and queues full.
            first = turn // 2 % len(names)
            order = names[first:] + names[:first]
            for name in order if turn % 2 == 0 else reversed(order):
                variant = self._variants[name]
                variant.clear(pattern)
                self._dist.barrier()
                start = time.perf_counter()
                variant.step(pattern)
                seconds[name].append(time.perf_counter() - start)
                variant.clear(pattern)
        gc.enable()
        return seconds

    def _count(self, variant: Any, patterns: Sequence[int], look: Any) -> testbed.Counters | None:
        self._dist.barrier()
        before = testbed.read_counters()
        self._dist.barrier()
        for pattern in patterns:
            variant.clear(pattern)
            variant.step(pattern)
            look(pattern)
            variant.clear(pattern)
        self._dist.barrier()
        after = testbed.read_counters()
        return None if before is None or after is None else after - before

    def _check(self) -> dict[str, dict[str, Any]]:
        patterns = range(self._workload.patterns)
        baseline = self._variants[self._peers.BASELINE]
        expected: dict[int, Any] = {}
        for pattern in patterns:
            baseline.clear(pattern)
            baseline.step(pattern)
            expected[pattern] = {name: g.clone() for name, g in baseline.gradients(pattern).items()}
        idle = self._count(baseline, (), None)  # what the barriers themselves cost
        checks = {}
        for name, variant in self._variants.items():
            stats = variant.statistics()
            gaps = []

            def look(pattern: int, variant: Any = variant, gaps: list[float] = gaps) -> None:
                gaps.append(self._peers.max_difference(variant.gradients(pattern), expected[pattern]))

            moved = self._count(variant, patterns, look)
            wire = None
            if moved is not None and idle is not None:
                net = moved - idle
                wire = (net.tx_bytes if net.shaped_tx_bytes is None else net.shaped_tx_bytes) / len(patterns)
            later = variant.statistics()
            if stats is None or later is None:
                known = [variant.payload_bytes(pattern) for pattern in patterns]
                payload = None if None in known else statistics.fmean(known)
            else:  # of the counted steps alone: `auto` may have changed its mind since the timed ones
                payload = (later["payload_bytes"] - stats["payload_bytes"]) / len(patterns)
            checks[name] = {
                "gradient_difference": max(gaps) / self._workload.loss_scale,
                "wire_bytes": wire,
                "counted_payload_bytes": payload,
                "statistics": stats,
            }
        return checks

    def _rows(
        self, slowest: dict[str, list[float]], checks: dict[str, Any], bytes_per_second: float | None
    ) -> list[dict[str, Any]]:
        peers, context = self._peers, self._context
        ranks = self._ranks
        share = 2 * (ranks - 1) / ranks
        rate = testbed.Rate.parse(os.environ.get("DDP_HOOKS_TESTBED_RATE", testbed.LOOPBACK))
        baseline = slowest[peers.BASELINE]
        oracle = slowest.get(peers.ORACLE)
        compute = slowest.get(peers.COMPUTE)
        turns = [turn % self._workload.patterns for turn in range(self._rounds)]
        used_bytes = statistics.fmean(context.bytes_of(usage.used) for usage in context.usage)
        row_bytes = [sum(usage.row_bytes.values()) for usage in context.usage]
        least = statistics.fmean(usage.least_bytes for usage in context.usage)
        row_oracle = None
        if bytes_per_second is not None:
            pairs = zip(slowest[peers.NOTHING], turns, strict=True)
            row_oracle = [nothing + row_bytes[pattern] * share / bytes_per_second for nothing, pattern in pairs]
        formula = None
        if rate.bits_per_second is not None and compute is not None:
            goodput = rate.bits_per_second / 8 * PAYLOAD_SHARE_OF_WIRE
            formula = used_bytes * share / goodput + statistics.median(compute)
        rows = []
        for name, times in slowest.items():
            peer, check = peers.find(name), checks[name]
            stats = check.pop("statistics")
            steps = stats["steps"] if stats else 0
            if stats:
                payload = stats["payload_bytes"] / max(steps, 1)
            else:
                known = [self._variants[name].payload_bytes(pattern) for pattern in turns]
                payload = None if None in known else statistics.fmean(known)
            wire, counted = check["wire_bytes"], check["counted_payload_bytes"]
            row = {
                "workload": self._plan.workload,
                "label": self._workload.label,
                "size": self._plan.size,
                "link": rate.text,
                "world_size": ranks,
                "ranks_per_host": self._ranks_per_host,
                "peer": name,
                "title": peer.title,
                "is_lossy": peer.is_lossy,
                "fraction_unused": 1.0 - used_bytes / context.dense_bytes,
                "rounds": self._rounds,
                "step_seconds": quartiles(times),
                "baseline": {"peer": peers.BASELINE, "step_seconds": quartiles(baseline)},
                "ratio_to_baseline": quartiles([a / b for a, b in zip(times, baseline, strict=True)]),
                "ratio_to_oracle": quartiles([a / b for a, b in zip(times, oracle, strict=True)]) if oracle else None,
                "ratio_to_row_oracle": _ratio(times, row_oracle),
                "ratio_to_allreduce_hook": _ratio(times, slowest.get("allreduce_hook")),
                "compute_seconds": statistics.median(compute) if compute else None,
                "formula_seconds": formula,
                "ratio_to_formula": statistics.median(times) / formula if formula else None,
                "dense_bytes": context.dense_bytes,
                "used_bytes": used_bytes,
                "used_row_bytes": statistics.fmean(row_bytes),
                "least_bytes": least,
                "ratio_to_least": wire * PAYLOAD_SHARE_OF_WIRE / least if wire is not None and least else None,
                "row_oracle_seconds": statistics.median(row_oracle) if row_oracle else None,
                "all_reduce_bytes_per_second": bytes_per_second,
                "payload_bytes": payload,
                "wire_bytes": wire,
                "wire_over_payload": wire / (counted * share) if wire is not None and counted else None,
                # Gradients that were not exchanged are not what DDP gives; comparing them means nothing.
                "gradient_difference": None if name in peers.SILENT else check["gradient_difference"],
                "exchange_wait_seconds": stats["exchange_wait_seconds"] / max(steps, 1) if stats else None,
                "hook_seconds": stats["hook_seconds"] / max(steps, 1) if stats else None,
                "statistics": stats,
                "samples_seconds": [round(t, 7) for t in times],
            }
            rows.append(row)
        for name, why in self._left_out.items():
            rows.append({"workload": self._plan.workload, "link": rate.text, "peer": name, "left_out": why})
        return rows


# An Ethernet frame of 1514 bytes carries 1448 bytes of TCP payload (IPv4, timestamps on); the shaper counts frames.
PAYLOAD_SHARE_OF_WIRE = 1448 / 1514
ALL_REDUCE_BYTES = 25 << 20  # what DDP puts into a bucket


def _bytes_per_second(all_reduce_seconds: Sequence[float], ranks: int) -> float | None:
    """How fast a rank sends in all-reduces of `ALL_REDUCE_BYTES`; None where none was timed or nobody else is there."""
    if not all_reduce_seconds or ranks < 2:
        return None
    return ALL_REDUCE_BYTES * 2 * (ranks - 1) / ranks / statistics.median(all_reduce_seconds)


def _ratio(times: Sequence[float], base: Sequence[float] | None) -> dict[str, float] | None:
    return quartiles([a / b for a, b in zip(times, base, strict=True)]) if base else None


def is_rank() -> bool:
    """Whether this process was started as a rank, by `testbed.launch`."""
    return "DDP_HOOKS_TESTBED_RATE" in os.environ


def run_for_minutes(script: str, options: argparse.Namespace, run_rank: Callable[[Any], None], ranks: int) -> int:
    """Run a script for `options.minutes` on ranks of this machine, of which this process may be one."""
    if is_rank():
        run_rank(options)
        return 0
    try:
        testbed.launch([script, *sys.argv[1:]], ranks, testbed.LOOPBACK, 60.0 * options.minutes + 300)
    except testbed.RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def add_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--size", default="default", help="tiny, small or default")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warm-up", type=int, default=3, help="rounds of every pattern before the timing")
    parser.add_argument("--timeout", type=float, default=900, help="seconds, for each workload on each link")
    parser.add_argument("--name", help="of the result; default: the script's name")
    parser.add_argument("--plan", help=argparse.SUPPRESS)  # how the ranks are told what to do


def main(script: str, plans: Sequence[Plan], links: Sequence[str], options: argparse.Namespace, describe: Any) -> int:
    """Run every plan on every link; write JSON as it comes in, print tables, end with one sentence."""
    if is_rank():
        raw = json.loads(options.plan)
        run_ranks(Plan(**{**raw, "peers": tuple(raw["peers"])}))
        return 0
    name = options.name or Path(script).stem
    header = environment_header(sys.argv, options.hosts, links)
    results: dict[str, Any] = {"benchmark": name, "header": header, "rows": [], "failures": []}
    for link in links:
        for plan in plans:
            argv = [script, "--plan", json.dumps(asdict(plan))]
            try:
                outcomes = testbed.launch(argv, options.hosts, link, options.timeout, None, options.ranks_per_host)
            except testbed.TestbedUnavailable as error:
                print(f"cannot run here: {error}", file=sys.stderr)
                return 69
            except testbed.RankFailed as error:
                print(error, file=sys.stderr)
                results["failures"].append({"workload": plan.workload, "link": link, "error": str(error)[-2000:]})
                continue
            except KeyboardInterrupt:
                return 130
            results["rows"] += outcomes[0].results
            write(name, results)
            print_table(outcomes[0].results)
    if not results["rows"]:
        return 1
    results["sentence"] = describe(results["rows"])
    write(name, results)
    print(results["sentence"])
    return 1 if results["failures"] else 0


def add_options_of_plans(
    parser: argparse.ArgumentParser, workloads: Sequence[str], links: Sequence[str], name: str
) -> None:
    """What a script asks for that has plans of its own kind, see `launch_plans`."""
    parser.add_argument("--workloads", nargs="+", default=list(workloads))
    parser.add_argument("--links", nargs="+", default=list(links), help="rates, none, or loopback")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--size", default="default", help="tiny, small or default")
    parser.add_argument("--timeout", type=float, default=240, help="seconds, for each workload on each link")
    parser.add_argument("--name", default=name, help="of the result")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where it is written")
    parser.add_argument("--plan", help=argparse.SUPPRESS)


def launch_plans(
    script: str,
    options: argparse.Namespace,
    settings_on: Callable[[str], dict[str, Any]],
    show: Callable[[Sequence[dict[str, Any]]], None],
    describe: Callable[[Sequence[dict[str, Any]]], str],
) -> int:
    """Run the script's ranks for every workload on every link; write JSON as it comes in, end with one sentence.

    Args:
        script: its file, which is started with ``--plan`` on every host.
        options: of `add_options_of_plans`.
        settings_on: what a plan has on a link besides workload, link and size.
        show: prints the rows of one plan.
        describe: makes the sentence of all rows.
    """
    results: dict[str, Any] = {
        "benchmark": Path(script).stem,
        "header": environment_header(sys.argv, options.hosts, options.links),
        "rows": [],
    }
    for link in options.links:
        for workload in options.workloads:
            plan = {"workload": workload, "link": link, "size": options.size, **settings_on(link)}
            try:
                argv = [script, "--plan", json.dumps(plan)]
                outcomes = testbed.launch(argv, options.hosts, link, options.timeout, echo_rank=None)
            except testbed.TestbedUnavailable as error:
                print(f"cannot run here: {error}", file=sys.stderr)
                return 69
            except testbed.RankFailed as error:
                print(error, file=sys.stderr)
                return 1
            results["rows"] += outcomes[0].results
            show(outcomes[0].results)
            write(options.name, results, options.folder)
    results["sentence"] = describe(results["rows"])
    write(options.name, results, options.folder)
    print(results["sentence"])
    return 0


def write(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    partial = path.with_suffix(".json.partial")
    text = json.dumps(results, indent=1)
    for place in (ROOT, Path(sys.prefix), Path.home()):  # tracebacks name this machine's folders; nobody else has them
        text = text.replace(f"{place}/", "")
    partial.write_text(text + "\n")
    partial.replace(path)
    return path


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    timed = [row for row in rows if "left_out" not in row]
    if timed:
        first = timed[0]
        hosts = first["world_size"] // first.get("ranks_per_host", 1)  # older results lack it
        print(
            f"\n{first['label']}, {first['size']}, {first['world_size']} ranks on {hosts} hosts, {first['link']}: "
            f"{describe_gradients(first)}"
        )
    headings = "peer,ms,q1..q3,/ DDP,/ oracle,/ row oracle,MB payload,MB wire,wire/payl,x least,wait us,hook us,max |d|"
    cells = [tuple(headings.split(","))]
    for row in timed:
        step = row["step_seconds"]
        cells.append(
            (
                row["peer"] + (" (lossy)" if row["is_lossy"] else ""),
                f"{step['median'] * 1e3:.2f}",
                f"{step['q1'] * 1e3:.1f}..{step['q3'] * 1e3:.1f}",
                f"{row['ratio_to_baseline']['median']:.3f}",
                number(median_of(row["ratio_to_oracle"]), ".3f"),
                number(median_of(row.get("ratio_to_row_oracle")), ".3f"),
                number(row["payload_bytes"], ".2f", 1e-6),
                number(row["wire_bytes"], ".2f", 1e-6),
                number(row["wire_over_payload"], ".3f"),
                number(row.get("ratio_to_least"), ".2f"),  # older results lack it
                number(row["exchange_wait_seconds"], ".0f", 1e6),
                number(row["hook_seconds"], ".0f", 1e6),
                number(row["gradient_difference"], ".1e"),
            )
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        padded = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *padded]))
    for row in rows:
        if "left_out" in row:
            print(f"left out: {row['peer']}: {row['left_out']}")


def select(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The timed rows in which every named field has the wanted value."""
    return [row for row in rows if "left_out" not in row and all(row.get(key) == v for key, v in wanted.items())]
