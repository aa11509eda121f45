"""Does another build of ddp_hooks make a step slower? Two builds, both running, in turns of a few steps.

    python benchmarks/paired_builds.py --old FOLDER --new FOLDER
    python benchmarks/paired_builds.py --old FOLDER --new FOLDER --links 1gbit    # needs root and iproute2

FOLDER is where a build lies unpacked (`pip wheel --no-deps .`, then `python -m zipfile -e *.whl FOLDER`). On every host
each build has a process of its own, and stands still while the other one steps. So what the machine does besides meets
both alike, which two runs, one after the other, cannot have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from tools import harness, testbed

BUILDS = ("old", "new")
STEPS = 2  # of each pattern, in a turn


def run_child(plan: dict[str, Any]) -> None:
    """One build on one rank: takes turns when it is told to, and says what each step took."""
    import torch
    import torch.distributed as dist

    from tools import peers, usage, workloads

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = workloads.make(plan["workload"], plan["size"])
    torch.manual_seed(1234)
    master = workload.build()
    found = usage.find_usage(workload, master, dist.get_world_size())
    context = peers.Context(workload, master, dist.get_rank(), found)
    variant = peers.find(plan["peer"]).build(context)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = []
        for step in range(STEPS * workload.patterns):
            pattern = step % workload.patterns
            variant.clear(pattern)
            dist.barrier()
            start = time.perf_counter()
            variant.step(pattern)
            seconds.append(time.perf_counter() - start)
            variant.clear(pattern)
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _read_line(child: subprocess.Popen[str], build: str) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"the {build} build's process ended with exit status {child.wait()}")
    return line


def run_host(plan: dict[str, Any]) -> None:
    """On every host: start both builds' processes, and let them take turns; rank 0 reports one row."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ports: list[Any] = [testbed.free_port(), testbed.free_port()]
    dist.broadcast_object_list(ports)
    children = {}
    for build, port in zip(BUILDS, ports, strict=True):
        children[build] = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MASTER_PORT": str(port), "PYTHONPATH": plan[build]},
        )
        # One after the other: a build may measure the link when it registers.
        _read_line(children[build], build)
    seconds: dict[str, list[float]] = {build: [] for build in BUILDS}
    for turn in range(-plan["warm_up"], plan["rounds"]):
        for build in BUILDS if turn % 2 else BUILDS[::-1]:
            child = children[build]
            assert child.stdin is not None
            dist.barrier()
            child.stdin.write("step\n")
            child.stdin.flush()
            line = _read_line(child, build)
            if turn >= 0:
                seconds[build].append(statistics.fmean(json.loads(line)))
    for child in children.values():
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    if dist.get_rank() == 0:
        slowest = {
            build: [max(times) for times in zip(*(one[build] for one in everyone), strict=True)] for build in BUILDS
        }
        ratios = [new / old for old, new in zip(slowest["old"], slowest["new"], strict=True)]
        testbed.report(
            {
                "link": os.environ["DDP_HOOKS_TESTBED_RATE"],
                "world_size": dist.get_world_size(),
                "workload": plan["workload"],
                "peer": plan["peer"],
                "old_seconds": harness.quartiles(slowest["old"]),
                "new_seconds": harness.quartiles(slowest["new"]),
                "ratio": harness.quartiles(ratios),
                "rounds": plan["rounds"],
            }
        )
    dist.destroy_process_group()


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: the new build's step over the old one's, for each workload."""
    parts = [
        f"{row['workload']} with {row['peer']} at {row['link']} {row['ratio']['median']:.3f} "
        f"({row['ratio']['q1']:.3f} to {row['ratio']['q3']:.3f})"
        for row in rows
    ]
    return f"A step of the new build over one of the old: {'; '.join(parts)}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", help="where the build lies that is compared with")
    parser.add_argument("--new", help="where the other one lies")
    parser.add_argument("--labels", nargs=2, default=BUILDS, help="what the two are, for the result: commits, say")
    parser.add_argument("--links", nargs="+", default=[testbed.LOOPBACK], help="rates, none, or loopback")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workloads", nargs="+", default=["frozen:0.9", "all_used"])
    parser.add_argument("--peers", nargs="+", default=["ours:skip_unused:native"], help="of the package itself")
    parser.add_argument("--size", default="default", help="of the models: default or tiny")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds, for each workload")
    parser.add_argument("--name", default="paired_builds")
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(json.loads(options.child))
        return 0
    if harness.is_rank():
        run_host(json.loads(options.host))
        return 0
    if not options.old or not options.new:
        parser.error("expected --old and --new, the folders of the two builds")
    command = [*sys.argv]
    for folder in (options.old, options.new):
        command = ["FOLDER" if argument == folder else argument for argument in command]
    header = harness.environment_header(command, options.hosts, options.links)
    rows = []
    for link in options.links:
        for workload in options.workloads:
            for peer in options.peers:
                plan = {
                    "workload": workload,
                    "size": options.size,
                    "peer": peer,
                    "rounds": options.rounds,
                    "warm_up": options.warm_up,
                    "old": os.path.abspath(options.old),
                    "new": os.path.abspath(options.new),
                }
                argv = [__file__, "--host", json.dumps(plan)]
                try:
                    outcome = testbed.launch(argv, options.hosts, link, options.timeout, echo_rank=None)
                except testbed.TestbedUnavailable as error:
                    print(error, file=sys.stderr)
                    return 69
                rows += outcome[0].results
                print(describe(rows[-1:]))
    builds = dict(zip(BUILDS, options.labels, strict=True))
    sentence = describe(rows)
    name = options.name
    harness.write(name, {"benchmark": name, "header": header, "builds": builds, "rows": rows, "sentence": sentence})
    return 0


if __name__ == "__main__":
    sys.exit(main())
