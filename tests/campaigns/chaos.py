"""Kills, stops and delays ranks at random moments, and asks that everybody else learns of it, or that nothing shows.

    python tests/campaigns/chaos.py --rounds 500
    python tests/campaigns/chaos.py --rounds 50 --kind kill --registration python --seed 7
    python tests/campaigns/chaos.py --kind alone --rounds 12 --verbose

Each seed is one round: a program of steps, freezing, rebuilds, policies and synchronisation, a rank, a moment in it,
and what happens to the rank then. Round number i has the seed `--seed` + i.

kill   SIGKILL. Every other rank ends, with an error unless it needed nothing more from the one that is gone.
stop   SIGSTOP, and SIGCONT before the process groups' timeout. Everything goes on; weights are plain DDP's.
late   the rank sleeps before one of its calls. The same.
freeze SIGSTOP, and SIGCONT long after the timeout. Every rank ends, with an error unless it needed nothing more.
alone  one call is made by one rank only, or left out by one. Every rank ends; what the errors say is printed.
slow   the data group begins collectives late and completes them in random order (slow_group.py). Gradients are plain
       DDP's, bit by bit.

A rank that has left its outcome and then ends, or hangs, in torch's own code counts as one that ended; see forked.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from forked import Rank, fork_rank, prepare_parent, wait

TIMEOUT_SECONDS = 5.0
# What a busy machine may add.
MARGIN_SECONDS = 10.0
KINDS = ("kill", "stop", "late", "freeze", "alone", "slow")
# How often each comes in a round of any kind; a frozen rank takes the time that it is frozen.
SHARES = (8, 5, 3, 1, 2, 3)
REGISTRATIONS = ("native", "python")
POLICIES = ("skip_unused", "skip_zeros", "auto", "allreduce")
CALLS = ("step", "step", "step", "accumulate", "freeze", "rebuild", "unfreeze", "set_policy", "broadcast", "average",
         "verify", "buffers")  # fmt: skip
CALLS_ALONE = ("register", "rebuild", "set_policy", "broadcast", "average", "verify", "buffers", "step")
# Sums of more than two numbers depend on their order.
TOLERANCE = 1e-5
GLOO_MISMATCH = "Received data size doesn't match expected size"


@dataclass(frozen=True)
class Round:
    seed: int
    kind: str
    registration: str
    ranks: int
    policy: str
    calls: tuple[str, ...]
    victim: int
    # The call in which it happens, and how long after its beginning.
    at: int
    delay_seconds: float
    stop_seconds: float
    # alone: whether the victim alone makes the call; otherwise it alone leaves it out.
    makes: bool = False
    hosts: str = "aaaa"  # by rank

    @staticmethod
    def random(seed: int, kind: str | None, registrations: list[str], call_alone: str | None = None) -> Round:
        rng = random.Random(seed)
        drawn = rng.choices(KINDS, SHARES)[0]
        kind = drawn if kind is None else kind
        # Ranks share one host; or two hosts, where they add up what they have first; or each has one of its own.
        ranks, hosts = rng.choices([(2, "aa"), (2, "ab"), (3, "abc"), (4, "aabb")], (5, 5, 3, 4))[0]
        if kind == "slow":
            ranks = 2
        calls = [rng.choice(CALLS) for _ in range(rng.randrange(3, 9))]
        calls = ["init", "wrap", "register", *calls, "step", "end"]
        at = rng.randrange(1, len(calls))
        if kind == "alone":
            drawn = rng.choice(CALLS_ALONE)
            call = drawn if call_alone is None else call_alone
            if call == "register":
                at = calls.index("register")
            else:
                at = rng.randrange(3, len(calls) - 2)
                # So that there is something to rebuild for.
                calls[at - 1 : at + 1] = ["freeze", call] if call == "rebuild" and at > 3 else [calls[at - 1], call]
        return Round(
            seed=seed,
            kind=kind,
            registration=rng.choice(registrations),
            ranks=ranks,
            policy=rng.choice(POLICIES),
            calls=tuple(calls),
            victim=rng.randrange(ranks),
            at=at,
            delay_seconds=10 ** rng.uniform(-4.5, -1.5),
            stop_seconds=TIMEOUT_SECONDS + 3 if kind == "freeze" else 10 ** rng.uniform(-2, 0.2),
            makes=rng.random() < 0.5,
            hosts=hosts,
        )

    def __str__(self) -> str:
        calls = [f"[{call}]" if i == self.at else call for i, call in enumerate(self.calls)]
        return (
            f"seed {self.seed}: {self.kind} rank {self.victim} of hosts {self.hosts}, {self.registration}, "
            f"{self.policy}, "
            f"{' '.join(calls)}, after {self.delay_seconds * 1e3:.2f} ms"
            + (f" for {self.stop_seconds:.2f} s" if self.kind in ("stop", "late", "freeze") else "")
            + (f", {'makes' if self.makes else 'leaves out'} the call alone" if self.kind == "alone" else "")
        )


class Training:
    """The calls, as one rank makes them."""

    def __init__(self, plan: Round, registration: str, rank: int, store: str) -> None:
        self.plan = plan
        self.registration = registration
        self.rank = rank
        self.store = store
        # Alike on every rank.
        self.rng = random.Random(plan.seed)
        self.state: Any = None

    def init(self) -> None:
        import torch
        import torch.distributed as dist

        os.environ["DDP_HOOKS_HOST"] = self.plan.hosts[self.rank]
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(self.store, self.plan.ranks),
            rank=self.rank,
            world_size=self.plan.ranks,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        self.generator = torch.Generator().manual_seed(self.plan.seed * 100 + self.rank)

    def wrap(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(self.plan.seed)
        self.model = branching_model()
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True, bucket_cap_mb=0.002)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def register(self) -> None:
        import ddp_hooks

        if self.registration == "native":
            self.state = ddp_hooks.register(self.ddp, self.plan.policy)
        elif self.registration == "python":
            self.state = ddp_hooks.SkipUnusedState(self.ddp, self.plan.policy)
            self.ddp.register_comm_hook(self.state, ddp_hooks.skip_unused_hook)

    def forward(self) -> Any:
        import torch

        branch = self.rng.randrange(2) if self.rng.random() < 0.5 else (self.rank + self.rng.randrange(2)) % 3
        return self.ddp(torch.randn(4, 8, generator=self.generator), branch).square().mean()

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accumulate(self) -> None:
        with self.ddp.no_sync():
            self.forward().backward()
        self.step()

    def freeze(self) -> None:
        import ddp_hooks

        ddp_hooks.freeze(self.ddp, f"branches.{self.rng.randrange(3)}")

    def unfreeze(self) -> None:
        import ddp_hooks

        ddp_hooks.unfreeze(self.ddp, "*")

    def rebuild(self) -> None:
        import ddp_hooks

        if self.state is not None:
            ddp_hooks.rebuild(self.ddp)

    def set_policy(self) -> None:
        policy = self.rng.choice(POLICIES)
        if self.state is not None:
            self.state.set_policy(policy)

    def broadcast(self) -> None:
        import ddp_hooks

        ddp_hooks.sync.broadcast_parameters(self.ddp, src=self.rng.randrange(self.plan.ranks))

    def average(self) -> None:
        import ddp_hooks

        ddp_hooks.sync.average_parameters(self.ddp)

    def verify(self) -> None:
        import ddp_hooks

        # DDP's buffers are rank 0's at the next forward; they differ until then.
        ddp_hooks.sync.verify_replicas(list(self.model.parameters()), raise_on_difference=True)

    def buffers(self) -> None:
        import ddp_hooks

        sync = ddp_hooks.sync.BufferSync(self.ddp, self.rng.choice(("broadcast", "changed")))
        self.step()
        sync.remove()

    def end(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def branching_model() -> Any:
    import torch

    class Branching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = torch.nn.Linear(8, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
            self.head = torch.nn.Linear(16, 4)

        def forward(self, batch: torch.Tensor, branch: int) -> torch.Tensor:
            return self.head(torch.tanh(self.branches[branch](self.norm(self.trunk(batch)))))

    return Branching()


def run_rank(plan: Round, registration: str, rank: int, directory: Path, progress: int, skips_end: bool) -> int:
    """Make the calls; leave behind how that went. The parent is told of each call that begins."""
    training = Training(plan, registration, rank, str(directory / "store"))
    outcome: dict[str, Any] = {}
    call = ""
    try:
        for number, call in enumerate(plan.calls):
            os.write(progress, bytes([number]))
            # Plain DDP is what an undisturbed run is compared with.
            here = number == plan.at and registration != "plain"
            if here and plan.kind == "late" and rank == plan.victim:
                time.sleep(plan.stop_seconds)
            if here and plan.kind == "alone" and (rank == plan.victim) != plan.makes:
                continue
            getattr(training, call)()
        outcome["weights"] = [value.double().flatten().tolist() for value in training.model.state_dict().values()]
    except Exception as error:
        outcome.update(call=call, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    finally:
        partial = directory / f"outcome{rank}.partial"
        partial.write_text(json.dumps(outcome))
        partial.rename(directory / f"outcome{rank}")
    code = 1 if "error" in outcome else 0
    if skips_end:
        os._exit(code)
    return code


def run_slowly(plan: Round, rank: int, directory: Path) -> int:
    """Train over a slow data group and over gloo side by side; compare each gradient bit by bit."""
    import copy

    import slow_group
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    outcome: dict[str, Any] = {}
    try:
        training = Training(plan, plan.registration, rank, str(directory / "store"))
        training.init()
        group = slow_group.new_slow_group(plan.seed)
        torch.manual_seed(plan.seed)
        models = [branching_model()]
        models.append(copy.deepcopy(models[0]))
        options: dict[str, Any] = {"find_unused_parameters": True, "broadcast_buffers": False}
        options["gradient_as_bucket_view"] = training.rng.random() < 0.5
        options["bucket_cap_mb"] = training.rng.choice((0.001, 0.002, 1))
        plain = DistributedDataParallel(models[0], **options)
        training.ddp = DistributedDataParallel(models[1], process_group=group, **options)
        training.register()
        for step in range(12):
            if training.rng.random() < 0.2:
                training.set_policy()
            branches = [training.rng.randrange(3) for _ in range(plan.ranks)]
            batch = torch.randn(4, 8, generator=training.generator)
            accumulates = training.rng.random() < 0.2
            for ddp in (plain, training.ddp):
                if accumulates:
                    with ddp.no_sync():
                        ddp(batch, 0).square().mean().backward()
                ddp(batch, branches[rank]).square().mean().backward()
            for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None), f"step {step}, {name}: plain {a.grad}, hook {b.grad}"
                if a.grad is not None:
                    assert torch.equal(a.grad, b.grad), f"step {step}, {name}: plain {a.grad}, hook {b.grad}"
            if training.rng.random() < 0.7:
                for ddp in (plain, training.ddp):
                    ddp.zero_grad()
        outcome["overtaken"] = group.overtaken
        # What one rank has completed may still be on its way to the other.
        dist.barrier()
        training.end()
    except BaseException as error:
        outcome.update(call="step", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    (directory / f"outcome{rank}").write_text(json.dumps(outcome))
    # Threads of this group are written in Python; how they meet the interpreter's end is not the question here.
    sys.stderr.flush()
    os._exit(1 if "error" in outcome else 0)


@dataclass
class Report:
    plan: Round
    ranks: list[Rank]
    outcomes: list[dict[str, Any]]
    seconds: float
    problems: list[str]
    # When each rank had ended, counted from the signal.
    seconds_after: list[float]

    def timed_out(self) -> bool:
        errors = [outcome.get("error", "").lower() for outcome in self.outcomes]
        return any("timed out" in error or "timeout" in error for error in errors)

    def describe(self, with_stacks: bool) -> str:
        lines = [str(self.plan)]
        for rank, outcome, seconds in zip(self.ranks, self.outcomes, self.seconds_after, strict=True):
            ending = "hung" if rank.hung else f"exit code {rank.code}, {seconds:.1f} s after it"
            lines.append(f"--- rank {rank.rank}: {ending}")
            if "error" in outcome:
                lines.append(f"    in {outcome['call']}: {outcome['error']}"[:600])
            if not outcome or (rank.code or 0) < 0:
                lines += [line[:300] for line in rank.output().rstrip().splitlines()[-8:]]
            if with_stacks and (rank.hung or (rank.code or 0) not in (0, 1, -signal.SIGKILL)):
                lines.append(rank.stacks or rank.crashing_stack() or rank.python_stacks())
        return "\n".join([*lines, *(f"*** {problem}" for problem in self.problems)])


class Runner:
    """Runs rounds. Every method may return in a rank, too, with what its process has to end with."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.options = options
        self.directory = directory
        self.is_rank = False
        self.ends_with: int | None = None

    def _run(self, plan: Round, registration: str, disturbed: bool) -> tuple[list[Rank], list[dict], float] | None:
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        ranks: list[Rank] = []
        progress: list[int] = []
        for number in range(plan.ranks):
            ours, theirs = os.pipe()
            rank = fork_rank(number, directory)
            if rank is None:
                self.is_rank = True
                os.close(ours)
                if plan.kind == "slow":
                    self.ends_with = run_slowly(plan, number, directory)
                else:
                    # Of plain DDP, which does not always end (see ends.py), only the weights are asked for.
                    skips_end = self.options.skip_ends or not disturbed
                    self.ends_with = run_rank(plan, registration, number, directory, theirs, skips_end)
                return None
            os.close(theirs)
            ranks.append(rank)
            progress.append(ours)
        moment = time.monotonic()
        limit = 3 * TIMEOUT_SECONDS + 2 * MARGIN_SECONDS
        if disturbed and plan.kind in ("kill", "stop", "freeze"):
            moment = self._disturb(plan, ranks[plan.victim], progress[plan.victim])
        wait(ranks, limit, native_stacks=True)
        for pipe in progress:
            os.close(pipe)
        outcomes = []
        for number in range(plan.ranks):
            path = directory / f"outcome{number}"
            outcomes.append(json.loads(path.read_text()) if path.exists() else {})
        return ranks, outcomes, moment

    def _disturb(self, plan: Round, victim: Rank, progress: int) -> float:
        deadline = time.monotonic() + MARGIN_SECONDS
        began = -1
        while began < plan.at and time.monotonic() < deadline:
            if select.select([progress], [], [], 0.1)[0]:
                data = os.read(progress, 1)
                if not data:
                    break
                began = data[0]
        time.sleep(plan.delay_seconds)
        moment = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL if plan.kind == "kill" else signal.SIGSTOP)
        while select.select([progress], [], [], 0)[0] and (data := os.read(progress, 64)):
            began = data[-1]
        victim.last_call = began
        if plan.kind != "kill":
            time.sleep(plan.stop_seconds)
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)
        return moment

    def judge(self, plan: Round) -> Report | None:
        """Run a round and say what was not as it should be; None in a rank."""
        started = time.monotonic()
        result = self._run(plan, plan.registration, disturbed=True)
        if result is None:
            return None
        ranks, outcomes, moment = result
        seconds = time.monotonic() - started
        after = [rank.started + rank.seconds - moment for rank in ranks]
        report = Report(plan, ranks, outcomes, seconds, [], after)
        for rank, outcome in zip(ranks, outcomes, strict=True):
            crashed = (rank.code or 0) < 0 and not (plan.kind == "kill" and rank.rank == plan.victim)
            if crashed and plan.kind == "alone" and rank.code == -signal.SIGABRT and GLOO_MISMATCH in rank.output():
                # What gloo has to say to collectives of different sizes; plain DDP's would end in the same way.
                outcome.update(call="?", error=f"SIGABRT: gloo: {GLOO_MISMATCH}")
            elif (crashed or rank.hung) and not (outcome and rank.goes_wrong_in_torch_alone()):
                what = f"hung{in_what(rank)}" if rank.hung else f"crashed: {rank.code}"
                report.problems.append(f"rank {rank.rank} {what}")
        if plan.kind in ("kill", "freeze", "alone"):
            self._check_errors(report)
        elif plan.kind == "slow":
            report.problems += [f"rank {i}: {o['error'][:300]}" for i, o in enumerate(outcomes) if "error" in o]
        elif not report.problems:
            plain = self._run(plan, "plain", disturbed=False)
            if plain is None:
                return None
            self._check_weights(report, plain[1])
        return report

    def _check_errors(self, report: Report) -> None:
        plan = report.plan
        allowed = TIMEOUT_SECONDS + MARGIN_SECONDS + (plan.stop_seconds if plan.kind == "freeze" else 0)
        if plan.kind == "alone":
            allowed += 2 * TIMEOUT_SECONDS
        if plan.kind == "kill" and plan.calls[report.ranks[plan.victim].last_call] == "register":
            # While groups connect, gloo waits five times as long.
            allowed += 4 * TIMEOUT_SECONDS
        # Whether the last step, which needs every rank, was still to come when it was killed.
        has_more_calls = report.ranks[plan.victim].last_call < len(plan.calls) - 2
        for rank, outcome, seconds in zip(report.ranks, report.outcomes, report.seconds_after, strict=True):
            if rank.rank == plan.victim and plan.kind == "kill":
                continue
            if not rank.hung and seconds > allowed:
                report.problems.append(f"rank {rank.rank} ended {seconds:.1f} s after it, expected {allowed:.0f}")
            if not outcome:
                report.problems.append(f"rank {rank.rank} left no outcome")
            elif "error" not in outcome and plan.kind == "kill" and has_more_calls:
                report.problems.append(f"rank {rank.rank} noticed nothing")
        if plan.kind == "alone" and not any("error" in outcome for outcome in report.outcomes):
            weights = [outcome.get("weights") for outcome in report.outcomes]
            if not alike(weights[0], weights[-1], TOLERANCE):
                report.problems.append("nobody noticed, and the weights differ")

    def _check_weights(self, report: Report, plain: list[dict[str, Any]]) -> None:
        for number, (outcome, expected) in enumerate(zip(report.outcomes, plain, strict=True)):
            if "error" in expected or not expected:
                report.problems.append(f"rank {number}: plain DDP failed: {expected.get('error')}")
            elif "weights" not in outcome:
                report.problems.append(f"rank {number} did not recover")
            elif not alike(outcome["weights"], expected["weights"], 0.0 if report.plan.ranks == 2 else TOLERANCE):
                report.problems.append(f"rank {number}: weights differ from plain DDP's")


def in_what(rank: Rank) -> str:
    places = rank.hangs_in()
    return f" in {', '.join(places)}" if places else ""


def alike(a: list[list[float]] | None, b: list[list[float]] | None, tolerance: float) -> bool:
    if a is None or b is None:
        return False
    return all(
        abs(x - y) <= tolerance * (1 + abs(x)) for xs, ys in zip(a, b, strict=True) for x, y in zip(xs, ys, strict=True)
    )


def first_words(error: str) -> str:
    """An error's text without what differs from run to run."""
    text = " ".join(error.split())
    for character in "0123456789":
        text = text.replace(character, "#")
    while "##" in text:
        text = text.replace("##", "#")
    return text[:150]


def print_errors(reports: list[Report]) -> None:
    said: Counter[tuple[str, str]] = Counter()
    for report in reports:
        if report.plan.kind not in ("kill", "freeze", "alone"):
            continue
        for rank, outcome in enumerate(report.outcomes):
            call = report.plan.calls[report.plan.at]
            who = "the rank itself" if rank == report.plan.victim else "another rank"
            if "error" in outcome:
                said[f"{report.plan.kind} in {call}: {who}", f"{outcome['call']}: {first_words(outcome['error'])}"] += 1
            elif outcome:
                said[f"{report.plan.kind} in {call}: {who}", "no error"] += 1
    before = ""
    for (what, text), count in sorted(said.items()):
        if what != before:
            print(f"\n{what}")
        before = what
        print(f"{count:5} {text}")


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after this time")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--registration", nargs="+", default=list(REGISTRATIONS), choices=[*REGISTRATIONS, "plain"])
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the others count up from it")
    parser.add_argument("--call", choices=CALLS_ALONE, help="with --kind alone: which call is made by one rank only")
    parser.add_argument(
        "--stack", action="store_true", help="print the stacks of what hangs, with gdb's if it is there"
    )
    parser.add_argument("--skip-ends", action="store_true", help="let no rank run its interpreter's end: see ends.py")
    parser.add_argument("--errors", action="store_true", help="print at the end what errors said")
    parser.add_argument("--verbose", action="store_true", help="describe every round")
    options = parser.parse_args()
    prepare_parent()
    began = time.monotonic()
    # Not a TemporaryDirectory, which every rank would remove when it ends.
    directory = tempfile.mkdtemp(prefix="ddp_hooks_chaos_")
    runner = Runner(options, directory)
    reports: list[Report] = []
    try:
        while len(reports) < options.rounds and time.monotonic() - began < options.seconds:
            plan = Round.random(options.seed + len(reports), options.kind, options.registration, options.call)
            report = runner.judge(plan)
            if report is not None and plan.kind in ("stop", "late") and report.timed_out():
                # A machine that is busy enough makes any timeout pass; a defect is there again.
                print(f"{report.describe(options.stack)}\n    timed out, so it is repeated\n", flush=True)
                report = runner.judge(plan)
            if report is None:
                return runner.ends_with
            reports.append(report)
            if report.problems or options.verbose:
                print(f"{report.describe(options.stack)}\n", flush=True)
    finally:
        if not runner.is_rank:
            shutil.rmtree(directory, ignore_errors=True)
    if options.errors:
        print_errors(reports)
    print(f"\n{'kind':8}{'rounds':>8}{'problems':>10}{'s each':>8}{'longest s until all had ended':>32}")
    for kind in KINDS:
        ours = [report for report in reports if report.plan.kind == kind]
        if ours:
            print(
                f"{kind:8}{len(ours):8}{sum(bool(report.problems) for report in ours):10}"
                f"{sum(report.seconds for report in ours) / len(ours):8.2f}"
                f"{max(max(report.seconds_after) for report in ours):32.1f}"
            )
    problems = sum(bool(report.problems) for report in reports)
    print(
        f"\n{len(reports)} rounds: {problems} with problems, {sum(r.hung for p in reports for r in p.ranks)} ranks hung"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    # A rank returns to here, too.
    code = main()
    if code is not None:
        sys.exit(code)
