"""Does anybody cry wolf? An hour of steps of random length, about which nothing may be said.

    python benchmarks/slow_steps.py --minutes 60

Three ranks train a small model with the hook. From one backward pass to the next, each rank takes a random time of its
own, up to eight seconds, in one of several places: the optimizer, a validation pass without gradients, before a barrier
of the program's own, its data loader (asleep, or computing), a submodule's forward pass, a hook within backward. So
ranks wait for each other for up to eight seconds all the time, and not for ten, after which a rank names who is
missing. Whatever is written about missing ranks is counted: a false alarm, unless the ranks' own clocks say that one
came to that step more than ten seconds after another, because the machine was busy. At the end one rank stays away for
longer, to see that it would have been noticed.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tools import harness, testbed

RANKS = 3
PLACES = ("loader", "computing", "forward", "backward", "optimizer", "validation", "barrier", "nowhere")
SAID = "Missing:"
IN_STEP = re.compile(r" in backward of \w+, step ([\d,]+) ")


class CountingStream(io.TextIOBase):
    """Standard error, and how often it was told of missing ranks."""

    def __init__(self, stream: Any) -> None:
        self.alarms: list[str] = []
        self._stream = stream

    def write(self, text: str) -> int:
        """Pass it on."""
        if SAID in text:
            self.alarms.append(text)
        return int(self._stream.write(text))

    def flush(self) -> None:
        """Pass it on."""
        self._stream.flush()


class Training:
    """One rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import ddp_hooks

        self.rank = dist.get_rank()
        self.longest, self.report_after = options.longest, options.report_after
        # A rank's times are its own; where the program goes is the same everywhere.
        self.rng, self.shared = random.Random(f"{options.seed}/{self.rank}"), random.Random(options.seed)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.state = ddp_hooks.register(self.ddp, report_hang_after=options.report_after)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.slow_in, self.seconds = "nowhere", 0.0
        self.model[1].register_forward_pre_hook(lambda module, args: self.take_time("forward"))
        self.optimizer.register_step_pre_hook(lambda *args: self.take_time("optimizer"))
        self.steps = 0
        self.arrivals: list[float] = []  # in each step, on the clock that this host's processes share
        self.places: Counter[str] = Counter()

    def take_time(self, place: str) -> None:
        if place == self.slow_in:
            self.slow_in = "nowhere"
            if place == "computing":
                deadline = time.monotonic() + self.seconds
                while time.monotonic() < deadline:
                    sum(range(1000))
                    time.sleep(0.02)  # other work runs on this machine
            else:
                time.sleep(self.seconds)

    def next_batch(self) -> Any:
        import torch

        self.take_time("loader")
        self.take_time("computing")
        return torch.randn(4, 64)

    def arrive(self) -> None:
        self.take_time("backward")
        self.arrivals.append(time.monotonic())

    def step(self) -> None:
        import torch
        import torch.distributed as dist

        output = self.ddp(self.next_batch())
        # Before the first parameter has its gradient, so that the others wait within backward.
        output.register_hook(lambda grad: self.arrive())
        output.square().mean().backward()
        self.slow_in, self.seconds = self.rng.choice(PLACES), self.rng.random() * self.longest
        validates, meets = self.shared.random() < 0.3, self.shared.random() < 0.3
        if (self.slow_in, validates) == ("validation", False) or (self.slow_in, meets) == ("barrier", False):
            self.slow_in = "loader"
        self.places[self.slow_in] += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        if validates:
            with torch.no_grad():
                self.model(torch.randn(4, 64))
            self.take_time("validation")
        if meets:
            self.take_time("barrier")
            dist.barrier()
        self.steps += 1


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    stream = CountingStream(sys.stderr)
    sys.stderr = stream
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(options)
    header = harness.environment_header(sys.argv, RANKS, [testbed.LOOPBACK]) if training.rank == 0 else None
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    minute = 0
    while minute < options.minutes:
        minute += 1
        # One rank's clock decides when the minute is over.
        is_over = torch.zeros(1)
        while not is_over.item():
            training.step()
            # A broadcast would let a rank go ahead of one that waits for a third one, and is slow only then.
            is_over.fill_(float(training.rank == 0 and time.monotonic() - began >= 60 * minute))
            dist.all_reduce(is_over)
        # What has come of all minutes so far.
        rows = [{**gather(training, stream), "minute": minute, "minutes_at_the_end": options.minutes}]
        if header is not None:
            counts = f"{rows[-1]['false_alarms']} false alarms, {rows[-1]['true_alarms']} true ones"
            print(f"minute {minute:3}: {rows[-1]['steps']:5} steps, {counts}", flush=True)
            harness.write(
                options.name, {"benchmark": options.name, "header": header, "rows": rows, "sentence": sentence(rows)}
            )
    # One that is none.
    if training.rank == RANKS - 1:
        time.sleep(1.5 * options.report_after + 2)
    training.slow_in = "nowhere"
    dist.barrier()
    noticed = len(gather(training, stream)["said"]) - len(rows[-1]["said"])
    rows[-1]["noticed_at_the_end"] = noticed
    if header is not None:
        harness.write(
            options.name, {"benchmark": options.name, "header": header, "rows": rows, "sentence": sentence(rows)}
        )
        print(sentence(rows))
    dist.destroy_process_group()


def gather(training: Training, stream: CountingStream) -> dict[str, Any]:
    """Put the ranks' counts together; every rank calls it."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * RANKS
    waited = training.state.stats().exchange_wait_seconds
    dist.all_gather_object(everyone, (list(stream.alarms), waited, dict(training.places), training.arrivals))
    arrivals = [times for *_, times in everyone]
    late = [max(times) - min(times) for times in zip(*arrivals, strict=True)]
    said = [text for alarms, *_ in everyone for text in alarms]
    true = [text for text in said if is_true(text, late, training.report_after)]
    return {
        "steps": training.steps,
        "longest_seconds": training.longest,
        "false_alarms": len(said) - len(true),
        "true_alarms": len(true),
        "said": said,
        "latest_seconds": round(max(late), 2),
        "waited_for_masks_seconds": [round(waited, 1) for _, waited, *_ in everyone],
        "slow_in": [places for _, _, places, _ in everyone],
    }


def is_true(text: str, late: Sequence[float], report_after: float) -> bool:
    """Say whether a rank did come so much later than another to the step that an alarm is about."""
    found = IN_STEP.search(text)
    step = int(found[1].replace(",", "")) if found else 0
    return 0 < step <= len(late) and late[step - 1] >= report_after


def sentence(rows: Sequence[dict[str, Any]]) -> str:
    last = rows[-1]
    waited = max(last["waited_for_masks_seconds"])
    text = (
        f"In {last['minute']} minutes with {last['steps']} steps, in which each of {RANKS} ranks took up to "
        f"{last['longest_seconds']:g} s of its own and one stood for {waited:.0f} s waiting for masks, there were "
        f"{last['false_alarms']} false alarms"
    )
    if last["true_alarms"]:
        text += f", and {last['true_alarms']} true ones, of a rank that came up to {last['latest_seconds']:.1f} s late"
    if "noticed_at_the_end" in last:
        text += f"; a rank that then stayed away was told of {last['noticed_at_the_end']} time(s)"
    return f"{text}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument(
        "--longest", type=float, default=8.0, help="how long a rank is slow in a step, at most; seconds"
    )
    parser.add_argument("--report-after", type=float, default=10.0, help="of the policy; seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="slow_steps", help="of the result")
    return harness.run_for_minutes(__file__, parser.parse_args(), run_rank, RANKS)


if __name__ == "__main__":
    sys.exit(main())
