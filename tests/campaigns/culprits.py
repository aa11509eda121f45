"""Lets a rank go missing in every way that people meet, and judges whether the others name it, and its place.

    python tests/campaigns/culprits.py --rounds 200
    python tests/campaigns/culprits.py --rounds 9 --seed 9 --verbose
    python tests/campaigns/culprits.py --cause lock --rounds 5 --report-after 10

Each seed is one round: ranks that train a small model, one of them, a step, and what happens to that rank there. The
cause is the seed modulo their number. The judge reads what the ranks write: the first report of another rank has to
name the right rank, and where it stands, to the line. Seconds count from when it happened to when the report was there.

kill       SIGKILL, before the step's forward pass, in it or in backward. Named with its process, which has ended.
stop       SIGSTOP, there as well. Named with its process, which is stopped.
loader     the rank sleeps in its data loader.
exception  the rank's program ends with an error. Its line and its message are named.
branch     the rank alone takes another branch: into a barrier, or into an endless evaluation.
register   the rank alone does not register the hook, and goes on to something else. Nobody watches it, so it is named
           as one that has called nothing.
lock       the rank waits for a lock that one of its threads holds for good.
gil        the rank is in a call that holds the GIL.
sync       the rank alone leaves out a call of `ddp_hooks.sync`, and goes on to something else.

The store is held by rank 0, as with `mp.spawn`, or by a process of its own, as with torchrun.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from forked import Rank, fork_rank, kill, poll, prepare_parent

HERE = Path(__file__).resolve()
CAUSES = ("kill", "stop", "loader", "exception", "branch", "register", "lock", "gil", "sync")
REGISTRATIONS = ("native", "python", "plain")
HOLDERS = ("rank 0", "a process of its own")
MOMENTS = ("before", "forward", "backward")
# The default, at which every so-manieth round is run.
DEFAULT_SECONDS = 10.0
# Long enough that no collective fails meanwhile.
TIMEOUT_SECONDS = 90.0
# From the report's time on; a busy machine starts ranks late.
MARGIN_SECONDS = 20.0
START_SECONDS = 60.0
POLL_SECONDS = 0.02
SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Round:
    seed: int
    cause: str
    registration: str
    holder: str
    ranks: int
    victim: int
    step: int
    moment: str
    report_after: float

    @staticmethod
    def random(seed: int, cause: str | None, report_after: float, default_share: float) -> Round:
        rng = random.Random(seed)
        cause = CAUSES[seed % len(CAUSES)] if cause is None else cause
        ranks = rng.choice((2, 2, 3))
        registrations = REGISTRATIONS[:2] if cause == "register" else REGISTRATIONS
        return Round(
            seed=seed,
            cause=cause,
            registration=rng.choice(registrations),
            holder=rng.choice(HOLDERS),
            ranks=ranks,
            victim=rng.randrange(ranks),
            step=rng.randrange(2, 12),
            moment=rng.choice(MOMENTS),
            report_after=DEFAULT_SECONDS if rng.random() < default_share else report_after,
        )

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.cause} of rank {self.victim} of {self.ranks} in step {self.step} "
            f"({self.moment}), {self.registration}, store held by {self.holder}, after {self.report_after:g} s"
        )


# --- what a rank does


class Training:
    """One rank's program."""

    def __init__(self, plan: Round, rank: int, directory: Path) -> None:
        import torch

        self.plan, self.rank, self.directory = plan, rank, directory
        self.step = 0
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

    def is_its_turn(self, *causes: str) -> bool:
        plan = self.plan
        return (
            plan.cause in causes and self.rank == plan.victim and (self.step == plan.step or plan.cause == "register")
        )

    def note_moment(self) -> None:
        """Say when it happens, and to which process."""
        partial = self.directory / "moment.partial"
        partial.write_text(json.dumps([time.monotonic(), os.getpid()]))
        partial.rename(self.directory / "moment")

    def end_here(self, moment: str) -> None:
        if moment == self.plan.moment and self.is_its_turn("kill", "stop"):
            self.note_moment()
            os.kill(os.getpid(), signal.SIGKILL if self.plan.cause == "kill" else signal.SIGSTOP)

    def next_batch(self) -> Any:
        import torch

        if self.is_its_turn("loader"):
            self.note_moment()
            time.sleep(1000)  # place: loader
        return torch.randn(4, 8)

    def wait_for_a_lock(self) -> None:
        lock = threading.Lock()
        threading.Thread(target=lock.acquire).start()
        time.sleep(0.05)
        self.note_moment()
        lock.acquire()  # place: lock

    def hold_the_gil(self) -> None:
        self.note_moment()
        ctypes.PyDLL(None).sleep(1000)

    def go_elsewhere(self) -> None:
        self.note_moment()
        time.sleep(1000)  # place: elsewhere

    def evaluate(self) -> None:
        import torch

        self.note_moment()
        while True:  # place: evaluation begins
            with torch.no_grad():
                self.model(torch.randn(4, 8))
            time.sleep(0.01)  # place: evaluation ends

    def take_another_branch(self) -> None:
        import torch.distributed as dist

        # Without a hook, both would be messages of one group.
        if self.plan.registration == "plain":
            self.evaluate()
        self.note_moment()
        dist.barrier()  # place: branch

    def run(self) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import ddp_hooks
        from ddp_hooks.hangs import watcher
        from ddp_hooks.serving.ddp_methods import watch_construction_from_its_beginning

        watched = self.plan.registration == "plain"  # as `run --watch` does it
        with watch_construction_from_its_beginning(watcher.watch_construction) if watched else nullcontext():
            self.ddp = DistributedDataParallel(self.model)
        self.model[1].register_forward_pre_hook(lambda module, args: self.end_here("forward"))
        if self.is_its_turn("register"):
            self.go_elsewhere()
        if self.plan.registration == "native":
            ddp_hooks.register(self.ddp, report_hang_after=self.plan.report_after)
        elif self.plan.registration == "python":
            state = ddp_hooks.SkipUnusedState(self.ddp, report_hang_after=self.plan.report_after)
            self.ddp.register_comm_hook(state, ddp_hooks.skip_unused_hook)
        optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        for step in range(1, self.plan.step + 1):
            self.step = step
            batch = self.next_batch()
            self.end_here("before")
            if self.is_its_turn("exception"):
                self.note_moment()
                raise ValueError("a batch without an end")  # place: exception
            if self.is_its_turn("lock"):
                self.wait_for_a_lock()
            if self.is_its_turn("gil"):
                self.hold_the_gil()
            if self.is_its_turn("branch"):
                self.take_another_branch()
            if self.plan.cause == "sync" and self.step == self.plan.step:
                if self.rank == self.plan.victim:
                    self.go_elsewhere()
                ddp_hooks.sync.average_parameters(self.ddp)
            output = self.ddp(batch)
            output.register_hook(lambda grad: self.end_here("backward"))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        raise AssertionError("expected a rank that does not come to this step")


def run_rank(plan: Round, rank: int, directory: Path, port: int) -> None:
    """Train until somebody is missing; what is raised ends the program as any error does."""
    # As torchrun starts ranks.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan.ranks))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(plan.holder != "rank 0")
    os.environ["DDP_HOOKS_REPORT_HANG_AFTER"] = str(plan.report_after)
    import torch.distributed as dist

    holds = plan.holder == "rank 0" and rank == 0
    store = dist.TCPStore("127.0.0.1", port, plan.ranks, holds, wait_for_workers=False)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks, timeout=timeout)
    Training(plan, rank, directory).run()


# --- what the judge reads


def line_of(place: str) -> int:
    """Return the line of this file that says it is that place."""
    return next(i for i, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# place: {place}"))


@dataclass
class Report:
    plan: Round
    text: str = ""
    seconds: float = float("nan")
    names_rank: bool = False
    names_place: bool = False
    outputs: str = ""

    @property
    def is_right(self) -> bool:
        return self.names_rank and self.names_place


# What a rank writes while it waits, and what its error says.
SAYS = re.compile(
    r"^(?:\[rank\d\]: ?)?(?P<head>ddp_hooks: (?P<there>ranks? [\d, ]+?) ha(?:s|ve) been waiting in .*?"
    r"Missing: (?P<missing>ranks? [\d, ]+)"
    r"|ddp_hooks: backward of .*? because (?P<absent>ranks? [\d, ]+) did not arrive.*"
    r"|ddp_hooks: rank \d+ failed because other ranks did not arrive:"
    r"|.*? of waiting for (?P<awaited>ranks? [\d, ]+), which did not call it.*)$"
    r"(?P<lines>(?:\n(?:\[rank\d\]: ?)?  .*)*)",
    re.MULTILINE,
)


def judge(plan: Round, pid: int, text: str) -> Report | None:
    """Judge the first report in what a rank has written; None if there is none yet."""
    # On a slow machine a start may take as long as ranks wait before they ask; that is about no step.
    found = next((found for found in SAYS.finditer(text) if not is_about_start(plan, found[0])), None)
    if found is None or not text.endswith("\n"):
        return None
    lines = [re.sub(r"^\[rank\d\]: ?", "", line) for line in found["lines"].splitlines() if line]
    named = found["missing"] or found["absent"] or found["awaited"]
    ranks = (
        set(map(int, re.findall(r"\d+", named)))
        if named
        else {int(line.split()[1]) for line in lines if line.startswith("  rank ")}
    )
    # Those lines that are about the rank.
    own: list[str] = []
    for line in lines:
        if line.startswith("  rank ") or own:
            if line.startswith("  rank ") and line.split()[1] != str(plan.victim):
                if own:
                    break
                continue
            own.append(line)
    about = "\n".join(own)
    there = set(map(int, re.findall(r"\d+", found["there"]))) if found["there"] else set()
    report = Report(plan, found[0])
    report.names_rank = ranks == {plan.victim}
    if plan.cause == "branch" and not report.names_rank and there == {plan.victim}:
        # Where it is the lowest of those that wait, each in its place, it is the one that says so.
        report.names_rank, about = True, found["head"]
    report.names_place = is_its_place(plan, pid, about)
    return report


def is_about_start(plan: Round, said: str) -> bool:
    """Say whether nobody in a report has begun a later step than the first."""
    head, *lines = said.splitlines()
    step = re.search(r", step (\d+)", head)
    about = [line for line in lines if re.match(r"(\[rank\d\]: ?)?  rank ", line)]
    at_start = all("before its first step" in line for line in about)
    return plan.cause != "register" and (step is None or step[1] == "1") and about != [] and at_start


def is_its_place(plan: Round, pid: int, about: str) -> bool:
    """Say whether what is said of a rank is where it was made to stand."""
    silent = f"rank {plan.victim} (process {pid} on " in about and ") does not answer: " in about
    if plan.cause in ("kill", "stop"):
        state = "it has ended" if plan.cause == "kill" else "it is stopped"
        return silent and state in about and was_there(plan, about)
    if plan.cause == "gil":
        return silent and "it is running, but in a call that holds the GIL" in about and was_there(plan, about)
    if plan.cause == "exception":
        return f"ended after {plan.step - 1} step" in about and (
            f"ValueError: a batch without an end, raised at {place_of('exception')} " in about
        )
    if plan.cause == "branch" and plan.registration == "plain":
        lines = [int(line) for line in re.findall(rf"{re.escape(shown_path())}:(\d+)", about)]
        return any(line_of("evaluation begins") <= line <= line_of("evaluation ends") for line in lines)
    if plan.cause == "register":
        return (
            re.search(r"has never reported: it has ended, or has called neither \w+ nor anything else", about)
            is not None
        )
    place = plan.cause if plan.cause in ("loader", "lock", "branch") else "elsewhere"
    return place_of(place) in about


def was_there(plan: Round, about: str) -> bool:
    """Say whether the step is right in which a silent rank was last seen: the one before, or this one in backward."""
    found = re.search(r"it took part in step (\d+)", about)
    # In a function, or behind a lost store, steps are not known.
    return found is None or int(found[1]) in (plan.step - 1, plan.step)


def shown_path() -> str:
    from ddp_hooks.hangs.stack import shorten

    return shorten(__file__)


def place_of(place: str) -> str:
    return f"{shown_path()}:{line_of(place)}"


class Runner:
    """Runs rounds. `run` returns None in a rank, too."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.is_rank = False

    def run(self, plan: Round) -> Report | None:
        """Run a round and judge it; None in a rank that has come to its end."""
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        server, port = start_server() if plan.holder != "rank 0" else (None, free_port())
        ranks: list[Rank] = []
        try:
            for number in range(plan.ranks):
                rank = fork_rank(number, directory)
                if rank is None:
                    self.is_rank = True
                    run_rank(plan, number, directory, port)
                    return None
                ranks.append(rank)
            return self._watch(plan, ranks, directory)
        finally:
            if not self.is_rank:
                for rank in ranks:
                    if not rank.ended:
                        kill(rank)
                if server is not None:
                    server.kill()
                    server.communicate()
                shutil.rmtree(directory, ignore_errors=True)

    def _watch(self, plan: Round, ranks: list[Rank], directory: Path) -> Report:
        moment, happened, pid = directory / "moment", 0.0, 0
        deadline = time.monotonic() + START_SECONDS
        report = None
        while time.monotonic() < deadline and report is None:
            poll(ranks)
            if pid == 0 and moment.exists():
                happened, pid = json.loads(moment.read_text())
                deadline = happened + plan.report_after + MARGIN_SECONDS
            for rank in ranks if pid else ():
                report = report or judge(plan, pid, rank.output())
            time.sleep(POLL_SECONDS)
        seconds = time.monotonic() - happened
        report = report or Report(plan)
        report.seconds = seconds
        if not report.is_right:
            report.outputs = "\n".join(f"--- rank {rank.rank}: {rank.code}\n{rank.output()[-3000:]}" for rank in ranks)
        return report


def start_server() -> tuple[subprocess.Popen[str], int]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
    assert server.stdout is not None
    return server, int(server.stdout.readline())


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


# --- what came of all rounds


def summarise(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Make a row of each cause and waiting time."""
    rows = []
    for after in sorted({report.plan.report_after for report in reports}):
        for cause in CAUSES:
            ours = [report for report in reports if (report.plan.cause, report.plan.report_after) == (cause, after)]
            if ours:
                seconds = sorted(report.seconds for report in ours)
                rows.append(
                    {
                        "report_after_seconds": after,
                        "cause": cause,
                        "rounds": len(ours),
                        "right_rank": sum(report.names_rank for report in ours),
                        "right_rank_and_place": sum(report.is_right for report in ours),
                        "median_seconds": round(statistics.median(seconds), 2),
                        "longest_seconds": round(seconds[-1], 2),
                    }
                )
    return rows


def sentence(reports: Sequence[Report]) -> str:
    """Say in one sentence what the rounds show."""
    right = sum(report.is_right for report in reports)
    share = right / len(reports)
    text = f"In {len(reports)} rounds the right rank and the right place were named in {right} ({share:.3f})"
    at_default = [report.seconds for report in reports if report.plan.report_after == DEFAULT_SECONDS]
    waited = [
        report.seconds
        for report in reports
        if report.plan.report_after == DEFAULT_SECONDS and report.plan.cause not in ("kill", "exception")
    ]
    if waited:
        text += (
            f"; at the default of {DEFAULT_SECONDS:g} s that took {statistics.median(at_default):.1f} s in the median "
            f"of {len(at_default)} rounds, and {statistics.median(waited):.1f} s in the {len(waited)} of these in "
            "which nothing failed at once"
        )
    return f"{text}."


def write_result(name: str, reports: Sequence[Report]) -> None:
    from tools import harness

    header = harness.environment_header(sys.argv, max(report.plan.ranks for report in reports), ["loopback"])
    rounds = [
        {
            **asdict(report.plan),
            "names_rank": report.names_rank,
            "names_place": report.names_place,
            "seconds": round(report.seconds, 3),
        }
        for report in reports
    ]
    result = {"benchmark": "culprits", "header": header, "rows": summarise(reports), "rounds": rounds}
    harness.write(name, {**result, "sentence": sentence(reports)})


def read_result(name: str) -> list[Report]:
    """Read the rounds of a result that is to be gone on with."""
    from tools import harness

    path = harness.RESULTS / f"{name}.json"
    rounds = json.loads(path.read_text())["rounds"] if path.exists() else []
    judged = ("names_rank", "names_place", "seconds")
    return [
        Report(
            Round(**{key: value for key, value in one.items() if key not in judged}),
            **{key: one[key] for key in judged},
        )
        for one in rounds
    ]


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cause", choices=CAUSES)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the others count up from it")
    parser.add_argument("--report-after", type=float, default=1.5, help="seconds")
    parser.add_argument(
        "--default-share", type=float, default=0.0, help="of the rounds: how many at the default of 10 s"
    )
    parser.add_argument("--name", help="of the result in benchmarks/results; none is written without it")
    parser.add_argument("--go-on", type=int, metavar="N", help="go on with that result, by N of its rounds")
    parser.add_argument("--verbose", action="store_true", help="print every report")
    options = parser.parse_args()
    prepare_parent()
    # Not a TemporaryDirectory, which every rank would remove when it ends.
    directory = tempfile.mkdtemp(prefix="ddp_hooks_culprits_")
    runner = Runner(directory)
    reports = read_result(options.name) if options.name and options.go_on else []
    first, last = options.seed + len(reports), options.seed + options.rounds
    if options.go_on:
        last = min(last, first + options.go_on)
    try:
        for seed in range(first, last):
            plan = Round.random(seed, options.cause, options.report_after, options.default_share)
            report = runner.run(plan)
            if report is None:
                return None
            reports.append(report)
            if options.verbose or not report.is_right:
                verdict = "right" if report.is_right else "*** WRONG"
                print(f"{plan}\n{report.text}\n{verdict}, {report.seconds:.2f} s\n{report.outputs}", flush=True)
            if options.name and len(reports) % 20 == 0:
                write_result(options.name, reports)
    finally:
        if not runner.is_rank:
            shutil.rmtree(directory, ignore_errors=True)
    for row in summarise(reports):
        print(
            f"{row['report_after_seconds']:5} s {row['cause']:10} {row['rounds']:4} rounds, right rank "
            f"{row['right_rank']:4}, and place {row['right_rank_and_place']:4}, median {row['median_seconds']:6.2f} s, "
            f"longest {row['longest_seconds']:6.2f} s"
        )
    print(sentence(reports))
    if options.name:
        write_result(options.name, reports)
    return 0 if all(report.is_right for report in reports) else 1


if __name__ == "__main__":
    # A rank returns to here, too.
    code = main()
    if code is not None:
        sys.exit(code)
