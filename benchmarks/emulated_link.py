"""How long does a step take on a real GPU, if seven other GPUs and the link to them are emulated?

    python benchmarks/emulated_link.py                               # needs a GPU and a build with the CUDA kernels
    python benchmarks/emulated_link.py --device pretend --shapes resnet50 --rounds 1   # rehearses it without a GPU

There is one rank. Its process groups (tests/emulated/group.h) behave as if there were eight: a collective on the GPU
occupies a stream of its own for a latency and for what a ring over eight ranks needs at the given rate, and an exchange
of masks ends 0.5 ms after it has begun, which is 0.3 ms for the messages and 0.2 ms for a host that is late. The other
ranks hold what this one holds, so the masks of all ranks are the same. They are not processes of their own, because
each would have to move as many bytes on the CPU as the GPU, and would take longer than a step.

The model has the layers of GPT-2 or ResNet-50 (tools/shaped_model.py). Its kernels wait for as long as their operations
would take, and the copies, launches, streams and events of DDP and of the hook are real. So a collective neither takes
multiprocessors from other kernels nor bandwidth from memory. It is launched by Python, which takes about as long as a
launch of NCCL. benchmarks/device_link.py plays the same step in virtual time.

`bound by` is `gpu` if there are so many samples that kernels take longer than launches, and otherwise `launch`. In
`frozen`, every other layer is frozen after DDP has laid out its buckets; `oracle` is plain DDP, wrapped after freezing.
In `rows`, one row in a hundred of the first parameter's gradient is not zero. Under autocast, gradients on a GPU travel
as without it. *idle* is the time that a step takes longer than the model's kernels alone, without DDP.

Variants exist side by side, and take turns. The JSON file is written after each link.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tools import harness, shaped_model, shapes, tables

RANKS = 8
PLAIN = "plain"
VARIANTS = (
    PLAIN,
    "skip_unused",
    "auto",
    f"{PLAIN}:frozen",
    "oracle:frozen",
    "skip_unused:frozen",
    "auto:frozen",
    f"{PLAIN}:rows",
    "skip_unused:rows",
    "auto:rows",
)
# By name: bytes per second of a GPU, in one direction.
LINKS = {"NVLink": 450e9, "400 Gbit/s": 50e9, "100 Gbit/s": 12.5e9, "25 Gbit/s": 3.125e9}
LATENCY_SECONDS, EXCHANGE_SECONDS = 30e-6, 0.5e-3
WARM_UP_STEPS = 24  # DDP times its first ten passes; then `auto` has settled
NAMES = {"cuda": "emulated_link", "pretend": "emulated_link_pretend"}


class Emulation:
    """This process's device, and the groups of eight ranks that it is the first of."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cuda":
            self.synchronize: Callable[[], None] = torch.cuda.synchronize
            self._cycles_per_second = _cycles_per_second()
            backend, self._hold_up = "nccl", self._spin
        else:
            sys.path[1:1] = [str(harness.ROOT / "tests")]
            import pretend  # noqa: F401, makes torch know the device

            from ddp_hooks_testing import _pretend

            _pretend.seed(0, 0.0)
            _pretend.leave_out_copies()
            self.synchronize = _pretend.synchronize
            backend, self._hold_up = "pretend", _pretend.work
        from ddp_hooks.serving import control_groups
        from ddp_hooks_testing import _emulated

        self._emulated = _emulated
        self.choose_link(LINKS["NVLink"], exchange_seconds=0)

        def make_group(name: str, device: str) -> Callable[[Any, int, int, timedelta], Any]:
            return lambda store, rank, size, timeout: _emulated.make_group(rank, size, name, device, self._hold_up)

        dist.Backend.register_backend("emulated", make_group(backend, device), devices=[device])
        dist.Backend.register_backend("emulated_host", make_group("gloo", "cpu"), devices=["cpu"])
        # The groups that carry masks are made below torch.distributed.
        control_groups._open_group = lambda ddp, name, rank, ranks, devices: _emulated.make_group(
            rank, ranks, "gloo", "cpu", self._hold_up
        )
        dist.init_process_group(
            f"cpu:emulated_host,{device}:emulated", store=dist.HashStore(), rank=0, world_size=RANKS
        )

    def choose_link(self, bytes_per_second: float, exchange_seconds: float) -> None:
        self._emulated.set_link(LATENCY_SECONDS, bytes_per_second, exchange_seconds)

    def run_kernels(self, launches: int, seconds: float) -> None:
        for _ in range(launches):
            self._hold_up(seconds / launches)

    def _spin(self, seconds: float) -> None:
        torch.cuda._sleep(max(1, int(seconds * self._cycles_per_second)))


def _cycles_per_second() -> float:
    cycles = 200_000_000
    for _ in range(2):  # the first one wakes the GPU up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)


class Variant:
    """A model, wrapped and hooked in one way; or, if it has no name, the model alone."""

    def __init__(self, emulation: Emulation, shape: str, name: str) -> None:
        import ddp_hooks

        self.name, self.emulation = name, emulation
        policy, _, self.case = name.partition(":")
        rows = next(shapes.LAYERS[shape]()).parameters[0][0] // 100 if self.case == "rows" else None
        model = shaped_model.Model(shape, emulation.run_kernels, rows).to(emulation.device)
        self.model, self.state = model, None
        self.forward: Callable[[torch.Tensor, int], torch.Tensor] = model
        if name:
            if policy == "oracle":
                model.freeze()
            searches = name == f"{PLAIN}:frozen"  # plain DDP cannot freeze without a search
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=searches)
            if policy not in (PLAIN, "oracle"):
                self.state = ddp_hooks.register(ddp, policy)
            self.forward = ddp
        self.x = torch.zeros((), device=emulation.device, requires_grad=True)

    def step(self, samples: int) -> tuple[float, float]:
        """Run a step; return how long it took, and how long until everything was launched, in seconds."""
        for weight in self.model.parameters():
            weight.grad = None
        self.emulation.synchronize()
        started = time.perf_counter()
        self.forward(self.x, samples).backward()
        launched = time.perf_counter() - started
        self.emulation.synchronize()
        return time.perf_counter() - started, launched

    def warm_up(self, samples: int) -> None:
        for step in range(WARM_UP_STEPS):
            if step == 2 and self.case == "frozen":
                self.model.freeze()
            self.step(samples)

    def waited_seconds(self) -> float:
        return 0.0 if self.state is None else float(self.state.stats().exchange_wait_seconds)


def measure(
    emulation: Emulation, variants: list[Variant], alone: Variant, shape: str, size: str, link: str, rounds: int
) -> list[dict[str, Any]]:
    samples = shaped_model.SAMPLES[shape][size]
    emulation.choose_link(LINKS[link], EXCHANGE_SECONDS)
    everyone = [alone, *variants]
    steps: dict[str, list[float]] = {variant.name: [] for variant in everyone}
    hosts: dict[str, list[float]] = {variant.name: [] for variant in everyone}
    before = {variant.name: variant.waited_seconds() for variant in everyone}
    for turn in range(rounds):
        first = turn % len(everyone)
        for variant in everyone[first:] + everyone[:first]:
            step, host = variant.step(samples)
            steps[variant.name].append(step)
            hosts[variant.name].append(host)
    kernels = harness.quartiles(steps[alone.name])["median"]
    rows = []
    for variant in variants:
        plain = steps[":".join([PLAIN, variant.case] if variant.case else [PLAIN])]
        step = harness.quartiles(steps[variant.name])
        ratios = [one / other for one, other in zip(steps[variant.name], plain, strict=True)]
        rows.append(
            {
                "shape": shape,
                "link": link,
                "bound by": size,
                "variant": variant.name,
                "step_ms": 1e3 * step["median"],
                "step_q1_ms": 1e3 * step["q1"],
                "step_q3_ms": 1e3 * step["q3"],
                "over_plain": harness.quartiles(ratios)["median"],
                "host_ms": 1e3 * harness.quartiles(hosts[variant.name])["median"],
                "mask_wait_ms": 1e3 * (variant.waited_seconds() - before[variant.name]) / rounds,
                "idle_ms": 1e3 * (step["median"] - kernels),
            }
        )
    return rows


def sentence_of(rows: list[dict[str, Any]]) -> str:
    def range_of(variant: str) -> str:
        found = [row["over_plain"] for row in rows if row["variant"] == variant]
        return f"{min(found):.2f} to {max(found):.2f} with {variant}"

    return f"A step takes these parts of plain DDP's: {', '.join(range_of(v) for v in VARIANTS if PLAIN not in v)}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(NAMES), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=shapes.LAYERS, default=["gpt2"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the result")
    options = parser.parse_args()
    if options.device == "cuda":
        from ddp_hooks import _C

        if not torch.cuda.is_available() or _C.why_unserved(torch.device("cuda")):
            print("cannot run here: needs a GPU and a build with the CUDA kernels (DDP_HOOKS_CUDA=1)", file=sys.stderr)
            return 69
    torch.set_num_threads(1)
    header = harness.environment_header(sys.argv, RANKS, list(LINKS), backend="emulated")
    emulation = Emulation(options.device)
    options.out.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    name = NAMES[options.device]
    for shape in options.shapes:
        alone = Variant(emulation, shape, "")
        variants = [Variant(emulation, shape, name) for name in VARIANTS]
        emulation.choose_link(LINKS["NVLink"], EXCHANGE_SECONDS)
        for variant in (alone, *variants):
            variant.warm_up(shaped_model.SAMPLES[shape]["launch"])
        for link in LINKS:
            for size in shaped_model.SAMPLES[shape]:
                found = measure(emulation, variants, alone, shape, size, link, options.rounds)
                print(tables.plain_table(found), flush=True)
                rows += found
            result = {"benchmark": name, "header": header, "rows": rows, "sentence": sentence_of(rows)}
            harness.write(name, result, options.out)
        # States are dropped and not closed: there is nobody to meet.
        del alone, variants
    print(sentence_of(rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
