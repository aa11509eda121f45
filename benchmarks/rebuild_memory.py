"""How much memory does a step take after rebuild(), against a DDP that was built with those parameters frozen?

    python benchmarks/rebuild_memory.py

Each way runs in processes of its own on loopback: a GPT whose lowest nine tenths are frozen trains for a few steps, the
kernel's high-water mark of resident memory is then reset, and read after some more steps. No root needed.

What a process has given back to malloc counts as resident until malloc gives it to the kernel, and glibc does so less
and less: whenever a large block is freed, it raises the size up to which it keeps blocks. So everything is measured
twice: as glibc does by itself, and with that size fixed where it begins (MALLOC_MMAP_THRESHOLD_), which shows what the
step uses.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

from tools import harness, testbed

BUILT_FROZEN = "DDP built frozen"
WORKLOAD = "frozen:0.9"
WARM_UP, STEPS = 4, 6
# name, value of MALLOC_MMAP_THRESHOLD_ in bytes
ALLOCATORS = (("malloc", None), ("malloc, threshold fixed", "131072"))


def resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: expected a line {field}, found none")


def measure(way: str, size: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ddp_hooks
    from tools import workloads

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    workload = workloads.make(WORKLOAD, size)
    model = workload.build()
    before = resident_bytes("VmRSS")

    freeze_first = way == BUILT_FROZEN
    if freeze_first:
        workload.after_wrapping(model)
    ddp = DistributedDataParallel(model, find_unused_parameters=not freeze_first)
    if way.startswith("ddp_hooks"):
        ddp_hooks.register(ddp, "skip_unused")
    if not freeze_first:
        workload.after_wrapping(model)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3)

    def steps(count: int) -> None:
        for _ in range(count):
            workload.backward(ddp, 0, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()

    steps(WARM_UP)
    if way.endswith("rebuild()"):
        ddp_hooks.rebuild(ddp, find_unused_parameters=False)
    steps(1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    steps(STEPS)
    mine = torch.tensor([resident_bytes("VmHWM"), resident_bytes("VmHWM") - before])
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        testbed.report({"way": way, "peak_bytes": int(mine[0]), "peak_bytes_over_model": int(mine[1])})
    dist.destroy_process_group()


WAYS: tuple[str, ...] = (
    BUILT_FROZEN,
    "ddp_hooks after rebuild()",
    "ddp_hooks, frozen after wrapping",
    "plain DDP, frozen after wrapping",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if harness.is_rank():
        measure(options.way, options.size)
        return 0
    header = harness.environment_header(sys.argv, 2, [testbed.LOOPBACK])
    peaks: dict[tuple[str, str], list[int]] = {(name, way): [] for name, _ in ALLOCATORS for way in WAYS}
    for _ in range(options.repeats):
        for name, threshold in ALLOCATORS:
            if threshold is None:
                os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
            else:
                os.environ["MALLOC_MMAP_THRESHOLD_"] = threshold
            for way in WAYS:
                argv = [__file__, "--way", way, "--size", options.size]
                row = testbed.launch(argv, 2, testbed.LOOPBACK, echo_rank=None)[0].results[0]
                peaks[name, way].append(row["peak_bytes"])
    rows: list[dict[str, Any]] = []
    for (name, way), bytes_of_runs in peaks.items():
        peak = harness.quartiles(bytes_of_runs)
        ratio = peak["median"] / harness.quartiles(peaks[name, BUILT_FROZEN])["median"]
        rows.append({"allocator": name, "way": way, "workload": WORKLOAD, "peak_bytes": peak, "ratio": ratio})
        print(f"{name:26}{way:36}{peak['median'] / 1e6:10.1f} MB{ratio:8.3f}")
    rebuilt = {row["allocator"]: row["ratio"] for row in rows if row["way"].endswith("rebuild()")}
    sentence = (
        "After rebuild() a step peaks at "
        + ", ".join(
            f"{ratio:.3f} times the memory of a DDP that was built frozen ({name})" for name, ratio in rebuilt.items()
        )
        + "."
    )
    print(sentence)
    harness.write(
        "rebuild_memory", {"benchmark": "rebuild_memory", "header": header, "rows": rows, "sentence": sentence}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
